"""The voice of pages, docstrings, help, messages and names: nouns as subjects and the words of the field.

A sentence that breaks a rule of :data:`RULES` is a hit. :data:`ALLOWED` has the number of hits of each place, which may
only fall; a place without a row has none, and the places of :data:`PLAIN` stay without one.
"""

import ast
import functools
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]

DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
#: Pages that docs/make.py writes.
GENERATED = {"findings.md", "matrix.md", "unreported.md"}
#: Everything that is printed of a failure or of a finding is a literal of these rooms.
PRINTED = ("judging", "plugin", "states", "training")
#: The texts of the commands, their ``--help`` among them. That of a run's options is in the room ``plugin``.
COMMANDS = ("shardproof/__main__.py", "shardproof/commands/")
#: Folders whose public docstrings count; harness by room.
PACKAGES = ("harness", "fsdp_impl", "suites", "shardproof", "reports", "planted")

#: Places without a hit, now and later.
PLAIN = {
    "README.md",
    "docs/check.md",
    "docs/doctor.md",
    "docs/gate.md",
    "docs/options.md",
    "help and messages of commands",
    *(f"messages of harness/{room}" for room in PRINTED),
}

#: Hits that are left, by place. A number may only fall: whoever rewrites a sentence lowers it.
ALLOWED: dict[str, int] = {
    "docs/architecture.md": 7,
    "docs/coverage.md": 8,
    "docs/implementations.md": 6,
    "docs/incidents.md": 1,
    "docs/judging.md": 10,
    "docs/page.md": 3,
    "docs/performance.md": 23,
    "docs/plan.md": 1,
    "docs/record.md": 6,
    "docs/reference.md": 7,
    "docs/reproduce.md": 2,
    "docs/results.md": 4,
    "docs/run-files.md": 11,
    "docs/seeds.md": 2,
    "docs/simulation.md": 1,
    "docs/torch-from-source.md": 4,
    "docs/torchrun.md": 2,
    "docs/upstream-tests.md": 5,
    "docstrings of fsdp_impl": 72,
    "docstrings of harness": 1,
    "docstrings of harness/adapters": 23,
    "docstrings of harness/collectives": 4,
    "docstrings of harness/judging": 15,
    "docstrings of harness/models": 12,
    "docstrings of harness/parity": 20,
    "docstrings of harness/planning": 12,
    "docstrings of harness/plugin": 34,
    "docstrings of harness/reproducing": 8,
    "docstrings of harness/simulation": 11,
    "docstrings of harness/tensors": 13,
    "docstrings of harness/training": 55,
    "docstrings of harness/watching": 40,
    "docstrings of harness/worlds": 14,
    "docstrings of planted": 37,
    "docstrings of reports": 15,
    "docstrings of shardproof": 32,
    "docstrings of suites": 65,
    "messages of harness/adapters": 1,
    "messages of harness/models": 1,
    "messages of harness/reproducing": 1,
    "messages of suites": 7,
    "names in suites": 1,
    "names in tests": 165,
}


class Rule(NamedTuple):
    """A pattern that no sentence has, and the words to use."""

    pattern: re.Pattern[str]
    instead: str


def _rule(pattern: str, instead: str, flags: int = re.IGNORECASE) -> Rule:
    return Rule(re.compile(pattern, flags), instead)


#: Of the table in DESIGN's "Voice" the words that are wrong wherever they stand; one that is often right is left out.
RULES = (
    _rule(r"^(What|Those|One|So)\b(?!.*\?$)", "the subject of a sentence is a noun, never What, Those, One or So", 0),
    _rule(r"^Of\b", "the subject comes first, not Of", 0),
    _rule(r"\bwhole (parameter|weight|tensor|gradient|state dict)s?\b|\bwhat is whole\b", "full, unsharded"),
    _rule(r"\btold\b", "set, reported, distinguished, has"),
    _rule(r"\b(is|are|was|were|be|being) asked\b", "is run, is checked, is queried"),
    _rule(r"\bin (the )?place of\b", "instead of, replaces"),
    _rule(r"\bbeside\b", "next to, with, other than"),
    _rule(r"\bapart from\b|\b(keeps?|kept|puts?|tells?|sets?|counted|counts?|stands?) apart\b", "except, separate"),
    _rule(r"\ba part of the ranks\b", "a sub-mesh, a subgroup, some ranks"),
    _rule(r"\bfirst parts?\b(?= ways|$|[,.;:)])|\bparts from the\b", "diverge"),
    _rule(r"\bwhom\b", "who, or the noun"),
    _rule(r"\b(what|where) (it|they) (is|are|was|were) given\b|\bthose of before\b", "the noun that it stands for"),
    _rule(r"\b(what|where) (a|the) script\b", "user code, the training loop"),
    _rule(r"\bmend(s|ed|ing)?\b", "fix, fixed"),
    _rule(r"\blets? live\b", "miss"),
    _rule(r"\b(is|are|was|were) taken back\b", "cleared, undone, restored"),
    _rule(r"\b(world|rank)s? that (is|are) alone\b", "world size 1, a single rank"),
)
#: A docstring of a case is read alone, in a report.
OF_CASES = _rule(r"^(The same\b|So (is|are|do|does)\b)", "a docstring of a case names its subject", 0)
#: A literal may be the middle of a text, so it begins small; "one" begins too many that are right.
OF_MESSAGES = _rule(r"^(what|those|so)\b(?!.*\?$)", RULES[0].instead, 0)
#: A name is a noun or a verb in the imperative.
OF_NAMES = _rule(r"^(what|those|so|it)\b", "a name is a noun, or a verb in the imperative")


