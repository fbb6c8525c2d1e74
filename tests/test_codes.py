"""The table of signatures and checks: no other module types a code, and a mistake and the page show each row."""

import ast
import re
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from shardproof.harness.judging import codes
from shardproof.harness.training import doctor
from tests import test_incidents
from tests.harness import (
    test_doctor_acts,
    test_doctor_checks,
    test_doctor_data,
    test_doctor_followers,
    test_doctor_gathers,
    test_doctor_later,
    test_doctor_loops,
    test_doctor_states,
)
from tests.harness.inner import ROOT

TABLE = "harness/judging/codes.py"
#: The format of run files describes a field by an example, and must not import the harness.
OF_A_FORMAT = "shardproof/runfile.py"

CODE = re.compile(r"\b[SD]\d{1,2}\b")
ROWS = [*codes.SIGNATURES.values(), *codes.CHECKS.values()]

#: The tables of planted mistakes by their files: the name of a mistake, and what is said of it.
PLANTED: dict[str, list[Mapping[str, Any]]] = {
    "tests/test_incidents.py": [test_incidents.SAID, test_incidents.COMPARED, test_incidents.CHECKED],
    "tests/harness/test_doctor_checks.py": [test_doctor_checks.FOUND],
    "tests/harness/test_doctor_gathers.py": [test_doctor_gathers.LOOPS],
    "tests/harness/test_doctor_loops.py": [test_doctor_loops.BROKEN],
    "tests/harness/test_doctor_acts.py": [test_doctor_acts.BROKEN],
    "tests/harness/test_doctor_later.py": [test_doctor_later.BROKEN],
    "tests/harness/test_doctor_data.py": [test_doctor_data.BROKEN],
    "tests/harness/test_doctor_followers.py": [test_doctor_followers.BROKEN],
    "tests/harness/test_doctor_states.py": [test_doctor_states.BROKEN],
}


def typed(source: str) -> Iterator[tuple[int, str]]:
    """The texts of a source that have a code, with their lines. Statements that are a text are for readers."""
    nodes = list(ast.walk(ast.parse(source)))
    for_readers = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    for node in nodes:
        text = node.value if isinstance(node, ast.Constant) and id(node) not in for_readers else None
        if isinstance(text, str) and CODE.search(text):
            yield node.lineno, text


def words(said: Any) -> Iterator[str]:
    """The texts in a row of a table, however it nests them."""
    if isinstance(said, str):
        yield said
    elif isinstance(said, tuple | list):
        for one in said:
            yield from words(one)


def test_no_other_module_types_a_code() -> None:
    paths = [path for room in ("harness", "suites", "reports", "shardproof") for path in (ROOT / room).rglob("*.py")]
    found = {
        f"{path.relative_to(ROOT)}:{line}: {text!r}" for path in paths for line, text in typed(path.read_text())
        if str(path.relative_to(ROOT)) not in (TABLE, OF_A_FORMAT)
    }  # fmt: skip
    assert len(paths) > 300 and not found, "name a constant of judging.codes instead:\n" + "\n".join(sorted(found))


@pytest.mark.parametrize(
    ("source", "count"),
    [
        ('x = "S2"', 1), ('f"{x} [D11]"', 1), ('x = ("D1 to "\n"D17",)', 1), ('def f():\n    """S2, D11."""', 0),
        ('x = "FSDP2"', 0), ('f"{codes.SCALED}"', 0), ('x = f"{a}S2"', 1),
    ],
)  # fmt: skip
def test_a_code_in_any_text_is_seen(source: str, count: int) -> None:
    assert len(list(typed(source))) == count


def test_codes_are_numbered_and_each_constant_has_its_row() -> None:
    assert list(codes.SIGNATURES) == [f"S{number}" for number in range(1, 14)]
    assert list(codes.CHECKS) == list(doctor.CHECKS) == [f"D{number}" for number in range(1, 33)]
    constants = [value for name, value in vars(codes).items() if name.isupper() and isinstance(value, str)]
    assert [one for one in constants if CODE.fullmatch(one)] == [row.code for row in ROWS]
    names = [row.name for row in ROWS]
    assert len(names) == len(set(names)) and all(re.fullmatch(r"[a-z]+(-[a-z]+)*", name) for name in names)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.code)
def test_a_planted_mistake_shows_each(row: codes.Code) -> None:
    file, _, name = row.planted.partition("::")
    tables = [table for table in PLANTED[file] if name in table]
    assert tables, f"{row.code}: {file} has no row {name!r}"
    said = " ".join(text for table in tables for text in words(table[name]))
    assert row.code in CODE.findall(said), f"{row.code}: of {name!r} {file} says {said}"


def test_the_page_has_the_rows() -> None:
    text = (ROOT / "docs/doctor.md").read_text()
    page = dict(
        re.findall(r"^\| ([SD]\d+) (\| .+ \| .+ \|)$", text.partition("\n## What is a finding")[0], re.MULTILINE)
    )
    assert page == {row.code: f"| {row.sentence} | {row.mend} |" for row in ROWS}
    headings = {re.sub(r"[^\w -]", "", line).strip().lower().replace(" ", "-")
                for line in re.findall(r"^#+ (.*)", text, re.MULTILINE)}  # fmt: skip
    assert {row.anchor.removeprefix("docs/doctor.md#") for row in ROWS} <= headings
