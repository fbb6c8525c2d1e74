"""The pages of docs/ that ``shardproof explain`` prints from: the row of a name in their tables, and sections about it.

Nothing is written twice: a clone reads docs/, of which a wheel and an sdist have copies. The standard library alone;
the build of a wheel runs this file by its path.
"""

import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parent

#: Where an installed package has its copies, and a clone the pages.
COPIES = PACKAGE / "pages"
FOLDER = COPIES if COPIES.exists() else PACKAGE.parent / "docs"

#: The pages with a table of names, by the kind of the names: codes of the doctor, findings, requirements, exit codes.
PAGES = {
    r"[DS]\d+": ("doctor.md",),
    r"F-\d+": ("findings.md",),
    r"[A-Z]+-\d+": ("contract.md",),
    r"\d": ("run-files.md", "gate.md", "check.md", "record.md"),
}

_LINK = re.compile(r"\[([^]]*)\]\([^)]*\)")
_HEADING = re.compile(r"(#+) (.*)")
#: Numbers are exit codes in a table of these alone.
_OF_CODES = {"code", "exit code"}


@dataclasses.dataclass(frozen=True)
class Row:
    """A row of a table, with what its page says of the table."""

    page: str
    heading: str
    before: str  # the sentence that introduces the table, if it ends in a colon
    cells: tuple[tuple[str, str], ...]  # the name of the column, which may be empty, and the text


def read(page: str) -> str:
    """Return a page, as Markdown."""
    packed = PACKAGE / page  # the contract, which others read too
    return (packed if packed.exists() else FOLDER / page).read_text(encoding="utf-8")


def names() -> list[str]:
    """Return the pages that the build copies for this module."""
    return sorted({page for pages in PAGES.values() for page in pages} - {"contract.md"})


def kind_of(name: str) -> tuple[str, ...]:
    """Return the pages that may have a name; none if it is of no kind."""
    return next((pages for pattern, pages in PAGES.items() if re.fullmatch(pattern, name)), ())


def plain(text: str) -> str:
    """Return a text without the addresses of its links, which lead nowhere in a terminal."""
    return _LINK.sub(r"\1", text).replace("\\|", "|").strip()


def rows(name: str) -> Iterator[Row]:
    """Find the rows of tables whose first cell is a name, in the order of the pages."""
    for page in kind_of(name):
        yield from _rows(name, page)


def _rows(name: str, page: str) -> Iterator[Row]:
    heading = before = paragraph = ""
    header: list[str] = []
    for line in read(page).splitlines():
        if found := _HEADING.fullmatch(line):
            heading = plain(found[2])
        if not line.startswith("|"):
            header = []
            paragraph = f"{paragraph} {line}".strip() if line.strip() else paragraph
            before, paragraph = (paragraph, "") if not line.strip() and paragraph else (before, paragraph)
            continue
        cells = [plain(cell) for cell in re.split(r"(?<!\\)\|", line.strip())[1:-1]]
        if not header:
            header = cells
        elif cells[0] == name and (not name.isdecimal() or header[0] in _OF_CODES):
            said = plain(re.split(r"(?<=\.) ", before)[-1]) if before.endswith(":") else ""
            yield Row(page, heading, said, tuple(zip(header[1:], cells[1:], strict=False)))


def sections(name: str) -> Iterator[tuple[str, str, str]]:
    """Find the sections whose heading has a name: the page, the heading and the text, in Markdown."""
    if name.isdecimal():
        return
    for page in kind_of(name):
        for part in re.split(r"^(?=##+ )", read(page), flags=re.MULTILINE)[1:]:
            heading, _, text = part.partition("\n")
            if re.search(rf"\b{re.escape(name)}\b", heading):
                yield page, plain(heading.lstrip("# ")), text.strip()
