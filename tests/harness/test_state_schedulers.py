"""Schedulers in files of each kind, and states that have the model alone: each mistake has its line, and a healthy
twin is silent."""

import copy
import json

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import nn
from torch.optim import lr_scheduler

import shardproof
from shardproof.__main__ import main

STEPS = 3

SCHEDULERS = {
    "StepLR": lambda one: lr_scheduler.StepLR(one, 2),
    "LambdaLR": lambda one: lr_scheduler.LambdaLR(one, lambda step: 1 / (1 + step)),
    "SequentialLR": lambda one: lr_scheduler.SequentialLR(
        one, [lr_scheduler.LinearLR(one), lr_scheduler.CosineAnnealingLR(one, 5)], [2]
    ),
    "MultiStepLR": lambda one: lr_scheduler.MultiStepLR(one, [2, 3]),
    "OneCycleLR": lambda one: lr_scheduler.OneCycleLR(one, 0.1, 10),
    "CyclicLR": lambda one: lr_scheduler.CyclicLR(one, 0.1, 0.2),
    "ChainedScheduler": lambda one: lr_scheduler.ChainedScheduler([lr_scheduler.LinearLR(one)]),
    "CosineAnnealingWarmRestarts": lambda one: lr_scheduler.CosineAnnealingWarmRestarts(one, 2),
}  # fmt: skip


class Training:
    """A model of several groups of an optimizer, and its scheduler."""

    def __init__(self, kind="StepLR", groups=2):
        torch.manual_seed(0)
        self.model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(groups)])
        some = [{"params": [*one.parameters()], "lr": 0.1 / (1 + n)} for n, one in enumerate(self.model)]
        self.optimizer = torch.optim.AdamW(some)
        self.scheduler = SCHEDULERS[kind](self.optimizer)

    def go(self, steps=STEPS):
        for _ in range(steps):
            self.model(torch.randn(2, 4)).square().sum().backward()
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()

    def write(self, out, scheduler=True):
        shardproof.state(self.model, self.optimizer, out=out, scheduler=self.scheduler if scheduler else None)

    def saved(self):
        parts = {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler}
        return {name: copy.deepcopy(one.state_dict()) for name, one in parts.items()}


#: The forms of files: a word for the scheduler in one of torch.save, Lightning's list, DCP, a folder of transformers.
FORMS = ("scheduler", "lr_scheduler", "lr_scheduler_state_dict", "lr_schedulers.0", "inner.scheduler", "dcp", "hf")


def write(saved, form, path):
    """Write a checkpoint, and return its path."""
    saved = dict(saved)
    state = saved.pop("scheduler", None)
    if form == "hf":
        path.mkdir()
        torch.save(saved["model"], path / "pytorch_model.bin")
        torch.save(saved["optimizer"], path / "optimizer.pt")
        if state is not None:
            torch.save(state, path / "scheduler.pt")
        return path
    if form == "dcp":
        dcp.save(saved | ({} if state is None else {"lr_scheduler": state}), checkpoint_id=path, no_dist=True)
        return path
    if state is not None:
        word, _, inner = form.partition(".")
        saved[word] = [state] if inner == "0" else {inner: state} if inner else state
    torch.save(saved, path)
    return path


def said(capsys, *arguments, code):
    """The line of what is not compared, and the lines behind the headlines."""
    assert main(["state", *map(str, arguments)]) == code, capsys.readouterr()
    head, _, lines = capsys.readouterr().out.partition("\n\n")
    return "".join(line for line in head.splitlines() if line.startswith("not compared")), lines.strip().splitlines()


PAIRS = [(kind, "scheduler") for kind in SCHEDULERS] + [("SequentialLR", form) for form in FORMS[1:]]


@pytest.mark.parametrize(("kind", "form"), PAIRS)
def test_a_scheduler_that_was_saved_is_the_same(kind, form, tmp_path, capsys):
    training = Training(kind)
    training.go()
    training.write(tmp_path / "live")
    file = write(training.saved(), form, tmp_path / "x")
    assert said(capsys, tmp_path / "live", file, code=0) == ("", ["nothing differs"])


@pytest.mark.parametrize("groups", [1, 10])
def test_a_learning_rate_of_each_of_many_groups(groups, tmp_path, capsys):
    """A snapshot has a list of more than eight as one value each."""
    training = Training(groups=groups)
    training.go()
    training.write(tmp_path / "live")
    saved = training.saved()
    file = write(saved, "scheduler", tmp_path / "x")
    assert said(capsys, tmp_path / "live", file, code=0)[1] == ["nothing differs"]
    saved["scheduler"]["_last_lr"][-1] *= 2
    (line,) = said(capsys, tmp_path / "live", write(saved, "scheduler", tmp_path / "y"), code=1)[1]
    assert line.startswith("scheduler: _last_lr: is 0.02 for 0.01" if groups == 1 else "scheduler: _last_lr"), line
    assert line.endswith("2 times what it was") and ("of group 9" in line) == (groups == 10), line


