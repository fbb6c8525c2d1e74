"""Reads run files and prints what they say. Needs the standard library alone, so that a run can be read anywhere."""

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
