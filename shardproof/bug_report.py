"""The report of a finding for the maintainers of an implementation: a program, what it prints, what is right.

Nothing in it is of shardproof. :func:`write` takes what a run of exactly this program printed; the command runs it.
"""

import ast
import importlib.util
import platform
import re
from collections.abc import Sequence
from pathlib import Path

from shardproof.findings import MAX_LINES, FindingError, KnownFinding, markdown

#: Lines that torch and Python print on stderr and that are about something else.
_NOISE = re.compile(r"(\[rank\d+\]:)?\[?[IWE]\d{4} |(USDT|ERROR):\d{4}-\d\d-\d\d ")
_WARNING = re.compile(r"\S+:\d+: \w*Warning: ")  # its line of source follows, if it can be read
_INSTALLED = re.compile(r"/\S*/site-packages/")
_FIRST, _LAST = 8, 14  # lines of a long output
_WIDTH = 600

_REPORT = """\
# {title}

{text}

## Program

`{command}`{on}

```python
{program}```

## It prints

```
{printed}
```

Expected: {right}

## Suspected place (lines of the torch below)

{places}

## Versions

torch {torch}{commit}, Python {python}, {system}.{seen}
"""


def check(finding: KnownFinding) -> None:
    """Refuse a finding of which no report can be made.

    Raises:
        FindingError: a release has fixed it, its header lacks a field, or its program is too long.
    """
    if finding.fixed_in is not None:
        raise FindingError(f"{finding.id} is fixed in torch {finding.fixed_in}: there is nothing to report")
    if missing := [field for field in ("shows", "right", "places") if not getattr(finding, field)]:
        raise FindingError(
            f"{finding.path.name}: a report needs the fields shows, right and places; {missing[0]} is missing"
        )
    if (count := lines_of(finding.program)) > MAX_LINES:
        raise FindingError(
            f"{finding.path.name}: its program has {count} lines, and one of a report at most {MAX_LINES}"
        )


def lines_of(program: str) -> int:
    """Return how many lines a program has, without blank ones."""
    return sum(bool(line.strip()) for line in program.splitlines())


def write(finding: KnownFinding, printed: Sequence[str], torch: str) -> str:
    """Return the report.

    Args:
        finding: what :func:`check` does not refuse.
        printed: the lines that its program printed, of which the last one says how it ended.
        torch: the version with which it ran.

    Raises:
        FindingError: this torch lacks a suspected place.
    """
    others = [*finding.upstream, *finding.related]
    report = _REPORT.format(
        title=finding.title,
        text=finding.paragraph,
        command=" ".join(["python repro.py", *finding.arguments]),
        on=f", on {finding.gpus} GPUs" if finding.gpus else ", on a CPU",
        program=finding.program,
        printed=_shortened(printed),
        right=finding.right,
        places="\n".join(f"- {_place(one, finding)}" for one in finding.places),
        torch=torch,
        commit=_commit(),
        python=platform.python_version(),
        system=f"{platform.system()} {platform.machine()}",
        seen=_seen(finding),
    )
    return report + (f"\n## Related\n\n{chr(10).join(f'- {markdown(one)}' for one in others)}\n" if others else "")


def _seen(finding: KnownFinding) -> str:
    said = []
    for word, lines in (("Seen", finding.reproduces), ("Not seen", finding.does_not_reproduce)):
        releases = [" ".join(line.split()[1:3]) for line in lines]
        said += [f" {word} with {', '.join(releases)}."] if releases else []
    return "".join(said)


def _shortened(printed: Sequence[str]) -> str:
    *lines, end = printed
    kept: list[str] = []
    for before, line in zip(["", *lines], lines, strict=False):
        is_source = _WARNING.match(before) and line.startswith("  ")
        if line.strip() and not (_NOISE.match(line) or _WARNING.match(line) or is_source):
            kept.append(_INSTALLED.sub("", line)[:_WIDTH])
    if len(kept) > _FIRST + _LAST:
        kept = [*kept[:_FIRST], "...", *kept[-_LAST:]]
    ends: list[str] = {"exit code 0": [], "time limit": ["(it does not end: time limit)"]}.get(end, [f"({end})"])
    return "\n".join([*kept, *ends]).replace("```", "'''")


def _root() -> Path:
    spec = importlib.util.find_spec("torch")
    assert spec is not None and spec.submodule_search_locations
    return Path(spec.submodule_search_locations[0])


def _commit() -> str:
    found = re.search(r"git_version.*= '(\w+)'", (_root() / "version.py").read_text(encoding="utf-8"))
    return f" ({found[1][:10]})" if found else ""


def _place(place: str, finding: KnownFinding) -> str:
    """Return the file, the line and the name of a function of the installed torch, which is not imported."""
    module, _, name = place.partition(":")
    path = f"{module.replace('.', '/')}.py"
    lacks = FindingError(f"{finding.path.name}: the installed torch has no {place}")
    try:
        body: Sequence[ast.AST] = ast.parse((_root().parent / path).read_text(encoding="utf-8")).body
    except OSError:
        raise lacks from None
    line = 0
    for part in name.split("."):
        named = [one for one in body if getattr(one, "name", None) == part]
        if not named:
            raise lacks
        line, body = getattr(named[0], "lineno", 0), getattr(named[0], "body", [])
    return f"`{path}`, line {line}: `{name}`"
