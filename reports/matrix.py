"""The matrix of one run as text: cases or requirements down, implementations across; then failures and skips."""

from collections import Counter
from collections.abc import Iterable, Sequence

from reports.record import CaseRecord, Failure, Verdict
from reports.run import Environment, Run
from reports.table import indented, printable, table

_NOT_RUN = "-"  # a cell without a record


def render_summary(run: Run, *, by_case: bool = False) -> str:
    """Render a run for a terminal.

    One row for each requirement, with the number of each verdict in a cell, or with `by_case` one for each case. Below
    it stand the failures, each with where it happened, its text and a line that repeats it, and the skips, grouped by
    what is missing. The text ends with a newline. It raises nothing.
    """
    blocks = [
        _heading(run.environment),
        _cases(run) if by_case else _requirements(run),
        *map(_failure, (case for case in run.cases if case.verdict.failed)),
        _skips(run.cases),
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
    names = dict.fromkeys(case.requirement for case in run.cases)
    rows = [["requirement", "cases", *map(printable, run.implementations)]]
    rows += [_counts_row(name, [c for c in run.cases if c.requirement == name], run.implementations) for name in names]
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


def _failure(case: CaseRecord) -> list[str]:
    lines = [printable(f"{case.verdict}: {case.implementation} {case.id} ({case.requirement})")]
    if case.nodeid:
        again = f'python -m pytest "{case.nodeid}" --impl {case.implementation} --device {case.device}'
        lines.append(printable(f"  reproduce: {again}"))
    if case.failure is None:
        return [*lines, "  the expected failure did not happen"] if case.verdict is Verdict.UNEXPECTED_PASS else lines
    place = _place(case.failure)
    return [*lines, *([f"  {place}"] if place else []), *indented(case.failure.text, 4)]


def _place(failure: Failure) -> str:
    """As `gradient, step 1, rank 3, head0.weight, element [0, 4]`, as far as it is known."""
    element = None if failure.element is None else list(failure.element)
    named = [("step", failure.step), ("rank", failure.rank), ("", failure.name), ("element", element)]
    parts = [f"{word} {value}".strip() for word, value in named if value is not None]
    return printable(", ".join([*([failure.stage] if failure.stage else []), *parts]))


def _skips(cases: Iterable[CaseRecord]) -> list[str]:
    """As `unsupported, mixed_precision: torch.fsdp 3`: a line for each set of missing things."""
    skipped: dict[tuple[Verdict, str], Counter[str]] = {}
    for case in cases:
        if case.verdict.skipped:
            missing = ", ".join(sorted(case.missing)) or "(the run file does not say what is missing)"
            skipped.setdefault((case.verdict, missing), Counter())[case.implementation] += 1
    lines = []
    for (verdict, missing), counts in sorted(skipped.items()):
        who = ", ".join(f"{name} {count}" for name, count in counts.items())
        lines.append(printable(f"{verdict}, {missing}: {who}"))
    return lines


def _total(cases: Sequence[CaseRecord]) -> str:
    ran = [case for case in cases if not case.verdict.skipped]
    failed = sum(case.verdict.failed for case in ran)
    return f"{failed} of {len(ran)} verdicts are failures; {len(cases) - len(ran)} more are skips"
