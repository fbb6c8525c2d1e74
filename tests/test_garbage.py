"""The garbage collector rests while a process imports torch, and finds nothing at its end."""

import gc

import pytest

from shardproof import garbage
from tests.harness.inner import PASSES, python

#: Makes a circle whose end is told, as a process of a run, of a command or of nobody.
CIRCLE = """
import os, sys
from shardproof import __main__, garbage
class Told:
    def __del__(self, write=os.write): write(1, b"collected\\n")  # at the end print may be gone
one = Told()
one.itself = one
{body}
sys.modules["told"] = one
"""


def test_the_collector_rests_within_the_context_alone():
    with garbage.resting():
        assert not gc.isenabled()
        with garbage.resting():
            pass
        assert not gc.isenabled(), "it is the outer context that ends the rest"
    assert gc.isenabled()


@pytest.mark.parametrize(
    ("body", "printed"),
    [
        ("", "collected\n"),
        ("garbage.retire_at_exit()", ""),
        ("__main__.main(['implementations', '--nothing'])", ""),
        ("__main__.main(['doctor', '--nothing'])", "collected\n"),
    ],
    ids=["nobody", "retired", "command", "command of a user's script"],
)
def test_the_end_of_a_process_collects_what_a_user_may_count_on(body, printed):
    body = body and f"try: {body}\nexcept SystemExit: pass"
    assert python("-c", CIRCLE.format(body=body)).stdout == printed


@pytest.mark.nightly
def test_a_run_collects_garbage_from_its_first_case_on_and_none_at_its_end(pytester):
    session = "import gc\ndef pytest_runtestloop(session): print('is on:', gc.isenabled())\n"
    pytester.makeconftest(session + CIRCLE.format(body=""))
    pytester.makepyfile(PASSES + "import gc\nprint('collects:', gc.isenabled())\n")
    done = pytester.runpytest_subprocess("-p", "shardproof.plugin", "--impl", "ddp", "--device", "cpu", "-s")
    done.stdout.fnmatch_lines(["collects: False", "is on: True"], consecutive=False)
    done.stdout.no_fnmatch_line("collected")
