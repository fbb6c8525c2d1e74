"""Runs the tests of one file in this process, and writes a line when each begins and when it ends."""

import importlib
import json
import os
import signal
import sys
import threading
import time
import traceback
import unittest
from collections.abc import Iterator
from typing import Any

import torch
import torch.multiprocessing

from tests.fsdp_impl.upstream import prepared

# Of the text of a failure; the last line has the reason.
_LONGEST = 6000


class _Events(unittest.TestResult):
    """Appends each outcome to a file at once, so that it survives a crash or a hang of a later test."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self._path = path
        self._outcome: tuple[str, str] | None = None

    def write(self, **event: Any) -> None:
        with open(self._path, "a") as file:
            print(json.dumps(event), file=file)

    def startTest(self, test: unittest.TestCase) -> None:
        super().startTest(test)
        self._outcome = None
        self.write(begins=name_of(test))

    def stopTest(self, test: unittest.TestCase) -> None:
        super().stopTest(test)
        outcome, text = self._outcome or ("error", "the test ended without an outcome")
        self.write(ends=name_of(test), outcome=outcome, text=text[-_LONGEST:])

    def _note(self, test: unittest.TestCase, outcome: str, text: str) -> None:
        if not isinstance(test, unittest.TestCase):  # set-up of a class: none of its tests runs
            self.write(stops=str(test), outcome=outcome, text=text[-_LONGEST:])
        elif self._outcome is None or outcome == "fail":
            self._outcome = (outcome, text)

    def addSuccess(self, test: unittest.TestCase) -> None:
        self._note(test, "pass", "")

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:
        self._note(test, "skip", reason)

    def addFailure(self, test: unittest.TestCase, err: Any) -> None:
        self._note(test, "fail", "".join(traceback.format_exception(*err)))

    def addError(self, test: unittest.TestCase, err: Any) -> None:
        self.addFailure(test, err)

    def addExpectedFailure(self, test: unittest.TestCase, err: Any) -> None:
        self._note(test, "pass", "")

    def addUnexpectedSuccess(self, test: unittest.TestCase) -> None:
        self._note(test, "fail", "UnexpectedSuccess: the test passed where it is expected to fail")

    def addSubTest(self, test: unittest.TestCase, subtest: Any, err: Any) -> None:
        if err is not None:
            self.addFailure(test, err)


def name_of(test: unittest.TestCase) -> str:
    """Return ``Class.method`` of a test."""
    return ".".join(test.id().split(".")[-2:])


def flat(tests: Any) -> Iterator[unittest.TestCase]:
    """Return the tests of nested suites."""
    for one in tests:
        if isinstance(one, unittest.TestSuite):
            yield from flat(one)
        else:
            yield one


def _touch_the_device() -> None:
    torch.zeros(1, device=prepared.JOB.device)


def fork_ranks() -> None:
    """Start ranks from a forkserver that has imported torch and the exchanged names, instead of a new interpreter each.

    A rank is then there in a second and not in ten. Where a forked process cannot use the device, ranks are spawned.
    """
    own = torch.multiprocessing.get_context
    context = own("forkserver")
    context.set_forkserver_preload([prepared.__name__])
    trial = context.Process(target=_touch_the_device)
    trial.start()
    trial.join()
    if trial.exitcode == 0:
        forked: Any = lambda method=None: context if method == "spawn" else own(method)  # noqa: E731
        torch.multiprocessing.get_context = forked


def _end_with(parent: int) -> None:
    """End this process and its ranks when the one that watches it has been killed."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os.killpg(os.getpgid(0), signal.SIGKILL)


def main() -> None:
    """Run what the job of this process names."""
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    job = prepared.JOB
    events = _Events(job.events)
    try:
        module = importlib.import_module(job.module)
    except (Exception, SystemExit) as error:
        events.write(unusable=f"{type(error).__name__}: {error}", text=traceback.format_exc()[-_LONGEST:])
        return
    tests = [*flat(unittest.defaultTestLoader.loadTestsFromModule(module))]
    # Neighbours stay together: tests of a class may share ranks.
    tests = tests[len(tests) * job.part // job.parts : len(tests) * (job.part + 1) // job.parts]
    events.write(found=[name_of(test) for test in tests])
    left = [test for test in tests if name_of(test) not in job.leave_out]
    if left and os.environ.get("SHARDPROOF_UPSTREAM_SPAWN") != "1":
        fork_ranks()
    unittest.TestSuite(left).run(events)
    events.write(finished=True)


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # threads of tests that were left waiting must not keep the process
