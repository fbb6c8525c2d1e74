"""Shorter runs: what they leave out, what they never leave out, and what they print of it; the order of cases."""

import json
import types

import pytest

from shardproof.harness.plugin import effort
from shardproof.runfile import load_run
from tests.harness import explained_bugs
from tests.harness.inner import name_of

pytestmark = pytest.mark.sampled

SOURCE = """
import pytest
from shardproof.testing import Capability, Hardware, contract, meaningful_from, needs, world

@contract("X-1", "X-2")
@world(1, 2)
@pytest.mark.parametrize("c", [0, 1])
@pytest.mark.parametrize("b", [0, pytest.param(1, marks=needs(Hardware.STREAMS))])
@pytest.mark.parametrize("a", [0, 1])
def test_product(rank, a, b, c):
    pass

@contract("X-2")
@world(1, 2)
@pytest.mark.parametrize("a", [0, pytest.param(1, marks=meaningful_from(2))])
def test_one_parameter(rank, a):
    pass

@contract("X-3")
@world(1)
@pytest.mark.parametrize("a", [pytest.param(0, marks=needs(Capability.SHARDED)), 1])
def test_half_unsupported(rank, a):
    pass

@world(1)
@pytest.mark.parametrize("a", [0, 1, 2])
def test_without_requirement(rank, a):
    pass

def test_ordinary():
    pass
"""
CASES = 16 + 4 + 2 + 3
STANDARD = [
    # Pairs with what needs streams, and pairs without it, apart.
    "test_product[ddp-w1-0-0-0]", "test_product[ddp-w1-0-0-1]", "test_product[ddp-w1-1-0-0]",
    "test_product[ddp-w1-1-0-1]", "test_product[ddp-w1-0-1-0]", "test_product[ddp-w1-1-1-1]",
    "test_product[ddp-w2-0-0-0]",
    "test_one_parameter[ddp-w1-0]", "test_one_parameter[ddp-w1-1]", "test_one_parameter[ddp-w2-1]",
    "test_half_unsupported[ddp-w1-0]", "test_half_unsupported[ddp-w1-1]",
    "test_without_requirement[ddp-w1-0]", "test_without_requirement[ddp-w1-1]", "test_without_requirement[ddp-w1-2]",
]  # fmt: skip


@pytest.fixture
def collected(run):
    """The names of the collected cases, in a run with these options."""

    def collected(*options, source=SOURCE):
        result = run(source, "--device", "cpu", "--collect-only", "-q", *options)
        names = [line.partition("::")[2] for line in result.stdout.lines if "::" in line]
        return [name for name in names if "[" in name]

    return collected


def test_standard_keeps_every_pair_for_whoever_can_run_it(collected):
    assert sorted(collected("--effort=standard")) == sorted(STANDARD)
    assert collected("--shardproof-effort=standard") == collected("--effort=standard")


def test_standard_is_the_same_for_all_implementations(collected):
    chosen = collected("--effort=standard", "--impl", "ddp,reference")
    assert [name.replace("reference", "ddp") for name in chosen if "reference" in name] == [
        name for name in chosen if "ddp" in name
    ]


def test_quick_asks_each_function_once(collected):
    names = [name.partition("[")[0] for name in collected("--effort=quick")]
    assert names == ["test_product", "test_one_parameter", "test_half_unsupported", "test_without_requirement"]


def test_quick_takes_what_can_run(collected):
    chosen = collected("--effort=quick", "--impl", "ddp,reference", "-k", "half_unsupported")
    assert len(chosen) == 2
    assert "test_half_unsupported[ddp-w1-1]" in chosen


@pytest.mark.parametrize("effort", ["quick", "standard"])
def test_an_item_that_is_named_by_its_node_id_always_runs(collected, pytester, effort):
    name = "test_product[ddp-w2-1-1-1]"
    assert name not in collected("--effort", effort)
    for path in ("test_inner.py", pytester.path / "test_inner.py"):
        assert collected("--effort", effort, f"{path}::{name}") == [name]
    assert len(collected("--effort", effort, "test_inner.py::test_product")) < 16
    assert name in collected("--effort", effort, "test_inner.py::test_half_unsupported", f"test_inner.py::{name}")


