"""Ways in which a state leaves or re-enters a training wrongly, and healthy twins that are silent."""

import copy
import re

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import shardproof
from shardproof.__main__ import main


class Net(nn.Module):
    def __init__(self, *, is_tied=False):
        super().__init__()
        self.words, self.up, self.down = nn.Embedding(50, 16), nn.Linear(16, 24), nn.Linear(24, 16)
        self.head = nn.Linear(16, 50, bias=False)
        if is_tied:
            self.head.weight = self.words.weight

    def forward(self, x):
        return self.head(self.down(self.up(self.words(x)).relu()))


class Training:
    """A training of three steps, of which the folder has the states after two and three."""

    def __init__(self, folder, *, is_tied=False, **extra):
        torch.manual_seed(0)
        self.folder, self.model = folder, Net(is_tied=is_tied)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05)
        for step in range(3):
            if step == 2:
                self.write("early", step)
            x = torch.randint(0, 50, (8,))
            nn.functional.cross_entropy(self.model(x), x).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        self.write("live", 3, **extra)
        model = {name: one.detach().clone() for name, one in self.model.state_dict().items()}
        self.saved = {"model": model, "optimizer": copy.deepcopy(self.optimizer.state_dict())}

    def write(self, name, at, **extra):
        shardproof.state(self.model, self.optimizer, out=self.folder / name, step=at, extra=extra)

    def said(self, capsys, saved, *arguments, live="live"):
        """What is said of a checkpoint."""
        torch.save(saved, self.folder / "x.pt")
        return said(capsys, self.folder / live, self.folder / "x.pt", *arguments)


def said(capsys, *arguments):
    code = main(["state", *map(str, arguments)])
    lines = capsys.readouterr().out.partition("\n\n")[2].strip().splitlines()
    assert code == int(lines != ["nothing differs"])
    return lines


def model_of(name, change):
    return lambda saved: saved["model"].update({name: change(saved["model"][name]).contiguous()})


def _chunks(order, dim=1):
    return lambda one: torch.cat([one.chunk(len(order), dim)[n] for n in order], dim)


def _states(order):
    def change(saved):
        states = saved["optimizer"]["state"]
        saved["optimizer"]["state"] = {number: states[source] for number, source in enumerate(order)}

    return change


def _moments(saved):
    for one in saved["optimizer"]["state"].values():
        one["exp_avg"], one["exp_avg_sq"] = one["exp_avg_sq"], one["exp_avg"]


