"""docs/contract.md and the cases agree on which requirements there are."""

import re
from pathlib import Path

from planted.table import contract_marks

ROOT = Path(__file__).parents[1]


def documented():
    return re.findall(r"^\| ([A-Z]+-\d+) \|", (ROOT / "docs/contract.md").read_text(), flags=re.MULTILINE)


def test_numbers_are_given_once_and_every_requirement_has_a_case():
    ids = documented()
    assert len(ids) == len(set(ids)) > 0
    checked = {name for names in contract_marks().values() for name in names}
    assert set(ids) - checked == set(), "requirements without a case"
    assert checked - set(ids) == set(), "cases of requirements that are not written down"


def test_every_case_names_a_requirement_of_its_chapter():
    for case, ids in contract_marks().items():
        # A long chapter has several files, whose names begin with it.
        chapter = re.split("[_.]", case.partition("test_")[2])[0].upper()
        assert ids, f"{case} names no requirement"
        assert all(name.startswith(f"{chapter}-") for name in ids), f"{case} names {ids}"
