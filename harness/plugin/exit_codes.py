"""The exit codes of a run beyond pytest's own, which are 0 to 5; docs/run-files.md has the whole table."""

from __future__ import annotations

#: No case ran on some implementation of the run: all of its cases were skipped, or none was selected.
ASKED_NOTHING = 6

#: No case failed, but the run is incomplete, or its run file could not be written.
INCOMPLETE = 7
