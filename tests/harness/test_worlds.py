"""Worlds of ranks: what a failing, dying, stuck or untidy rank does to its own case and to the next."""

from __future__ import annotations

import pathlib

import pytest

import harness.adapters.replicas  # noqa: F401  (imported before inner runs, which forget what they import)

QUIET = ("-p", "no:cacheprovider", "-p", "harness.plugin", "--impl", "ddp")

FOLLOWED = """
import os, signal, time
import torch
import torch.distributed as dist
import pytest
from harness import deadline, world

@world(2)
def test_before(rank):
    rank.tmp_path.joinpath(str(rank.index)).write_text("")

@world(2)
{marks}
def test_wrong(rank):
    {body}

@world(2)
def test_after(rank):
    assert len(set(rank.exchange(rank.index))) == 2
    assert torch.is_grad_enabled() and torch.get_default_dtype() is torch.float32
"""


@pytest.fixture
def run(pytester, monkeypatch):
    """Run a case with this body between two sound ones; the lines that pytest printed."""
    monkeypatch.setenv("PYTHONPATH", str(pathlib.Path(__file__).parents[2]))

    def run(body, marks=""):
        body = body.strip().replace("\n", "\n    ")
        pytester.path.joinpath("test_inner.py").write_text(FOLLOWED.format(body=body, marks=marks))
        result = pytester.runpytest_inprocess(*QUIET)
        result.assert_outcomes(passed=2, failed=1)
        return result.stdout

    return run


def test_exception_on_one_rank_does_not_leave_the_others_in_a_collective(run):
    lines = run(
        """
if rank.index == 1:
    raise ValueError("only here")
dist.barrier()
"""
    )
    lines.fnmatch_lines(["fail: rank 1 of 2:", "ValueError: only here", "rank 0 of 2:", "*still waiting*"])


def test_exception_on_all_ranks_is_told_once(run):
    lines = run('raise RuntimeError("everywhere")')
    lines.fnmatch_lines(["fail: every rank of 2:", "RuntimeError: everywhere"])
    assert lines.str().count("RuntimeError: everywhere") == 1


def test_exception_that_has_no_text_and_cannot_be_pickled(run):
    lines = run(
        """
class Odd(Exception):
    def __str__(self):
        raise KeyError("no text")
    def __reduce__(self):
        raise TypeError("no pickle")
raise Odd()
"""
    )
    lines.fnmatch_lines(["fail: every rank of 2:", "*Odd*"])


@pytest.mark.parametrize(
    ("body", "ending"),
    [
        ("if rank.index == 1: os._exit(7)\ndist.barrier()", "exit code 7"),
        ("if rank.index == 1: os._exit(0)\ndist.barrier()", "exit code 0"),
        ("if rank.index == 1: os.kill(os.getpid(), signal.SIGKILL)\ndist.barrier()", "killed by SIGKILL"),
    ],
)
def test_rank_that_dies(run, body, ending):
    run(body).fnmatch_lines(["crash: *", f"*the rank's process ended: {ending}*"])


def test_rank_that_never_answers_is_shown_where_it_is(run):
    lines = run("time.sleep(600) if rank.index == 1 else None", marks="@deadline(2)")
    lines.fnmatch_lines(
        ["hang: rank 1 is at File *test_inner.py*, line 15 in test_wrong, before any collective of the case"]
    )


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ("torch.set_grad_enabled(False)", "gradient mode: True became False"),
        ("torch.set_default_dtype(torch.float64)", "default dtype: torch.float32 became torch.float64"),
        ("dist.new_group([0, 1])", "process groups: 0 became 1"),
        ("os.environ['SOME_NAME'] = 'x'", "environment variables changed: SOME_NAME"),
        ("os.chdir('/')", "working directory: * became /"),
        ("torch.use_deterministic_algorithms(True)", "deterministic algorithms: False became True"),
        (
            "torch.nn.modules.module.register_module_forward_hook(lambda *a: None)",
            "modules' global forward hooks: 0 became 1",
        ),
    ],
)
def test_what_a_case_leaves_behind_fails_it_by_name(run, body, told):
    run(body).fnmatch_lines([f"fail: left behind: rank 0: {told}; rank 1: {told}"])


def test_case_may_not_skip_by_itself(run):
    run('pytest.skip("on a whim")').fnmatch_lines(["*a case must not skip by itself: use @needs (on a whim)*"])


DEBUG_LEVELS = """
import os
import torch.distributed as dist
from harness import world

@world(2, debug_level="DETAIL")
def test_detail(rank):
    assert dist.get_debug_level() == dist.DebugLevel.DETAIL
    rank.mesh()

@world(2)
def test_off(rank):
    assert dist.get_debug_level() == dist.DebugLevel.OFF
"""


def test_debug_level_makes_a_world_of_its_own(pytester, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(pathlib.Path(__file__).parents[2]))
    pytester.path.joinpath("test_inner.py").write_text(DEBUG_LEVELS)
    pytester.runpytest_inprocess(*QUIET).assert_outcomes(passed=2)