def _late(state):
    state["last_epoch"] = 1


def _half(state):
    state["base_lrs"] = [one / 2 for one in state["base_lrs"]]


def _fresh(state):
    state.update(Training().scheduler.state_dict())


def _size(state):
    state["step_size"] = 5


def _one(state):
    state["base_lrs"] = state["base_lrs"][:1]


MISTAKES = {
    "a step counter": (_late, ["last_epoch: is 1 for 3, 2 steps behind"]),
    "base rates": (_half, ["base_lrs: is [0.05, 0.025] for [0.1, 0.05], 0.5 times what it was"]),
    "begins anew": (
        _fresh,
        ["last_epoch: is 0 for 3, 3 steps behind",
         "_last_lr: is [0.1, 0.05] for [0.01, 0.005], 10 times what it was"],
    ),
    "another setting": (_size, ["step_size: is 5 for 2"]),
    "a group is lost": (_one, ["base_lrs: is 0.1 for [0.1, 0.05]"]),
    "an entry is lost": (lambda state: state.pop("_last_lr"), ["_last_lr: a value that {file} does not have"]),
}  # fmt: skip


WRITTEN = [(mistake, "scheduler") for mistake in MISTAKES] + [("begins anew", form) for form in FORMS[1:]]


@pytest.mark.parametrize(("mistake", "form"), WRITTEN)
def test_a_mistake_of_a_scheduler_is_named(mistake, form, tmp_path, capsys):
    training = Training()
    training.go()
    training.write(tmp_path / "live")
    saved = training.saved()
    change, expected = MISTAKES[mistake]
    change(saved["scheduler"])
    file = write(saved, form, tmp_path / "x")
    right = [f"scheduler: {one.format(file=file)}" for one in expected]
    assert sorted(said(capsys, tmp_path / "live", file, code=1)[1]) == sorted(right)


@pytest.mark.parametrize("form", ["scheduler", "dcp", "hf"])
def test_a_scheduler_that_one_side_lacks(form, tmp_path, capsys):
    training = Training()
    training.go()
    training.write(tmp_path / "live")
    training.write(tmp_path / "without", scheduler=False)
    whole, saved = write(training.saved(), form, tmp_path / "x"), training.saved()
    saved.pop("scheduler")
    file = write(saved, form, tmp_path / "y")
    lost = "scheduler: the scheduler: none of its 8 entries is there"
    assert said(capsys, tmp_path / "live", file, code=1) == ("", [lost])
    assert said(capsys, tmp_path / "live", tmp_path / "without", code=1)[1] == [lost]
    # Whoever writes a state may leave the scheduler out.
    left_out, lines = said(capsys, tmp_path / "without", whole, code=0)
    assert lines == ["nothing differs"]
    assert left_out == f"not compared: the scheduler of {whole} (10 entries): the other state was written without"
    assert said(capsys, tmp_path / "without", file, code=0) == ("", ["nothing differs"])


def test_a_module_named_scheduler_is_none(tmp_path, capsys):
    model = nn.ModuleDict({"noise_scheduler": nn.Linear(2, 2), "scheduler": nn.BatchNorm1d(2)})
    shardproof.state(model, out=tmp_path / "live")
    torch.save(model.state_dict(), tmp_path / "x.pt")
    assert said(capsys, tmp_path / "live", tmp_path / "x.pt", code=0) == ("", ["nothing differs"])


# States that have the model alone -------------------------------------------------------------------------------------


def _safetensors(training, path):
    path.mkdir()
    save_file(training.model.state_dict(), path / "model.safetensors")


EXPORTS = {
    "safetensors": _safetensors,
    "state dict": lambda training, path: torch.save(training.model.state_dict(), path),
    "model": lambda training, path: torch.save({"model": training.model.state_dict()}, path),
    "state_dict": lambda training, path: torch.save({"state_dict": training.model.state_dict()}, path),
    "dcp": lambda training, path: dcp.save({"model": training.model.state_dict()}, checkpoint_id=path, no_dist=True),
    "module": lambda training, path: torch.save(
        {f"module.{name}": one for name, one in training.model.state_dict().items()}, path
    ),
}  # fmt: skip


