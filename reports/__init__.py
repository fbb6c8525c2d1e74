"""Reads run files and prints them. Imports the standard library alone, so that a run can be read on any machine.

``reports.page``, which makes a page of them, needs more; only its command imports it.
"""

if __name__ != "shardproof.reports":
    # From the root of a clone the folder could be imported by a second name, and every class in it would exist twice.
    raise ImportError(f"{__name__} is imported as shardproof.{__name__}")

from shardproof.reports.fields import RecordError
from shardproof.reports.matrix import render_summary
from shardproof.reports.record import CaseRecord, Failure, Verdict
from shardproof.reports.run import Run, RunFileError, load_run, parse_run

__all__ = [
    "CaseRecord",
    "Failure",
    "RecordError",
    "Run",
    "RunFileError",
    "Verdict",
    "load_run",
    "parse_run",
    "render_summary",
]
