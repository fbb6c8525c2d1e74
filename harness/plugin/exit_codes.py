"""The exit codes of a run beyond pytest's own, which are 0 to 5; docs/run-files.md has the whole table."""

from __future__ import annotations

#: No case ran on some implementations of the run, because their cases were skipped or deselected; others had cases.
ASKED_NOTHING = 6

#: No case failed, but the run is incomplete, or its run file could not be written.
INCOMPLETE = 7
