"""Inner pytest runs on one file of cases: what tests of the plugin share."""

from __future__ import annotations

import os
import pathlib

# Imported before the inner runs, which forget the modules that they import: torch cannot be imported twice.
import shardproof.harness.adapters.reference
import shardproof.harness.adapters.replicas
import shardproof.harness.models.plain  # noqa: F401

ROOT = pathlib.Path(__file__).parents[2]

#: For processes of their own: this clone before everything else, and what the host needs besides.
PYTHONPATH = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))

#: Without the plugin of hypothesis, whose summary imports all of it, in a fifth of the time of a run of its own.
NO_HYPOTHESIS = ("-p", "no:hypothesispytest")

#: Without the plugin that listens on a port in every run, only to hear of reruns.
QUIET = ("-p", "no:cacheprovider", "-p", "no:rerunfailures", *NO_HYPOTHESIS, "-p", "shardproof.plugin")

CASE = """
from shardproof.testing import world
@world(2)
def test_case(rank):
    {body}
"""


def error_lines(result):
    """What an inner run says of itself rather than of a test."""
    return [line for line in result.stderr.lines + result.stdout.lines if line.startswith("ERROR: ")]


def last_error(result):
    """The one line after which pytest gave up."""
    assert "Traceback" not in result.stderr.str() + result.stdout.str()
    (line,) = error_lines(result)
    return line