def test_the_effort_is_applied_to_what_other_options_select(collected):
    assert collected("--effort=standard", "-k", "w2-1-1-1") == ["test_product[ddp-w2-1-1-1]"]
    assert collected("--effort=quick", "-k", "w2-1-1-1") == ["test_product[ddp-w2-1-1-1]"]
    in_large_worlds = [name for name in collected("--effort=standard", "--world=2") if "one_parameter" in name]
    assert in_large_worlds == ["test_one_parameter[ddp-w2-0]", "test_one_parameter[ddp-w2-1]"]


DIFFERENT_THINGS = """
import pytest
from shardproof.testing import contract, each_value, world
@contract("X-1")
@world(1)
@each_value("what")
@pytest.mark.parametrize("b", [0, 1])
@pytest.mark.parametrize("what", ["this", "that"])
def test_things(rank, what, b):
    pass
"""


def test_quick_has_an_item_of_each_value_that_names_a_thing(collected):
    found = collected("--effort=quick", source=DIFFERENT_THINGS)
    assert sorted(name.split("-")[2] for name in found) == ["that", "this"]
    assert len(collected("--effort=quick", source=DIFFERENT_THINGS.replace('@each_value("what")', ""))) == 1


def test_each_value_of_no_parameter_is_one_line(run, refused):
    line = refused(DIFFERENT_THINGS.replace('each_value("what")', 'each_value("which")'), "--effort=quick")
    assert line.endswith("each_value('which') names no parameter; the case has what, b")
    result = run(DIFFERENT_THINGS.replace('each_value("what")', "each_value()"), "--effort=quick")
    result.stdout.fnmatch_lines(["*each_value() takes the names of one or more parameters of the case, and got none"])


def test_what_is_skipped_covers_nothing(collected):
    source = """
import pytest
from shardproof.testing import contract, world
@contract("X-1")
@world(1)
@pytest.mark.parametrize("b", [0, 1])
@pytest.mark.parametrize("a", [0, pytest.param(1, marks=pytest.mark.skip(reason="broken"))])
def test_case(rank, a, b):
    pass
"""
    assert "test_case[ddp-w1-0" in collected("--effort=quick", source=source)[0]
    assert len(collected("--effort=standard", source=source)) == 4


def test_combinations_that_a_table_lists_are_kept(collected, pytester, refused):
    source = SOURCE.replace("needs(Hardware.STREAMS)", "()")
    listed = "[[always]]\ncase = 'test_inner.py::test_product'\nworld = [2]\na = [1]\nb = [1]\nc = [0, 1]\n"
    listed += "seed = 'test_torch.py::test_it'\n[seeds]\n'test_torch.py::test_it' = {combinations = 2}\n"
    without = collected("--effort=standard", source=source)
    table = pytester.path / "standard.toml"
    table.write_text(listed)
    added = set(collected("--effort=standard", source=source)) - set(without)
    assert {"test_product[ddp-w2-1-1-0]", "test_product[ddp-w2-1-1-1]"} <= added
    table.write_text(listed.replace("[1]", "1"))
    line = refused(source, "--effort=standard", "--device", "cpu")
    assert line.endswith("standard.toml entry 1: expected a case and lists of values of its parameters")


def test_an_unknown_effort_is_one_line(refused):
    assert refused(SOURCE, "--effort=some") == "ERROR: --effort some: expected quick, standard, full"


#: Nothing runs in it on the CPU, so that no rank starts.
UNMET = SOURCE.replace("@world", "@needs(Hardware.STREAMS)\n@world")


@pytest.mark.parametrize("effort", ["quick", "standard"])
def test_xdist_runs_the_same_items_and_counts_the_same(run, pytester, effort):
    counts = []
    for workers in ("0", "2"):
        report = pytester.path / f"run{workers}.json"
        options = ("-n", workers, "--effort", effort, "--device", "cpu", "--report", str(report))
        result = run(UNMET, *options, own_process=workers != "0")
        found = load_run(report)
        counts.append((found.selected, found.effort, {case.id for case in found.cases}))
        left_out = CASES - len(found.cases)
        result.stdout.fnmatch_lines([f"effort {effort}: {left_out} of {CASES} cases left out: inner {left_out}"])
    assert counts[0] == counts[1]
    assert counts[0][1].name == effort


