"""Adapters of a reference with one bug planted at a seam; each lives in ranks of its own."""

from __future__ import annotations

import dataclasses
import inspect
import json
import os
import pathlib
import re
import subprocess
import zlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

from fsdp_impl.common import collectives, divide, norm
from fsdp_impl.per_parameter import reduction
from shardproof.harness.adapters.base import Adapter
from shardproof.harness.adapters.reference import ReferenceAdapter
from shardproof.harness.parity.rank import Rank
from tests import warm
from tests.harness import narrow
from tests.harness.inner import NO_HYPOTHESIS, PYTHONPATH

ROOT = pathlib.Path(__file__).parents[2]
DROPPED_UNIT = "layers.1"
GATHERED_TWICE = "layers.2"


_replaced: list[tuple[Any, str, Any]] = []


def replace(owner: Any, name: str, new: Any) -> None:
    """Set an attribute of a module or class until the case ends."""
    _replaced.append((owner, name, inspect.getattr_static(owner, name)))
    setattr(owner, name, new)


def _undo() -> None:
    while _replaced:
        setattr(*_replaced.pop())


_finish = Rank.finish


def _finish_and_undo(rank: Rank) -> None:
    try:
        _finish(rank)
    finally:
        _undo()


class Planting(Adapter):
    """Plants a bug before the first model of a case is sharded, until the case ends; mixed into a sound adapter."""

    def plant(self) -> None:
        """Call :func:`replace`; once for a case, also where it shards several models."""
        raise NotImplementedError

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        if not _replaced:
            self.plant()
            # The case may have no adapter to tear down: one that refuses a model is none.
            replace(Rank, "finish", _finish_and_undo)
        super().__init__(*args, **kwargs)

    def teardown(self) -> None:
        try:
            super().teardown()
        finally:
            _undo()


class _Planted(ReferenceAdapter):
    """Replaces a seam before the first model of the process is sharded, for good."""

    traits = dataclasses.replace(ReferenceAdapter.traits, isolation="adapter")
    module_: Any
    seam: str

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        if getattr(self.module_, self.seam) is not type(self).wrong:
            setattr(self.module_, self.seam, type(self).wrong)
        super().__init__(*args, **kwargs)


class ForgottenDivision(_Planted):
    """Gradients are summed and never divided."""

    name = "forgotten-division"
    module_, seam = divide, "divide"

    @staticmethod
    def wrong(dtype: torch.dtype, shard_size: int, replicate_size: int = 1) -> divide.Division:
        return divide.Division(before=1, reduce_op=dist.ReduceOp.SUM, all_reduce_op=dist.ReduceOp.SUM, after=1)


_reduce, _gather, _all_reduce = collectives.reduce, collectives.gather, collectives.all_reduce
_add = reduction.Accumulator.add


class DroppedReduction(_Planted):
    """One unit's gradients are divided and never summed: each rank keeps its own part of its own."""

    name = "dropped-reduction"
    module_, seam = collectives, "reduce"

    @staticmethod
    def wrong(output: torch.Tensor, contributions: torch.Tensor, group: Any, op: Any, *, unit: str) -> None:
        if unit != DROPPED_UNIT:
            return _reduce(output, contributions, group, op, unit=unit)
        output.copy_(contributions.view(group.size(), -1)[group.rank()])


class AverageIsSum(_Planted):
    """The backend's average is a sum."""

    name = "average-is-sum"
    module_, seam = collectives, "reduce"

    @staticmethod
    def wrong(output: torch.Tensor, contributions: torch.Tensor, group: Any, op: Any, *, unit: str) -> None:
        _reduce(output, contributions, group, dist.ReduceOp.SUM, unit=unit)


class LocalNorm(_Planted):
    """The norm's reduction over the ranks is skipped."""

    name = "local-norm"
    module_, seam = norm, "reduce_norm"

    @staticmethod
    def wrong(shares: torch.Tensor, group: Any, p: float) -> torch.Tensor:
        return shares


class SecondGather(_Planted):
    """One unit is gathered twice each time."""

    name = "second-gather"
    module_, seam = collectives, "gather"

    @staticmethod
    def wrong(output: torch.Tensor, shard: torch.Tensor, group: Any, *, unit: str, async_op: bool = False) -> Any:
        if unit == GATHERED_TWICE:
            _gather(output, shard, group, unit=unit)
        return _gather(output, shard, group, unit=unit, async_op=async_op)


