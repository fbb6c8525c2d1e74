"""Round trips of a state under each implementation, on 1, 2 and 4 ranks, in each format, where each damage is named."""

import copy
import functools
import re
import shutil
from typing import NamedTuple

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict

import shardproof
from shardproof.__main__ import main
from tests.harness.inner import torchrun
from tests.harness.state_layouts import OF_FLAT, SHARDED, UNTIED, Adapted, write_full
from tests.harness.state_trainings import WORDS, Net

#: Implementations by the number of ranks.
KINDS = {
    1: ("ddp", "fsdp1", "flat", "fsdp2"),
    2: ("ddp", "fsdp1", "flat", "fsdp2", "hsdp", "tp"),
    4: ("ddp", "fsdp1", "flat", "fsdp2", "hsdp", "tp"),
}


def said(*arguments, capsys, code):
    """What the command prints behind its headlines, as one text."""
    assert main(["state", *map(str, arguments)]) == code, capsys.readouterr()
    return capsys.readouterr().out.partition("\n\n")[2].strip()


@pytest.fixture(scope="module")
def origin(tmp_path_factory):
    """The folder with a state of one process, after 2 and 3 steps, and one of a model with an adapter."""
    folder = tmp_path_factory.mktemp("trips")
    for name, is_tied in (("tied", True), ("untied", False)):
        torch.manual_seed(0)
        model = Net(is_tied=is_tied)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        for step in range(4):
            if step >= 2:
                full = f"{'earlier-' * (step == 2)}{name}"
                shardproof.state(model, optimizer, out=folder / full, step=step)
                saved = {
                    "model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer),
                }  # fmt: skip
                torch.save(saved, folder / f"{full}.pt")
            if step < 3:
                x = torch.randint(0, WORDS, (8,), generator=torch.Generator().manual_seed(step))
                nn.functional.cross_entropy(model(x), x).backward()
                optimizer.step()
                optimizer.zero_grad()
    return folder


@pytest.fixture(scope="module")
def made(origin):
    """Returns the folder with what an implementation on so many ranks has written; each number of ranks runs once."""

    @functools.cache
    def run(ranks):
        done = torchrun(ranks, "-m", "tests.harness.state_layouts", origin, *KINDS[ranks])
        return done.stdout + done.stderr

    def find(kind, ranks):
        text = run(ranks)
        found = origin / f"{kind}-{ranks}"
        # A process may abort while it exits, with everything written: F-20 of findings/.
        assert (found / f"state/rank{ranks - 1:05}.jsonl").exists(), text
        return found

    return find


def _formats(kind):
    if kind == "flat":
        return ("state", "flat")
    return ("state", "pt", "dcp", "index", "hf", *["sharded"] * (kind in SHARDED))


TRIPS = [(ranks, kind, form) for ranks, kinds in KINDS.items() for kind in kinds for form in _formats(kind)]


@pytest.mark.nightly
@pytest.mark.parametrize(("ranks", "kind", "form"), TRIPS, ids=["-".join(map(str, one)) for one in TRIPS])
def test_a_state_that_was_loaded_and_saved_is_the_same(ranks, kind, form, origin, made, capsys):
    folder = made(kind, ranks)
    for a in (origin / ("untied" if kind in UNTIED else "tied"), folder / "state"):
        # Which parameters a flat one has is in its own state alone.
        if form != "flat" or a == folder / "state":
            assert said(a, folder / form, capsys=capsys, code=0) == "nothing differs"


ADAPTED = [(ranks, kind) for ranks in KINDS for kind in ("ddp", "fsdp1", "fsdp2")]


@pytest.mark.nightly
@pytest.mark.parametrize(("ranks", "kind"), ADAPTED)
def test_an_adapter_that_was_saved_is_the_same(ranks, kind, made, capsys):
    folder = made(kind, ranks)
    assert said(folder / "adapted", folder / "peft", capsys=capsys, code=0) == "nothing differs"


# Damages --------------------------------------------------------------------------------------------------------------


def of_model(name, change):
    """Replace one entry of the model."""

    def changed(saved, old):
        saved["model"][name] = change(saved["model"][name]).clone()

    return changed


