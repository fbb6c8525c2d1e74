"""Drafts the known failures of an implementation from a run: TOML to be edited, with the reason that each case gave."""

import json
from collections.abc import Iterable, Sequence

from shardproof.door import BadFile, printable
from shardproof.runfile import CaseRecord, Run, Verdict

EXCUSABLE = (Verdict.CRASH, Verdict.FAIL, Verdict.HANG)
"""The verdicts that an entry can expect."""

_LINK = "TODO"


def draft(run: Run, implementation: str) -> str:
    """Write a file of known failures with one entry for each kind of failure: a verdict and a reason.

    An entry names all items of a function by a wildcard if all that ran fail alike. Otherwise it names each item that
    fails. The entries excuse this run, of all cases that the file is for, so that each reason must still be checked.
    A reason is the first divergence that ``--explain`` has found, where the run has it.

    Raises:
        BadFile: the run has no case of the implementation. The message is one line.
    """
    cases = [case for case in run.cases if case.implementation == implementation]
    if not cases:
        known = ", ".join(run.implementations) or "none"
        raise BadFile(f"the run has no case of {implementation!r}; it has those of {known}")
    lines = [
        printable(
            f"# Drafted from a run with torch {run.environment.torch} on {run.environment.device}. Look into each "
            "failure"
        ),
        "# before it is expected: it may be a defect of the implementation, of its adapter, or of the case.",
        f"implementation = {_string(implementation)}",
    ]
    for (verdict, reason), patterns in _entries(cases).items():
        fields = {"verdict": str(verdict), "reason": reason, "link": _LINK}
        lines += ["", "[[expect]]", *_list(patterns), *(f"{name} = {_string(value)}" for name, value in fields.items())]
    return "\n".join(lines) + "\n"


def _list(patterns: Sequence[str]) -> list[str]:
    if len(patterns) == 1:
        return [f"cases = [{_string(patterns[0])}]"]
    return ["cases = [", *(f"    {_string(pattern)}," for pattern in patterns), "]"]


def _string(text: str) -> str:
    """Return a basic string of TOML, which has JSON's escapes; a run file's text may have any character.

    TOML has no halves of surrogate pairs. The others that are escaped besides JSON's are for terminals and CIs.
    """
    found = json.dumps(text.encode(errors="backslashreplace").decode())
    return found.replace("\x7f", "\\u007f").replace("##", "#\\u0023")


def _entries(cases: Sequence[CaseRecord]) -> dict[tuple[Verdict, str], list[str]]:
    """The patterns of each kind of failure."""
    entries: dict[tuple[Verdict, str], list[str]] = {}
    for function, items in _by_function(cases).items():
        ran = [case for case in items if not case.verdict.is_skip]
        failed = [case for case in ran if case.verdict in EXCUSABLE]
        kinds = {(case.verdict, case.reason) for case in failed}
        if len(failed) == len(ran) > 1 and len(kinds) == 1:
            entries.setdefault(kinds.pop(), []).append(f"{function}*")
        else:
            for case in failed:
                entries.setdefault((case.verdict, case.reason), []).append(case.id)
    return entries


def _by_function(cases: Iterable[CaseRecord]) -> dict[str, list[CaseRecord]]:
    found: dict[str, list[CaseRecord]] = {}
    for case in cases:
        # With the bracket: the name of one function may begin that of another.
        found.setdefault(case.id.partition("[")[0] + "[", []).append(case)
    return found
