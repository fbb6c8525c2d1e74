"""What the published runs say of each implementation: docs/matrix.md and README's table.

``python docs/make.py matrix readme`` writes them from the run files of reports/published. A failure is explained by the
finding to which its expectation links, which may be younger than the run.
"""

import dataclasses
import datetime
import functools
import pathlib
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

ROOT = pathlib.Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))  # a clone need not be installed

from shardproof import contract
from shardproof.findings import KnownFinding, load
from shardproof.harness.plugin import known_failures
from shardproof.harness.tensors import devices
from shardproof.reports.merge import merge
from shardproof.reports.profiles import standings
from shardproof.reports.texts import cause
from shardproof.runfile import CaseRecord, Run, Verdict, load_run, parse_run, public_version

README = ROOT / "README.md"
PUBLISHED = ROOT / "reports/published"
#: The text of README.md between these lines is written here.
BEGIN, END = "<!-- matrix: written by docs/make.py -->\n", "<!-- end of matrix -->\n"
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
    Place(
        "Four H200 GPUs", "4 GPUs", "2.11",
        tuple(sorted(path.name for path in PUBLISHED.glob("h200-x4-*.json.gz") if "rest-of" not in path.name)),
    ),
    Place("Four H200 GPUs, the cases after", "4 GPUs", "2.11", ("h200-x4-rest-of-references-w4.json.gz",)),
)  # fmt: skip

_HEAD = """\
# Which implementation meets what

From the [published run files](../reports/published/README.md): of each implementation on each device the run that has
the most items of the [profiles](contract.md#profiles), and of several that with the newest torch. `python
docs/make_page.py` writes [the page](page.md#the-published-runs) of all runs, with the record of each case.

A cell counts the cases that pass and the cases that were asked. Below the table each failure is explained by a
finding, which may be younger than the run; [findings.md](findings.md) has the titles. A case is not asked of an
implementation that does not declare the capabilities that it needs, or on a host without the hardware; a dash means
that none was asked. The last two rows count the cases that were not asked; [this
page](implementations.md#the-built-in-adapters) has the reasons. Compare the number asked as well: a correct
implementation passes every case that it is asked, but it may declare few capabilities.

Written by `python docs/make.py matrix`; `tests/test_matrix_page.py` compares.

## Profiles

How far each implementation is from the profiles; the cells are explained [in the
README](../README.md#which-implementation-passes-what). A dash: two GPUs cannot have the profile. Cases with eight ranks
ran over gloo, and no run used eight GPUs.
"""

_UNEXPLAINED = """\
## Failures that no finding explains

Of all published runs; [what is known of them](../reports/published/README.md).

| failure | run |
|---|---|"""


def run_of(place: Place) -> Run:
    """Join the run files of a place, and judge what failed unexpectedly by the expectations of today."""
    paths = [PUBLISHED / name for name in place.files]
    run = parse_run(merge(paths, command=["docs/make.py"]).data) if len(paths) > 1 else load_run(paths[0])
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


@functools.cache
def runs() -> Mapping[Place, Run]:
    """Return the run of each place; ValueError if a run file cannot be used."""
    return {place: run_of(place) for place in PLACES}


@functools.cache
def known() -> Mapping[str, KnownFinding]:
    """Return the findings by their ids."""
    return {one.id: one for one in load()}


def page(runs: Mapping[Place, Run], known: Mapping[str, KnownFinding]) -> str:
    """Write docs/matrix.md: profiles, chapters and failures of one run of each implementation and device."""
    parts = [_HEAD, table(runs)]
    chosen, linked = _best(runs), set()
    for column in dict.fromkeys(column for _, column in chosen):
        mine = {name: runs[one.place] for (name, where), one in chosen.items() if where == column}
        cases = {name: _of(mine[name], name) for name in _in_order(mine)}
        parts += [f"## {column}: chapters\n", *_chapters(cases, [_head(name, mine[name]) for name in cases])]
        parts += [f"\n## {column}: failures\n", "| implementation | findings, with their cases |", "|---|---|"]
        for name, of in cases.items():
            failed = _failures(of)
            linked |= failed.keys() & known.keys()
            cells = [f"{f'[{why}]' if why in known else _cell(why)} {len(same)}" for why, same in failed.items()
                     if not _is_unexplained(why, same, known)]  # fmt: skip
            parts.append(f"| {name} | {', '.join(cells) or '-'} |")
        parts.append("")
    parts.append(_UNEXPLAINED)
    for place, run in runs.items():
        parts += _unexplained(run, place, known)
    parts += ["", *(f"[{one}]: ../findings/{known[one].path.name}" for one in sorted(linked, key=_order))]
    return "\n".join(parts) + "\n"


def _unexplained(run: Run, place: Place, known: Mapping[str, KnownFinding]) -> Iterator[str]:
    """The rows of a run's failures that no finding explains: one for each function, of all that fail it alike."""
    names: dict[str, list[str]] = {}
    for name in _columns(run):
        found: dict[str, list[tuple[str, Sequence[CaseRecord]]]] = {}
        for why, same in _failures(_of(run, name)).items():
            if _is_unexplained(why, same, known):
                function, bracket, parameters = why.partition("[")
                found.setdefault(function, []).append((bracket + parameters, same))
        for function, several in found.items():
            counts = Counter(case.verdict for _, same in several for case in same)
            verdicts = ", ".join(f"{n} {one}" for one, n in counts.items())
            listed = ", ".join(f"`{_cell(parameters)}`" for parameters, _ in several[1:])
            first = f"`{_cell(function + several[0][0])}`"
            text = f"**not explained**: {verdicts} of {first}{', ' * bool(listed)}{listed}"
            names.setdefault(text, []).append(name)
    for text, who in names.items():
        yield f"| {text} | {', '.join(who)}; {place.title} |"