def _stale(saved, old):
    saved["model"]["up.weight"] = old["model"]["up.weight"]


def _narrow(saved, old):
    saved["model"] = {name: one.bfloat16() for name, one in saved["model"].items()}


def _untied(saved, old):
    saved["model"]["head.weight"] = saved["model"]["head.weight"] + 1


def _without_moments(saved, old):
    for state in saved["optimizer"]["state"].values():
        state.pop("exp_avg")


def _reset(saved, old):
    for state in saved["optimizer"]["state"].values():
        state["step"] = torch.tensor(0.0)


def _rows(*halves):
    """Replace the rows of a tensor by its first and second half, or by zeros."""

    def changed(one):
        both = {"first": one[:15], "second": one[15:], "zeros": torch.zeros_like(one[:15])}
        return torch.cat([both[half] for half in halves])

    return of_model("up.weight", changed)


class Damage(NamedTuple):
    """What happens to a state, and the line that is said then, as a regular expression.

    Attributes:
        of_optimizer: whether it is of the optimizer, which files of the model alone do not have.
    """

    change: object
    line: str
    of_optimizer: bool = False


ALL = "step of words.weight, step of norm.weight, step of norm.bias and 4 more"
CUT = "(has the shard of rank 0 alone: |lacks the last 15 rows: )?"
SHARD = r"(, the shard of rank \d,)?"
DAMAGES = {
    "a shard lost": Damage(
        _rows("first"), rf"model: up.weight: {CUT}has the shape \[15, 16\] for \[30, 16\]"
    ),
    "two swapped": Damage(
        _rows("second", "first"), r"model: up.weight: rows 0-14 of 30 and rows 15-29 of 30 are exchanged"
    ),
    "zeros": Damage(_rows("first", "zeros"), rf"model: up.weight: rows 15-29 of 30{SHARD} are zeros"),
    "stale": Damage(_stale, r"model: up.weight: is that of .*/earlier-tied, after step 2"),
    "bfloat16": Damage(
        _narrow, r"model: .* and \d more: is bfloat16 for float32, which cost at most [0-9.e-]+ of a norm"
    ),
    "transposed": Damage(
        of_model("down.weight", torch.t), r"model: down.weight: is transposed: has the shape \[30, 16\] for \[16, 30\]"
    ),
    "a tie broken": Damage(_untied, r"model: head.weight differs, by [0-9.e-]+ of its norm"),
    "moments missing": Damage(
        _without_moments, f"optimizer: {ALL.replace('step', 'exp_avg')}: a state that .* does not have", True
    ),
    "a step reset": Damage(_reset, f"optimizer: {ALL}: is 0 for 3", True),
    "an extra entry": Damage(
        lambda saved, old: saved["model"].update(spare=torch.ones(3)), "model: spare: an entry that .* does not have"
    ),
    "another rank's rows": Damage(
        _rows("first", "first"), rf"model: up.weight: rows 15-29 of 30{SHARD} have the values of rows 0-14 of 30"
        r"(, the shard of rank \d)?"
    ),
}  # fmt: skip

#: The state that is right, by its implementation and number of ranks: that of one process in the default run.
RIGHT = [("", 1), *(pytest.param(*one, marks=pytest.mark.nightly) for one in [("fsdp2", 2), ("hsdp", 4), ("ddp", 2)])]
WRITTEN = [
    (damage, form)
    for damage, one in DAMAGES.items()
    for form in ("pt", "dcp", "index", "hf")
    if form != "index" or not one.of_optimizer
]


@pytest.mark.parametrize(("kind", "ranks"), RIGHT)
@pytest.mark.parametrize(("damage", "form"), WRITTEN)
def test_a_damage_is_named_in_each_format(damage, form, kind, ranks, origin, made, tmp_path, capsys):
    saved, old = (torch.load(origin / f"{name}.pt", weights_only=True) for name in ("tied", "earlier-tied"))
    changed = copy.deepcopy(saved)
    DAMAGES[damage].change(changed, old)
    write_full(changed, form, tmp_path / form)
    right = made(kind, ranks) / "state" if kind else origin / "tied"
    text = said(right, tmp_path / form, "--earlier", origin / "earlier-tied", capsys=capsys, code=1)
    assert re.fullmatch(DAMAGES[damage].line, text), text


