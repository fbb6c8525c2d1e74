"""Cases whose verdict is not the same in each of several runs of one commit."""

from collections.abc import Callable, Mapping

from shardproof.door import BadFile, printable
from shardproof.reports import texts
from shardproof.reports.texts import table
from shardproof.runfile import UNKNOWN, CaseRecord, Run

#: What runs must have in common: another verdict is expected where one of these is another.
_CONDITIONS: Mapping[str, Callable[[Run], str]] = {
    "commit": lambda run: texts.short(run.environment.shardproof_commit),
    "suites": lambda run: run.suites,
    "torch": lambda run: texts.torch(run.environment),
    "device": lambda run: run.environment.device,
}


def render_flakes(runs: Mapping[str, Run]) -> str:
    """Render the cases of several runs, by the path of each file, that ended differently, and where each attempt ran.

    An attempt that was followed by another one of the same run counts as well. Of each the text says the seeds, its
    place in the order in which the cases of the run ended, and the host.

    Raises:
        BadFile: the runs are of different code or conditions, or it is not known of which. The message is one line.
    """
    first, *others = runs
    for name, condition in _CONDITIONS.items():
        for path in runs:
            if condition(runs[path]) in ("", UNKNOWN):
                raise BadFile(f"{path} does not say its {name}: only runs of one {name} can be compared")
        for path in others:
            one, other = condition(runs[first]), condition(runs[path])
            if one != other:
                raise BadFile(f"{first} has {name} {one}, {path} {other}: that may be why verdicts differ")
    attempts: dict[tuple[str, str], list[tuple[CaseRecord, str]]] = {}
    for path, run in runs.items():
        for place, case in enumerate(run.cases, start=1):
            attempts.setdefault((case.implementation, case.id), []).append((case, _where(path, run, case, str(place))))
        for case in run.earlier:
            attempts[case.implementation, case.id].append((case, _where(path, run, case, "earlier")))
    changed = {key: found for key, found in attempts.items() if len({case.verdict for case, _ in found}) > 1}
    counts = f"{len(attempts)} cases, {len(changed)} with more than one verdict"
    lines = [printable(f"{len(runs)} runs of {_CONDITIONS['commit'](runs[first])}: {counts}")]
    for (implementation, id_), found in changed.items():
        lines += ["", f"{printable(id_)} on {printable(implementation)}"]
        rows = [[case.verdict, where, printable(case.why) if case.verdict.fails else ""] for case, where in found]
        lines += [f"  {row}" for row in table(rows)]
    return "\n".join(lines) + "\n"


def _where(path: str, run: Run, case: CaseRecord, place: str) -> str:
    """The file, the seeds, the place in its order and the host of an attempt."""
    seeds = ", ".join(f"{name} {seed}" for name, seed in case.seeds.items())
    hosts = ", ".join(dict.fromkeys(case.hosts)) or f"{run.environment.platform}, {run.environment.cpu_count} cores"
    order = f"{place} of {len(run.cases)}"
    return printable("; ".join(part for part in (path, f"seeds {seeds}" if seeds else "", order, hosts) if part))
