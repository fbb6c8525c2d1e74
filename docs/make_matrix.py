"""Writes docs/matrix.md and the table of implementations in README.md from run files of reports/published.

``--check`` compares instead of writing. The page has a table for each environment, with a row for each chapter of the
contract and a column for each implementation, and explains each failure by the finding to which its expectation links,
which may be younger than the run.

Run as ``python docs/make_matrix.py`` in the repository's root.
"""

import dataclasses
import datetime
import functools
import pathlib
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence

from generating import ROOT, write_or_compare

from shardproof import contract
from shardproof.findings import Finding, load, markdown
from shardproof.harness.plugin import known_failures
from shardproof.harness.tensors import devices
from shardproof.reports.merge import merge
from shardproof.reports.profiles import standings
from shardproof.reports.texts import cause
from shardproof.runfile import CaseRecord, Run, Verdict, load_run, parse_run, public_version

PAGE, README = ROOT / "docs/matrix.md", ROOT / "README.md"
PUBLISHED = ROOT / "reports/published"
#: The text of README.md between these lines is written here.
BEGIN, END = "<!-- matrix: written by docs/make_matrix.py -->\n", "<!-- end of matrix -->\n"
#: The implementations in it; the page has all.
SHORT = ("reference", "reference.flat", "torch.fully_shard", "torch.fsdp", "deepspeed.zero3", "fairscale.sdp",
         "lightning.fabric", "olmo_core.fsdp", "torchtitan.simple_fsdp")  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Place:
    """Where the runs of one table were made."""

    title: str
    column: str  # of README.md; places that share one have different versions of torch there
    torch: str
    files: tuple[str, ...]  # the run files in reports/published whose implementations are its columns


#: Those of one column of README.md follow each other, the newest torch first.
PLACES = (
    Place("CPU, gloo, torch 2.15", "CPU", "2.15", ("cpu-torch-2.15-standard.json.gz",)),
    Place("CPU, gloo, torch 2.14", "CPU", "2.14", ("cpu-torch-2.14-standard.json.gz",)),
    Place("CPU, gloo, torch 2.13", "CPU", "2.13", ("cpu-torch-v6-standard.json.gz", "cpu-veomni-v9-standard.json.gz")),
    Place(
        "CPU, gloo, torch 2.11", "CPU", "2.11",
        ("cpu-torch-2.11-v12-standard.json.gz", "cpu-deepspeed-fairscale-v12-standard.json.gz",
         "cpu-torchtitan-lightning-v12-standard.json.gz", "cpu-olmo-core-v10-standard.json.gz"),
    ),
    Place("CPU, gloo, torch 2.11, the cases before", "CPU", "2.11", ("cpu-deepspeed-v8-standard.json.gz",)),
    Place(
        "Two H200 GPUs, NCCL, torch 2.11", "2 GPUs", "2.11",
        tuple(sorted(path.name for path in PUBLISHED.glob("h200-x2-*.json.gz"))),
    ),
)  # fmt: skip

_HEAD = """\
# Which implementation meets what

Each cell gives, for one chapter of [the contract](contract.md), the cases that pass and the cases that were asked.
Every case that an implementation fails is explained below its table by a finding, which may be younger than the run,
unless a row says otherwise. A case is not asked of an implementation that does not declare the capabilities that it
needs, or on a host without the hardware. A dash means that no case of the chapter was asked. The last two rows count
the cases that were not asked; [this page](implementations.md#the-built-in-adapters) has the reasons. Compare the number
asked as well: a correct implementation passes every case that it is asked, but it may declare few capabilities.

Written by `python docs/make_matrix.py` from [published run files](../reports/published/README.md);
`tests/test_matrix_page.py` compares.

## Profiles

How far each implementation is from the [profiles](contract.md#profiles) of the contract, in the run that has the most
of their items, of several with the newest torch. The cells are explained [in the
README](../README.md#which-implementation-passes-what). A dash: two GPUs cannot have the profile. Cases with eight ranks
ran over gloo, and no run used eight GPUs.
"""


