"""Each planted bug names one item of the suites; a case that gets more parameters must not make it two, or none."""

from __future__ import annotations

import importlib
import pathlib
import subprocess
import sys

import pytest
from _pytest.mark.expression import Expression

from tests.harness import test_planted_composition as composition
from tests.harness import test_planted_simulation as simulation
from tests.harness.planted import Killer
from tests.harness.planted_reductions import Edited

HERE = pathlib.Path(__file__).parent
PLANTED = sorted(path.stem for path in HERE.glob("planted_*.py"))
MODULES = sorted({path.stem for path in HERE.glob("test_planted_*.py")} - {"test_planted_simulation"})


@pytest.fixture(scope="module")
def items():
    """The ids of all items of both references; those of GPUs are selected too, and do not run."""
    ids = collected("suites")
    assert len(ids) > 1000
    return ids


@pytest.fixture(scope="module")
def simulated():
    """The ids of the items of simulated worlds."""
    return collected("suites/test_simulation.py", "--simulate", str(simulation.SIZE))


def collected(*options):
    command = [sys.executable, "-m", "pytest", "--impl", "reference,reference.flat", "--device", "cpu", *options]
    command += ["-m", "nightly or not nightly", "--collect-only", "-q", "-p", "no:cacheprovider"]
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
    wrong = {}
    for bug, item in named.items():
        half = "[reference.flat-" if bug.startswith("flat") else "[reference-"
        # As of ``-k``, whose names are those of the file, of the function and of the item.
        expression = Expression.compile(item)
        hits = [one for one in items if half in one and expression.evaluate(lambda word, one=one: word in one)]
        if len(hits) != 1:
            wrong[bug] = hits
    assert not wrong, f"by bug of {module}, the items that its killer names instead of one: {wrong}"
