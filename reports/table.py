"""Plain text for a terminal: tables, and text from elsewhere made safe to print."""

from collections.abc import Sequence


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a table: columns as wide as their widest cell, two spaces apart, nothing after the last cell."""
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def printable(text: str) -> str:
    """The text with what would steer a terminal written out: a run file may come from anyone, and its texts hold
    whatever a rank printed.
    """
    return "".join(ch if ch.isprintable() else ch.encode("unicode_escape").decode() for ch in text)


def indented(text: str, spaces: int) -> list[str]:
    """The text's lines, safe to print, indented by `spaces`."""
    return [(" " * spaces + printable(line.expandtabs())).rstrip() for line in text.splitlines()]
