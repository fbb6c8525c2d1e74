"""Renders run files as one HTML page that needs nothing but itself."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from markupsafe import Markup

from shardproof.contract import NoList, version
from shardproof.reports import texts
from shardproof.reports.page import assets
from shardproof.reports.page.details import chunks
from shardproof.reports.page.table import Contract, as_data, table
from shardproof.reports.profiles import LEGEND, places
from shardproof.runfile import MIXED, End, Environment, Run, Verdict, public_version


@dataclass(frozen=True)
class Source:
    """A run and the path of the file from which it was read."""

    path: str
    run: Run


def render(sources: Sequence[Source], *, title: str, documents: Sequence[tuple[str, str]] = ()) -> str:
    """Render runs as a page, in the order of an implementation's columns. Of the same runs the HTML is always the same.

    ``documents`` are pages next to this one, by their titles and addresses, to which it links.

    The texts of run files reach the page in two ways: through the template, which escapes them, and as compressed JSON,
    which the script of the page shows as text. A content security policy allows that script and the plotting library by
    their hashes and nothing else, so that no other script could run and nothing could be fetched.
    """
    runs = [source.run for source in sources]
    names = _labels([(source.path, source.run) for source in sources])
    contract = Contract()
    cases = table(runs, contract)
    parts = list(chunks(cases, runs))
    try:
        standings = places(runs)
        legend = f"Contract {version()}: {LEGEND}." if standings else ""
    except NoList as error:
        standings, legend = {}, f"{error}."
    data = as_data(cases, contract, run_labels=names, chunks=[part.first for part in parts])
    return assets.rendered(
        "page.html", assets.SCRIPTS, data, title=title, counts=_verdicts(runs), chapters=data["chapters"],
        runs=[_about(source, name) for source, name in zip(sources, names, strict=True)],
        places=[(f"{where}, torch {torch}", rows) for (where, torch), rows in standings.items()], legend=legend,
        documents=documents,
        implementations=list(dict.fromkeys(column.implementation for column in cases.columns)),
        cases=len(cases.cases), requirements=len(cases.requirements), chunks=[Markup(part.packed) for part in parts],
    )  # fmt: skip


def _verdicts(runs: Sequence[Run]) -> list[tuple[Verdict, int]]:
    """The verdicts of all runs with their numbers, gravest first."""
    count = Counter(case.verdict for run in runs for case in run.cases)
    return [(verdict, count[verdict]) for verdict in Verdict if count[verdict]]


def _about(source: Source, label: str) -> dict[str, Any]:
    run, env = source.run, source.run.environment
    return {
        "label": label, "file": PurePath(source.path).name, "incomplete": run.incomplete, "not_run": len(run.not_run),
        "left_out": len(run.left_out), "again": len(run.earlier), "effort": run.effort.name if run.effort else "",
        "counts": _verdicts([run]), "facts": _facts(env, run.end, _accelerators(run)),
        "parts": [(part.file, _facts(part.environment, part.end, "")) for part in run.merged],
        "implementations": [(name, _version(env, name)) for name in run.implementations],
    }  # fmt: skip


def _facts(env: Environment, end: End, devices: str) -> list[tuple[str, str]]:
    facts = [
        ("torch", texts.torch(env)), ("NCCL", env.nccl or ""), ("Python", env.python),
        ("shardproof", texts.shardproof(env)), ("contract", env.contract), ("accelerators", devices),
        ("CPU cores", str(env.cpu_count or "")), ("platform", env.platform), ("started", env.started),
        ("duration", f"{end.seconds:.0f} s" if end.seconds else ""), ("command", " ".join(env.command)),
    ]  # fmt: skip
    return [(name, value) for name, value in facts if value]


def _version(env: Environment, name: str) -> str:
    known = env.implementations.get(name)
    return known.version if known else ""


def _labels(runs: Sequence[tuple[str, Run]]) -> list[str]:
    """Name each run, no two alike, by device type, version of torch, and as much more as tells it from the others."""
    named = [_device_and_torch(run) for _, run in runs]
    for fact in _FACTS:
        named = _with(fact, named, runs)
    return [f"{label}, run {i}" if named.count(label) > 1 else label for i, label in enumerate(named, start=1)]


def _with(fact: Callable[[str, Run], str], named: list[str], runs: Sequence[tuple[str, Run]]) -> list[str]:
    """Add a fact to the labels that several runs have, where it is not the same for all of these."""
    facts = [fact(path, run) for path, run in runs]
    count = Counter(named)
    differ = {label for label in count if len({one for one, of in zip(facts, named, strict=True) if of == label}) > 1}
    return [f"{label}, {one}" if label in differ and one else label for label, one in zip(named, facts, strict=True)]


def _device_and_torch(run: Run) -> str:
    device = {"": "unknown device", MIXED: MIXED}.get(run.environment.device, run.environment.device.upper())
    torch = public_version(run.environment.torch)
    return f"{device}, torch {torch}" if torch else device


def _accelerators(run: Run) -> str:
    """The accelerators of a run's host, as in ``2 x NVIDIA H200``; empty if there are none."""
    counts = Counter(one.name for one in run.environment.accelerators)
    return ", ".join(f"{count} x {name}" for name, count in counts.items())


#: What tells runs of one device type and torch apart, of the path and the run, as far as it is needed: the build of
#: torch, the effort, the host and the file.
_FACTS: tuple[Callable[[str, Run], str], ...] = (
    lambda _, run: f"build {run.environment.torch.partition('+')[2] or 'without a name'}",
    lambda _, run: f"effort {run.effort.name if run.effort else 'full'}",
    lambda _, run: _accelerators(run) or f"{run.environment.cpu_count or 0} cores",
    lambda path, _: PurePath(path).name.removesuffix(".gz").removesuffix(".json"),
)
