"""Importing this makes a process ready for the tests of its job: names exchanged, the file importable, patched.

It is imported by the process that runs the tests, by the forkserver of their ranks, and by ranks that are spawned.
"""

import ast
import contextlib
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
import unittest
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import torch
import torch._dynamo

from tests.fsdp_impl.upstream import exchange, sources
from tests.fsdp_impl.upstream.job import Job, current

JOB = current()
# Of the tests that choose their ranks on a CPU.
_MOST_RANKS = 8


class _Patched(importlib.abc.Loader):
    """Imports a file with its patch applied, and writes nothing next to it."""

    def __init__(self, job: Job) -> None:
        self._job = job

    def exec_module(self, module: types.ModuleType) -> None:
        with open(self._job.path, encoding="utf-8") as file:
            text = sources.patched(file.read(), self._job.patch)
        with _lacking_names(ast.parse(text)):
            exec(compile(text, self._job.path, "exec"), vars(module))


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(
        self, name: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != JOB.module:
            return None
        return importlib.machinery.ModuleSpec(name, _Patched(JOB), origin=JOB.path)


class _Lacking:
    """Stands for a name that this torch lacks: a test that uses it is skipped, and the others of its file run."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise unittest.SkipTest(f"torch {torch.__version__} lacks {self._path}")


def _is_submodule(home: types.ModuleType, name: str) -> bool:
    return hasattr(home, "__path__") and importlib.util.find_spec(f"{home.__name__}.{name}") is not None


@contextlib.contextmanager
def _lacking_names(tree: ast.Module) -> Iterator[None]:
    """Give modules of torch, while a test imports from them, the names that a newer torch has."""
    added: list[tuple[types.ModuleType, str]] = []
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "torch":
            with contextlib.suppress(ImportError):
                home = importlib.import_module(node.module)
                for name in {alias.name for alias in node.names} - {"*"}:
                    if not hasattr(home, name) and not _is_submodule(home, name):
                        setattr(home, name, _Lacking(f"{node.module}.{name}"))
                        added.append((home, name))
    try:
        yield
    finally:
        for home, name in added:
            delattr(home, name)


def _claim_ranks_of_the_cpu(ranks: int) -> None:
    """Let a test that counts devices find ``ranks`` on a CPU, each a process with gloo."""
    import torch.testing._internal.common_distributed as distributed

    torch.cpu.device_count = lambda: ranks
    # A test that has a number of its own for a CPU gets it: FSDPTest asks only whether there are enough.
    torch.accelerator.device_count = lambda: max(ranks, _MOST_RANKS)
    ask: Callable[..., Any] = distributed.skip_if_lt_x_gpu

    def skip_if_lt_x_gpu(least: int, *, allow_cpu: bool = False) -> Any:
        return (lambda test: test) if least <= ranks else ask(least)

    distributed.skip_if_lt_x_gpu = skip_if_lt_x_gpu
    import torch.testing._internal.common_fsdp as fsdp

    fsdp.DEVICE_COUNT = ranks


if JOB.device == "cpu":
    _claim_ranks_of_the_cpu(JOB.ranks)
import torch.testing._internal.common_fsdp  # noqa: E402  it imports torch's FSDP, which is exchanged next

if JOB.implementation == "reference":
    exchange.exchange()
sys.meta_path.insert(0, _Finder())
