"""A recording of a training and one of its resumption: aligned, and the mistakes of a resumption named."""

import json
import shutil

import pytest
import torch
from torch import nn

from shardproof.__main__ import main
from shardproof.harness.training.comparing import compare
from shardproof.harness.training.recording import read, record
from shardproof.runfile import load_run
from tests.harness import forked
from tests.harness.inner import ROOT

ROWS, SAVED, STEPS = 8, 4, 6


def make(kind="AdamW"):
    """A model with an optimizer and a scheduler of its learning rate."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 5))
    return model, *optimizer_of(model, kind)


def optimizer_of(model, kind):
    options = {"momentum": 0.9, "weight_decay": 0.01} if kind == "SGD" else {}
    optimizer = OPTIMIZERS[kind](model.parameters(), lr=0.01, **options)
    return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)


class Counting(torch.optim.SGD):
    """An optimizer that counts in a number of the host."""

    def step(self, closure=None):
        for group in self.param_groups:
            for one in group["params"]:
                self.state[one]["step"] = self.state[one].get("step", 0) + 1
        return super().step(closure)


OPTIMIZERS = {"AdamW": torch.optim.AdamW, "SGD": torch.optim.SGD, "Counting": Counting}


def train(model, optimizer, scheduler, steps, *, microbatches=1):
    for step in steps:
        made = torch.Generator().manual_seed(step)
        for rows in torch.randn(ROWS, 4, generator=made).chunk(microbatches):
            (model(rows).square().sum() / ROWS).backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()


def before(folder, kind="AdamW", recorded=range(STEPS), steps=range(STEPS)):
    """Record a training of six steps, and return the checkpoint after four."""
    model, optimizer, scheduler = make(kind)
    with record(model, optimizer, out=folder, steps=recorded):
        train(model, optimizer, scheduler, steps[:SAVED])
        torch.save([one.state_dict() for one in (model, optimizer, scheduler)], folder / "saved.pt")
        train(model, optimizer, scheduler, steps[SAVED:])
    return folder / "saved.pt"


def after(folder, saved, *, mistake="", kind="AdamW", microbatches=2, **options):
    """Record two steps of a resumption."""
    model, optimizer, scheduler = make(kind)
    states = torch.load(saved, weights_only=False)
    if mistake == "counter":
        for one in states[1]["state"].values():
            one["step"] = one["step"] * 0
    if mistake == "moments":
        for one in states[1]["state"].values():
            one |= {key: value * 0 for key, value in one.items() if key != "step" and value is not None}
    model.load_state_dict(states[0])
    if mistake != "optimizer":
        optimizer.load_state_dict(states[1])
    if mistake == "scheduler":
        optimizer.param_groups[0]["lr"] = 0.01
    else:
        scheduler.load_state_dict(states[2])
        optimizer.param_groups[0]["lr"] = scheduler.get_last_lr()[0]
    start = {"loader": 0, "loader behind": SAVED - 1, "loader elsewhere": 100}.get(mistake, SAVED)
    with record(model, optimizer, out=folder, **options):
        train(model, optimizer, scheduler, range(start, start + 2), microbatches=microbatches)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    return folder, before(folder / "before")


def compared(capsys, *arguments):
    code = main(["compare", *map(str, arguments)])
    printed = capsys.readouterr()
    return code, printed.out + printed.err


BOTH = ("data", str(SAVED))


@pytest.mark.parametrize("microbatches", [1, 2, 4])
@pytest.mark.parametrize("kind", ["AdamW", "SGD", "Counting"])
def test_a_right_resumption_agrees(tmp_path, capsys, kind, microbatches):
    saved = before(tmp_path / "before", kind)
    after(tmp_path / "after", saved, kind=kind, microbatches=microbatches)
    for how in BOTH:
        code, text = compared(capsys, tmp_path / "before", tmp_path / "after", "--align", how)
        said = "steps 0-1 of RUN are steps 4-5 of REF"
        assert code == 0 and said in text and "\nno divergence" in text and "not compared" not in text, text
    code, text = compared(capsys, tmp_path / "after", tmp_path / "before", "--align", "data")
    assert code == 0 and "steps 4-5 of RUN are steps 0-1 of REF" in text, text
    assert compared(capsys, tmp_path / "after", tmp_path / "before", "--align", "-4") == (code, text)


AGES = "optimizer states of RUN begin anew: age 1 at its step 0, REF's are 5 at step 4 (all 4 parameters)"
ALONE = "'exp_avg' is made of the gradient of that step alone (all 4 parameters)"
RATE = ("learning rate of RUN begins anew: 0.01 at its step 0, as REF's at step 0; REF's is 0.0025 at step 4 "
        "(all 4 parameters)")  # fmt: skip
AFTER = "first divergence on rank 0: parameter after step of "
SAID = {
    "optimizer": [AGES, f"  at RUN's step 0 {ALONE}", AFTER],
    "counter": [AGES, "  'exp_avg', 'exp_avg_sq' agree: the counter alone differs", AFTER],
    "moments": [f"optimizer states of RUN begin anew: at its step 0 {ALONE}", AFTER],
    "scheduler": [RATE, AFTER],
    "loader": ["data of RUN begin anew: its step 0 reads the data of REF's step 0 instead of step 4",
               "no other divergence (largest distance 0)"],
    "loader behind": ["data of RUN are 1 step behind: its step 0 reads the data of REF's step 3 instead of step 4",
                      "no other divergence (largest distance 0)"],
}  # fmt: skip


@pytest.mark.parametrize("how", BOTH)
@pytest.mark.parametrize("mistake", SAID)
def test_a_mistake_of_a_resumption_is_named(runs, tmp_path, capsys, mistake, how):
    folder, saved = runs
    after(tmp_path / "after", saved, mistake=mistake)
    arguments = [folder / "before", tmp_path / "after", "--align", how, "--report", tmp_path / "run.json"]
    code, text = compared(capsys, *arguments)
    lines = text.splitlines()[1:]
    assert code == 1 and [line[: len(said)] for line, said in zip(lines, SAID[mistake], strict=False)] == SAID[mistake]
    last, case = load_run(tmp_path / "run.json").cases
    assert case.id == "compare::resumption[w1]" and case.failure is not None and last.id == "compare::rank_0[w1]"
    assert case.failure.text == "\n".join(line for line in SAID[mistake] if "divergence" not in line)
    assert main(["report", str(tmp_path / "run.json")]) == 0


def test_the_reference_may_be_the_resumption(runs, tmp_path, capsys):
    folder, saved = runs
    for mistake, said in [("optimizer", AGES), ("scheduler", RATE), ("loader", SAID["loader"][0])]:
        after(tmp_path / mistake, saved, mistake=mistake)
        swapped = said.replace("RUN", "-").replace("REF", "RUN").replace("-", "REF")
        code, text = compared(capsys, tmp_path / mistake, folder / "before", "--align", "-4")
        assert code == 1 and swapped in text.splitlines(), text


def test_states_without_a_counter(tmp_path, capsys):
    saved = before(tmp_path / "before", "SGD")
    after(tmp_path / "after", saved, kind="SGD", mistake="optimizer")
    code, text = compared(capsys, tmp_path / "before", tmp_path / "after", "--align", "data")
    said = ALONE.replace("exp_avg", "momentum_buffer")
    assert code == 1 and f"optimizer states of RUN begin anew: at its step 0 {said}" in text.splitlines(), text


def test_ages_and_rates_do_not_depend_on_the_dtype(tmp_path, capsys):
    """In bfloat16 distances are allowed that moments which begin anew do not exceed; nobody says that these agree."""
    torch.set_default_dtype(torch.bfloat16)
    try:
        saved = before(tmp_path / "before")
        for mistake in ("", "optimizer", "scheduler"):
            after(tmp_path / f"after{mistake}", saved, mistake=mistake)
    finally:
        torch.set_default_dtype(torch.float32)
    for mistake, said in [("optimizer", AGES), ("scheduler", RATE)]:
        code, text = compared(capsys, tmp_path / "before", tmp_path / f"after{mistake}", "--align", "data")
        assert code == 1 and said in text.splitlines() and "the counter alone" not in text, text
    assert compared(capsys, tmp_path / "before", tmp_path / "after", "--align", "data")[0] == 0


def test_a_counter_on_the_host(tmp_path, capsys):
    saved = before(tmp_path / "before", "Counting")
    after(tmp_path / "after", saved, kind="Counting", mistake="counter")
    assert compared(capsys, tmp_path / "before", tmp_path / "after", "--align", "4")[0] == 1
    code, text = compared(capsys, tmp_path / "before", tmp_path / "after", "--align", "data")
    assert code == 1 and AGES in text.splitlines() and "no other divergence" in text, text


def test_an_update_of_another_age_is_no_other_learning_rate(runs, tmp_path, capsys):
    folder, saved = runs
    after(tmp_path / "after", saved, mistake="scheduler")
    code, text = compared(capsys, folder / "before", tmp_path / "after", "--align", "data")
    said = "with equal gradients, every parameter moved 4 times as far as the reference's: "
    assert code == 1 and text.rstrip().endswith(f"{said}learning rates differ"), text
    path = tmp_path / "after/rank00000/events.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        if line.get("key") == "step":
            line["squares"] = 1.0
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    _, text = compared(capsys, folder / "before", tmp_path / "after", "--align", "data")
    assert text.rstrip().endswith(f"{said}the ages of optimizer states differ"), text


def without_settings(folder):
    """Make a recording as it was written before there were settings in it."""
    path = folder / "rank00000/events.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert all(line.pop("stepped") for line in lines if "end" in line)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_an_older_recording_is_compared_without_settings(runs, tmp_path, capsys):
    folder, saved = runs
    for name, mistake in (("right", ""), ("rate", "scheduler"), ("new", "optimizer")):
        after(tmp_path / name, saved, mistake=mistake)
        without_settings(tmp_path / name)
    lacks = f"not compared: learning rates and other settings, which {tmp_path}/{{}} lacks: record it anew"
    code, text = compared(capsys, folder / "before", tmp_path / "right", "--align", "data")
    assert code == 0 and text.splitlines()[-1] == lacks.format("right"), text
    code, text = compared(capsys, folder / "before", tmp_path / "rate", "--align", "data")
    assert code == 1 and "learning rate of" not in text and lacks.format("rate") in text.splitlines(), text
    code, text = compared(capsys, folder / "before", tmp_path / "new", "--align", "data")
    assert code == 1 and AGES in text.splitlines(), text


# Offsets


def test_bad_offsets_are_refused_in_one_line(runs, tmp_path, capsys):
    folder, saved = runs
    ref, run = folder / "before", tmp_path / "after"
    after(run, saved)
    after(tmp_path / "other", saved, mistake="loader elsewhere")
    steps = f"{ref} has steps 0-5 and {{}} has steps 0-1"
    right = "expected data, or the step of REF that is step 0 of RUN, such as 4"
    for value in ("x", "", "4.0", "1" * 10):
        assert compared(capsys, ref, run, f"--align={value}") == (2, f"shardproof: --align {value}: {right}\n")
    for value in ("6", "-2"):
        line = f"--align {value}: {steps.format(run)}, and none would be in common: expected -1 to 5"
        assert compared(capsys, ref, run, "--align", value) == (2, f"shardproof: {line}\n")
    other = tmp_path / "other"
    line = (f"--align data: {steps.format(other)}, and at no offset all common steps read the same data: record both "
            "with the same data, or give the offset, as in --align 4")  # fmt: skip
    assert compared(capsys, ref, other, "--align", "data") == (2, f"shardproof: {line}\n")
    line = f"step 0 of RUN, step 4 of REF: 8 of 8 sequences of {ref} are not in {other}: the runs read different data"
    assert compared(capsys, ref, other, "--align", "4") == (2, f"shardproof: {line}\n")


def test_several_offsets_are_named(runs, tmp_path, capsys):
    """Data that repeat fit at several; microbatches decide where they can."""
    before(tmp_path / "before", steps=[0, 1, 2, 3, 0, 1])
    before(tmp_path / "after", steps=[0, 1], recorded=[0, 1])
    code, text = compared(capsys, tmp_path / "before", tmp_path / "after", "--align", "data")
    said = "the data are the same at several offsets: give the right one of 0 or 4, as in --align 4"
    assert code == 2 and text.count("\n") == 1 and text.endswith(f"{said}\n"), text
    assert compared(capsys, tmp_path / "before", tmp_path / "after", "--align", "0")[0] == 0


def test_microbatches_decide_between_offsets(tmp_path):
    model, optimizer, scheduler = make()
    with record(model, optimizer, out=tmp_path / "before", steps=[0, 1]):
        for count in (1, 2):
            train(model, optimizer, scheduler, [0], microbatches=count)
    model, optimizer, scheduler = make()
    with record(model, optimizer, out=tmp_path / "after", steps=[0]):
        train(model, optimizer, scheduler, [0], microbatches=2)
    found = compare(read(tmp_path / "before"), read(tmp_path / "after"), align=1)
    assert found.ref.shift == 1 and [one.stage.value for one in found.divergent] == ["parameter before step"]
    found = compare(read(tmp_path / "before"), read(tmp_path / "after"), align="data")
    assert found.ref.shift == 0 and found.agrees  # it begins with the parameters of step 0


def test_without_the_option_it_is_suggested(runs, tmp_path, capsys):
    folder, saved = runs
    ref, run = folder / "before", tmp_path / "after"
    after(run, saved)
    said = f"; {run} reads the data of {ref}'s steps 4-5: compare --align data\n"
    line = f"step 0: 8 of 8 sequences of {ref} are not in {run}: the runs read different data"
    assert compared(capsys, ref, run) == (2, f"shardproof: {line}{said}")
    before(tmp_path / "late", recorded=[4, 5])
    line = f"{tmp_path}/late has steps 4-5 and {run} has steps 0-1: none in common"
    assert compared(capsys, tmp_path / "late", run) == (
        2,
        f"shardproof: {line}{said.replace(str(ref), f'{tmp_path}/late')}",
    )


def test_noise_is_that_of_the_aligned_steps(runs, tmp_path, capsys):
    folder, saved = runs
    after(tmp_path / "after", saved)
    shutil.copytree(folder / "before", tmp_path / "noise")
    arguments = [folder / "before", tmp_path / "after", "--align", "data", "--noise", tmp_path / "noise"]
    assert compared(capsys, *arguments)[0] == 0


def test_the_next_commands_have_steps_and_the_offset(runs, tmp_path, capsys, monkeypatch):
    folder, saved = runs
    monkeypatch.setattr(nn.Tanh, "forward", lambda self, x: x.sin())
    after(tmp_path / "after", saved)
    code, text = compared(capsys, folder / "before", tmp_path / "after", "--align", "data")
    assert code == 1 and "record --stages modules --steps 0,1,2,3,4,5 --out ref-modules" in text, text
    assert "record --stages modules --out run-modules" in text
    assert text.splitlines()[-1].strip() == "shardproof compare ref-modules run-modules --align 4", text


# Ranks

SCRIPT = ROOT / "examples/resuming/train.py"
OF_SCRIPT = {
    "": ("no divergence (largest distance ",),
    "optimizer": (AGES.replace("4 param", "5 param"), f"  at RUN's step 0 {ALONE.replace('4 param', '5 param')}"),
    "counter": (AGES.replace("4 param", "5 param"), "  'exp_avg', 'exp_avg_sq' agree: the counter alone differs"),
    "scheduler": ("learning rate of RUN begins anew: 0.01 at its step 0, as REF's at step 0; REF's is 0.006 ",),
    "loader": (SAID["loader"][0],),
}


@pytest.fixture(scope="module")
def of_script(tmp_path_factory):
    folder = tmp_path_factory.mktemp("script")
    command = ["record", "--out", str(folder / "before"), "--steps", "0,1,2,3,4,5"]
    ran = forked.run(SCRIPT, 1, command=command, CHECKPOINT=str(folder / "checkpoint.pt"))
    assert ran.is_complete, ran.text
    return folder


@pytest.mark.sampled
@pytest.mark.parametrize("mistake", OF_SCRIPT)
def test_on_another_number_of_ranks(of_script, tmp_path, capsys, mistake):
    """FSDP2 on two ranks goes on from a checkpoint of one."""
    command, given = ["record", "--out", str(tmp_path / "after")], ["resume", *filter(None, [mistake])]
    ran = forked.run(SCRIPT, 2, *given, command=command, CHECKPOINT=str(of_script / "checkpoint.pt"))
    assert ran.is_complete, ran.text
    code, text = compared(capsys, of_script / "before", tmp_path / "after", "--align", "data")
    lines = text.splitlines()
    assert code == bool(mistake) and "REF 1 rank, RUN 2 ranks" in lines[0], text
    assert all(any(line.startswith(said) for line in lines) for said in OF_SCRIPT[mistake]), text
    if mistake in ("optimizer", "counter"):
        assert "learning rates differ" not in text, text
