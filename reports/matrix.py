"""Renders a run as text: failures, skips, and a matrix of requirements or cases by implementations."""

import textwrap
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import PurePath

from shardproof import contract
from shardproof.door import printable
from shardproof.reports import texts
from shardproof.reports.texts import counted, indented, table
from shardproof.runfile import CaseRecord, End, Environment, Failure, Run, Verdict

_NOT_RUN = "-"  # the text of a cell without a record
_FIRST_LINES, _LAST_LINES = 6, 10  # of a long failure text that is shortened
_SAME = "with the same failure (only numbers and names differ); --full shows each:"
_WIDTH = 100  # of the lists of cases
#: From this number of cases on, a capability that alone keeps an implementation from them is worth a hint.
_MANY = 10

_GATES = 8  # the most gates of an implementation that are listed without `full`
#: Interfaces of torch's own, which an implementation has on purpose or not at all: no hint for who lacks one.
_OF_TORCH = frozenset({"fsdp1-api", "fsdp2-api", "zero-api"})
_HINTED = 3  # the most capabilities in a hint
_UNNAMED = "(the run file does not name what is missing)"

_ORDINALS = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth", "tenth")


def render_summary(run: Run, *, by_case: bool = False, full: bool = False) -> str:
    """Render a run for a terminal.

    The failures come first, each with its place, its text and a command that reproduces it. Expected failures, grouped
    by reason, and the missing capabilities and hardware of each implementation follow. The matrix comes last, because a
    terminal shows the end of the output. Its cells contain the number of each verdict.

    Args:
        by_case: whether the matrix has a row for each case, with its verdict, instead of each requirement.
        full: whether to show each failure, instead of one of those that are alike, the middle of long texts, and
            everything that is missing.
    """
    blocks = [
        *_headings(run),
        _effort(run),
        _gaps(run),
        *_failures([case for case in run.cases if case.verdict.fails], full=full),
        _excused(run.cases),
        *gates(run, full=full),
        _cases(run) if by_case else _requirements(run),
        [_total(run)],
    ]
    return "\n\n".join("\n".join(block) for block in blocks if block) + "\n"


def _headings(run: Run) -> list[list[str]]:
    """The environment of the run; of a merged one, those of its parts, each with the name of its file."""
    if not run.merged:
        return [_heading(run.environment, run.end)]
    lines = [f"merged from {len(run.merged)} runs:"]
    for part in run.merged:
        effort = f", effort {part.effort.name}" if part.effort else ""
        lines.append(f"  {printable(part.file)}{effort}:")
        lines += [f"    {line}" for line in _heading(part.environment, part.end)]
    return [lines]


def _heading(env: Environment, end: End) -> list[str]:
    """The versions, the host and the time of the run, without those that the run file lacks."""
    versions = [
        ("shardproof", texts.shardproof(env)), ("contract", env.contract), ("torch", texts.torch(env)),
        ("Python", env.python), ("NCCL", env.nccl),
    ]  # fmt: skip
    facts = [f"{name} {version}" for name, version in versions if version]
    facts += [env.device] if env.device else []
    facts += [f"{env.cpu_count} cores"] if env.cpu_count else []
    accelerators = Counter(accelerator.name for accelerator in env.accelerators)
    facts += [f"{count} x {name}" for name, count in accelerators.items()]
    when = [env.started] if env.started else []
    when += [f"{end.seconds:.1f} s"] if end.seconds else []
    lines = [", ".join(line) for line in (facts, when) if line]
    return [printable(line) for line in [*lines, *(f"{part}: {what}" for part, what in env.mends.items())]]


def _effort(run: Run) -> list[str]:
    """The effort of the run, and how many cases it left out, by the names of their files."""
    if run.effort is None:
        return []
    counts: Counter[str] = Counter()
    for files in run.effort.deselected.values():
        counts.update({PurePath(file).stem.removeprefix("test_"): count for file, count in files.items()})
    left_out, kept = counts.total(), sum(map(len, run.selected.values()))
    what = f"{left_out} of {left_out + kept} cases left out: {_by_name(counts)}" if left_out else "all cases"
    text = f"{f'profile {run.effort.profile}' if run.effort.profile else f'effort {run.effort.name}'}: {what}"
    return textwrap.wrap(printable(text), _WIDTH, subsequent_indent="  ", break_long_words=False)