@pytest.mark.parametrize("form", ["pt", "dcp", "index", "hf"])
def test_a_sound_state_has_no_line_in_each_format(form, origin, tmp_path, capsys):
    write_full(torch.load(origin / "tied.pt", weights_only=True), form, tmp_path / form)
    ask = (origin / "tied", tmp_path / form, "--earlier", origin / "earlier-tied")
    assert said(*ask, capsys=capsys, code=0) == "nothing differs"


OF_FILES = {
    "dcp": ("__1_0.distcp", 2, r".*/dcp/__1_0.distcp: No such file or directory"),
    "index": (
        "model-00002-of-00002.safetensors",
        2,
        ".*: it names the file model-00002-of-00002.safetensors, which is missing"
    ),
    "sharded": ("rank_1.pt", 1, r"model: .*: in .*: rows 15-29 of 30, the shard of rank 1, are in no file"),
    "flat": (
        "rank1.pt", 2, "exp_avg.* of 0: flat, with 1319 elements of 1 rank, and words.weight and the others in it have "
        "2638: the file of a rank may be missing"
    ),
}  # fmt: skip


@pytest.mark.nightly
@pytest.mark.parametrize("form", OF_FILES)
def test_a_file_that_is_lost_is_named(form, made, tmp_path, capsys):
    file, code, line = OF_FILES[form]
    folder = made("flat" if form == "flat" else "fsdp2", 2)
    shutil.copytree(folder / form, tmp_path / form)
    (tmp_path / form / file).unlink()
    assert main(["state", str(folder / "state"), str(tmp_path / form)]) == code
    printed = capsys.readouterr()
    lines = (printed.err if code == 2 else printed.out).splitlines()
    assert any(re.fullmatch(f"(shardproof: )?{line}", one) for one in lines), lines


#: What is said of flat parameters of two ranks, of which the second one is damaged: parts of a line.
FLAT = {
    "zeros": "down.weight, down.bias, head.weight: is all zeros",
    "swapped": "down.weight differs, by .* 8 of 10",
    "another rank's rows": "down.weight differs, by .* 4 of 10",
    "stale": "rows 7-29 of 30, the shard of rank 1, are those of .*earlier-untied, after step 2",
}


@pytest.mark.nightly
@pytest.mark.parametrize("damage", OF_FLAT)
def test_a_damage_of_flat_parameters_is_named(damage, origin, made, capsys):
    folder = made("flat", 2)
    name = f"flat-{damage.replace(' ', '-')}"
    text = said(folder / "state", folder / name, "--earlier", origin / "earlier-untied", capsys=capsys, code=1)
    assert re.search(FLAT[damage], text), text


def _exchanged(files, other):
    first, second, *_ = (one.read_bytes() for one in files)
    files[0].write_bytes(second)
    files[1].write_bytes(first)


def _twice(files, other):
    shutil.copy(files[0], files[1])


def _of_another_world(files, other):
    shutil.copy(other / files[1].name, files[1])


#: What happens to files of ranks, and what is said of them.
OF_RANKS = {
    "exchanged": (_exchanged, ["{0}: has the shards of rank 1 of {state}", "{1}: has the shards of rank 0 of {state}"]),
    "twice": (_twice, ["{1}: has the shards of rank 0 of {state}"]),
    "another world": (
        _of_another_world,
        ["{1}: has shards that no rank of {state} has, as of another number of ranks"],
    ),
}


@pytest.mark.nightly
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(("kind", "form"), [("fsdp2", "sharded"), ("flat", "flat")])
@pytest.mark.parametrize("damage", OF_RANKS)
def test_a_file_of_another_rank_is_named(damage, kind, form, ranks, made, tmp_path, capsys):
    folder, other = made(kind, ranks), made(kind, 6 - ranks)
    change, expected = OF_RANKS[damage]
    shutil.copytree(folder / form, tmp_path / form)
    files = sorted((tmp_path / form).iterdir())
    change(files, other / form)
    names = [one.name for one in files]
    lines = said(folder / "state", tmp_path / form, capsys=capsys, code=1).splitlines()
    wanted = [f"model: {one.format(*names, state=folder / 'state')}" for one in expected]
    assert [line for line in lines if ".pt: has " in line] == wanted, lines


