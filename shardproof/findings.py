"""The findings: errors of other implementations, one file ``findings/F*.py`` each with its data and a reproducer.

A file begins with a docstring, whose first line is the title, and a block of comments in TOML::

    # /// finding
    # implementations = ["torch.fully_shard"]
    # reproduces = ["torch 2.13.0 cpu 2026-11-25"]
    # shows = 'cannot compute the infinity norm'
    # ///

What follows is the reproducer, which needs nothing of shardproof. Reading imports none of it. The fields:

- ``implementations`` names those of ``--impl`` that have the defect, "torch" for another part of torch, or a
  package without an adapter;
- ``requirements`` has the requirements of the contract whose cases see it;
- ``reproduces`` and ``does_not_reproduce`` have a line for each release of torch with which the reproducer ran: the
  type of device and the last date; ``since`` is the first minor version of torch with the defect, ``fixed_in`` the
  first without it again;
- ``gpus`` is the number of GPUs that it needs, and ``packages`` are other packages, as requirements of pip;
- ``by_hand`` says why no program can run or judge it; without code it is required;
- ``arguments`` are those of its command line;
- ``shows`` is a regular expression, with ``^`` and ``$`` at each line, that its output has if and only if the defect is
  there. The last line of the output is made by the runner: "exit code N", or "time limit" where it did not end;
- ``unlisted`` says why no expectation, case, adapter or document names the finding;
- ``severity`` is what a user meets, of :data:`SEVERITIES`; ``right`` says what the program prints without the defect,
  and ``places`` names the suspected functions of torch, as "torch.nn.utils.clip_grad:clip_grad_norm_". A finding with
  the last two can be reported (``shardproof findings --report``): the paragraph below its title is for the maintainers
  of the implementation then, and names nothing of shardproof; further paragraphs are for readers of this project;
- ``upstream`` lists threads about exactly this defect, and ``related`` others: an address, then the state when it was
  looked up and a remark, as in "https://github.com/pytorch/pytorch/issues/1 open: the report".
"""

import ast
import dataclasses
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from shardproof import door

FOLDER = Path(__file__).parents[1] / "findings"
"""The folder of a clone; an installed package has none."""

SEVERITIES = {
    "silent": "wrong values or a wrong state, and no error",
    "hang": "ranks that wait for each other",
    "exception": "an error where there is none, or one that names something else",
    "leak": "memory that is not freed",
    "slow": "work whose result nothing uses",
}
"""What a user meets, the gravest first."""

MAX_LINES = 30
"""The most lines of a program in a report, without blank ones: a maintainer reads it."""

_VERSION = r"torch \d+\.\d+\.\d+ (cpu|cuda) \d{4}-\d\d-\d\d"
_THREAD = (
    r"(?P<address>https://github\.com/(?P<name>[\w.-]+/[\w.-]+)/(issues|pull)/(?P<number>\d+))"
    r"( (?P<state>open|closed|merged))?(: (?P<remark>.+))?"
)
#: What each item of a list, and each text, is.
_LISTS = {
    "implementations": r"[a-z][\w.]*",
    "requirements": r"[A-Z]+-\d+",
    "reproduces": _VERSION,
    "does_not_reproduce": _VERSION,
    "packages": r"[a-z][a-z-]*((==|>=|<)\d[\d.]*,?)+",
    "arguments": r".+",
    "places": r"[a-z][\w.]*:[\w.]+",
    "upstream": _THREAD,
    "related": _THREAD,
}
_TEXTS = {
    "since": r"\d+\.\d+",
    "fixed_in": r"\d+\.\d+",
    "by_hand": ".+",
    "shows": ".+",
    "unlisted": ".+",
    "severity": "|".join(SEVERITIES),
    "right": ".+",
}

_BLOCK = re.compile(r"^# /// finding\n((?:#.*\n)*?)# ///\n", flags=re.MULTILINE)


class FindingError(ValueError):
    """A finding cannot be read. The message is one line with the file and the field."""