def _gaps(run: Run) -> list[str]:
    """What a reader must know: why the run is incomplete, which cases did not run, and which ran twice."""
    lines = [f"INCOMPLETE: {run.incomplete}"] if run.incomplete else []
    for name, needs in run.unasked.items():
        text = ", ".join(f"{one} (needs {what})" for one, what in needs.items())
        lines.append(f"{name}: required of every implementation, not run: {text}")
    not_run = Counter(name for name, _ in run.not_run)
    if not_run:
        lines.append(f"selected, but not run: {_by_name(not_run)}")
    reasons: dict[str, Counter[str]] = {}
    for case in run.left_out:
        reasons.setdefault(case.reason, Counter())[case.implementation] += 1
    lines += [f"skipped by pytest ({reason}): {_by_name(counts)}" for reason, counts in sorted(reasons.items())]
    if run.earlier:
        again = Counter(case.implementation for case in run.earlier)
        lines.append(f"run again, only the last attempt counts: {_by_name(again)}")
    return [printable(line) for line in lines]


def _by_name(counts: Counter[str]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.items())


def _requirements(run: Run) -> list[str]:
    of: dict[str, list[CaseRecord]] = {}
    for case in run.cases:
        for name in dict.fromkeys(case.requirements):
            of.setdefault(name, []).append(case)
    ids = [id_ for _, _, requirements in contract.chapters() for id_, _, _ in requirements]
    place = {id_: number for number, id_ in enumerate(ids)}
    rows = [["requirement", "cases", *map(printable, run.implementations)]]
    # Workers end their cases in any order. Requirements that the contract does not have come last.
    names = sorted(of, key=lambda name: place.get(name, len(place)))
    rows += [_counts_row(name, of[name], run.implementations) for name in names]
    return table([*rows, _counts_row("all", run.cases, run.implementations)])


def _counts_row(name: str, cases: Sequence[CaseRecord], implementations: Sequence[str]) -> list[str]:
    cells = [_counts(case.verdict for case in own) for own in _by_implementation(cases, implementations)]
    return [printable(name), str(len({case.id for case in cases})), *cells]


def _by_implementation(cases: Iterable[CaseRecord], implementations: Sequence[str]) -> list[list[CaseRecord]]:
    """Return the cases of each implementation, which are read once."""
    found: dict[str, list[CaseRecord]] = {name: [] for name in implementations}
    for case in cases:
        found[case.implementation].append(case)
    return list(found.values())


def _counts(verdicts: Iterable[Verdict]) -> str:
    """Count verdicts, as in `1 fail, 11 pass`; the gravest comes first, in the order of `Verdict`."""
    count = Counter(verdicts)
    return ", ".join(f"{count[verdict]} {verdict}" for verdict in Verdict if count[verdict]) or _NOT_RUN


def _cases(run: Run) -> list[str]:
    verdicts = {(case.id, case.implementation): case.verdict for case in run.cases}
    requirements = {case.id: case.requirement for case in run.cases}
    rows = [["case", "requirement", *map(printable, run.implementations)]]
    for case, requirement in requirements.items():
        cells = [str(verdicts.get((case, name), _NOT_RUN)) for name in run.implementations]
        rows.append([printable(case), printable(requirement), *cells])
    return table([*rows, _counts_row("all", run.cases, run.implementations)])


def _failures(failed: Sequence[CaseRecord], *, full: bool) -> list[list[str]]:
    """One block for each failure, or for those that are alike the block of the first with the others below it."""
    blocks = []
    for first, *others in [[case] for case in failed] if full else _alike(failed):
        # Each id is one word, however long.
        ids = textwrap.TextWrapper(_WIDTH - 4, break_long_words=False, break_on_hyphens=False)
        listed = [f"    {line}" for line in ids.wrap(" ".join(printable(case.id) for case in others))]
        title = [f"  {counted(len(others), 'more case')} {_SAME}"] if others else []
        # Last, as in pytest's output: the line to copy.
        command = [printable(f"  reproduce: {first.reproduction}")] if first.reproduction else []
        blocks.append([*_failure(first, full=full), *title, *listed, *command])
    return blocks


def _alike(cases: Iterable[CaseRecord]) -> list[list[CaseRecord]]:
    """Group the failures that are alike, in the order of their first cases."""
    groups: dict[object, list[CaseRecord]] = {}
    for case in cases:
        kind = id(case) if case.failure is None else (case.implementation, texts.kind_of(case))
        groups.setdefault(kind, []).append(case)
    return list(groups.values())


def _failure(case: CaseRecord, *, full: bool) -> list[str]:
    lines = [printable(f"{case.verdict}: {case.implementation} {case.id} ({case.requirement})")]
    if case.failure is None:
        return [*lines, f"  {case.why}"] if case.verdict is Verdict.UNEXPECTED_PASS else lines
    place, text = _place(case.failure), indented(case.failure.text, 4)
    return [*lines, *([f"  {place}"] if place else []), *(text if full else _without_middle(text))]


