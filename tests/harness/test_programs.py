"""Programs of calls: which are legal, which are left out for a finding, and the case to paste."""

import pickle
from pathlib import Path
from typing import Any

import pytest

from shardproof import findings
from shardproof.harness.adapters import registry
from shardproof.harness.models.drawn import Block, Part, Plan
from shardproof.harness.models.programs import KINDS, WRONG, Call, Program, Situation, needs_of_program, playable
from shardproof.harness.plugin import drawing
from shardproof.harness.plugin.records import MadeRecord
from shardproof.runfile import Verdict
from shardproof.testing import calls as made

NAMES = {one.__name__: one for one in (Block, Call, Part, Plan, Program)}
STEP = (Call("forward", "reduced"), Call("backward"), Call("step"))
ROOT = Path(__file__).parents[2]


def played(*calls: Call, wrong: str = "", torch_version: str = "2.13.0", **options: Any) -> list[Call]:
    return [*playable(Program(calls=calls, **options), wrong.split(), torch_version=torch_version).calls]


def test_each_kind_is_made():
    methods = {name[1:] for name in vars(made._Both) if name.startswith("_") and not name.startswith("__")}
    assert set(KINDS) <= methods


@pytest.mark.parametrize(
    "calls",
    [
        (Call("backward"),),
        (Call("forward", "reduced"), Call("step")),
        (Call("forward", "deferred"), Call("backward"), Call("step")),
        (Call("load"),),
        (Call("clip", "low"),),
        (*STEP, Call("freeze", "held")),
        (*STEP, Call("cast")),
    ],
    ids=lambda calls: calls[-1].kind + str(len(calls)),
)
def test_what_is_not_legal_is_left_out(calls: tuple[Call, ...]):
    assert played(*calls) == [*calls[:-1]]


def test_states_are_saved_once_there_are_some():
    save = Call("save", "full")
    assert played(save, *STEP, save) == [*STEP, save]
    assert played(*STEP, Call("new_optimizer"), save)[-1] == Call("new_optimizer")
    assert played(*STEP, save, optimizer="sgd") == [*STEP]


def test_what_a_finding_says_is_wrong_is_left_out_for_whom_it_is_about():
    calls = (*STEP, Call("evaluate", "no_grad"), Call("scale_parameters"))
    assert played(*calls) == [*calls]
    assert played(*calls, wrong="F-29") == [*calls[:-1]]
    recover = (Call("forward", "deferred"), Call("backward"), Call("recover"))
    assert played(*recover, wrong="F-70") == [*recover[:-1]]
    assert played(*recover, wrong="F-70", torch_version="2.15.0") == [*recover]


def test_each_finding_is_of_the_implementations_that_name_it():
    """And each implementation names those in the table that its finding is about."""
    named = {name: registry.load(name).traits.wrong_calls for name in ("torch.fully_shard", "torch.fsdp", "reference")}
    about = {one.finding: findings.read(ROOT / f"findings/F{int(one.finding[2:]):03}.py") for one in WRONG}
    assert not named["reference"]
    for name, ids in named.items():
        assert ids == {id_ for id_, finding in about.items() if name in finding.implementations}, name


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("implementation", ["reference", "reference.flat", "torch.fully_shard", "torch.fsdp"])
def test_drawn_is_legal_and_claimed(implementation: str, size: int):
    pytest.importorskip("hypothesis")
    adapter = registry.load(implementation)
    capabilities, wrong = adapter.capabilities(), adapter.traits.wrong_calls
    options: Any = {"capabilities": capabilities, "wrong_calls": wrong, "world_size": size}
    lengths = []

    def judge(program: Program, deadline: float | None) -> MadeRecord:
        situation = Situation(program)
        for call in program.calls:
            assert situation.allows(call)
            situation.take(call)
        assert needs_of_program(program, world_size=size) <= capabilities
        assert pickle.loads(pickle.dumps(program)) == program == eval(repr(program), NAMES)
        compile(program.as_case(world_size=size, requirements=["DRAWN-3"]), "case", "exec")
        lengths.append(len(program.calls))
        return MadeRecord(
            id="f.py::test", implementation=implementation, requirement="", world=size, device="cpu", parameters={},
            verdict=Verdict.PASS, seconds=0.1,
        )  # fmt: skip

    assert drawing.Search(judge).find(drawing.strategy_of(Program, **options), seed=1, examples=8) is None
    assert max(lengths) > 25


def test_efforts_draw_different_numbers():
    assert [drawing.examples_of(Program, effort) for effort in ("quick", "full")] == [8, 100]
    assert drawing.examples_of(int, "quick") == drawing.EXAMPLES