@pytest.mark.parametrize("earlier", [True, False])
@pytest.mark.parametrize("form", EXPORTS)
def test_an_export_lacks_no_optimizer(form, earlier, tmp_path, capsys):
    training = Training()
    training.go(2)
    old = write(training.saved(), "hf" if form == "safetensors" else "scheduler", tmp_path / "checkpoint-2")
    training.go(1)
    training.write(tmp_path / "live")
    EXPORTS[form](training, tmp_path / "export")
    ask = (tmp_path / "live", tmp_path / "export", *(["--earlier", old] if earlier else []))
    live = tmp_path / "live"
    left_out, lines = said(capsys, *ask, code=0)
    assert lines == ["nothing differs"]
    assert left_out.startswith(f"not compared: the optimizer of {live} (") and f"the scheduler of {live} (" in left_out
    assert left_out.endswith(f"): {tmp_path / 'export'} has the model alone")
    left_out, lines = said(capsys, tmp_path / "export", live, code=0)
    assert lines == ["nothing differs"] and left_out.endswith(f"): {tmp_path / 'export'} has the model alone")


@pytest.mark.parametrize("form", ["scheduler", "dcp", "hf"])
def test_a_file_that_was_loaded_is_compared_as_the_right_one(form, tmp_path, capsys):
    """I resumed: is the training what the file has?"""
    training = Training()
    training.go()
    file = write(training.saved(), form, tmp_path / "x")
    training.write(tmp_path / "after")
    assert said(capsys, file, tmp_path / "after", code=0) == ("", ["nothing differs"])
    Training().write(tmp_path / "fresh")
    lines = said(capsys, file, tmp_path / "fresh", code=1)[1]
    assert {line.partition(":")[0] for line in lines} == {"model", "optimizer", "scheduler"}, lines
    assert any(line.startswith("scheduler: last_epoch: is 0 for 3, 3 steps behind") for line in lines), lines
    training.go(1)
    training.write(tmp_path / "later", scheduler=False)
    lines = said(capsys, file, tmp_path / "later", code=1)[1]
    assert any(line == "scheduler: the scheduler: none of its 10 entries is there" for line in lines), lines


TRAINERS = {
    "a scheduler": lambda saved: saved.pop("optimizer"),
    "a counter": lambda saved: [saved.pop("optimizer"), saved.pop("scheduler"), saved.update(epoch=3)],
    "a counter of another name": lambda saved: [saved.pop("optimizer"), saved.pop("scheduler"),
                                                saved.update(trainer={"global_step": 3})],
    "a state of generators": lambda saved: [saved.pop("optimizer"), saved.pop("scheduler"),
                                            saved.update(rng_state=torch.get_rng_state())],
}  # fmt: skip


@pytest.mark.parametrize("case", TRAINERS)
@pytest.mark.parametrize("form", ["scheduler", "dcp"])
def test_a_checkpoint_that_has_more_than_the_model_lacks_its_optimizer(case, form, tmp_path, capsys):
    training = Training()
    training.go()
    training.write(tmp_path / "live")
    saved = training.saved()
    TRAINERS[case](saved)
    lines = said(capsys, tmp_path / "live", write(saved, form, tmp_path / "x"), code=1)[1]
    assert lines[0].startswith("optimizer: the optimizer: none of its "), lines


def test_the_next_checkpoint_of_a_training_lacks_its_optimizer(tmp_path, capsys):
    training = Training()
    training.go()
    old = write(training.saved(), "scheduler", tmp_path / "step2.pt")
    training.write(tmp_path / "live")
    for name in ("step3.pt", "final.pt"):
        torch.save({"model": training.model.state_dict()}, tmp_path / name)
    lines = said(capsys, tmp_path / "live", tmp_path / "step3.pt", "--earlier", old, code=1)[1]
    assert [line.partition(":")[0] for line in lines] == ["optimizer", "scheduler"], lines
    assert said(capsys, tmp_path / "live", tmp_path / "final.pt", "--earlier", old, code=0)[1] == ["nothing differs"]


def test_values_of_your_own_are_compared_between_trainings(tmp_path, capsys):
    training = Training()
    for name, tokens in (("one", 7), ("same", 7), ("other", 8)):
        shardproof.state(training.model, out=tmp_path / name, extra={"tokens": tokens, "list": [1, 2]})
    assert said(capsys, tmp_path / "one", tmp_path / "same", code=0)[1] == ["nothing differs"]
    assert said(capsys, tmp_path / "one", tmp_path / "other", code=1)[1] == ["extra: tokens: is 8 for 7"]


def test_the_json_has_the_sentence_of_a_scheduler(tmp_path, capsys):
    training = Training()
    training.go()
    training.write(tmp_path / "live")
    saved = training.saved()
    _late(saved["scheduler"])
    file = write(saved, "scheduler", tmp_path / "x")
    said(capsys, tmp_path / "live", file, "--json", tmp_path / "found.json", code=1)
    assert "last_epoch: is 1 for 3, 2 steps behind" in json.dumps(json.loads((tmp_path / "found.json").read_text()))
