"""Renders the regressions of a run: for a terminal, as Markdown for a pull request, and as GitHub's annotations.

Regressions that are alike are shown once, with their number and their cases.
"""

import os
import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Mapping

from shardproof.door import printable
from shardproof.reports.regressions import Group, RegressionKind, RunComparison, Worse, grouped
from shardproof.reports.texts import counted, short, torch
from shardproof.runfile import UNKNOWN, Run

_SHOWN = 50  # the most lines of one kind in a comment, which has a limited size
_CHANGED = "expected failures that fail otherwise than before"
_WIDTH = 100  # of the lists of cases


def described(run: Run, name: str, path: str) -> str:
    """Return one line about a run that is compared: its file, when it started, and what code it is of."""
    env = run.environment
    ours = env.shardproof if env.shardproof_commit in ("", UNKNOWN) else short(env.shardproof_commit)
    known = [("torch", torch(env)), ("shardproof", ours), ("suites", run.suites)]
    facts = [env.started, *(f"{word} {fact}" for word, fact in known if fact)]
    return f"{name} {path}: {', '.join(filter(None, facts))}"


def as_text(outcome: RunComparison) -> str:
    """Render a comparison of runs for a terminal: the verdict comes last."""
    lines = [*map(printable, outcome.runs), ""] if outcome.runs else []
    for kind, found in _by_kind(outcome).items():
        members = [one for group in found for one in group.members]
        lines.append(f"{_counts(members, '{} ({})')}:")
        for group in found:
            first = group.first
            lines += [printable(f"  {line}") for line in _told(group)]
            lines += [f"    {line}" for line in _cases(group)]
            lines += [printable(f"    reproduce: {first.reproduce}")] if first.reproduce and kind.is_failure else []
        lines.append("")
    lines += _listed("accepted", _accepted(outcome))
    lines += _listed("better", outcome.better)
    lines += _listed(_CHANGED, outcome.changed)
    lines += _listed("not compared", outcome.not_compared)
    return "\n".join([*lines, _verdict(outcome)]) + "\n"


def as_markdown(outcome: RunComparison) -> str:
    """Render a comparison of runs as a comment on a pull request: the verdict comes first, long lists are folded."""
    parts = [f"### shardproof: {_verdict(outcome)}", ""]
    parts += [*(f"- {_escaped(line)}" for line in outcome.runs), ""] if outcome.runs else []
    if outcome.worse:
        parts += ["| what got worse | implementation | case | |", "|---|---|---|---|"]
        for kind, found in _by_kind(outcome).items():
            parts += [_row(group) for group in found[:_SHOWN]]
            if len(found) > _SHOWN:
                parts.append(f"| {kind} | | | and {len(found) - _SHOWN} more |")
        parts.append("")
        for group in (one for found in _by_kind(outcome).values() for one in found[:_SHOWN] if len(one.cases) > 1):
            first, count = group.first, counted(len(group.cases), "case")
            title = f"{first.kind}: {count} of {first.implementation}, the first {first.case}"
            parts += [
                f"<details><summary>{_escaped(title)}</summary>",
                "",
                *_block(_cases(group)),
                "",
                "</details>",
                "",
            ]
        firsts = [group.first for group in outcome.groups if group.first.kind.is_failure]
        commands = list(dict.fromkeys(one.reproduce for one in firsts if one.reproduce))
        if commands:
            block = _block(map(printable, commands[:_SHOWN]))
            parts += ["<details><summary>Reproduce</summary>", "", *block, "", "</details>", ""]
    parts += _folded("Accepted", _accepted(outcome))
    parts += _folded("Better", outcome.better)
    parts += _folded(_CHANGED.capitalize(), outcome.changed)
    parts += _folded("Not compared", outcome.not_compared)
    return "\n".join(parts).rstrip() + "\n"


def as_github(outcome: RunComparison) -> str:
    """Render a comparison of runs as workflow commands, which GitHub shows in the summary and at files."""
    lines = [_message(line) for line in outcome.runs]
    for group in outcome.groups:
        one, cases = group.first, group.cases
        file = _in_repository(one.nodeid.partition("::")[0])
        place = f" file={_property(file)}," if file else " "
        more = f" and {counted(len(cases) - 1, 'more case')} alike" if len(cases) > 1 else ""
        text = "; ".join([one.text, *(f"{other.kind}: {other.text}" for other in group.also)])
        lines.append(f"::error{place}title={_property(f'{one.kind}: {_subject(one)}{more}')}::{_message(text)}")
    lines += [f"::notice title=shardproof accepted::{_message(line)}" for line in _accepted(outcome)]
    lines += [f"::notice title=shardproof {_CHANGED}::{_message(line)}" for line in outcome.changed]
    lines += [f"::notice title=shardproof not compared::{_message(line)}" for line in outcome.not_compared]
    return "\n".join([*lines, _message(_verdict(outcome))]) + "\n"