def _without_middle(lines: list[str]) -> list[str]:
    """Shorten a long text to its two ends: the comparison is at the beginning, the error of a traceback at the end."""
    left_out = len(lines) - _FIRST_LINES - _LAST_LINES
    if left_out <= 1:  # the note about the omission takes a line itself
        return lines
    middle = f"    ... {left_out} lines left out; --full shows them ..."
    return [*lines[:_FIRST_LINES], middle, *lines[-_LAST_LINES:]]


def _place(failure: Failure) -> str:
    """The place of a failure without unknown parts: `gradient, second step (step 1), rank 3, w, element [0, 4]`."""
    element = None if failure.element is None else list(failure.element)
    step = None if failure.step is None else _step(failure.step)
    named = [("", step), ("rank", failure.rank), ("", failure.name), ("element", element)]
    parts = [f"{word} {value}".strip() for word, value in named if value is not None]
    return printable(", ".join([*([failure.stage] if failure.stage else []), *parts]))


def _step(step: int) -> str:
    return f"{_ORDINALS[step]} step (step {step})" if 0 <= step < len(_ORDINALS) else f"step {step} (counted from 0)"


def _excused(cases: Iterable[CaseRecord]) -> list[str]:
    """Count expected failures by reason, as in `expected-fail, fail: the norm raises (F-2): torch.fsdp 3`."""
    found: dict[str, Counter[str]] = {}
    for case in cases:
        if case.verdict is Verdict.EXPECTED_FAIL:
            why = case.expected or "(the run file gives no reason)"
            found.setdefault(why, Counter())[case.implementation] += 1
    return [printable(f"{Verdict.EXPECTED_FAIL}, {why}: {_by_name(counts)}") for why, counts in sorted(found.items())]


def gates(run: Run, *, full: bool = False) -> list[list[str]]:
    """Render what kept each implementation from cases: missing capabilities and hardware, by number of cases.

    A case that lacks two things counts for both. A capability that is the only thing which many cases lack is named in
    a hint. With ``full`` everything that is missing is listed, instead of what most cases lack.
    """
    blocks = []
    for name, cases in zip(run.implementations, _by_implementation(run.cases, run.implementations), strict=True):
        if skipped := [case for case in cases if case.verdict.is_skip]:
            title = f"{name}: {len(skipped)} of {counted(len(cases), 'case')} skipped; what they lack:"
            blocks.append([printable(title), *_listed(skipped, full=full), *_hints(skipped)])
    return blocks


def _listed(skipped: Iterable[CaseRecord], *, full: bool) -> list[str]:
    counts: Counter[tuple[str, str]] = Counter()
    alone: Counter[tuple[str, str]] = Counter()
    for case in skipped:
        # Not the verdict alone: an unsupported case may lack hardware as well.
        names = case.missing or (_UNNAMED,)
        counts.update((case.verdict, name) for name in names)
        if len(names) == 1:
            alone[case.verdict, names[0]] += 1
    ordered = sorted(counts, key=lambda gate: (-counts[gate], gate))
    shown = ordered if full or len(ordered) <= _GATES + 1 else ordered[:_GATES]
    width = len(str(counts[ordered[0]]))
    lines = [_line(gate, counts[gate], alone[gate], width) for gate in shown]
    if rest := ordered[len(shown) :]:
        lines.append(f"  {len(rest)} more, at most {counted(counts[rest[0]], 'case')} each; --full lists them")
    return lines


def _line(gate: tuple[str, str], count: int, alone: int, width: int) -> str:
    verdict, name = gate
    only = f" ({'all' if alone == count else alone} for lack of this alone)" if alone else ""
    return printable(f"  {count:{width}} {verdict}: {name}{only}")


def _hints(skipped: Iterable[CaseRecord]) -> list[str]:
    """Name the capabilities that are all that many cases lack, most cases first."""
    alone = Counter(
        case.missing[0]
        for case in skipped
        if case.verdict is Verdict.UNSUPPORTED and len(case.missing) == 1 and case.missing[0] not in _OF_TORCH
    )
    many = [(name, count) for name, count in alone.most_common(_HINTED) if count >= _MANY]
    if not many:
        return []
    (first, count), *others = many
    told = "".join(f", {count} only {name}" for name, count in others)
    text = f"{count} cases lack only {first}{told}"
    return [printable(f"  hint: {text}; declare what the implementation has (docs/adapters.md)")]


def _total(run: Run) -> str:
    ran = [case for case in run.cases if not case.verdict.is_skip]
    failed = sum(case.verdict.fails for case in ran)
    text = f"{failed} of {counted(len(ran), 'case')} that ran failed; {len(run.cases) - len(ran)} skipped"
    return text + ("; the run is INCOMPLETE" if run.incomplete else "")