@dataclasses.dataclass(frozen=True)
class KnownFinding:
    """One finding; the module describes the fields of its header."""

    path: Path  # of its file
    title: str  # in one line, in Markdown
    text: str  # below the title, in Markdown
    has_code: bool  # whether a reproducer follows
    implementations: tuple[str, ...]
    requirements: tuple[str, ...] = ()
    since: str | None = None
    fixed_in: str | None = None
    reproduces: tuple[str, ...] = ()
    does_not_reproduce: tuple[str, ...] = ()
    gpus: int = 0
    packages: tuple[str, ...] = ()
    by_hand: str | None = None
    arguments: tuple[str, ...] = ()
    shows: str | None = None
    severity: str | None = None
    right: str | None = None
    places: tuple[str, ...] = ()
    unlisted: str | None = None
    upstream: tuple[str, ...] = ()
    related: tuple[str, ...] = ()

    @property
    def id(self) -> str:
        """The name in prose, such as ``F-2``."""
        return f"F-{int(self.path.stem[1:])}"

    @property
    def paragraph(self) -> str:
        """The part of the text that is for the readers of a report."""
        return self.text.partition("\n\n")[0]

    @property
    def program(self) -> str:
        """The reproducer as one pastes it: what follows the header."""
        header = self.path.read_text(encoding="utf-8").partition("# /// finding\n")[2]
        return header.partition("# ///\n")[2].strip() + "\n"

    @property
    def is_known_upstream(self) -> bool:
        """Whether a thread is about exactly this, or a release has fixed it."""
        return bool(self.upstream) or self.fixed_in is not None

    @property
    def is_there(self) -> bool:
        """Whether the newest release with which the reproducer ran shows the defect, or it was not run."""
        return self.seen is not None or not self.does_not_reproduce

    @property
    def seen(self) -> str | None:
        """The newest release that showed the defect, if no newer one lacks it, as in "torch 2.15.0 cpu"."""
        lines = dict.fromkeys(self.reproduces, True) | dict.fromkeys(self.does_not_reproduce, False)
        newest = max(lines, key=lambda line: release(line.split()[1]), default=None)
        return newest.rpartition(" ")[0] if newest is not None and lines[newest] else None

    def claim(self, torch: str) -> bool | None:
        """Return whether the header says that the defect is there in a version of torch, None if it says neither.

        It is what the newest release up to this version showed.
        """
        known = {release(line.split()[1]): True for line in self.reproduces}
        known |= {release(line.split()[1]): False for line in self.does_not_reproduce}
        if self.since is not None:
            known |= {(0,): False, release(self.since): True}
        if self.fixed_in is not None:
            known[release(self.fixed_in)] = False
        return max(((one, shown) for one, shown in known.items() if one <= release(torch)), default=(None, None))[1]

    @property
    def state(self) -> str:
        """What the header says of versions of torch, in a few words."""
        if self.fixed_in is not None:
            return f"mended in torch {self.fixed_in}"
        last = {"reproduces": self.reproduces, "does not reproduce": self.does_not_reproduce}
        newest = {said: max((release(line.split()[1]) for line in lines), default=()) for said, lines in last.items()}
        if not any(newest.values()):
            return "the reproducer was not run"
        said = max(newest, key=lambda one: newest[one])
        return f"{said} with torch {'.'.join(map(str, newest[said]))}"


def release(version: str) -> tuple[int, ...]:
    """Return the numbers of a version: 2.16.0.dev20270101+git counts as 2.16.0."""
    return tuple(map(int, re.findall(r"\d+", re.match(r"[\d.]*", version)[0])))  # type: ignore[index]


def markdown(thread: str) -> str:
    """Return a line of ``upstream`` or ``related`` with a link."""
    found = re.fullmatch(_THREAD, thread)
    assert found, thread
    state, remark = f", {found['state']}" if found["state"] else "", f": {found['remark']}" if found["remark"] else ""
    return f"[{found['name']}#{found['number']}]({found['address']}){state}{remark}"


def load(folder: Path = FOLDER) -> list[KnownFinding]:
    """Read all findings, in the order of their numbers.

    Raises:
        FindingError: there are none, or one cannot be read.
    """
    found = [read(path) for path in sorted(folder.glob("*.py"), key=lambda path: (len(path.stem), path.stem))]
    if not found:
        raise FindingError(f"{folder} has no findings: they are in a clone of shardproof, not in what pip installs")
    return found


def read(path: Path) -> KnownFinding:
    """Read one finding without importing it.

    Raises:
        FindingError: the name, the docstring or a field is not as the module describes it.
    """
    if not re.fullmatch(r"F\d{3,}", path.stem):
        raise FindingError(f"{path.name}: the name of a finding is like F002.py")
    try:
        source = path.read_text(encoding="utf-8")
        tree = ast.parse(source)
        header = door.parse_toml(_block(source, path))
    except FindingError:
        raise
    except (OSError, SyntaxError, ValueError) as error:
        raise FindingError(f"{path.name}: {error}") from None
    title, _, text = (ast.get_docstring(tree) or "").partition("\n\n")
    if not title.strip() or "\n" in title or not text.strip():
        raise FindingError(f"{path.name}: the docstring is a title in one line, an empty line, and a text")
    has_code = len(tree.body) > 1
    if not has_code and "by_hand" not in header:
        raise FindingError(f"{path.name}: by_hand is missing: a finding without a reproducer says why")
    return KnownFinding(path, title, text, has_code, **_checked(header, path.name))


def _block(source: str, path: Path) -> str:
    blocks = _BLOCK.findall(source)
    if len(blocks) != 1:
        raise FindingError(f"{path.name}: has {len(blocks)} headers '# /// finding' ... '# ///' instead of one")
    lines: Iterable[str] = blocks[0].splitlines()
    return "\n".join(line[2:] for line in lines)


def _checked(header: dict[str, Any], name: str) -> dict[str, Any]:
    if not header.get("implementations"):
        raise FindingError(f"{name}: implementations is missing")
    for field, value in header.items():
        if field in _LISTS:
            if not isinstance(value, list) or not value:
                raise FindingError(f"{name}: {field} = {value!r} should be a list of strings")
            for one in value:
                if not isinstance(one, str) or not re.fullmatch(_LISTS[field], one):
                    raise FindingError(f"{name}: {field}: {one!r} should match {_LISTS[field]}")
        elif field in _TEXTS:
            if not isinstance(value, str) or not re.fullmatch(_TEXTS[field], value):
                raise FindingError(f"{name}: {field} = {value!r} should match {_TEXTS[field]}")
        elif field == "gpus":
            if type(value) is not int or value < 1:
                raise FindingError(f"{name}: gpus = {value!r} should be a number of GPUs")
        else:
            raise FindingError(f"{name}: unknown field {field!r}")
    if "shows" in header:
        try:
            re.compile(header["shows"])
        except re.error as error:
            raise FindingError(f"{name}: shows: {error}") from None
    return {field: tuple(value) if isinstance(value, list) else value for field, value in header.items()}