def test_a_run_is_full_by_default_and_its_file_says_so(run, pytester, collected):
    assert len(collected()) == CASES and collected("--effort", "full") == collected()
    result = run(SOURCE, "-k", "without_requirement", "--report", "run.json")
    result.stdout.fnmatch_lines(["effort full: all cases"])
    assert json.loads((pytester.path / "run.json").read_text())["effort"] == {"name": "full", "deselected": {}}


def test_a_known_failure_that_the_effort_leaves_out_is_no_mistake(run, pytester):
    folder = pytester.mkdir("expectations")
    entry = "[[expect]]\nverdict = 'fail'\nreason = 'r'\nlink = 'l'\ncases = ['test_inner.py::{}']\n"
    (folder / "ddp.toml").write_text(entry.format("test_product[[]w2-1-1-1]".replace("[[]", "[")))
    assert run(SOURCE, "--effort=quick", "--device", "cpu").ret == pytest.ExitCode.OK
    (folder / "ddp.toml").write_text(entry.format("test_gone"))
    result = run(SOURCE, "--effort=quick", "--device", "cpu")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(["ERROR: expectations/ddp.toml entry 1 matches no case: test_inner.py::test_gone"])


# The order: one case of each function first, worlds of an implementation together, cases that are alone last

OF_SEVERAL_KINDS = """
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
"""


def test_worlds_of_an_implementation_are_used_in_one_go(collected):
    # Two that have ranks of their own.
    one, other = map(name_of, (explained_bugs.StaleParameters, explained_bugs.Unsteady))
    names = ["ddp", one, "torch.fully_shard", other]
    found = collected("--impl", ",".join(names), source=OF_SEVERAL_KINDS)
    assert found == [
        "test_first[ddp-w1]", "test_first[torch.fully_shard-w1]",
        "test_second[ddp-w1]", "test_second[torch.fully_shard-w1]",
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


def test_a_function_has_its_first_case_before_another_has_its_second(collected):
    found = collected("--impl", "ddp", source=PARAMETERS)
    functions = [name.partition("[")[0] for name in found]
    assert functions == ["test_first", "test_second", *["test_first"] * 15, "test_second"]
    assert len(set(found)) == 18


def test_all_cases_of_an_implementation_with_its_own_worlds_come_before_those_of_the_next(collected):
    """Also where a function has a second case: two implementations in turn start a world each."""
    one, other = map(name_of, (explained_bugs.StaleParameters, explained_bugs.Unsteady))
    found = collected("--impl", f"{one},{other}", "-k", "test_second", source=PARAMETERS)
    assert [name.partition("[")[2].partition("-w2")[0] for name in found] == [one, one, other, other]


class Item:
    """A case of an implementation, as far as its place in the order depends on it."""

    def __init__(self, name, implementation, turn, alone=False):
        self.name, self.implementation, self.turn, self.alone = name, implementation, turn, alone

    def get_closest_marker(self, name):
        return self.alone if name == "alone" and self.alone else None


@pytest.mark.parametrize(("profile", "order"), [((), "abcdef"), (("core",), "adbecf")])
def test_a_turn_is_of_all_cases_of_profiles_and_else_of_an_implementation(monkeypatch, profile, order):
    """Time may be over: what wants worlds of its own, or to be alone, is not last of all, but last of its turn."""
    items = [Item("d", "own", 0), Item("a", "other", 0), Item("b", "other", 1), Item("e", "own", 1)]
    items += [Item("f", "own", 2, alone=True), Item("c", "other", 2)]
    apart = types.SimpleNamespace(traits=types.SimpleNamespace(isolation="process"))
    shared = types.SimpleNamespace(traits=types.SimpleNamespace(isolation="shared"))
    chosen = types.SimpleNamespace(profile=profile, implementations={"own": apart, "other": shared})
    # The name in the module alone: the plugin of this run of pytest has functions of its own to ask.
    own = types.SimpleNamespace(is_case=lambda item: True, launch_of=lambda item: item)
    monkeypatch.setattr(effort, "cases", own)
    effort.order(items, chosen, turns={item: item.turn for item in items})
    assert "".join(item.name for item in items) == order
