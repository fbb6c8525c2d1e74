"""Renders the regressions of a run: for a terminal, as Markdown for a pull request, and as GitHub's annotations."""

import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping

from shardproof.reports.regressions import Kind, Outcome, Worse
from shardproof.reports.texts import counted, printable, short, torch
from shardproof.runfile import UNKNOWN, Run

_SHOWN = 50  # the most lines of one kind in a comment, which has a limited size


def described(run: Run, name: str, path: str) -> str:
    """Return one line about a run that is compared: its file, when it started, and what code it is of."""
    env = run.environment
    ours = env.shardproof if env.shardproof_commit in ("", UNKNOWN) else short(env.shardproof_commit)
    known = [("torch", torch(env)), ("shardproof", ours), ("suites", run.suites)]
    facts = [env.started, *(f"{word} {fact}" for word, fact in known if fact)]
    return f"{name} {path}: {', '.join(filter(None, facts))}"


def as_text(outcome: Outcome) -> str:
    """Render an outcome for a terminal: the verdict comes last."""
    lines = [*map(printable, outcome.runs), ""] if outcome.runs else []
    for kind, found in _by_kind(outcome.worse).items():
        lines.append(f"{kind} ({len(found)}):")
        for one in found:
            lines.append(printable(f"  {_subject(one)}: {one.text}"))
            lines += [printable(f"    reproduce: {one.reproduce}")] if one.reproduce and one.kind.is_failure else []
        lines.append("")
    lines += _listed("accepted", _accepted(outcome))
    lines += _listed("better", outcome.better)
    lines += _listed("not compared", outcome.not_compared)
    return "\n".join([*lines, _verdict(outcome)]) + "\n"


def as_markdown(outcome: Outcome) -> str:
    """Render an outcome as a comment on a pull request: the verdict comes first, long lists are folded."""
    parts = [f"### shardproof: {_verdict(outcome)}", ""]
    parts += [*(f"- {_escaped(line)}" for line in outcome.runs), ""] if outcome.runs else []
    if outcome.worse:
        parts += ["| what got worse | implementation | case | |", "|---|---|---|---|"]
        for found in _by_kind(outcome.worse).values():
            parts += [
                f"| {one.kind} | `{one.implementation}` | {_code(one.case)} | {_cell(one.text)} |"
                for one in found[:_SHOWN]
            ]
            if len(found) > _SHOWN:
                parts.append(f"| {found[0].kind} | | | and {len(found) - _SHOWN} more |")
        parts.append("")
        commands = list(dict.fromkeys(one.reproduce for one in outcome.worse if one.reproduce and one.kind.is_failure))
        if commands:
            block = ["```", *commands[:_SHOWN], "```"]
            parts += ["<details><summary>Reproduce</summary>", "", *block, "", "</details>", ""]
    parts += _folded("Accepted", _accepted(outcome))
    parts += _folded("Better", outcome.better)
    parts += _folded("Not compared", outcome.not_compared)
    return "\n".join(parts).rstrip() + "\n"


def as_github(outcome: Outcome) -> str:
    """Render an outcome as workflow commands, which GitHub shows in the summary and at files of the repository."""
    lines = [_message(line) for line in outcome.runs]
    for one in outcome.worse:
        file = _in_repository(one.nodeid.partition("::")[0])
        place = f" file={_property(file)}," if file else " "
        lines.append(f"::error{place}title={_property(f'{one.kind}: {_subject(one)}')}::{_message(one.text)}")
    lines += [f"::notice title=shardproof accepted::{_message(line)}" for line in _accepted(outcome)]
    lines += [f"::notice title=shardproof not compared::{_message(line)}" for line in outcome.not_compared]
    return "\n".join([*lines, _message(_verdict(outcome))]) + "\n"


def _in_repository(file: str) -> str:
    """Return a file if the repository that GitHub checked out has it; the packaged suites are elsewhere."""
    root = os.path.abspath(os.environ.get("GITHUB_WORKSPACE") or ".")
    path = os.path.normpath(os.path.join(root, file))
    return file if path.startswith(root + os.sep) and os.path.isfile(path) else ""


FORMATS: Mapping[str, Callable[[Outcome], str]] = {"text": as_text, "markdown": as_markdown, "github": as_github}
"""The renderers, by the names of ``--format``."""


def _by_kind(worse: Iterable[Worse]) -> dict[Kind, list[Worse]]:
    found: dict[Kind, list[Worse]] = {}
    for one in worse:
        found.setdefault(one.kind, []).append(one)
    return found


def _subject(one: Worse) -> str:
    return f"{one.implementation} {one.case}".rstrip()


def _accepted(outcome: Outcome) -> list[str]:
    return [f"{one.worse.kind}: {_subject(one.worse)}: {one.worse.text} ({one.reason})" for one in outcome.accepted]


def _verdict(outcome: Outcome) -> str:
    compared = f"compared: {counted(outcome.compared, 'case')} that ran in both"
    if outcome.effort == "quick":
        compared += ", with --effort quick alone: most items of each case did not run"
    if outcome.accepted:
        compared = f"accepted: {len(outcome.accepted)}; {compared}"
    if not outcome.worse:
        return f"nothing got worse; {compared}"
    counts = Counter(one.kind for one in outcome.worse)
    return f"WORSE: {', '.join(f'{kind} {counts[kind]}' for kind in Kind if counts[kind])}; {compared}"


def _listed(title: str, lines: Iterable[str]) -> list[str]:
    found = [printable(f"  {line}") for line in lines]
    return [f"{title} ({len(found)}):", *found, ""] if found else []


def _folded(title: str, lines: Iterable[str]) -> list[str]:
    found = [f"- {_escaped(line)}" for line in lines]
    more = [f"- and {len(found) - _SHOWN} more"] if len(found) > _SHOWN else []
    body = [*found[:_SHOWN], *more]
    return [f"<details><summary>{title} ({len(found)})</summary>", "", *body, "", "</details>", ""] if found else []


def _code(text: str) -> str:
    return f"`{_cell(text)}`" if text else ""


def _cell(text: str) -> str:
    return _escaped(text).replace("|", "\\|")


def _escaped(text: str) -> str:
    # A run file may come from anyone: its texts are quoted, not rendered.
    return printable(text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _message(text: str) -> str:
    """Escape the message of a workflow command, as its own toolkit does."""
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _message(text).replace(":", "%3A").replace(",", "%2C")