#: Damages of an adapter, and what is said.
OF_ADAPTERS = {
    "missing": (
        lambda saved: saved.pop("base_model.model.lora_B.weight"), "model: lora_B.default.weight: a parameter that .*"
    ),
    "zeros": (
        lambda saved: saved["base_model.model.lora_B.weight"].zero_(), "model: lora_B.default.weight: is all zeros"
    ),
    "a shard lost": (
        lambda saved: saved.update({"base_model.model.lora_B.weight": saved["base_model.model.lora_B.weight"][:15]}),
        rf"model: lora_B.default.weight: {CUT}has the shape \[15, 4\] for \[30, 4\]",
    ),
    "bfloat16": (
        lambda saved: saved.update({name: one.bfloat16() for name, one in saved.items()}),
        "model: .*: is bfloat16 for float32, which cost at most .*",
    ),
    "an extra entry": (
        lambda saved: saved.update({"base_model.model.spare": torch.ones(3)}), "model: spare: an entry that .*"
    ),
}  # fmt: skip


@pytest.fixture
def adapted(tmp_path):
    """The folder with the state of a model that has an adapter, and the adapter."""
    torch.manual_seed(0)
    model = Adapted()
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=0.01)
    model(torch.ones(2, 16)).square().sum().backward()
    optimizer.step()
    shardproof.state(model, optimizer, out=tmp_path / "adapted", step=1)
    saved = {name: one for name, one in model.state_dict().items() if "lora_" in name}
    write_full({"model": saved}, "peft", tmp_path / "peft")
    return tmp_path


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("damage", OF_ADAPTERS)
def test_a_damage_of_an_adapter_is_named(damage, ranks, adapted, made, tmp_path, capsys):
    change, line = OF_ADAPTERS[damage]
    folder = adapted if ranks == 1 else made("fsdp2", ranks)
    saved = load_file(folder / "peft/adapter_model.safetensors")
    change(saved)
    (tmp_path / "damaged").mkdir()
    write = {name.removeprefix("base_model.model."): one for name, one in saved.items()}
    write_full({"model": write}, "peft", tmp_path / "damaged/peft")
    text = said(folder / "adapted", tmp_path / "damaged/peft", capsys=capsys, code=1)
    assert re.fullmatch(line, text), text


# Files that have the model alone, and those that should have more -----------------------------------------------------

MISSED = "optimizer: the optimizer: none of its 28 entries is there"
FROZEN = "model: base_layer.weight, base_layer.bias: a parameter that .* does not have"


def whole(origin, path, *without, earlier="", **more):
    """A folder of Hugging Face with a model, optimizer and scheduler, without some files, and with others instead."""
    saved = torch.load(origin / f"{earlier}tied.pt", weights_only=True)
    write_full(saved, "hf", path)
    torch.save({"last_epoch": 3, "_last_lr": [0.01]}, path / "scheduler.pt")
    torch.save({"python": (3, (1, 2), None), "cpu": torch.get_rng_state()}, path / "rng_state.pth")
    for name in without:
        (path / name).unlink()
    for name, state in more.items():
        torch.save(state, path / f"{name}.pt")
    return path


OF_TRAINERS = {
    "as it is": ((), {}, "nothing differs"),
    "the model alone": (("optimizer.pt", "scheduler.pt", "rng_state.pth"), {}, "nothing differs"),
    "no optimizer next to a scheduler": (("optimizer.pt", "rng_state.pth"), {}, MISSED),
    "no optimizer next to generators": (("optimizer.pt", "scheduler.pt"), {}, MISSED),
    "an empty optimizer": ((), {"optimizer": {}}, MISSED),
}


@pytest.mark.parametrize("case", OF_TRAINERS)
def test_a_folder_of_a_trainer_has_an_optimizer(case, origin, tmp_path, capsys):
    without, more, line = OF_TRAINERS[case]
    folder = whole(origin, tmp_path / "checkpoint-3", *without, **more)
    assert said(origin / "tied", folder, capsys=capsys, code=int(line == MISSED)) == line