class LonelyReplicas(_Planted):
    """One unit is not reduced over the replicas, although the collective is issued."""

    name = "lonely-replicas"
    module_, seam = collectives, "all_reduce"

    @staticmethod
    def wrong(tensor: torch.Tensor, group: Any, op: Any, *, unit: str) -> None:
        _all_reduce(tensor.clone() if unit == DROPPED_UNIT else tensor, group, op, unit=unit)


class ReplacedGradient(_Planted):
    """A reduced gradient takes the place of the one that is there, instead of being added to it."""

    name = "replaced-gradient"
    module_, seam = reduction.Accumulator, "add"

    @staticmethod
    def wrong(self: reduction.Accumulator, params: Any, layout: Any, shards: torch.Tensor) -> bool:
        self._last = None
        for param in params:
            param.sharded.grad = None
        return _add(self, params, layout, shards)


class DeafToPrefetch(ReferenceAdapter):
    """Whatever a unit is told to gather ahead, it does not."""

    name = "deaf-to-prefetch"

    def prefetch(self, **_: Any) -> None:
        pass


class ForgottenFlags(ReferenceAdapter):
    """No unit ever waits for the last microbatch."""

    name = "forgotten-flags"

    def _accumulate(self, *_: Any, **__: Any) -> None:
        pass


def few_by_day(rows: Iterable[Any], names: Iterable[str]) -> list[Any]:
    """The parameter sets of planted bugs, all but a fixed fifteenth marked ``nightly``.

    Which fifteenth does not depend on the other bugs: a new one moves none into the night.

    Args:
        rows: the parameters of each test; tuples for several.
        names: by which each is chosen, and called.
    """
    return [
        pytest.param(*(row if isinstance(row, tuple) else (row,)), id=name, marks=[] if _by_day(name) else _NIGHTLY)
        for row, name in zip(rows, names, strict=True)
    ]


_NIGHTLY = [pytest.mark.nightly]


def _by_day(name: str) -> bool:
    return zlib.crc32(name.encode()) % 15 == 0


def selected(request: pytest.FixtureRequest, argument: str = "bug") -> list[Any]:
    """The bugs whose tests run: the values of a parameter in the selected items of the fixture's module, once each."""
    items = [item for item in request.session.items if item.path == request.path and hasattr(item, "callspec")]
    found = list(dict.fromkeys(item.callspec.params[argument] for item in items if argument in item.callspec.params))
    return found or pytest.skip("no test of a planted bug of this file is selected")


def run_suites(
    names: Sequence[str],
    expression: str,
    folder: pathlib.Path,
    *,
    chapters: Sequence[str] = (),
    timeout: float = 300,
    device: str = "cpu",
    workers: int = 0,
    options: Sequence[str] = (),
) -> list[dict[str, Any]]:
    """Run the suites' cases on implementations, at least one of which fails; returns the records of the cases.

    Args:
        names: the implementations, as of ``--impl``.
        expression: the cases, as of pytest's ``-k``. Only the tests that it names are collected (``narrow``).
        folder: where the run file may be written.
        chapters: the chapters to collect instead, by the names of their files without "test_".
        timeout: seconds that the run may take.
        device: as of ``--device``.
        workers: as of ``-n``.
        options: further ones of pytest.
    """
    report = folder / "run.json"
    words = set(re.findall(r"\btest_\w+", expression))
    found = [path for path in sorted(ROOT.glob("suites/test_*.py")) if _has(path, words)]
    files = [f"suites/test_{chapter}.py" for chapter in chapters] or [str(path) for path in found]
    command = [warm.python(), "-m", "pytest", "-p", "no:cacheprovider", "-p", narrow.__name__, *NO_HYPOTHESIS, "-q"]
    command += [*files, "-k", expression]
    command += ["--impl", ",".join(names), "--device", device, "--report", str(report), "-n", str(workers), *options]
    environment = {**os.environ, "PYTHONPATH": PYTHONPATH}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 1, done.stdout + done.stderr
    cases: list[dict[str, Any]] = json.loads(report.read_text())["cases"]
    return cases


