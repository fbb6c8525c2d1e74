"""The command ``shardproof reproduce``: its programs fail as their cases do, with torch alone."""

import os
import subprocess
import sys

import pytest

from planted.upstream.__main__ import rows
from shardproof import reproducers
from shardproof.commands.reproduce import reproduce
from tests.harness.inner import ROOT

#: Five shapes of failure, of known findings and of fixes of torch that are undone (``planted/upstream``).
TEN = {
    "numbers": ("", "evaluation.py::test_second_evaluation_sees_the_step[torch.fully_shard-w2-None]"),
    "exception": ("", "clipping.py::test_empty_shards[torch.fully_shard-w4-inf]"),
    "collectives": ("", "collectives.py::test_evaluations_add_no_gather_to_a_step[torch.fully_shard-w2-None]"),
    "memory": ("", "memory.py::test_what_is_held_between_steps[torch.fsdp-w2-shards]"),
    "state": ("", "state.py::test_names_and_values[torch.fsdp-w2-plain-first-rank]"),
    "numbers-edit": (
        "125484", "accumulation.py::test_hybrid_reduction_waits[torch.fully_shard-w4-all-reduce-root-only-2-None]"
    ),
    "exception-edit": (
        "146709", "evaluation.py::test_first_forward_is_in_inference_mode[torch.fully_shard-w2-evaluated-again-shards]"
    ),
    "collectives-edit": ("162021", "collectives.py::test_no_collectives_alone[torch.fully_shard-w1]"),
    "memory-edit": ("176225", "init.py::test_parameter_of_two_units[torch.fully_shard-w2-once-originals-two-units]"),
    "state-edit": ("126948", "state.py::test_into_a_new_optimizer[torch.fully_shard-w2-first-rank-originals]"),
}  # fmt: skip


@pytest.mark.nightly
@pytest.mark.parametrize(("row", "item"), TEN.values(), ids=TEN)
def test_fails_as_its_case_does(tmp_path, row, item):
    path = tmp_path / "repro.py"
    words = [sys.executable, "-m", "shardproof", "reproduce", f"suites/test_{item}", "-o", str(path)]
    edit = next((one.environment for one in rows() if one.id == row), {})
    done = subprocess.run(words, cwd=ROOT, env=os.environ | edit, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    text = path.read_text()
    assert len(text.splitlines()) < 60 and "import" in text and "shardproof" not in text, text
    if row:  # it passes, or is refused, where torch has the fix
        said = text.split('"""')[1].strip().splitlines()[-1]
        assert said not in subprocess.run([sys.executable, path], capture_output=True, text=True).stderr


def tape(rank, **judged):
    call = {"step": 0, "under": [], "graph": True, "args": [], "kwargs": {}, "target": ""}
    data = f"batch(0, §{rank}§, 4, 2)"
    calls = [
        call | {"kind": "make", "name": "make", "root": "model", "code": "nn.Linear(2, 2)"},
        call | {"kind": "forward", "name": "f", "id": 1, "assign": "out1", "target": "model", "args": [data]},
        call | {"kind": "backward", "name": "backward", "of": 1},
    ]
    return {"rank": rank, "calls": calls, "judged": judged or None, "sources": {"imports": [], "texts": {}}}


NUMBERS = {"kind": "numbers", "stage": "gradient", "name": "bias", "step": 0}


def test_the_plain_copy_trains_on_the_data_of_all_ranks():
    program = reproducers.Program([tape(0, **NUMBERS), tape(1)], "a case", 2)
    text = program.text(program.calls)
    assert "out1 = model(batch(0, rank, 4, 2))" in text
    assert "(sum(plain(batch(0, each, 4, 2)).square().mean() for each in range(WORLD)) / WORLD).backward()" in text


@pytest.mark.parametrize(
    ("tapes", "says"),
    [
        ([tape(0), tape(1)], "no rank raised"),
        ([tape(0, kind="assert", where="suites/test_x.py:test_x"), tape(1)], "what test_x.py:test_x compares"),
        ([tape(0, **NUMBERS), tape(1) | {"calls": tape(1)["calls"][1:]}], "ranks make different calls"),
        ([tape(0, **NUMBERS | {"step": 3}), tape(1)], "belongs to no call"),
    ],
)
def test_says_why_there_is_no_program(tapes, says):
    with pytest.raises(reproducers.NotReproducible, match=says):
        reproducers.Program(tapes, "a case", 2)


@pytest.mark.parametrize("nodeid", ["suites/test_training.py::test_x", "test_x", "suites/test_training.py"])
def test_what_is_no_item_is_refused_in_one_line(capsys, nodeid):
    assert reproduce([nodeid]) == 2
    told = (
        f"shardproof: reproduce: {nodeid!r} is no item: its brackets have the implementation and the parameters, as in "
    )
    said = capsys.readouterr().err
    assert said.startswith(told) and said.count("\n") == 1


def test_other_implementations_are_refused_in_one_line(capsys):
    assert reproduce(["suites/test_training.py::test_x[deepspeed.zero3-w2]"]) == 2
    assert capsys.readouterr().err.count("\n") == 1
