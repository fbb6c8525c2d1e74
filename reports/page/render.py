"""Renders run files as one HTML page that needs nothing but itself."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from markupsafe import Markup

from shardproof.reports import origins
from shardproof.reports.page import assets
from shardproof.reports.page.contract import Contract
from shardproof.reports.page.details import chunks
from shardproof.reports.page.environment import environment
from shardproof.reports.page.labels import accelerators, labels
from shardproof.reports.page.packing import packed, packed_json
from shardproof.reports.page.table import as_data, table
from shardproof.reports.record import Verdict
from shardproof.reports.run import Environment, Run


@dataclass(frozen=True)
class Source:
    """A run and the path of the file from which it was read."""

    path: str
    run: Run


def render(sources: Sequence[Source], *, title: str) -> str:
    """Render runs as a page.

    The texts of run files reach the page in two ways: through the template, which escapes them, and as compressed JSON,
    which the script of the page shows as text. A content security policy allows that script and the plotting library by
    their hashes and nothing else, so that no other script could run and nothing could be fetched.

    Args:
        sources: the runs, in the order of the columns of an implementation.
        title: of the page.

    Returns:
        The HTML. Of the same runs it is always the same.
    """
    runs = [source.run for source in sources]
    names = labels([(source.path, source.run) for source in sources])
    contract = Contract()
    cases = table(runs, contract)
    parts = list(chunks(cases, runs))
    data = as_data(cases, contract, run_labels=names, chunks=[part.first for part in parts])
    plotting, script = assets.plotting_library(), assets.script()
    return (
        environment()
        .get_template("page.html")
        .render(
            title=title,
            runs=[_about(source, name) for source, name in zip(sources, names, strict=True)],
            counts=_verdicts(runs),
            chapters=data["chapters"],
            implementations=list(dict.fromkeys(column.implementation for column in cases.columns)),
            cases=len(cases.cases),
            requirements=len(cases.requirements),
            # What is not escaped is our own source and base64.
            style=Markup(assets.style()),
            script=Markup(script),
            script_hash=assets.content_hash(script),
            plotting=Markup(packed(plotting)),
            plotting_hash=assets.content_hash(plotting),
            data=Markup(packed_json(data)),
            chunks=[Markup(part.packed) for part in parts],
        )
    )


def _verdicts(runs: Sequence[Run]) -> list[tuple[Verdict, int]]:
    """The verdicts of all runs with their numbers, gravest first."""
    count = Counter(case.verdict for run in runs for case in run.cases)
    return [(verdict, count[verdict]) for verdict in Verdict if count[verdict]]


def _about(source: Source, label: str) -> dict[str, Any]:
    """What the page says about a run itself."""
    run, env = source.run, source.run.environment
    return {
        "label": label,
        "file": PurePath(source.path).name,
        "incomplete": run.incomplete,
        "not_run": len(run.not_run),
        "left_out": len(run.left_out),
        "again": len(run.earlier),
        "effort": run.effort.name if run.effort else "",
        "counts": _verdicts([run]),
        "facts": _facts(env, accelerators(run)),
        "parts": [(part.file, _facts(part.environment, "")) for part in run.merged],
        "implementations": [(name, _version(env, name)) for name in run.implementations],
    }


def _facts(env: Environment, devices: str) -> list[tuple[str, str]]:
    facts = [
        ("torch", origins.torch(env)),
        ("NCCL", env.nccl or ""),
        ("Python", env.python),
        ("shardproof", origins.shardproof(env)),
        ("accelerators", devices),
        ("CPU cores", str(env.cpu_count or "")),
        ("platform", env.platform),
        ("started", env.started),
        ("duration", f"{env.seconds:.0f} s" if env.seconds else ""),
        ("command", " ".join(env.command)),
    ]
    return [(name, value) for name, value in facts if value]


def _version(env: Environment, name: str) -> str:
    known = env.implementations.get(name)
    return known.version if known else ""
