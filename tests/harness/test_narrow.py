"""Which functions of the suites become items, for an expression that selects few."""

from __future__ import annotations

import pytest

from tests.harness.narrow import may_select


@pytest.mark.parametrize(
    ("expression", "stem", "function", "expected"),
    [
        ("a-w2 and test_one", "test_chapter", "test_one_of_many", True),
        ("a-w2 and test_one", "test_chapter", "test_two", False),
        ("test_chapter and test_two", "test_chapter", "test_two", True),
        ("test_chapter and test_two", "test_other", "test_two", False),
        ("test_one or test_two", "test_chapter", "test_two", True),
        ("test_one or test_two", "test_chapter", "test_three", False),
        ("test_chapter", "test_chapter", "test_three", True),
        ("w2-first", "test_chapter", "test_three", True),
        ("test_one and not test_one_of_many", "test_chapter", "test_one", True),
        ("(test_one or test_two) and w2", "test_chapter", "test_two", True),
    ],
)
def test_what_may_be_selected_is_collected(expression, stem, function, expected):
    assert may_select(expression, stem, function) is expected