def _in_repository(file: str) -> str:
    """Return a file if the repository that GitHub checked out has it; the packaged suites are elsewhere."""
    root = os.path.abspath(os.environ.get("GITHUB_WORKSPACE") or ".")
    path = os.path.normpath(os.path.join(root, file))
    return file if path.startswith(root + os.sep) and os.path.isfile(path) else ""


FORMATS: Mapping[str, Callable[[RunComparison], str]] = {"text": as_text, "markdown": as_markdown, "github": as_github}
"""The renderers, by the names of ``--format``."""


def _by_kind(outcome: RunComparison) -> dict[RegressionKind, list[Group]]:
    found: dict[RegressionKind, list[Group]] = {}
    for group in outcome.groups:
        found.setdefault(group.first.kind, []).append(group)
    return found


def _told(group: Group) -> list[str]:
    """What got worse: of several cases how many there are, and the text of the first."""
    first, count = group.first, len(group.cases)
    if count > 1:
        who = f"{first.implementation}: {count} cases alike (only numbers and names differ), the first"
    else:
        who = _subject(first)
    return [f"{who}: {first.text}", *(f"  {other.kind}: {other.text}" for other in group.also)]


def _cases(group: Group) -> list[str]:
    """The ids of several cases, those of one function in one line or more; nothing of a case alone."""
    if len(group.cases) < 2:
        return []
    functions: dict[str, list[str]] = {}
    for case in group.cases:
        function, bracket, parameters = case.partition("[")
        functions.setdefault(function, []).append(bracket + parameters)
    lines = []
    for function, listed in functions.items():
        line = printable(f"{function} {' '.join(listed)}".rstrip())
        lines += textwrap.wrap(line, _WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
    return lines


def _row(group: Group) -> str:
    first, count = group.first, len(group.cases)
    kinds = "; ".join([first.kind, *(other.kind for other in group.also)])
    case = f"{count} cases, the first {_code(first.case)}" if count > 1 else _code(first.case)
    text = "; ".join(_cell(one.text) for one in (first, *group.also))
    return f"| {kinds} | {_code(first.implementation)} | {case} | {text} |"


def _subject(one: Worse) -> str:
    return f"{one.implementation} {one.case}".rstrip()


def _accepted(outcome: RunComparison) -> list[str]:
    reasons = {one.worse: one.reason for one in outcome.accepted}
    lines = []
    for group in grouped(reasons):
        told = "; ".join(line.strip() for line in _told(group))
        because = "; ".join(dict.fromkeys(reasons[one] for one in group.members))
        lines.append(f"{group.first.kind}: {told} ({because})")
    return lines


def _verdict(outcome: RunComparison) -> str:
    compared = f"compared: {counted(outcome.compared, 'case')} that ran in both"
    if outcome.expected:
        compared += f", {outcome.expected} of which {'is' if outcome.expected == 1 else 'are'} expected to fail in both"
    if outcome.effort == "quick":
        compared += ", with --effort quick alone: most items of each case did not run"
    if outcome.accepted:
        compared = f"accepted: {len(outcome.accepted)}; {compared}"
    if not outcome.worse:
        return f"nothing got worse; {compared}"
    alike = f" in {counted(groups, 'group')}" if (groups := len(outcome.groups)) < len(outcome.worse) else ""
    return f"WORSE: {_counts(outcome.worse, '{} {}')}{alike}; {compared}"


def _counts(worse: Iterable[Worse], form: str) -> str:
    counts = Counter(one.kind for one in worse)
    return ", ".join(form.format(kind, counts[kind]) for kind in RegressionKind if counts[kind])


def _listed(title: str, lines: Iterable[str]) -> list[str]:
    found = [printable(f"  {line}") for line in lines]
    return [f"{title} ({len(found)}):", *found, ""] if found else []


def _folded(title: str, lines: Iterable[str]) -> list[str]:
    found = [f"- {_escaped(line)}" for line in lines]
    more = [f"- and {len(found) - _SHOWN} more"] if len(found) > _SHOWN else []
    body = [*found[:_SHOWN], *more]
    return [f"<details><summary>{title} ({len(found)})</summary>", "", *body, "", "</details>", ""] if found else []


def _block(lines: Iterable[str]) -> list[str]:
    """Return lines as a block of code, which none of them ends."""
    return ["```", *(line.replace("```", "` ` `") for line in lines), "```"]


def _code(text: str) -> str:
    return f"`{_cell(text).replace('`', chr(39))}`" if text else ""


def _cell(text: str) -> str:
    return _escaped(text).replace("|", "\\|")


def _escaped(text: str) -> str:
    # A run file may come from anyone: its texts are quoted, not rendered.
    return printable(text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _message(text: str) -> str:
    """Escape a line, or the message of a workflow command as its own toolkit does."""
    return printable(text).replace("%", "%25")


def _property(text: str) -> str:
    return _message(text).replace(":", "%3A").replace(",", "%2C")
