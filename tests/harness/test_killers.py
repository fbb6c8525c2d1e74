"""Each planted bug names one item of the suites, which ``--effort standard`` selects.

A case that gets more parameters must not make it two, or none, or one that is left out.
"""

from __future__ import annotations

import importlib
from typing import NamedTuple

import pytest

from tests.harness import killers
from tests.harness import test_planted_simulation as simulation
from tests.harness.killers import MODULES, PLANTED, collected, hits
from tests.harness.planted_reductions import Edited

#: Modules whose bugs share the items of one expression, of which each test of the suites has one.
SHARED = ["bugs", "evidence", "in_steps", "memory", "order"]


class Items(NamedTuple):
    """The ids of items.

    Args:
        all: those of both references.
        standard: those of them that ``--effort standard`` selects.
    """

    all: list[str]
    standard: frozenset[str]


@pytest.fixture(scope="module")
def items():
    """The items of the suites; those of GPUs are selected too, and do not run."""
    found = of("suites")
    assert len(found.all) > len(found.standard) > 1000
    return found


@pytest.fixture(scope="module")
def simulated():
    """The items of simulated worlds."""
    return of("suites/test_simulation.py", "--simulate", str(simulation.SIZE))


def of(*options):
    return Items(
        collected(*options, "-m", "nightly or not nightly"), frozenset(collected(*options, "--effort", "standard"))
    )


@pytest.mark.parametrize("name", MODULES)
def test_killers_name_one_item(items, name):
    assert_one_item(items, killers.of_module(name), name)


def test_killers_in_simulated_worlds_name_one_item(simulated):
    assert_one_item(simulated, killers.of_module("test_planted_simulation"), simulation.__name__)


def test_composition_names_one_item(items):
    assert_one_item(items, killers.of_composition(), "test_planted_composition")


def test_training_names_one_item(items):
    assert_one_item(items, killers.of_training(), "test_planted_training")


@pytest.mark.parametrize("name", SHARED)
def test_standard_selects_what_bugs_share(items, name):
    cases = importlib.import_module(f"tests.harness.test_planted_{name}").CASES
    found = hits(items.all, "reference", cases)
    assert found
    left_out = [item for item in found if item not in items.standard]
    assert not left_out, f"of the items of test_planted_{name}, --effort standard leaves out {left_out}"


@pytest.mark.parametrize("name", PLANTED)
def test_edits_find_their_places(name):
    """By day for those too that are planted by night: a place that has moved is noticed by whoever moves it."""
    adapters = getattr(importlib.import_module(f"tests.harness.{name}"), "ADAPTERS", {})
    lost = {}
    for bug, adapter in adapters.items():
        if issubclass(adapter, Edited):
            try:
                adapter.edit.edited()
            except (AssertionError, AttributeError) as error:
                lost[bug] = str(error)
    assert not lost, f"by bug of {name}, what its edit does not find: {lost}"


def assert_one_item(items, bugs, module):
    wrong, left_out = {}, {}
    for bug, (adapter, expression) in bugs.items():
        found = hits(items.all, killers.sound(adapter), expression)
        if len(found) != 1:
            wrong[bug] = found
        elif found[0] not in items.standard:
            left_out[bug] = found[0]
    assert not wrong, f"by bug of {module}, the items that its killer names instead of one: {wrong}"
    assert not left_out, f"by bug of {module}, the item of its killer that --effort standard leaves out: {left_out}"