class Text(NamedTuple):
    """A sentence, or the name of a test, with its place."""

    place: str
    file: str
    line: int
    sentence: str


class Hit(NamedTuple):
    """A sentence and the rule that it breaks."""

    text: Text
    rule: Rule

    def say(self) -> str:
        """Return file, line, sentence and rule."""
        return f"{self.text.file}:{self.text.line}: {self.text.sentence}\n    -> {self.rule.instead}"


def sentences(text: str, ends: str = r"(?<=[.!?:])[\"')*_]*\s+(?=[A-Z`(*\"\[])") -> Iterator[str]:
    """The sentences of a paragraph, without the marks before their first word."""
    for one in re.split(ends, " ".join(text.split())):
        if stripped := re.sub(r"^[\s*_(\[\"'|>#-]+", "", one):
            yield stripped


def of_block(file: str, block: Sequence[tuple[int, str]]) -> Iterator[Text]:
    """The sentences of numbered lines, each with the line of its first word."""
    lines = [number for number, row in block for _ in row.split()]
    text = " ".join(" ".join(row for _, row in block).split())
    position = 0
    for one in sentences(text):
        position = text.index(one, position)
        yield Text(file, file, lines[len(text[: position + 1].split()) - 1], one)


def of_page(file: str, source: str) -> Iterator[Text]:
    """The sentences of a Markdown page: paragraphs, items and cells, without headings, code and comments."""
    text = re.sub(r"^```.*?^```$|<!--.*?-->", lambda hit: "\n" * hit[0].count("\n"), source, flags=re.M | re.S)
    block: list[tuple[int, str]] = []
    for number, line in enumerate([*text.splitlines(), ""], 1):
        row = re.sub(r"`[^`]*`", "`code`", line)
        row = re.sub(r"\]\([^)\s]*\)", "]", row)
        begins = re.match(r"\s*([-*>]|\d+\.) ", row) is not None
        stands_alone = not row.strip() or row.startswith(("#", "|", "    "))
        if (begins or stands_alone) and block:
            yield from of_block(file, block)
            block = []
        if row.startswith("|"):
            for cell in row.strip("|").split("|"):
                yield from of_block(file, [(number, cell)])
        elif not stands_alone:
            block.append((number, re.sub(r"^\s*([-*>]|\d+\.) ", "", row)))