def _has(path: pathlib.Path, words: set[str]) -> bool:
    """Whether a chapter's name, or the name of one of its tests, contains one of the words."""
    names = [path.stem, *re.findall(r"^def (test_\w+)", path.read_text(), flags=re.MULTILINE)]
    return any(word in name for name in names for word in words)


def name_of(bug: type[Adapter]) -> str:
    """The name by which ``--impl`` takes an adapter."""
    return f"{bug.__module__}:{bug.__name__}"


def failures_of(
    bugs: Sequence[type[Adapter]], cases: str, folder: pathlib.Path, chapters: Sequence[str] = ()
) -> dict[str, dict[str, Any]]:
    """What the suites' cases say of each bug and of the sound reference: ``{bug: {test: failure or None}}``.

    Args:
        bugs: adapters, with names of their own.
        cases: an expression as of pytest's ``-k``, which leaves one case of each test.
        folder: where the run file may be written.
        chapters: as of :func:`run_suites`.
    """
    failures: dict[str, dict[str, Any]] = {}
    for case in run_suites(["reference", *map(name_of, bugs)], cases, folder, chapters=chapters):
        found = failures.setdefault(case["implementation"].rpartition(":")[2], {})
        test = case["id"].partition("::")[2].partition("[")[0]
        assert test not in found, f"{cases!r} leaves two cases of {test}"
        found[test] = case["failure"]
    return failures


class Killer(NamedTuple):
    """The item that fails because of a bug, as an expression of ``-k``, and words of its message."""

    item: str
    words: str


def assert_sound_passes(cases: Iterable[dict[str, Any]]) -> None:
    """Check that the references pass the items of the bugs, of which there are some."""
    sound = [case for case in cases if case["implementation"].startswith("reference")]
    assert sound
    failed = [
        f"{case['implementation']} {case['id']}: {case['verdict']}" for case in sound if case["verdict"] != "pass"
    ]
    assert not failed, "\n".join(failed)


def assert_killed(cases: Iterable[dict[str, Any]], bug: type[Adapter], killer: Killer) -> None:
    """Check that a bug's one item fails with the words of its killer."""
    (case,) = [case for case in cases if case["implementation"].rpartition(":")[2] == bug.__name__]
    assert case["failure"] is not None, f"{case['id']} passes"
    assert "in edited" not in case["failure"]["text"], "the edit of the source fails"
    assert killer.words in case["failure"]["text"]


def cases_of(
    items: Mapping[str, str],
    adapters: Mapping[str, type[Adapter]],
    *,
    flat: Collection[str],
    folder: pathlib.Path,
    device: str = "cpu",
    workers: int = 0,
    options: Sequence[str] = (),
) -> list[dict[str, Any]]:
    """Run each bug's item, for the bug and for the reference that it is a bug of, all in one run of the suites.

    Args:
        items: by bug, an expression of ``-k``.
        adapters: by bug.
        flat: the bugs of ``reference.flat``.
        folder: where the run file is written.
        device: as of ``--device``.
        workers: as of ``-n``.
        options: as of :func:`run_suites`.

    Returns:
        The records.
    """
    names = ["reference", "reference.flat"]
    chosen = set()
    for bug, item in items.items():
        names.append(name_of(adapters[bug]))
        chosen.add(f":{adapters[bug].__name__}- and {item}")
        chosen.add(f"{'reference.flat' if bug in flat else 'reference-'} and {item}")
    return run_suites(names, " or ".join(chosen), folder, timeout=1800, device=device, workers=workers, options=options)


def cases_of_killers(
    killed: Mapping[str, Killer],
    adapters: Mapping[str, type[Adapter]],
    *,
    flat: Collection[str],
    options: Sequence[str] = (),
) -> Any:
    """A module's fixture: the records of one run of the killer of every selected bug, for the bug and its reference.

    Args:
        killed: by bug.
        adapters: by bug.
        flat: the bugs of ``reference.flat``.
        options: as of :func:`run_suites`.
    """

    @pytest.fixture(scope="module")
    def cases(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
        items = {bug: killed[bug].item for bug in selected(request)}
        return cases_of(items, adapters, flat=flat, folder=tmp_path_factory.mktemp("planted"), options=options)

    return cases