#: Mistakes of a file, and patterns of its lines; None has none.
MISTAKES = {
    "healthy": (lambda saved: None, ["nothing differs"]),
    "healthy, with an average": (
        lambda saved: saved.update(ema={name: one * 0.9 for name, one in saved["model"].items()}), ["nothing differs"],
    ),
    "healthy, of Lightning": (
        lambda saved: saved.update(state_dict=saved.pop("model"), optimizer_states=[saved.pop("optimizer")],
                                   global_step=3), ["nothing differs"],
    ),
    "states by number, in another order": (
        _states([6 - 1 - n for n in range(6)]),
        [r"optimizer: .*: is that of another parameter, as words.weight that of head.weight: states by number need .*"],
    ),
    "two states by number, exchanged": (
        _states([0, 3, 2, 1, 4, 5]), [r"optimizer: .* and 1 more: is that of another parameter, as up.weight that .*"],
    ),
    "moments exchanged": (
        _moments,
        [r"optimizer: exp_avg of .*: has the values of exp_avg_sq of the same parameter",
         r"optimizer: exp_avg_sq of .*: has the values of exp_avg of the same parameter"],
    ),
    "shards of columns, exchanged": (
        model_of("up.weight", _chunks([1, 0])), ["model: up.weight: has its 2 shards of columns in another order"],
    ),
    "shards of columns, interleaved": (
        model_of("up.weight", _chunks([0, 2, 1, 3])),
        ["model: up.weight: has its 4 shards of columns in another order"],
    ),
    "shards of columns, put below each other": (
        model_of("up.weight", lambda one: torch.cat(one.chunk(2, 1))),
        ["model: up.weight: has 2 shards one below the other, which belong side by side: .*"],
    ),
    "shards of rows, put side by side": (
        model_of("up.weight", lambda one: torch.cat(one.chunk(2), 1)),
        ["model: up.weight: has 2 shards side by side, which belong one below the other: .*"],
    ),
    "a vocabulary that is cut": (
        model_of("head.weight", lambda one: one[:48]), ["model: head.weight: lacks the last 2 rows: .*"],
    ),
    "a vocabulary that is padded before": (
        model_of("head.weight", lambda one: torch.cat([torch.zeros(14, 16), one])),
        ["model: head.weight: has 14 rows of padding before the others: .*"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_of_a_file_is_named(mistake, tmp_path, capsys):
    training = Training(tmp_path)
    change, patterns = MISTAKES[mistake]
    change(training.saved)
    lines = training.said(capsys, training.saved)
    assert len(lines) == len(patterns), lines
    assert all(map(re.fullmatch, patterns, lines)), lines


@pytest.mark.parametrize("times", [2.0, 0.5, -1.0])
def test_a_change_that_was_merged_several_times_or_in_part(times, tmp_path, capsys):
    torch.manual_seed(0)
    training = Training(tmp_path)
    base = copy.deepcopy(training.saved)
    change = torch.randn(24, 4) @ torch.randn(4, 16)
    with torch.no_grad():
        training.model.up.weight += change
    training.write("merged", 3)
    torch.save(base, tmp_path / "base.pt")
    saved = copy.deepcopy(base)
    saved["model"]["up.weight"] += times * change
    ask = ("--earlier", tmp_path / "base.pt")
    (line,) = training.said(capsys, saved, *ask, live="merged")
    assert line == f"model: up.weight: has {times:g} times the change since {tmp_path / 'base.pt'}"
    saved["model"]["up.weight"] += torch.randn(24, 16) * 0.1
    (line,) = training.said(capsys, saved, *ask, live="merged")
    assert line.startswith("model: up.weight differs, by "), line
    saved["model"]["up.weight"] = training.model.up.weight
    assert training.said(capsys, saved, *ask, live="merged") == ["nothing differs"]


@pytest.mark.parametrize("is_healthy", [True, False])
def test_the_state_of_a_scaler_and_counters(is_healthy, tmp_path, capsys):
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0).state_dict()
    training = Training(tmp_path, scaler=scaler, step=3, seen=[1, 2], more=torch.arange(3.0))
    other = {} if is_healthy else {"scaler": scaler | {"scale": 65536.0}, "step": 2, "more": torch.arange(3.0) + 1}
    saved = training.saved | {"scaler": scaler, "step": 3, "seen": [1, 2], "more": torch.arange(3.0)} | other
    lines = training.said(capsys, saved)
    if is_healthy:
        assert lines == ["nothing differs"]
    else:
        assert [line.partition(" ")[2].partition(" ")[0] for line in lines] == ["scaler.scale:", "step:", "more:"]
    assert training.said(capsys, training.saved) == ["nothing differs"], "a file need not have them"


def test_a_tied_head_takes_no_number_of_an_optimizer(tmp_path, capsys):
    training = Training(tmp_path, is_tied=True)
    assert training.said(capsys, training.saved) == ["nothing differs"]
    training.saved["model"]["head.weight"] = training.saved["model"]["head.weight"] * 1.1
    assert training.said(capsys, training.saved) == ["model: head.weight: is 1.1 times what it was"]


def test_entries_of_a_trainer_next_to_names_of_the_model(tmp_path, capsys):
    """As torchtitan writes them, without a word before the names of the model."""
    training = Training(tmp_path)
    more = {"train_state": {"step": torch.tensor(3)}, "dataloader": {"dp_rank_0": b"abc"}}
    saved = {**training.saved["model"], "optimizer": training.saved["optimizer"], **more}
    dcp.save(saved, checkpoint_id=tmp_path / "x", no_dist=True)
    assert said(capsys, tmp_path / "live", tmp_path / "x") == ["nothing differs"]


FORMS = {"list": lambda one, two: {"optimizers": [one, two]}, "names": lambda one, two: {"opt_g": one, "opt_d": two}}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
def test_several_optimizers(kind, form, tmp_path, capsys):
    torch.manual_seed(0)
    model = nn.ModuleDict({"g": nn.Linear(4, 4), "d": nn.Linear(4, 3)})
    made = torch.optim.AdamW(model["g"].parameters(), 0.1), kind(model["d"].parameters(), 0.2)
    model["d"](model["g"](torch.randn(2, 4))).sum().backward()
    for one in made:
        one.step()
    shardproof.state(model, made, out=tmp_path / "live")
    states = [copy.deepcopy(one.state_dict()) for one in made]
    torch.save({"model": model.state_dict(), **FORMS[form](*states)}, tmp_path / "x.pt")
    assert said(capsys, tmp_path / "live", tmp_path / "x.pt") == ["nothing differs"]
    states[0]["param_groups"][0]["lr"] = 0.3
    torch.save({"model": model.state_dict(), **FORMS[form](*states)}, tmp_path / "x.pt")
    assert said(capsys, tmp_path / "live", tmp_path / "x.pt") == ["optimizer: lr of group 0:0: is 0.3 for 0.1"]
