"""The order of cases: one of each function first, worlds of one implementation together, cases that are alone last."""

from __future__ import annotations

from tests.harness import explained_bugs
from tests.harness.inner import name_of

SOURCE = """
from shardproof.testing import alone, world

@world(1)
@alone()
def test_alone(rank):
    pass

@world(1)
def test_first(rank):
    pass

@world(1)
def test_second(rank):
    pass

def test_ordinary():
    pass
"""


def test_worlds_of_an_implementation_are_used_in_one_go(run):
    # Two that have ranks of their own.
    one, other = map(name_of, (explained_bugs.StaleParameters, explained_bugs.PaddingInShards))
    names = ["ddp", one, "torch.fully_shard", other]
    result = run(SOURCE, "--device", "cpu", "--collect-only", "-q", "--impl", ",".join(names))
    found = [line.partition("::")[2] for line in result.stdout.lines if "::" in line]
    assert found == [
        "test_first[ddp-w1]", "test_first[torch.fully_shard-w1]",
        "test_second[ddp-w1]", "test_second[torch.fully_shard-w1]",
        "test_ordinary",
        f"test_first[{one}-w1]", f"test_second[{one}-w1]",
        f"test_first[{other}-w1]", f"test_second[{other}-w1]",
        "test_alone[ddp-w1]", "test_alone[torch.fully_shard-w1]", f"test_alone[{one}-w1]", f"test_alone[{other}-w1]",
    ]  # fmt: skip


PARAMETERS = """
import pytest
from shardproof.testing import world

@world(1, 2)
@pytest.mark.parametrize("one", [0, 1])
@pytest.mark.parametrize("two", [0, 1])
@pytest.mark.parametrize("three", [0, 1])
def test_first(rank, one, two, three):
    pass

@world(2)
@pytest.mark.parametrize("one", [0, 1])
def test_second(rank, one):
    pass
"""


def test_a_function_has_its_first_case_before_another_has_its_second(run):
    result = run(PARAMETERS, "--device", "cpu", "--collect-only", "-q", "--impl", "ddp")
    found = [line.partition("::")[2] for line in result.stdout.lines if "::" in line]
    functions = [name.partition("[")[0] for name in found]
    assert functions == ["test_first", "test_second", *["test_first"] * 15, "test_second"]
    assert len(set(found)) == 18


def test_all_cases_of_an_implementation_with_its_own_worlds_come_before_those_of_the_next(run):
    """Also where a function has a second case: two implementations in turn start a world each."""
    one, other = map(name_of, (explained_bugs.StaleParameters, explained_bugs.PaddingInShards))
    result = run(PARAMETERS, "--device", "cpu", "--collect-only", "-q", "--impl", f"{one},{other}", "-k", "test_second")
    found = [line.partition("::")[2] for line in result.stdout.lines if "::" in line]
    assert [name.partition("[")[2].partition("-w2")[0] for name in found] == [one, one, other, other]
