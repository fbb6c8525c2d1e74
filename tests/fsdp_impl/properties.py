"""Hypothesis as the tests of properties use it; they are skipped without it."""

from typing import Any

import pytest

hypothesis: Any = pytest.importorskip("hypothesis", reason="properties need hypothesis: pip install '.[tests]'")
st: Any = pytest.importorskip("hypothesis.strategies")
given = hypothesis.given

# Derived from a test's name alone: the same examples in every run, and none kept in the working tree.
hypothesis.settings.register_profile("shardproof", deadline=None, derandomize=True, database=None, max_examples=150)
hypothesis.settings.load_profile("shardproof")
