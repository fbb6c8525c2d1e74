"""Names that tell the runs of a page apart."""

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import PurePath

from shardproof.reports.run import Run, public_version


def labels(runs: Sequence[tuple[str, Run]]) -> list[str]:
    """Name each run by its device type and version of torch, and by as much more as tells it from the others.

    Args:
        runs: the path of each run file and the run.

    Returns:
        One label for each run, in the order of `runs`; no two are the same.
    """
    named = [_device_and_torch(run) for _, run in runs]
    for fact in (_build, _effort, _host, _file):
        named = _with(fact, named, runs)
    return [f"{label}, run {i}" if named.count(label) > 1 else label for i, label in enumerate(named, start=1)]


def _with(fact: Callable[[str, Run], str], named: list[str], runs: Sequence[tuple[str, Run]]) -> list[str]:
    """Add a fact to the labels that several runs have, where it is not the same for all of these."""
    facts = [fact(path, run) for path, run in runs]
    count = Counter(named)
    differ = {label for label in count if len({one for one, of in zip(facts, named, strict=True) if of == label}) > 1}
    return [f"{label}, {one}" if label in differ and one else label for label, one in zip(named, facts, strict=True)]


def _device_and_torch(run: Run) -> str:
    device = {"cpu": "CPU", "cuda": "CUDA"}.get(run.environment.device, run.environment.device or "unknown device")
    torch = public_version(run.environment.torch)
    return f"{device}, torch {torch}" if torch else device


def _build(_: str, run: Run) -> str:
    return f"build {run.environment.torch.partition('+')[2] or 'without a name'}"


def _effort(_: str, run: Run) -> str:
    return f"effort {run.effort.name if run.effort else 'full'}"


def _host(_: str, run: Run) -> str:
    return accelerators(run) or f"{run.environment.cpu_count} cores"


def _file(path: str, _: Run) -> str:
    return PurePath(path).name.removesuffix(".gz").removesuffix(".json")


def accelerators(run: Run) -> str:
    """The accelerators of a run's host, as in ``2 x NVIDIA H200``; empty if there are none."""
    counts = Counter(one.name for one in run.environment.accelerators)
    return ", ".join(f"{count} x {name}" for name, count in counts.items())
