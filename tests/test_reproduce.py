"""The command ``shardproof reproduce``: its programs fail as their cases do, with torch alone."""

import contextlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import time
import types
import weakref

import pytest
import torch
from torch import nn

from planted.upstream.__main__ import rows
from shardproof.commands import reproduce as command
from shardproof.commands.reproduce import reproduce
from shardproof.harness.reproducing import program as programs
from shardproof.harness.reproducing import shrinking
from shardproof.harness.reproducing import tape as tapes_of
from shardproof.harness.reproducing.expressions import Expressions
from shardproof.harness.tensors import notes
from tests.harness.inner import ROOT

#: Five shapes of failure, of known findings and of fixes of torch that are undone (``planted/upstream``).
TEN = {
    "numbers": ("", "evaluation.py::test_second_evaluation_sees_the_step[torch.fully_shard-w2-None]"),
    "exception": ("", "clipping.py::test_empty_shards[torch.fully_shard-w4-inf]"),
    "collectives": ("", "collectives.py::test_evaluations_add_no_gather_to_a_step[torch.fully_shard-w2-None]"),
    "memory": ("", "memory.py::test_memory_between_steps[torch.fsdp-w2-shards]"),
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
    # The nightly host is busy with other tests, for which two minutes are too few.
    words = [sys.executable, "-m", "shardproof", "reproduce", f"suites/test_{item}", "-o", str(path)]
    words += ["--seconds", "900"]
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
    program = programs.Program([tape(0, **NUMBERS), tape(1)], "a case", 2)
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
    with pytest.raises(programs.NotReproducible, match=says):
        programs.Program(tapes, "a case", 2)


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


# What a rank writes down ---------------------------------------------------------------------------


def calls_of(folder, act):
    """The calls of one rank's case."""
    with tapes_of.recorded(folder, 0, types.SimpleNamespace(module=__name__)):
        act()
    return json.loads((folder / "rank0.json").read_text())["calls"]


def in_contexts():
    model, other, context = nn.Linear(2, 2), nn.Linear(2, 2), nn.parallel.DistributedDataParallel.no_sync
    model.require_backward_grad_sync = other.require_backward_grad_sync = True
    with context(model):
        model.eval()
        with context(other):
            model.zero_grad()
        model.train()
    with contextlib.suppress(KeyError), context(model):
        raise KeyError
    model.eval()
    for _ in range(2):
        with context(model), context(model):
            model.zero_grad()
    model.train()


def test_a_call_has_the_contexts_that_are_open(tmp_path):
    """Of a context that is entered twice, within another one, and that an error leaves."""
    one, other = (f"DistributedDataParallel.no_sync({model})" for model in ("model", "model1"))
    found = [(call["name"], call["under"]) for call in calls_of(tmp_path, in_contexts) if call["kind"] == "call"]
    assert found == [
        ("eval", [one]), ("zero_grad", [one, other]), ("train", [one]), ("eval", []),
        ("zero_grad", [one, one]), ("zero_grad", [one, one]), ("train", []),
    ]  # fmt: skip


def test_what_is_done_in_order_to_compare_is_left_out(tmp_path):
    def act():
        model = nn.Linear(2, 2)
        model.eval()
        with notes.during("comparing"), notes.during("comparing"):
            model.zero_grad()
            notes.tell("stepped")
        notes.tell("stepped")
        model.train()

    found = [(one["name"], one["step"]) for one in calls_of(tmp_path, act)]
    assert found == [("make", 0), ("eval", 0), ("train", 1)]


def test_what_is_gone_leaves_its_name_to_nobody():
    """As a scheduler that is freed, whose id a model may have later."""
    written = Expressions(lambda call: None)
    gone, device = nn.Identity(), torch.device("cpu")
    written.names[id(device)] = (weakref.ref(gone), "scheduler")
    del gone
    assert written.write(device) == "torch.device('cpu')" and not written.is_owned(device)
    written.names[id(device)] = (device, "scheduler|state")
    assert written.write(device) == "scheduler" and written.is_owned(device)


def test_nobody_hears_a_note_outside_of_a_recording(tmp_path):
    assert notes.LISTENERS == [] and notes.during("comparing") is notes.during("evaluation")
    heard = []
    calls_of(tmp_path, lambda: heard.append(len(notes.LISTENERS)))
    assert (heard, notes.LISTENERS) == ([1], [])

    def fail():
        raise KeyError

    with pytest.raises(KeyError):
        calls_of(tmp_path, fail)
    assert notes.LISTENERS == [] and sys.getprofile() is None


@pytest.mark.parametrize("catches", [False, True])
def test_a_check_judges_the_failure_that_it_raises_alone(tmp_path, catches):
    def check():
        notes.tell("check", kind="counts", phase="forward", expected={"all_gather": 1})
        raise AssertionError("counts")

    def act():
        with contextlib.suppress(AssertionError) if catches else contextlib.nullcontext():
            check()
        raise AssertionError("another")

    with pytest.raises(AssertionError):
        calls_of(tmp_path, act)
    judged = json.loads((tmp_path / "rank0.json").read_text())["judged"]
    assert judged["kind"] == ("assert" if catches else "counts")


# When the time is over -----------------------------------------------------------------------------

RAISED = {"kind": "raise", "error": "ValueError", "text": "a text", "where": "a.py:f"}


@pytest.fixture
def clock(monkeypatch):
    """A clock on which each trial takes a second, in which each program fails alike."""
    now = [0.0]

    def tried(text, seconds):
        now[0] += 1
        return "ValueError: a text"

    monkeypatch.setattr(shrinking, "tried", tried)
    monkeypatch.setattr(shrinking, "time", types.SimpleNamespace(monotonic=lambda: now[0]))
    return now


def test_shrinking_ends_with_the_time(clock):
    lines, counts = {}, {}
    for until in (2, 3, 100):  # the whole program takes two, itself and with the reference
        clock[0], program = 0.0, programs.Program([tape(0, **RAISED), tape(1)], "a case", 3)
        left = shrinking.Shrinking(program, until)
        lines[until], counts[until] = len(left.run().splitlines()), (left.trials, left.left_out > 0)
    assert counts[2] == (0, True) and counts[3] == (1, True) and counts[100][1] is False
    assert lines[3] < lines[2], "what was tried in time is left out"


def test_the_smallest_program_is_written_when_the_time_is_over(clock, tmp_path, monkeypatch, capsys):
    record = types.SimpleNamespace(verdict="fail", failure=None, missing=["a text"], id="a case", world=2)
    monkeypatch.setattr(command, "_recorded", lambda *_: (record, [tape(0, **RAISED), tape(1)]))
    monkeypatch.setattr(command, "_run", lambda *_: (1, "ValueError: a text"))
    monkeypatch.setattr(command, "time", types.SimpleNamespace(monotonic=lambda: 0.0))
    path = tmp_path / "repro.py"
    assert reproduce(["suites/test_x.py::test_x[torch.fully_shard-w2]", "-o", str(path), "--seconds", "3"]) == 0
    whole = programs.Program([tape(0, **RAISED), tape(1)], "a case", 2)
    assert len(path.read_text().splitlines()) < len(whole.text(whole.calls).splitlines())
    said = capsys.readouterr().out
    assert "tried 1 smaller programs" in said and "the time of 3 seconds was over: " in said
    assert "smaller programs were not tried" in said and "exit code 1: ValueError: a text" in said


def test_a_case_that_does_not_end_is_refused_in_one_line(monkeypatch, capsys):
    monkeypatch.setattr(command, "_run", lambda *_, **__: (None, ""))
    assert reproduce(["suites/test_x.py::test_x[torch.fully_shard-w2]"]) == 2
    assert capsys.readouterr().err.endswith("did not end in time: give it more by --seconds\n")


def is_gone(pid):
    """Whether a process has ended, or is about to: nobody may be there to wait for it."""
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


def wait_until(condition):
    last = time.monotonic() + 60
    while not condition() and time.monotonic() < last:
        time.sleep(0.05)
    assert condition()


def test_no_process_of_a_command_is_left_when_the_time_is_over():
    code, said = command._run(["sh", "-c", "sleep 1000 & echo $! $$; wait"], time.monotonic() + 2)
    assert code is None and len(said.split()) == 2
    wait_until(lambda: all(map(is_gone, said.split())))


#: Ranks that never end.
HANGS = """\
import os, pathlib, time, torch
def main(rank):
    pathlib.Path(f"{folder}/{rank}").write_text(str(os.getpid()))
    time.sleep(1000)
torch.multiprocessing.spawn(main, nprocs=2)
"""


@pytest.mark.parametrize("ends", ["limit", "interrupt"])
def test_no_process_of_a_trial_is_left(tmp_path, ends):
    pids = [tmp_path / "0", tmp_path / "1"]
    text = f"folder = {str(tmp_path)!r}\n{HANGS}"
    script = f"from shardproof.harness.reproducing.shrinking import tried; print(tried({text!r}, 8))"
    if ends == "interrupt":
        # A shell's background job ignores SIGINT, and so do its descendants unless they ask for it.
        begin = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
        script = begin + script.replace(", 8)", ", 600)")
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen([sys.executable, "-c", script], env=environment, stdout=subprocess.PIPE, text=True,
                               stderr=subprocess.STDOUT, start_new_session=True)  # fmt: skip
    try:
        if ends == "interrupt":
            wait_until(lambda: all(one.exists() and one.read_text() for one in pids))
            process.send_signal(signal.SIGINT)
        said = process.communicate(timeout=120)[0]
    finally:
        process.kill()
    assert ("TimeoutError: not ended after 8 seconds" if ends == "limit" else "KeyboardInterrupt") in said
    wait_until(lambda: all(is_gone(one.read_text()) for one in pids if one.exists()))
