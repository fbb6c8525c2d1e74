"""The tables of ``tests/harness/test_planted_*.py``: each planted bug, and the item of the suites written for it."""

from __future__ import annotations

import importlib
import pathlib
import subprocess
import sys
from collections.abc import Iterable

from _pytest.mark.expression import Expression

from shardproof.harness.adapters.base import Adapter
from shardproof.harness.adapters.reference_flat import ReferenceFlatAdapter
from tests.harness import test_planted_composition as composition
from tests.harness import test_planted_training as training
from tests.harness.planted import Killer

HERE = pathlib.Path(__file__).parent
PLANTED = sorted(path.stem for path in HERE.glob("planted_*.py"))
#: The modules with a table of killers; bugs of simulated worlds have other items.
MODULES = sorted({path.stem for path in HERE.glob("test_planted_*.py")} - {"test_planted_simulation"})

Bugs = dict[str, tuple[type[Adapter], str]]


def of_module(name: str) -> Bugs:
    """By bug of a module's table, its adapter and the item that finds it, as an expression of ``-k``."""
    killed = getattr(importlib.import_module(f"tests.harness.{name}"), "KILLED", {})
    if not any(isinstance(killer, Killer) for killer in killed.values()):
        return {}
    adapters = importlib.import_module(f"tests.harness.{name.removeprefix('test_')}").ADAPTERS
    return {bug: (adapters[bug], killer.item) for bug, killer in killed.items()}


def of_composition() -> Bugs:
    """The same of ``test_planted_composition``."""
    return {bug.name: (bug, composition.words(item)) for bug, (item, _) in composition.CAUGHT.items()}


def of_training() -> Bugs:
    """The same of ``test_planted_training``, by bug and case."""
    # Two chapters have a test_order.
    chapters = " or ".join(f"test_{chapter}.py" for chapter in training.CHAPTERS)
    return {
        f"{bug.name} in {case}": (bug, f"{case}[ and w2 and {rest} and ({chapters})")
        for bug, (case, rest), _ in training.ROWS
    }


def sound(bug: type[Adapter]) -> str:
    """The name of the reference of which an adapter is a bug."""
    return "reference.flat" if issubclass(bug, ReferenceFlatAdapter) else "reference"


def collected(*options: str) -> list[str]:
    """The ids of the items of both references that these options of pytest select."""
    command = [sys.executable, "-m", "pytest", "--impl", "reference,reference.flat", "--device", "cpu", *options]
    command += ["--collect-only", "-q", "-p", "no:cacheprovider"]
    found = subprocess.run(command, cwd=HERE.parents[1], capture_output=True, text=True, check=True, timeout=300)
    return [line for line in found.stdout.splitlines() if "::" in line]


def hits(items: Iterable[str], implementation: str, expression: str) -> list[str]:
    """The ids of an implementation's items that an expression of ``-k`` selects, by file, function and parameters."""
    compiled = Expression.compile(expression)
    own = [one for one in items if f"[{implementation}-" in one]
    return [one for one in own if compiled.evaluate(lambda word, one=one: word in one)]