@pytest.mark.parametrize(
    ("b", "earlier", "line"),
    [
        ("checkpoint-3", "checkpoint-2", MISSED),
        ("checkpoint-3/pytorch_model.bin", "checkpoint-2", "nothing differs"),
        ("checkpoint-3", "checkpoint-2/pytorch_model.bin", "nothing differs"),
        ("checkpoint-3", "earlier-tied", "nothing differs"),
    ],
)
def test_the_checkpoint_after_one_with_an_optimizer_has_one(b, earlier, line, origin, tmp_path, capsys):
    whole(origin, tmp_path / "checkpoint-3", "optimizer.pt", "scheduler.pt", "rng_state.pth")
    whole(origin, tmp_path / "checkpoint-2", earlier="earlier-")
    old = (origin if earlier == "earlier-tied" else tmp_path) / earlier
    ask = (origin / "tied", tmp_path / b, "--earlier", old)
    assert said(*ask, capsys=capsys, code=int(line == MISSED)) == line


def test_a_file_without_any_entry_lacks_all(origin, tmp_path, capsys):
    torch.save({}, tmp_path / "one.pt")
    assert said(origin / "tied", tmp_path / "one.pt", capsys=capsys, code=1).splitlines()[0] == (
        "model: the model: none of its 10 entries is there"
    )


@pytest.mark.parametrize(
    ("form", "has_optimizer", "line"),
    [
        ("peft", False, "nothing differs"),
        ("peft", True, "nothing differs"),
        ("hf", False, "nothing differs"),
        ("hf", True, FROZEN),
    ],
)
def test_frozen_parameters_are_missed_in_a_checkpoint_of_a_trainer(form, has_optimizer, line, tmp_path, capsys):
    model = Adapted()
    optimizer = torch.optim.SGD([one for one in model.parameters() if one.requires_grad], lr=0.01)
    shardproof.state(model, optimizer, out=tmp_path / "state")
    saved = {"model": {name: one for name, one in model.state_dict().items() if "lora_" in name}}
    write_full(saved, form, tmp_path / form)
    if has_optimizer:
        torch.save(optimizer.state_dict(), tmp_path / form / "optimizer.pt")
    text = said(tmp_path / "state", tmp_path / form, capsys=capsys, code=int(line == FROZEN))
    assert re.fullmatch(line, text), text


@pytest.mark.parametrize(
    ("kept", "missed"),
    [
        (("lora_A.default.weight",), "lora_B.default.weight"),
        (("lora_A.default.weight", "lora_B.default.weight", "base_layer.bias"), "base_layer.weight"),
    ],
)
def test_an_adapter_that_lacks_a_part_is_no_healthy_one(kept, missed, tmp_path, capsys):
    model = Adapted()
    shardproof.state(model, out=tmp_path / "state")
    write_full({"model": {name: model.state_dict()[name] for name in kept}}, "hf", tmp_path / "hf")
    text = said(tmp_path / "state", tmp_path / "hf", capsys=capsys, code=1)
    assert text.startswith(f"model: {missed}: a parameter that "), text


def test_other_values_of_an_equal_norm_are_no_permutation(tmp_path, capsys):
    """As of another orthogonal matrix, whose norm is equal but for rounding; a permuted one has all of its digits."""
    model = nn.Linear(16, 16, bias=False)
    lines = []
    for seed, (name, change) in enumerate(
        (
            ("state", nn.init.orthogonal_),
            ("other", nn.init.orthogonal_),
            ("permuted", lambda one: one.copy_(one[torch.randperm(16)][:, torch.randperm(16)].clone())),
        )
    ):
        with torch.no_grad():
            torch.manual_seed(seed)
            change(model.weight)
        shardproof.state(model, out=tmp_path / name)
        if name == "other":
            lines.append(said(tmp_path / "state", tmp_path / name, capsys=capsys, code=1))
    lines.append(said(tmp_path / "other", tmp_path / "permuted", capsys=capsys, code=1))
    assert lines[0].startswith("model: weight differs, by 1.") and "an equal norm" not in lines[0], lines
    assert lines[1].startswith("model: weight: has an equal norm, and its values at other places"), lines
