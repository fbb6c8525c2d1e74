"""Reads run files and prints them. Imports the standard library alone, so that a run can be read on any machine.

``reports.page``, which makes a page of them, needs more; only its command imports it.
"""

if __name__ != "shardproof.reports":
    # From the root of a clone the folder could be imported by a second name, and every class in it would exist twice.
    raise ImportError(f"{__name__} is imported as shardproof.{__name__}")
