"""Reads run files and prints what they say. Needs the standard library alone, so that a run can be read anywhere."""

from reports.fields import RecordError
from reports.matrix import render_summary
from reports.record import CaseRecord, Failure, Verdict
from reports.run import Run, RunFileError, load_run, parse_run

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