def run_of(place: Place) -> Run:
    """Join the run files of a place, and judge what failed unexpectedly by the expectations of today."""
    paths = [PUBLISHED / name for name in place.files]
    run = parse_run(merge(paths, command=["docs/make_matrix.py"]).data) if len(paths) > 1 else load_run(paths[0])
    device, never = run.environment.device, datetime.date.min  # nothing has expired then
    where = {"torch_version": run.environment.torch, "device": device, "backend": devices.BACKENDS[device]}

    @functools.cache
    def expected(implementation: str) -> known_failures.KnownFailures:
        entries = known_failures.load(ROOT / "suites/expectations", implementation)
        return known_failures.KnownFailures(entries, **where, today=never)

    def judged(case: CaseRecord) -> CaseRecord:
        if _is_fine(case) or case.verdict is Verdict.EXPECTED_FAIL:
            return case
        verdict, why = expected(case.implementation).judge(case.id, case.verdict)
        is_known = verdict is Verdict.EXPECTED_FAIL
        return dataclasses.replace(case, verdict=verdict, expected=f"{case.verdict}: {why}") if is_known else case

    return dataclasses.replace(run, cases=tuple(map(judged, run.cases)))


def page(runs: Mapping[Place, Run], known: Mapping[str, Finding]) -> str:
    """Write docs/matrix.md."""
    parts = [_HEAD, table(runs).rstrip()]
    for place, run in runs.items():
        names = ", ".join(f"[{name}](../reports/published/{name})" for name in place.files)
        parts += [f"\n## {place.title}\n", f"From {names}.", "", *_chapters(run), *_failures(run, known)]
    return "\n".join(parts) + "\n"


def table(runs: Mapping[Place, Run], short: Iterable[str] = ()) -> str:
    """Write the profiles of each implementation and column; of ``short``, those of the first column.

    Of several places the one whose run lacks the fewest items of the contract counts, and of these the newest torch.
    """
    best: dict[tuple[str, str], tuple[int, str]] = {}
    for place, run in runs.items():
        all_standings = standings(run)
        for name in _columns(run):
            asked = _passed([case for case in run.cases if case.implementation == name])
            own = {one.profile: one for one in all_standings if one.implementation == name}
            reached = [own[one].cell if one in own else "-" for one in contract.profiles()]
            row = [f"`{name}`", f"{place.column}, torch {place.torch}", *reached, asked]
            if asked != "-":
                mine = sum(one.not_run for one in own.values()), f"| {' | '.join(row)} |"
                best[name, place.column] = min(best.get((name, place.column), mine), mine, key=lambda one: one[0])
    names = _in_order(name for name, _ in best)
    head = ["implementation", "on", *contract.profiles(), "passed of asked"]
    rows = [row for name in names for (other, _), (_, row) in best.items() if other == name]
    rows = [next(row for row in rows if row.startswith(f"| `{name}` |")) for name in short] or rows
    return "\n".join([f"| {' | '.join(head)} |", "|---" * len(head) + "|", *rows]) + "\n"


def _columns(run: Run) -> list[str]:
    return _in_order(case.implementation for case in run.cases)


def _in_order(names: Iterable[str]) -> list[str]:
    """Sort names, ours first: with several workers the order of the records is that of their ends."""
    return sorted(set(names), key=lambda name: (not name.startswith("reference"), name))