def table(runs: Mapping[Place, Run], short: Iterable[str] = ()) -> str:
    """Write the profiles of each implementation and column; of ``short``, those of the first column.

    Of several places the one whose run lacks the fewest items of the contract counts, and of these the newest torch.
    """
    best = _best(runs)
    names = _in_order(name for name, _ in best)
    head = ["implementation", "on", *contract.profiles(), "passed of asked"]
    rows = [one.row for name in names for (other, _), one in best.items() if other == name]
    rows = [next(row for row in rows if row.startswith(f"| `{name}` |")) for name in short] or rows
    return "\n".join([f"| {' | '.join(head)} |", "|---" * len(head) + "|", *rows]) + "\n"


@dataclasses.dataclass(frozen=True)
class _Best:
    not_run: int  # items of profiles
    place: Place
    row: str


def _best(runs: Mapping[Place, Run]) -> dict[tuple[str, str], _Best]:
    """The place that counts, by implementation and column."""
    best: dict[tuple[str, str], _Best] = {}
    for place, run in runs.items():
        all_standings = standings(run)
        for name in _columns(run):
            asked = _passed(_of(run, name))
            own = {one.profile: one for one in all_standings if one.implementation == name}
            reached = [own[one].cell if one in own else "-" for one in contract.profiles()]
            row = [f"`{name}`", f"{place.column}, torch {place.torch}", *reached, asked]
            if asked != "-":
                mine = _Best(sum(one.not_run for one in own.values()), place, f"| {' | '.join(row)} |")
                best[name, place.column] = min(best.get((name, place.column), mine), mine, key=lambda one: one.not_run)
    return best


def readme(runs: Mapping[Place, Run]) -> str:
    """The README with the table of today; ValueError if there is no place for it."""
    before, begin, rest = README.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"README.md has no {BEGIN.strip()} with {END.strip()} behind it")
    return f"{before}{begin}{table(runs, SHORT)}{end}{after}"


def _columns(run: Run) -> list[str]:
    return _in_order(case.implementation for case in run.cases)


def _in_order(names: Iterable[str]) -> list[str]:
    """Sort names, ours first: with several workers the order of the records is that of their ends."""
    return sorted(set(names), key=lambda name: (not name.startswith("reference"), name))


def _of(run: Run, name: str) -> list[CaseRecord]:
    return [case for case in run.cases if case.implementation == name]


def _head(name: str, run: Run) -> str:
    version = run.environment.implementations[name].version
    own = version and public_version(version) != public_version(run.environment.torch)
    return f"{name} {version}" if own else name


def _chapters(by_name: Mapping[str, Sequence[CaseRecord]], heads: Sequence[str]) -> list[str]:
    rows = [f"| chapter | {' | '.join(heads)} |", "|---" * (len(heads) + 1) + "|"]
    for chapter in sorted({chapter for cases in by_name.values() for case in cases for chapter in _chapters_of(case)}):
        cells = [_passed([case for case in cases if chapter in _chapters_of(case)]) for cases in by_name.values()]
        if set(cells) != {"-"}:
            rows.append(f"| {chapter} | {' | '.join(cells)} |")
    sums = {
        "all": [_passed(cases) for cases in by_name.values()],
        "unsupported": [str(_count(cases, Verdict.UNSUPPORTED)) for cases in by_name.values()],
        "unmet": [str(_count(cases, Verdict.UNMET)) for cases in by_name.values()],
    }
    return [*rows, *(f"| *{title}* | {' | '.join(cells)} |" for title, cells in sums.items())]


def _chapters_of(case: CaseRecord) -> list[str]:
    return list(dict.fromkeys(name.rpartition("-")[0] for name in case.requirements))


def _passed(cases: Iterable[CaseRecord]) -> str:
    asked = [case for case in cases if not case.verdict.is_skip]
    return f"{_count(asked, Verdict.PASS)} of {len(asked)}" if asked else "-"


def _count(cases: Iterable[CaseRecord], verdict: Verdict) -> int:
    return sum(case.verdict is verdict for case in cases)


def _is_fine(case: CaseRecord) -> bool:
    return case.verdict.is_skip or case.verdict is Verdict.PASS


def _failures(cases: Sequence[CaseRecord]) -> dict[str, list[CaseRecord]]:
    """Group failures by their findings, or by the text of the expectation, or none of both: by the case."""
    found: dict[str, list[CaseRecord]] = {}
    for case in cases:
        if not _is_fine(case):
            found.setdefault(cause(case), []).append(case)
    return dict(sorted(found.items(), key=lambda item: _order(item[0])))


def _order(why: str) -> tuple[int, str]:
    return (int(why.removeprefix("F-")), "") if re.fullmatch(r"F-\d+", why) else (sys.maxsize, why)


def _is_unexplained(why: str, cases: Sequence[CaseRecord], known: Mapping[str, KnownFinding]) -> bool:
    return why not in known and not all(case.verdict is Verdict.EXPECTED_FAIL for case in cases)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