def documented(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and docstring of the module and of its public classes and functions."""

    def visit(node: DOCUMENTED) -> Iterator[tuple[int, str]]:
        if (text := ast.get_docstring(node)) is not None:
            yield node.body[0].lineno, text
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            for child in node.body:
                if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and child.name[:1] != "_":
                    yield from visit(child)

    return visit(tree)


def literals(tree: ast.Module, only: type[ast.AST] | tuple[type[ast.AST], ...] | None) -> Iterator[tuple[int, str]]:
    """Line and text of each literal that is no docstring, f-strings with "..." for values; `only`: inside of these."""
    nodes = list(ast.walk(tree))
    docs = {id(one.value) for one in nodes if isinstance(one, ast.Expr)}
    parts = {id(value) for one in nodes if isinstance(one, ast.JoinedStr) for value in one.values}
    if only is not None:
        nodes = list({id(inner): inner for one in nodes if isinstance(one, only) for inner in ast.walk(one)}.values())
    for node in nodes:
        if id(node) in docs | parts:
            continue
        if isinstance(node, ast.JoinedStr):
            pieces = [one.value if isinstance(one, ast.Constant) else "..." for one in node.values]
            yield node.lineno, "".join(map(str, pieces))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value


def of_source(file: str, source: str) -> Iterator[Text]:
    """The public docstrings and the messages of a module, and the names and docstrings of its cases."""
    tree = ast.parse(source)
    folder, *deeper = file.split("/")
    room = f"harness/{deeper[0]}" if folder == "harness" and deeper[1:] else folder
    for line, text in documented(tree):
        place = f"docstrings of {room}"
        paragraphs = [re.sub(r"``[^`]*``|`[^`]*`", "`code`", one) for one in re.split(r"\n\s*\n|\n(?=\s*\w+: )", text)]
        for one in (sentence for paragraph in paragraphs for sentence in sentences(paragraph)):
            yield Text(place, file, line, one)
    is_command = file.startswith(COMMANDS)
    is_printed = is_command or (folder == "harness" and deeper[0] in PRINTED)
    place = "help and messages of commands" if is_command else f"messages of {room}"
    for line, text in literals(tree, None if is_printed else (ast.Raise, ast.Assert)):
        if len(text.split()) > 2:
            for one in (sentence for part in text.split("\n\n") for sentence in sentences(part, r"(?<=[.!?:;])\s+")):
                yield Text(place, file, line, re.sub(r"`[^`]*`", "`code`", one))


def of_names(folder: str, file: str, source: str) -> Iterator[Text]:
    """The names of test functions, as words."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            yield Text(f"names in {folder}", file, node.lineno, node.name[5:].replace("_", " "))


@functools.cache
def texts() -> tuple[Text, ...]:
    """All sentences and names of the repository."""
    return tuple(_texts())


def _texts() -> Iterator[Text]:
    for page in [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))]:
        if page.name not in GENERATED:
            yield from of_page(page.relative_to(ROOT).as_posix(), page.read_text())
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            if not any(one.is_symlink() for one in path.parents):
                yield from of_source(path.relative_to(ROOT).as_posix(), path.read_text())
    for folder in ("tests", "suites"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            yield from of_names(folder, path.relative_to(ROOT).as_posix(), path.read_text())


def rules(place: str, file: str) -> tuple[Rule, ...]:
    """The rules of a place."""
    if place.startswith("names"):
        return (OF_NAMES, *RULES[2:])
    if place.startswith(("messages", "help")):
        return (OF_MESSAGES, *RULES)
    return (OF_CASES, *RULES) if file.startswith("suites/test_") else RULES


def hits(found: Iterable[Text]) -> dict[str, list[Hit]]:
    """The hits by place."""
    by_place: dict[str, list[Hit]] = {}
    for text in found:
        for rule in rules(text.place, text.file):
            if rule.pattern.search(text.sentence):
                by_place.setdefault(text.place, []).append(Hit(text, rule))
    return by_place


def test_no_place_has_more_sentences_than_it_had():
    found = hits(texts())
    wrong = []
    for place in sorted({*found, *ALLOWED}):
        here, allowed = found.get(place, []), ALLOWED.get(place, 0)
        if len(here) > allowed:
            listed = "\n".join(one.say() for one in here)
            wrong.append(
                f"{place}: {len(here)} sentences break a rule of tests/test_voice.py, {allowed} may:\n{listed}"
            )
        elif len(here) < allowed:
            wrong.append(
                f"{place}: {len(here)} are left of {allowed}: lower ALLOWED in tests/test_voice.py to {len(here)}"
            )
    assert not wrong, "\n\n".join(wrong)


def test_plain_places_have_no_row():
    assert not PLAIN & ALLOWED.keys() and all(ALLOWED.values())


def test_all_places_are_read():
    places = {text.place for text in texts()}
    assert places >= {*PLAIN, *ALLOWED}, "a place has moved"
    assert {"docstrings of fsdp_impl", "messages of suites", "names in tests", "docs/contract.md"} <= places


BAD = """\
# What it checks

What is compared is the gradient. It has `what is whole` in code.
Ranks that read whole parameters are told so.

| mistake | Those of before |
|---|---|

    What a command prints

1. One of them. Why? What for?
"""


def test_a_page_is_read_without_headings_and_code():
    found = [(one.text.line, one.rule) for one in hits(of_page("page.md", BAD))["page.md"]]
    assert sorted(line for line, _ in found) == [3, 4, 4, 6, 6, 11], found


@pytest.mark.parametrize(
    "sentence",
    ["Somewhat later, ranks agree.", "Ranks tell apples.", "the whole step", "besides", "What is checked?", "a mended"],
)
def test_a_word_that_is_right_is_no_hit(sentence):
    number = int(sentence == "a mended")
    assert sum(bool(rule.pattern.search(sentence)) for rule in RULES) == number


SOURCE = '''
def public():
    """What is public."""
    raise ValueError(f"rank {rank} is told {what} in place of it; what is left")

def _private():
    """What is private."""
    name = "What is no message"
'''


@pytest.mark.parametrize(("file", "number"), [("reports/a.py", 4), ("harness/training/a.py", 5)])
def test_docstrings_and_messages_are_read(file, number):
    assert sum(map(len, hits(of_source(file, SOURCE)).values())) == number


def test_a_name_is_read_as_words():
    found = hits(of_names("tests", "a.py", "def test_what_is_told(): ..."))["names in tests"]
    assert [one.rule for one in found] == [OF_NAMES, RULES[3]]