def _chapters(run: Run) -> list[str]:
    names = _columns(run)
    versions = {name: run.environment.implementations[name].version for name in names}
    rows = [f"| chapter | {' | '.join(_head(name, versions[name], run) for name in names)} |"]
    rows.append("|---" * (len(names) + 1) + "|")
    by_chapter = defaultdict(list)
    for case in run.cases:
        for chapter in _chapters_of(case):
            by_chapter[chapter].append(case)
    for chapter, cases in sorted(by_chapter.items()):
        cells = [_passed([case for case in cases if case.implementation == name]) for name in names]
        rows.append(f"| {chapter} | {' | '.join(cells)} |")
    by_name = {name: [case for case in run.cases if case.implementation == name] for name in names}
    sums = {
        "all": [_passed(cases) for cases in by_name.values()],
        "unsupported": [str(_count(cases, Verdict.UNSUPPORTED)) for cases in by_name.values()],
        "unmet": [str(_count(cases, Verdict.UNMET)) for cases in by_name.values()],
    }
    return [*rows, *(f"| *{title}* | {' | '.join(cells)} |" for title, cells in sums.items())]


def _head(name: str, version: str, run: Run) -> str:
    own = version and public_version(version) != public_version(run.environment.torch)
    return f"{name} {version}" if own else name


def _chapters_of(case: CaseRecord) -> list[str]:
    return list(dict.fromkeys(name.rpartition("-")[0] for name in case.requirements))


def _passed(cases: Iterable[CaseRecord]) -> str:
    asked = [case for case in cases if not case.verdict.is_skip]
    return f"{_count(asked, Verdict.PASS)} of {len(asked)}" if asked else "-"


def _count(cases: Iterable[CaseRecord], verdict: Verdict) -> int:
    return sum(case.verdict is verdict for case in cases)


def _failures(run: Run, known: Mapping[str, Finding]) -> list[str]:
    """What each implementation fails: a row for each finding, and one for each case that no finding explains."""
    lines = []
    for name in _columns(run):
        failed = [case for case in run.cases if case.implementation == name and not _is_fine(case)]
        if failed:
            lines += [f"\n### {name}\n", "| failure | cases | chapters | upstream |", "|---|---|---|---|"]
            lines += [row for why, cases in _by_reason(failed).items() for row in _rows(why, cases, known)]
    return lines


def _is_fine(case: CaseRecord) -> bool:
    return case.verdict.is_skip or case.verdict is Verdict.PASS


def _by_reason(cases: Sequence[CaseRecord]) -> dict[str, list[CaseRecord]]:
    """Group failures by their findings, or by the text of the expectation, or none of both: by the case."""
    found: dict[str, list[CaseRecord]] = {}
    for case in cases:
        found.setdefault(cause(case), []).append(case)
    return dict(sorted(found.items(), key=lambda item: _order(item[0])))


def _order(why: str) -> tuple[int, str]:
    return (int(why.removeprefix("F-")), "") if re.fullmatch(r"F-\d+", why) else (sys.maxsize, why)


def _rows(why: str, cases: Sequence[CaseRecord], known: Mapping[str, Finding]) -> list[str]:
    chapters = ", ".join(sorted({chapter for case in cases for chapter in _chapters_of(case)}))
    if why in known:
        finding = known[why]
        what = f"[{why}](../findings/{finding.path.name}) {_cell(finding.title)}"
        return [f"| {what} | {len(cases)} | {chapters} | {_cell('; '.join(map(markdown, finding.upstream)))} |"]
    if all(case.verdict is Verdict.EXPECTED_FAIL for case in cases):
        return [f"| {_cell(why)} | {len(cases)} | {chapters} | |"]
    verdicts = ", ".join(f"{count} {verdict}" for verdict, count in Counter(case.verdict for case in cases).items())
    what = f"**not explained**: {verdicts} of `{_cell(why)}` ([what is known](../reports/published/README.md))"
    return [f"| {what} | {len(cases)} | {chapters} | |"]


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def made() -> dict[pathlib.Path, str]:
    """The contents of each file; ValueError if a run file cannot be used."""
    runs = {place: run_of(place) for place in PLACES}
    before, begin, rest = README.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"README.md has no {BEGIN.strip()} with {END.strip()} behind it")
    readme = f"{before}{begin}{table(runs, SHORT)}{end}{after}"
    return {PAGE: page(runs, {one.id: one for one in load()}), README: readme}


if __name__ == "__main__":
    raise SystemExit(write_or_compare(made, __doc__))
