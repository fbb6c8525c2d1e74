"""Fixtures that the tests of the harness share."""

from __future__ import annotations

import sys

import pytest

from tests import warm
from tests.harness.inner import PYTHONPATH, QUIET


@pytest.fixture
def run(pytester, monkeypatch):
    """Run pytest on one case file with these options, in this process unless told otherwise.

    The process of its own, and the workers of xdist, are warm.
    """
    monkeypatch.setenv("PYTHONPATH", PYTHONPATH)

    def run(source, *options, own_process=False, named=True):
        pytester.path.joinpath("test_inner.py").write_text(source)
        options = options if "--impl" in options or not named else (*options, "--impl", "ddp")
        with monkeypatch.context() as patch:
            if own_process or "-n" in options:
                patch.setattr(sys, "executable", warm.python())
            if own_process:
                return pytester.runpytest_subprocess(*QUIET, *options, timeout=300)
            return pytester.runpytest_inprocess(*QUIET, *options)

    return run
