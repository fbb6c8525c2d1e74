"""Recordings and their comparison: what is written, what is refused in one line, and where runs diverge."""

import contextlib
import json
import shutil

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from shardproof.__main__ import main
from shardproof.door import BadFile
from shardproof.harness.parity.rank import Rank
from shardproof.harness.training import recording
from shardproof.harness.training.comparing import compare
from shardproof.harness.training.recording import read, record
from shardproof.runfile import load_run
from shardproof.testing import world
from tests.errors import error_of

ROWS = 8


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.head = nn.Sequential(nn.Linear(4, 6), nn.Tanh()), nn.Linear(6, 2)

    def forward(self, x):
        return self.head(self.inner(x))


def train(folder, *, microbatches=1, mistake="", steps=2, seed=0, **options):
    """Record a training on the same rows, however they are spread over microbatches; `mistake` is one in step 1."""
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    made = torch.Generator().manual_seed(seed)
    with record(model, optimizer, out=folder, **{"stages": ["modules"], **options}) as recorded:
        for step in range(steps):
            late = mistake if step == 1 else ""
            for number, rows in enumerate(torch.randn(ROWS, 4, generator=made).chunk(microbatches)):
                made_of = model(rows)
                loss = (made_of.abs() if late == "forward" else made_of.square()).sum() / ROWS
                if mistake == "scaled by hand":
                    loss = loss * 4
                if late == "weights":
                    loss = loss * (1 + number)
                if late == "zero_grad":
                    optimizer.zero_grad()
                loss.backward()
                if late == "killed":
                    raise KeyError("mine")
            if late == "factor" or mistake == "scaled by hand":
                for one in model.parameters():
                    one.grad *= 4 if late == "factor" else 0.25
            if late == "no gradient":
                model.head.bias.grad = None
            if late == "not finite":
                model.head.bias.grad[1] = float("nan")
            if late == "one element":
                model.head.weight.grad[1, 3] += 1e-3
            if late == "noise":
                model.inner[0].bias.grad[:2] = 1e-9 if microbatches == 1 else -1e-9
            if mistake == "zero":
                model.head.weight.grad.zero_()
            if late == "still":
                optimizer.param_groups[0]["lr"] = 0
            if late == "rate":
                optimizer.param_groups[0]["lr"] = 0.015
            if late == "decay":
                optimizer.param_groups[0]["weight_decay"] = 1.0
            optimizer.step()
            optimizer.zero_grad()
            if mistake == "between":
                model.head.weight.data *= 1.01
    return recorded


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The reference, in one microbatch with all values."""
    folder = tmp_path_factory.mktemp("runs")
    train(folder / "ref", detail="tensors")
    return folder


def compared(capsys, *arguments):
    code = main(["compare", *map(str, arguments)])
    printed = capsys.readouterr()
    return code, printed.out + printed.err


# Writing


def test_the_files_are_small_and_in_order(runs):
    lines = [json.loads(text) for text in (runs / "ref/rank00000/events.jsonl").read_text().splitlines()]
    events = [one for one in lines if "stage" in one]
    assert sum(map(len, map(json.dumps, events))) / len(events) < 320
    assert [one["n"] for one in events if one["step"] == 0] == sorted(one["n"] for one in events if one["step"] == 0)
    assert read(runs / "ref").steps == [0, 1] and (runs / "ref/rank00000/done").exists()


def size_of_values(folder):
    return sum(one.stat().st_size for one in (folder / "rank00000").glob("*.safetensors"))


def test_values_are_bounded(tmp_path):
    train(tmp_path / "all", detail="tensors")
    most = size_of_values(tmp_path / "all") // 4
    train(tmp_path / "few", detail="tensors", max_bytes=most)
    assert 0 < size_of_values(tmp_path / "few") < 2 * most  # with the header of safetensors
    left_out = json.loads((tmp_path / "few/rank00000/done").read_text())["left_out"]
    assert left_out["values"] > 0 and left_out["events"] > 0
    stages = [seen.stage.value for seen in read(tmp_path / "few").ranks[0].events[1]]
    assert "output of a module" not in stages and stages.count("parameter after step") == 4
    train(tmp_path / "named", detail="tensors", tensors=["head.*"])
    seen = [one for own in read(tmp_path / "named").ranks[0].events.values() for one in own if one.has_value]
    assert {one.parameter for one in seen} == {"", "head.weight", "head.bias"}


REFUSED = [
    ({"steps": []}, "steps=[]: expected steps counted from 0"),
    ({"detail": "all"}, "detail='all': expected 'digest' or 'tensors'"),
    ({"stages": ["attention"]}, "stages='attention': expected 'parameters' or 'modules'"),
    ({"model": [Net(), Net()]},
     "'inner.0.weight' names two parameters (stages 0 and 1): pass names= with the offset of the stage"),
]  # fmt: skip


@pytest.mark.parametrize(("given", "line"), REFUSED, ids=[next(iter(given)) for given, _ in REFUSED])
def test_what_is_refused(tmp_path, given, line):
    assert error_of(record, **{"model": Net(), "out": tmp_path / "out", **given}) == f"record: {line}"


def test_where_a_recording_is_none_is_written(tmp_path):
    train(tmp_path / "run")
    line = f"record: {tmp_path}/run/rank00000 exists: name another folder, or remove it"
    assert error_of(train, tmp_path / "run") == line


BAD = [
    (["--out", "out"], "nothing: name a script, or -m and a module"),
    (["--out", "out", "nosuch.py"], "nosuch.py: there is no such script"),
    (["--out", "out", "--steps", "x", "train.py"], "record: steps='x': expected steps counted from 0, such as 0,1,2"),
    (["--out", "out", "--detail", "all", "train.py"], "record: detail='all': expected 'digest' or 'tensors'"),
]


@pytest.mark.parametrize(("arguments", "line"), BAD, ids=[" ".join(row[0]) for row in BAD])
def test_bad_input_of_record_is_one_line(arguments, line, capsys):
    assert main(["record", *arguments]) == 2
    assert capsys.readouterr() == ("", f"shardproof: {line}\n")


def test_values_without_safetensors(tmp_path, monkeypatch):
    monkeypatch.setattr(recording.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"record: values need safetensors: pip install 'safetensors>=0.4'"):
        record(Net(), out=tmp_path, detail="tensors")


def test_a_loop_without_steps(tmp_path, capsys):
    with record(out=tmp_path / "run"):
        Net()(torch.ones(1, 4))
    counts = "1 forwards with gradients, 0 optimizer steps"
    line = f"the loop ended before a step was complete ({counts}): was the wrapped module called?"
    assert capsys.readouterr().err == f"shardproof record: {line}\n"


# Comparing


@pytest.mark.parametrize("microbatches", [1, 2, 8])
def test_accumulation_does_not_matter(runs, tmp_path, capsys, microbatches):
    train(tmp_path / "run", microbatches=microbatches)
    code, text = compared(capsys, runs / "ref", tmp_path / "run")
    assert code == 0 and "no divergence" in text and "the same 8 sequences in step 1" in text, text
    assert "not compared" not in text, text
    assert compared(capsys, tmp_path / "run", runs / "ref")[0] == 0


def test_what_is_made_up_for_before_the_step_is_a_note(runs, tmp_path, capsys):
    train(tmp_path / "run", microbatches=2, mistake="scaled by hand")
    code, text = compared(capsys, runs / "ref", tmp_path / "run")
    assert code == 0 and "are compared as 0.25 x the run's" in text, text
    line = "step 1: 'head.bias', 'head.weight', 'inner.0.bias' and 1 more differ before the reduction, and"
    assert line in text, text


def test_a_gradient_of_which_a_part_is_noise_is_no_divergence(tmp_path, capsys):
    train(tmp_path / "ref", mistake="noise")
    train(tmp_path / "run", microbatches=2, mistake="noise")
    code, text = compared(capsys, tmp_path / "ref", tmp_path / "run")
    assert code == 0 and "rounding noise, or a part of them ('inner.0.bias')" in text, text


def test_a_gradient_that_is_zero_is_said_to_be(runs, tmp_path, capsys):
    train(tmp_path / "run", mistake="zero")
    code, text = compared(capsys, runs / "ref", tmp_path / "run")
    assert code == 1 and "it is zero, which the reference's is not" in text, text


SAID = {
    "factor": ("gradient at the optimizer's step of 'inner.0.weight' in step 1",
               "every gradient is exactly 4.0000 x the reference's (4 of 4): the number of microbatches [S1]"),
    "zero_grad": ("gradient of 'inner.0.weight' in step 1", "it has the last of 4 microbatches only", "[S4]"),
    "weights": ("gradient of the output of 'head' in step 1",
                "other weights than in the reference: 0.4, 0.8, 1.2, 1.6 times the mean [S5]\n  next: the doctor says "
                "whether each counts alike, whatever its tokens [D17]\n    torchrun --nproc-per-node 1 -m shardproof "),
    "forward": ("gradient of the output of 'head' in step 1", "the forward or the loss differs, or a part"),
    "no gradient": ("gradient at the optimizer's step of 'head.bias' in step 1", "has no gradient", "[S10]"),
    "not finite": ("gradient at the optimizer's step of 'head.bias' in step 1", "it is not finite"),
    "still": ("parameter after step of 'inner.0.weight' in step 1", "the optimizer has not moved it [S7]"),
    "rate": ("parameter after step of 'inner.0.weight' in step 1",
             "with equal gradients, every parameter moved 1.5 times as far as the reference's: learning rates differ"),
    "decay": ("parameter after step of 'inner.0.weight' in step 1", "moved by -0.0099 x itself more than the "
              "reference's: the weight decay differs"),
    "between": ("parameter before step of 'head.weight' in step 1", "exactly 1.0100 x the reference's (1 of 4) [S1]"),
    "one element": ("gradient at the optimizer's step of 'head.weight' in step 1", "element [1, 3]: run "),
}  # fmt: skip


@pytest.mark.parametrize("mistake", SAID)
def test_a_mistake_is_named_where_it_first_shows(runs, tmp_path, capsys, mistake):
    train(tmp_path / "run", microbatches=4, mistake=mistake, detail="tensors")
    code, text = compared(capsys, runs / "ref", tmp_path / "run", "--report", tmp_path / "run.json")
    assert code == 1, text
    said = SAID[mistake]
    assert all(words in text for words in [f"first divergence on rank 0: {said[0]}", *said[1:]]), text
    (case,) = load_run(tmp_path / "run.json").cases
    assert case.failure is not None and case.failure.rank == 0 and case.failure.step == 1
    assert main(["report", str(tmp_path / "run.json")]) == 0


def test_the_event_before_it_is_told(runs, tmp_path, capsys):
    train(tmp_path / "run", mistake="one element")
    _, text = compared(capsys, runs / "ref", tmp_path / "run")
    line = text.splitlines()[2]
    assert line.endswith(" at the event before it, gradient at the optimizer's step of 'inner.0.bias'"), text


def test_noise_of_the_reference_is_allowed(runs, tmp_path, capsys):
    train(tmp_path / "run", mistake="one element")
    assert compared(capsys, runs / "ref", tmp_path / "run", "--noise", tmp_path / "run")[0] == 0
    train(tmp_path / "same")
    code, text = compared(capsys, runs / "ref", tmp_path / "run", "--noise", tmp_path / "same")
    assert code == 1 and "'head.weight' in step 1" in text


def test_what_was_killed_is_compared_as_far_as_it_goes(runs, tmp_path, capsys):
    with pytest.raises(KeyError) as caught:
        train(tmp_path / "run", mistake="killed")
    assert caught.value.__notes__ == ["shardproof record: the step had reached: backward of 'inner.0.weight'"]
    code, text = compared(capsys, runs / "ref", tmp_path / "run")
    last = max(seen.n for seen in read(tmp_path / "run").ranks[0].events[0])
    line = f"{tmp_path}/run/rank00000 is incomplete (it ended in step 1); compared up to event {last}"
    assert code == 0 and line in text.splitlines(), text


def rewrite(path, before, after):
    text = path.read_text()
    assert before in text
    path.write_text(text.replace(before, after, 1))


LINES = "rank00000/events.jsonl"
EVENTS = "{run}/rank00000/events.jsonl"
UNREADABLE = {
    "missing": (shutil.rmtree, "{run}/recording.json: No such file or directory"),
    "version": (lambda run: rewrite(run / "recording.json", '"version": 1', '"version": 2'),
                "{run}/recording.json: version: 2 is not supported; supported: 1"),
    "head": (lambda run: rewrite(run / "recording.json", '"world": 1', '"world": "one"'),
             "{run}/recording.json: world: 'one' is not an integer"),
    "rank": (lambda run: rewrite(run / "recording.json", '"world": 1', '"world": 2'),
             "{run}/rank00001 is missing; the recording is of 2 ranks"),
    "cut": (lambda run: (run / LINES).write_text((run / LINES).read_text().partition(':1,"stepped"')[0]),
            f"{EVENTS}: line {{last}}: it is cut off"),
    "field": (lambda run: rewrite(run / LINES, '"dtype":"float32",', ""),
              f"{EVENTS}: line 2: the event: the field 'dtype' is missing"),
    "twice": (lambda run: rewrite(run / LINES, '{"end":1,', '{"end":0,'),
              f"{EVENTS}: line {{last}}: end: step 0 has ended before"),
    "json": (lambda run: rewrite(run / LINES, '{"n":3', '{"n":'), None),
    "empty": (lambda run: (run / LINES).write_text(""),
              f"{EVENTS}: it has no step, and {{run}}/rank00000/done says that it is complete"),
}  # fmt: skip


@pytest.mark.parametrize("change", UNREADABLE)
def test_a_bad_recording_is_one_line(runs, tmp_path, capsys, change):
    shutil.copytree(runs / "ref", tmp_path / "run")
    spoil, line = UNREADABLE[change]
    last = len((runs / "ref" / LINES).read_text().splitlines())
    spoil(tmp_path / "run")
    for arguments in ([tmp_path / "run", runs / "ref"], [runs / "ref", tmp_path / "run"]):
        code, text = compared(capsys, *arguments)
        assert code == 2 and text.count("\n") == 1 and text.startswith("shardproof: "), text
        assert line is None or text == f"shardproof: {line.format(run=tmp_path / 'run', last=last)}\n"


def test_recordings_that_cannot_be_compared(runs, tmp_path, capsys):
    train(tmp_path / "data", seed=1)
    ref, data = runs / "ref", tmp_path / "data"
    line = f"step 0: 8 of 8 sequences of {ref} are not in {data}: the runs read different data"
    assert compared(capsys, ref, data) == (2, f"shardproof: {line}\n")
    train(tmp_path / "late", steps=1)
    rewrite(tmp_path / "late/rank00000/events.jsonl", '{"end":0,', '{"end":7,')
    line = f"{ref} has steps 0-1 and {tmp_path}/late has no step that all ranks have ended: none in common"
    assert compared(capsys, ref, tmp_path / "late") == (2, f"shardproof: {line}\n")
    train(tmp_path / "names", names=lambda name: f"model.{name}")
    line = f"{ref} and {tmp_path}/names share no parameter name: they are of different models"
    assert compared(capsys, ref, tmp_path / "names") == (2, f"shardproof: {line}\n")
    with pytest.raises(BadFile):
        read(tmp_path)


@pytest.mark.sampled
@world(2)
def test_ranks_that_reduce_nothing(rank: Rank):
    """Each rank records by itself, and any of them compares."""
    for name in ("reduced", "own"):
        torch.manual_seed(0)
        model = DistributedDataParallel(Net())
        made = torch.Generator().manual_seed(rank.index)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with record(model, optimizer, out=rank.tmp_path / name, steps=[0]):
            with model.no_sync() if name == "own" else contextlib.nullcontext():
                model(torch.randn(4, 4, generator=made)).square().mean().backward()
            optimizer.step()
    rank.exchange(None)
    found = compare(read(rank.tmp_path / "reduced"), read(rank.tmp_path / "own"))
    assert [one.rank for one in found.divergent] == [0, 1]
    assert found.divergent[1].lines == ["it is this rank's own gradient (c = 1.0000) [S2]"], found.divergent
    assert not compare(read(rank.tmp_path / "own"), read(rank.tmp_path / "own")).divergent


@world(2)
def test_ranks_whose_learning_rates_differ(rank: Rank):
    """Each shard moves by the rate of its rank, so that no factor fits a full tensor."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    for name in ("equal", "different"):
        torch.manual_seed(0)
        model = fully_shard(Net(), mesh=mesh)
        made = torch.Generator().manual_seed(rank.index)
        rate = 0.01 * (1 + 2 * rank.index) if name == "different" else 0.01
        optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
        with record(model, optimizer, out=rank.tmp_path / name, steps=[0]):
            model(torch.randn(4, 4, generator=made)).square().mean().backward()
            optimizer.step()
    rank.exchange(None)
    found = compare(read(rank.tmp_path / "equal"), read(rank.tmp_path / "different"))
    line = "the shards of ranks moved 1, 3 times as far as the reference's, by rank: learning rates differ"
    assert found.divergent[0].lines == [f"with equal gradients, {line}"], found.divergent


def test_where_the_forward_differs_what_shows_the_module_is_said(tmp_path, capsys):
    for name, mistake in (("ref", ""), ("run", "forward")):
        train(tmp_path / name, mistake=mistake, stages=["parameters"])
    code, text = compared(capsys, tmp_path / "ref", tmp_path / "run")
    assert code == 1, text
    first, *_, last = text.partition("has no gradient in one of the two\n")[2].splitlines()[:4]
    assert first == "  next: record the outputs of modules as well, and compare names the first that differs"
    assert "-m shardproof record --stages modules --out run-modules" in text
    assert last == "    shardproof compare ref-modules run-modules", text
