"""`shardproof explain` prints the documentation's own words of each code, finding, requirement and exit code."""

import re

import pytest
from expecttest import assert_expected_inline

from shardproof import contract, findings, pages
from shardproof.__main__ import main
from shardproof.harness.judging import codes
from tests.installations import ROOT

CODES = [*codes.CHECKS.values(), *codes.SIGNATURES.values()]


def explained(*names, capsys):
    code = main(["explain", *names])
    captured = capsys.readouterr()
    return code, captured.out + captured.err


def words(text):
    return " ".join(text.split())


@pytest.mark.parametrize("row", CODES, ids=lambda row: row.code)
def test_a_code_has_its_sentence_and_its_fix(row, capsys):
    code, printed = explained(row.code, capsys=capsys)
    assert code == 0 and row.sentence in words(printed) and row.mend in words(printed)


def test_each_requirement_and_each_finding_is_there(capsys):
    for _, subject, requirements in contract.chapters():
        for name, text, _ in requirements:
            (row,) = pages.rows(name)
            assert subject in row.heading and (row.cells[-1][0], row.cells[-1][1]) == ("requirement", pages.plain(text))
    for one in findings.load():
        (row,) = pages.rows(one.id)
        assert dict(row.cells)["title"] == pages.plain(one.title)


def test_a_finding_is_its_row_and_its_file(capsys):
    code, printed = explained("F-17", capsys=capsys)
    one = findings.read(ROOT / "findings/F017.py")
    assert code == 0 and words(one.text) in words(printed) and "the program: python findings/F017.py 9" in printed
    assert "state: reproduces with torch" in printed


def test_a_section_about_a_code_is_printed_whole(capsys):
    _, printed = explained("D17", capsys=capsys)
    assert "docs/doctor.md, The mend of D17" in printed and "dist.all_reduce(count)" in printed


def test_an_exit_code_is_that_of_each_command(capsys):
    code, printed = explained("6", "ACCUMULATION-4", capsys=capsys)
    assert code == 0
    assert_expected_inline(
        printed,
        """\
6  docs/run-files.md, Exit codes: Of `pytest` and `shardproof run`
  meaning: no case ran on some implementation, and cases ran on others

ACCUMULATION-4  docs/contract.md, ACCUMULATION: several microbatches in a step
  requirement: A unit whose reduction is deferred and that stays unsharded after forward and
    backward is all-gathered once in a step.
""",
    )
    _, printed = explained("1", capsys=capsys)
    of = re.findall(r"^1  docs/([\w-]+)\.md", printed, flags=re.MULTILINE)
    assert {"run-files", "gate", "check", "record"} == set(of)


@pytest.mark.parametrize("name", ["d11", "s4", "f-17"])
def test_names_are_read_in_lower_case_too(name, capsys):
    assert explained(name, capsys=capsys) == (0, explained(name.upper(), capsys=capsys)[1])


@pytest.mark.parametrize("name", ["D99", "F-9999", "9", "x", "", "../x", "TRAINING-999"])
def test_an_unknown_name_is_one_line(name, capsys):
    code, printed = explained("D11", name, capsys=capsys)
    assert code == 2 and printed.count("\n") == 1
    assert printed.startswith(f"shardproof: explain: {name!r} is in no table of the documentation; expected a code of")


def test_no_link_is_left(capsys):
    names = [*(row.code for row in CODES), *(one.id for one in findings.load()), *map(str, range(9))]
    for name in names:
        text = "".join(cell for row in pages.rows(name) for _, cell in row.cells)
        assert not re.search(r"\]\(", text), name
