"""Tries programs, and makes one smaller for as long as it fails alike and there is time.

1. :func:`tried` runs a program, in forks of this process, which has imported torch and started no thread.
2. :class:`Shrinking` leaves out ranks, models, steps, calls and options one by one, as long as the program fails alike
   and passes with the reference implementation (:func:`control`), if the whole program did.
"""

import contextlib
import functools
import importlib
import multiprocessing
import os
import pathlib
import re
import signal
import tempfile
import time
from collections.abc import Sequence
from multiprocessing import connection
from typing import Any

import torch

from shardproof.harness.reproducing.program import Call, Program

#: A model that takes the place of one with ``layers``, if the program fails alike.
_STACK = """\
class {name}(nn.Module):
    def __init__({signature}):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(dim, dim) for _ in range({depth}))
        self.out = nn.Linear(dim, dim)
    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.out(x)"""
#: The calls that set the training up, or load: they stay when a step is left out.
_SETTING = re.compile("make|mesh|held|fully_shard|__init__|state_dict")


def control(text: str) -> str:
    """The program with the reference implementation in place of torch's, which it passes."""
    for place in ("torch.distributed.fsdp", "torch.nn.utils"):
        text = text.replace(f"from {place} import", "from fsdp_impl import")
    return text


def tried(text: str, seconds: float) -> str:
    """Run a program; what it prints if it fails or does not end in time, empty if it passes.

    Its processes are one group, of which none is left, also if this process is interrupted meanwhile.
    """
    with tempfile.TemporaryDirectory(prefix="shardproof-program-") as folder:
        output = pathlib.Path(folder) / "output"
        output.touch()  # a child may end before it writes
        child = multiprocessing.get_context("fork").Process(target=_run, args=(text, folder))
        try:
            child.start()
            with contextlib.suppress(OSError):  # whichever of the two comes first
                os.setpgid(child.pid or 0, child.pid or 0)
            has_ended = bool(connection.wait([child.sentinel], max(0.0, seconds)))
        finally:
            if child.pid:
                # Before it is waited for, so that its id is of no other group.
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(child.pid, signal.SIGKILL)
                child.join()
        if has_ended and child.exitcode == 0:
            return ""
        printed = output.read_text(errors="replace")
        return printed + ("failed" if has_ended else f"\nTimeoutError: not ended after {seconds:.0f} seconds\n")


def _run(text: str, folder: str) -> None:
    os.setpgid(0, 0)  # its ranks are killed with it
    output = os.open(f"{folder}/output", os.O_WRONLY | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    tempfile.tempdir = folder
    processes: Any = torch.multiprocessing
    processes.spawn = functools.partial(processes.start_processes, start_method="fork")
    exec(compile(text, "program.py", "exec"), {"__name__": "__main__"})


def prepare() -> None:
    """Import what all trials need, once."""
    torch.set_num_threads(1)
    for name in ("torch.distributed.fsdp", "torch.distributed.checkpoint.state_dict", "fsdp_impl"):
        importlib.import_module(name)


class Shrinking:
    """Leaves out what the failure does not need.

    Args:
        program: the whole program.
        until: when the time is over, as of ``time.monotonic()``.

    Attributes:
        said: what the whole program printed.
        holds: whether it fails as the case does.
        has_control: whether it passes with the reference implementation.
        calls: the calls that are left.
        trials: how many smaller programs were tried.
        left_out: how many were not, because the time was over.
    """

    def __init__(self, program: Program, until: float) -> None:
        prepare()
        self.program, self.calls, self._until = program, program.calls, until
        self.trials = self.left_out = 0
        began = time.monotonic()
        self._limit = until - began
        self.said = self._tried(program.text(self.calls))
        self.holds = program.fails_alike(self.said)
        self._limit = 5 + 4 * (time.monotonic() - began)  # of a smaller program, which may hang
        self.has_control = self.holds and self._tried(control(program.text(self.calls))) == ""

    def run(self) -> str:
        """Return the program that is left."""
        program = self.program
        # Where nothing tells a right program from a wrong one, only what cannot make it wrong goes.
        careful = program.kind != "raise" and not self.has_control
        if careful and program.kind in ("numbers", "counts", "memory"):
            return program.text(self.calls)
        for root in [one["root"] for one in self.calls if one["kind"] == "make"]:
            self._without([one for one in self.calls if re.search(rf"\b{root}\b", str([*one.values()]))])
        if program.world > 2:
            self._on_two_ranks()
        self._without_groups()
        for name in program.texts:
            self._stack(name)
        self._without_steps()
        for call in reversed(self.calls):  # what uses a value goes before what makes it
            if not careful or not _SETTING.search(call["name"]):
                self._without([call])
        if not careful:
            self._without_options()
        return program.text(self.calls)

    def _on_two_ranks(self) -> None:
        program, world = self.program, self.program.world
        program.world = 2
        codes = [one.get("code", "").replace(f"({world},)", "(2,)") for one in self.calls]  # of meshes
        if not self._keep([one | {"code": code} for one, code in zip(self.calls, codes, strict=True)]):
            program.world = world

    def _without_groups(self) -> None:
        """Have each optimizer update all parameters of its model in one group."""
        groups = re.compile(r"^\[\{.*?\b(model\d*)\..*")
        plain = [[groups.sub(r"\1.parameters()", arg) for arg in one.get("args", ())] for one in self.calls]
        self._keep([one | {"args": args} for one, args in zip(self.calls, plain, strict=True)])

    def _without_steps(self) -> None:
        for step in sorted({one["step"] for one in self.calls}):
            self._without([one for one in self.calls if one["step"] == step and not _SETTING.search(one["name"])])

    def _without_options(self) -> None:
        for key in sorted({key for one in self.calls for key in one.get("kwargs", ())} - {"mesh"}):
            kept = [{k: v for k, v in one.get("kwargs", {}).items() if k != key} for one in self.calls]
            self._keep([one | {"kwargs": left} for one, left in zip(self.calls, kept, strict=True)])

    def _stack(self, name: str) -> None:
        """Replace a model that has ``layers`` by a smaller one."""
        texts, text = self.program.texts, self.program.texts[name]
        found = re.search(r"def __init__\((self, dim[^)]*)\)", text)
        for depth in (1, 2, 3) if found and "self.layers = " in text else ():
            signature = re.sub(r"depth=\d", f"depth={depth}", found[1]) if found else ""
            layers = "depth" if "depth" in signature else depth
            texts[name] = _STACK.format(name=name, signature=signature, depth=layers)
            gone = re.compile(rf"\.layers\[[{depth}-9]\]")
            if self._without([one for one in self.calls if gone.search(str([*one.values()]))]):
                return
        texts[name] = text

    def _without(self, left: Sequence[Call]) -> bool:
        return self._keep([one for one in self.calls if not any(one is other for other in left)])

    def _keep(self, calls: list[Call]) -> bool:
        """Take over fewer calls if the program still fails alike, and the reference passes it if it did."""
        if time.monotonic() >= self._until:
            self.left_out += 1
            return False
        self.trials += 1
        text = self.program.text(calls)
        if not self.program.fails_alike(self._tried(text)):
            return False
        if self.program.kind != "raise" and self.has_control and self._tried(control(text)):
            return False
        self.calls = calls
        return True

    def _tried(self, text: str) -> str:
        return tried(text, min(self._limit, self._until - time.monotonic()))
