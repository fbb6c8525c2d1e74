"""The harness of shardproof: runs cases on worlds of ranks and compares sharded training with a baseline.

What case modules need of it they import from ``shardproof.testing``.
"""

if __name__ != "shardproof.harness":
    # From the root of a clone the folder could be imported by a second name, and every class in it would exist twice.
    raise ImportError(f"{__name__} is imported as shardproof.{__name__}")
