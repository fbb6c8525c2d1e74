"""Each planted bug names one item of the suites, which ``--effort standard`` selects.

A case that gets more parameters must not make it two, or none, or one that is left out.
"""

from __future__ import annotations

import importlib
import pathlib
import subprocess
import sys
from typing import NamedTuple

import pytest
from _pytest.mark.expression import Expression

from tests.harness import test_planted_composition as composition
from tests.harness import test_planted_simulation as simulation
from tests.harness import test_planted_training as training
from tests.harness.planted import Killer
from tests.harness.planted_reductions import Edited

HERE = pathlib.Path(__file__).parent
PLANTED = sorted(path.stem for path in HERE.glob("planted_*.py"))
MODULES = sorted({path.stem for path in HERE.glob("test_planted_*.py")} - {"test_planted_simulation"})


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


def collected(*options):
    command = [sys.executable, "-m", "pytest", "--impl", "reference,reference.flat", "--device", "cpu", *options]
    command += ["--collect-only", "-q", "-p", "no:cacheprovider"]
    found = subprocess.run(command, cwd=HERE.parents[1], capture_output=True, text=True, check=True, timeout=300)
    return [line for line in found.stdout.splitlines() if "::" in line]


@pytest.mark.parametrize("name", MODULES)
def test_killers_name_one_item(items, name):
    killed = getattr(importlib.import_module(f"tests.harness.{name}"), "KILLED", {})
    named = {bug: killer.item for bug, killer in killed.items() if isinstance(killer, Killer)}
    assert_one_item(items, named, name)


def test_killers_in_simulated_worlds_name_one_item(simulated):
    named = {bug: killer.item for bug, killer in simulation.KILLED.items()}
    assert_one_item(simulated, named, simulation.__name__)


def test_composition_names_one_item(items):
    named = {bug.name: composition.words(item) for bug, (item, _) in composition.CAUGHT.items()}
    assert_one_item(items, named, "test_planted_composition")


def test_training_names_one_item(items):
    # Two chapters have a test_order.
    chapters = " or ".join(f"test_{chapter}.py" for chapter in training.CHAPTERS)
    named = {
        f"{bug.name} in {case}": f"{case}[ and w2 and {rest} and ({chapters})" for bug, (case, rest), _ in training.ROWS
    }
    assert_one_item(items, named, "test_planted_training")


@pytest.mark.parametrize("name", SHARED)
def test_standard_selects_what_bugs_share(items, name):
    cases = importlib.import_module(f"tests.harness.test_planted_{name}").CASES
    found = hits(items, "reference", cases)
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


def assert_one_item(items, named, module):
    wrong, left_out = {}, {}
    for bug, expression in named.items():
        found = hits(items, "reference.flat" if bug.startswith("flat") else "reference", expression)
        if len(found) != 1:
            wrong[bug] = found
        elif found[0] not in items.standard:
            left_out[bug] = found[0]
    assert not wrong, f"by bug of {module}, the items that its killer names instead of one: {wrong}"
    assert not left_out, f"by bug of {module}, the item of its killer that --effort standard leaves out: {left_out}"


def hits(items, implementation, expression):
    """The ids of an implementation's items that an expression of ``-k`` selects, by file, function and parameters."""
    compiled = Expression.compile(expression)
    own = [one for one in items.all if f"[{implementation}-" in one]
    return [one for one in own if compiled.evaluate(lambda word, one=one: word in one)]
