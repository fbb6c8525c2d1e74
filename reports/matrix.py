"""One run as text: failures, skips, and the matrix with cases or requirements down and implementations across."""

from collections import Counter
from collections.abc import Iterable, Sequence

from shardproof.reports.record import CaseRecord, Failure, Verdict
from shardproof.reports.run import Environment, Run
from shardproof.reports.table import indented, printable, table

_NOT_RUN = "-"  # a cell without a record
_FIRST_LINES, _LAST_LINES = 6, 10  # what remains of a long failure text


def render_summary(run: Run, *, by_case: bool = False, full: bool = False) -> str:
    """Render a run for a terminal.

    First come the failures, each with a line that repeats it, where it happened and its text, then the failures that
    were expected, grouped by why, and the skips, by what is missing. The matrix is last, where a terminal stands still:
    a row for each requirement, with the number of each verdict in a cell, or with `by_case` one for each case. A long
    text loses its middle unless `full`. The result ends with a newline. Nothing is raised.
    """
    blocks = [
        _heading(run.environment),
        *(_failure(case, full=full) for case in run.cases if case.verdict.failed),
        _excused(run.cases),
        _cases(run) if by_case else _requirements(run),
        [_total(run.cases)],
    ]
    return "\n\n".join("\n".join(block) for block in blocks if block) + "\n"


def _heading(env: Environment) -> list[str]:
    """What ran where, as far as the writer said so."""
    versions = [("shardproof", env.shardproof), ("torch", env.torch), ("Python", env.python), ("NCCL", env.nccl)]
    facts = [f"{name} {version}" for name, version in versions if version]
    facts += [env.device] if env.device else []
    facts += [f"{env.cpu_count} cores"] if env.cpu_count else []
    accelerators = Counter(accelerator.name for accelerator in env.accelerators)
    facts += [f"{count} x {name}" for name, count in accelerators.items()]
    when = [env.started] if env.started else []
    when += [f"{env.seconds:.1f} s"] if env.seconds else []
    return [printable(", ".join(line)) for line in (facts, when) if line]


def _requirements(run: Run) -> list[str]:
    names = dict.fromkeys(name for case in run.cases for name in case.requirements)
    rows = [["requirement", "cases", *map(printable, run.implementations)]]
    rows += [_counts_row(name, [c for c in run.cases if name in c.requirements], run.implementations) for name in names]
    return table([*rows, _counts_row("all", run.cases, run.implementations)])


def _counts_row(name: str, cases: Sequence[CaseRecord], implementations: Sequence[str]) -> list[str]:
    cells = [_counts(case.verdict for case in cases if case.implementation == name) for name in implementations]
    return [printable(name), str(len({case.id for case in cases})), *cells]


def _counts(verdicts: Iterable[Verdict]) -> str:
    """As `1 fail, 11 pass`: gravest first, as the verdicts are declared."""
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


def _failure(case: CaseRecord, *, full: bool) -> list[str]:
    lines = [printable(f"{case.verdict}: {case.implementation} {case.id} ({case.requirement})")]
    if case.nodeid:
        again = f'python -m pytest "{case.nodeid}" --impl {case.implementation} --device {case.device}'
        lines.append(printable(f"  reproduce: {again}"))
    if case.failure is None:
        return [*lines, "  the expected failure did not happen"] if case.verdict is Verdict.UNEXPECTED_PASS else lines
    place, text = _place(case.failure), indented(case.failure.text, 4)
    return [*lines, *([f"  {place}"] if place else []), *(text if full else _without_middle(text))]


def _without_middle(lines: list[str]) -> list[str]:
    """A long text's two ends: what was compared stands at its beginning, what a traceback comes to at its end."""
    left_out = len(lines) - _FIRST_LINES - _LAST_LINES
    if left_out <= 1:  # one line is no longer than saying that it is left out
        return lines
    middle = f"    ... {left_out} lines left out; --full shows them ..."
    return [*lines[:_FIRST_LINES], middle, *lines[-_LAST_LINES:]]


def _place(failure: Failure) -> str:
    """As `gradient, step 1, rank 3, head0.weight, element [0, 4]`, as far as it is known."""
    element = None if failure.element is None else list(failure.element)
    named = [("step", failure.step), ("rank", failure.rank), ("", failure.name), ("element", element)]
    parts = [f"{word} {value}".strip() for word, value in named if value is not None]
    return printable(", ".join([*([failure.stage] if failure.stage else []), *parts]))


def _excused(cases: Iterable[CaseRecord]) -> list[str]:
    """As `unsupported, tied: torch.fsdp 3`: a line for each missing thing and for each reason of an expected failure,
    with how many cases each implementation loses by it. A case that misses two things is in two lines.
    """
    found: dict[tuple[Verdict, str], Counter[str]] = {}
    for case in cases:
        if case.verdict.skipped or case.verdict is Verdict.EXPECTED_FAIL:
            for why in _reasons(case):
                found.setdefault((case.verdict, why), Counter())[case.implementation] += 1
    lines = []
    for (verdict, why), counts in sorted(found.items()):
        who = ", ".join(f"{implementation} {count}" for implementation, count in counts.items())
        lines.append(printable(f"{verdict}, {why}: {who}"))
    return lines


def _reasons(case: CaseRecord) -> list[str]:
    if case.verdict is Verdict.EXPECTED_FAIL:
        return [case.expected or "(the run file does not say why)"]
    return list(case.missing) or ["(the run file does not say what is missing)"]


def _total(cases: Sequence[CaseRecord]) -> str:
    ran = [case for case in cases if not case.verdict.skipped]
    failed = sum(case.verdict.failed for case in ran)
    return f"{failed} of {len(ran)} verdicts are failures; {len(cases) - len(ran)} more are skips"
