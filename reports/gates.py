"""What kept each implementation of a run from the cases that were skipped."""

from collections import Counter
from collections.abc import Iterable

from shardproof.reports.texts import printable
from shardproof.runfile import CaseRecord, Run, Verdict

#: From this number of cases on, a capability that alone keeps an implementation from them is worth a hint.
_MANY = 10

_SHOWN = 8  # the most gates of an implementation that are listed without `full`
_HINTED = 3  # the most capabilities in a hint
_UNNAMED = "(the run file does not name what is missing)"


def gates(run: Run, *, full: bool = False) -> list[list[str]]:
    """Render what kept each implementation from cases: missing capabilities and hardware, by number of cases.

    A case that lacks two things counts for both. A capability that is the only thing which many cases lack is named in
    a hint.

    Args:
        run: the run.
        full: whether to list everything that is missing, instead of what most cases lack.

    Returns:
        One block of lines for each implementation that skipped any case.
    """
    blocks = []
    for name in run.implementations:
        cases = [case for case in run.cases if case.implementation == name]
        if skipped := [case for case in cases if case.verdict.is_skip]:
            title = f"{name} was kept from {len(skipped)} of {len(cases)} cases by what is missing:"
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
    shown = ordered if full or len(ordered) <= _SHOWN + 1 else ordered[:_SHOWN]
    width = len(str(counts[ordered[0]]))
    lines = [_line(gate, counts[gate], alone[gate], width) for gate in shown]
    if rest := ordered[len(shown) :]:
        lines.append(f"  {len(rest)} more, at most {_cases(counts[rest[0]])} each; --full lists them")
    return lines


def _line(gate: tuple[str, str], count: int, alone: int, width: int) -> str:
    verdict, name = gate
    only = f", {'all' if alone == count else alone} of which lack nothing else" if alone else ""
    return printable(f"  {count:{width}} {verdict}: {name}{only}")


def _hints(skipped: Iterable[CaseRecord]) -> list[str]:
    """Name the capabilities that are all that many cases lack, most cases first."""
    alone = Counter(
        case.missing[0] for case in skipped if case.verdict is Verdict.UNSUPPORTED and len(case.missing) == 1
    )
    many = [(name, count) for name, count in alone.most_common(_HINTED) if count >= _MANY]
    if not many:
        return []
    (first, count), *others = many
    told = "".join(f", {name} from {count}" for name, count in others)
    text = f"{first} alone keeps it from {count} cases{told}"
    return [printable(f"  hint: {text}; declare what the implementation has (docs/adapters.md)")]


def _cases(count: int) -> str:
    return "1 case" if count == 1 else f"{count} cases"
