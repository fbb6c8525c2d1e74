"""States: what a training has is what its checkpoint has, under any implementation; and each difference is named."""

import base64
import copy
import json
import shutil
from typing import NamedTuple

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import nn

import shardproof
from shardproof.__main__ import main
from shardproof.harness.states.blocks import numels_of
from shardproof.harness.tensors.fingerprints import Box
from shardproof.harness.tensors.layouts import Layout
from shardproof.harness.tensors.lines import box_of
from tests.errors import error_of
from tests.harness.inner import torchrun
from tests.harness.state_trainings import Net

#: The trainings by the number of their ranks: those of the default run, and those of the night.
KINDS = {2: ("ddp", "fsdp2")}
MORE = {2: ("fsdp1", "untied"), 4: ("hsdp", "tp")}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The folder with the states and checkpoints of some trainings."""
    return train(tmp_path_factory.mktemp("states"), KINDS)


@pytest.fixture(scope="module")
def every(made):
    """The folder with those of all trainings."""
    return train(made, MORE)


def train(folder, trainings):
    """Write states and checkpoints of trainings."""
    for ranks, kinds in trainings.items():
        # A process may abort while it exits, with everything written: F-20 of findings/.
        done = torchrun(ranks, "-m", "tests.harness.state_trainings", folder, *kinds)
        written = {str(path.relative_to(folder)) for path in folder.rglob("*")}
        wanted = {f"{kind}/rank{rank:05}.jsonl" for kind in kinds for rank in range(ranks)}
        assert wanted <= written, done.stdout + done.stderr
    return folder


def said(capsys, *arguments, code):
    """What the command prints behind its headlines, as one text."""
    assert main(["state", *map(str, arguments)]) == code, capsys.readouterr()
    return capsys.readouterr().out.partition("\n\n")[2].strip()


SAME = [("ddp", "fsdp2"), ("ddp", "fsdp2.pt"), ("fsdp2.pt", "fsdp2.dcp")]
SAME_OF_MORE = [
    *[("fsdp2", "hsdp"), ("hsdp", "ddp"), ("untied", "fsdp1"), ("fsdp1", "untied")],
    *[("hsdp", "fsdp2.dcp"), ("fsdp1", "untied.dcp")],
]


@pytest.mark.parametrize(("a", "b"), SAME, ids=["-".join(pair) for pair in SAME])
def test_a_state_is_the_same_under_each_implementation_and_in_each_format(made, a, b, capsys):
    assert said(capsys, made / a, made / b, code=0) == "nothing differs"


@pytest.mark.nightly
@pytest.mark.parametrize(("a", "b"), SAME_OF_MORE, ids=["-".join(pair) for pair in SAME_OF_MORE])
def test_a_state_is_the_same_under_more_implementations(every, a, b, capsys):
    assert said(capsys, every / a, every / b, code=0) == "nothing differs"


@pytest.mark.nightly
def test_another_order_of_sums_is_a_distance_of_rounding(every, capsys):
    lines = said(capsys, every / "hsdp", every / "tp", code=1).splitlines()
    assert [line.partition(":")[0] for line in lines] == ["model", "optimizer"]
    assert all("e-0" in line and "of its norm" in line for line in lines), lines


def test_a_file_of_weights_alone_has_no_optimizer_to_miss(made, capsys):
    assert main(["state", str(made / "fsdp2"), str(made / "fsdp2.safetensors")]) == 0
    text = capsys.readouterr().out
    file = made / "fsdp2.safetensors"
    left_out = f"not compared: the optimizer of {made / 'fsdp2'} (29 entries) and the scheduler of {made / 'fsdp2'} "
    assert f"\n{left_out}(8 entries): {file} has the model alone\n\nnothing differs\n" in text, text


def test_an_earlier_state_is_named_with_its_step(made, capsys):
    text = said(capsys, made / "fsdp2", made / "ddp-2", "--earlier", made / "fsdp2-2", code=1)
    assert "norm.bias and 5 more: is that of" in text and "fsdp2-2, after step 2" in text
    assert "step of words.weight, step of norm.weight, step of norm.bias and 4 more: is 2 for 3" in text
    assert "scheduler: last_epoch: is 2 for 3" in text


def test_a_state_is_summed_up(made, capsys):
    assert main(["state", str(made / "fsdp2")]) == 0
    text = capsys.readouterr().out
    assert "FSDPNet on 2 ranks after step 3" in text
    assert "model: 9 tensors of 1,843 elements (float32)" in text
    assert "optimizer: 21 tensors of 3,683 elements (float32)" in text


# What is said of checkpoints that something has happened to -----------------------------------


class Damage(NamedTuple):
    """What happens to a checkpoint, and the lines that are said then."""

    change: object
    lines: tuple[str, ...]


def of_model(name, change):
    """Replace one entry of the model."""

    def changed(saved):
        saved["model"][name] = change(saved["model"][name]).clone()

    return changed


def _swap(rows):
    return torch.cat([rows[15:], rows[:15]])


def _repeat(rows):
    return torch.cat([rows[:15], rows[:15]])


def _zero(rows):
    return torch.cat([rows[:15], torch.zeros_like(rows[15:])])


def _narrow(saved):
    saved["model"] = {name: one.bfloat16() for name, one in saved["model"].items()}


def _reset(saved):
    for state in saved["optimizer"]["state"].values():
        state["step"] = torch.tensor(0.0)
        state["exp_avg"].zero_()


def _wrap(saved):
    saved["model"] = {f"module._orig_mod.{name}": one for name, one in saved["model"].items()}


def _untie(saved):
    saved["model"]["head.weight"] = saved["model"]["head.weight"].clone() + 1


DAMAGES = {
    "none": Damage(lambda saved: None, ("nothing differs",)),
    "names of wrappers": Damage(_wrap, ("nothing differs",)),
    "one of two tied": Damage(lambda saved: saved["model"].pop("head.weight"), ("nothing differs",)),
    "a shard alone": Damage(
        of_model("up.weight", lambda one: one[:15]),
        ("model: up.weight: has the shard of rank 0 alone: has the shape [15, 16] for [30, 16]",),
    ),
    "zeros": Damage(
        of_model("up.weight", _zero), ("model: up.weight: rows 15-29 of 30, the shard of rank 1, are zeros",)
    ),
    "all zeros": Damage(of_model("up.bias", torch.zeros_like), ("model: up.bias: is all zeros",)),
    "exchanged": Damage(
        of_model("up.weight", _swap), ("model: up.weight: rows 0-14 of 30 and rows 15-29 of 30 are exchanged",)
    ),
    "another rank's": Damage(
        of_model("up.weight", _repeat),
        (
            "model: up.weight: rows 15-29 of 30, the shard of rank 1, have the values of rows 0-14 of 30, the shard "
            "of rank 0",
        ),
    ),
    "a narrow dtype": Damage(_narrow, ("is bfloat16 for float32, which cost at most ",)),
    "transposed": Damage(
        of_model("down.weight", lambda one: one.t()),
        ("model: down.weight: is transposed: has the shape [30, 16] for [16, 30]",),
    ),
    "missing": Damage(lambda saved: saved["model"].pop("down.bias"), ("model: down.bias: a parameter that ",)),
    "both of two tied missing": Damage(
        lambda saved: [saved["model"].pop(name) for name in ("head.weight", "words.weight")],
        ("model: words.weight: a parameter that ",),
    ),
    "no optimizer": Damage(
        lambda saved: saved.pop("optimizer"), ("optimizer: the optimizer: none of its 29 entries is there",)
    ),
    "moments begin anew": Damage(
        _reset,
        (
            "optimizer: step of words.weight, step of norm.weight, step of norm.bias and 4 more: is 0 for 3",
            "optimizer: exp_avg of words.weight, exp_avg of norm.weight, exp_avg of norm.bias and 4 more: is all zeros",
        ),
    ),
    "an entry more": Damage(
        lambda saved: saved["model"].update(spare=torch.ones(3)), ("model: spare: an entry that ",)
    ),
    "a factor": Damage(of_model("up.bias", lambda one: one * 0.3), ("model: up.bias: is 0.3 times what it was",)),
    "other values": Damage(
        of_model("up.bias", lambda one: one + one.abs().roll(1)), ("model: up.bias differs, by ",)
    ),
    "values of another entry": Damage(
        lambda saved: saved["model"].update({"norm.bias": saved["model"]["down.bias"].clone()}),
        ("model: norm.bias: has the values of down.bias",),
    ),
    "an empty entry": Damage(
        of_model("head.weight", lambda one: one[:0, 0]),
        ("model: head.weight: is an empty entry: has the shape [0] for [50, 16]",),
    ),
    "padding": Damage(
        of_model("up.weight", lambda one: torch.cat([one, torch.zeros(2, 16)])),
        ("model: up.weight: has 2 rows of padding: has the shape [32, 16] for [30, 16]",),
    ),
    "flat": Damage(
        of_model("up.weight", lambda one: torch.cat([one.flatten(), torch.zeros(5)])),
        ("model: up.weight: is flat, with 5 elements of padding: has the shape [485] for [30, 16]",),
    ),
    "not finite": Damage(
        of_model("up.bias", lambda one: one * float("nan")), ("model: up.bias: is not finite",)
    ),
    "other values in a shard": Damage(
        of_model("up.weight", lambda one: torch.cat([one[:15], one[15:] + one[15:].abs().roll(1)])),
        ("model: up.weight differs in rows 15-29 of 30, the shard of rank 1, by ",),
    ),
    "a shard that is not finite": Damage(
        of_model("up.weight", lambda one: torch.cat([one[:15], one[15:] * float("nan")])),
        ("model: up.weight: is not finite in rows 15-29 of 30, the shard of rank 1",),
    ),
    "a tie that ends": Damage(_untie, ("model: head.weight differs, by ",)),
    "a list for a tuple": Damage(
        lambda saved: saved["optimizer"]["param_groups"][0].update(betas=[0.9, 0.999]), ("nothing differs",)
    ),
    "the direction": Damage(
        lambda saved: saved["optimizer"]["param_groups"][0].update(maximize=True),
        ("optimizer: maximize of group 0: is true for false",),
    ),
    "a learning rate": Damage(
        lambda saved: saved["optimizer"]["param_groups"][0].update(lr=0.5),
        ("optimizer: lr of group 0: is 0.5 for 0.001",),
    ),
}  # fmt: skip


#: Distributed checkpoints are put together from parts, and each of these is one.
OF_PARTS = ("none", "zeros", "missing", "moments begin anew")


@pytest.mark.parametrize(("damage", "form"), [*((one, "pt") for one in DAMAGES), *((one, "dcp") for one in OF_PARTS)])
def test_each_damage_of_a_checkpoint_has_its_line(made, damage, form, tmp_path, capsys):
    saved = torch.load(made / "fsdp2.pt", weights_only=True)
    changed = copy.deepcopy(saved)
    DAMAGES[damage].change(changed)
    if form == "pt":
        torch.save(changed, tmp_path / "one.pt")
    else:
        dcp.save(changed, checkpoint_id=tmp_path / "one.dcp", no_dist=True)
    right = DAMAGES[damage].lines
    text = said(capsys, made / "fsdp2", tmp_path / f"one.{form}", code=int(right != ("nothing differs",)))
    assert len(text.splitlines()) == len(right), text
    for line, expected in zip(text.splitlines(), right, strict=True):
        assert expected in line, text


def test_states_of_two_trainings_say_what_trains_and_what_is_tied(made, tmp_path, capsys):
    torch.manual_seed(0)
    one, other = Net(), Net(is_tied=False)
    other.load_state_dict(one.state_dict())
    other.up.weight.requires_grad_(False)
    for name, model in (("one", one), ("other", other)):
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        shardproof.state(model, torch.optim.SGD(trained, lr=0.1), out=tmp_path / name)
    assert said(capsys, tmp_path / "one", tmp_path / "other", code=1).splitlines() == [
        f"model: up.weight: is frozen in {tmp_path / 'other'}, and not in {tmp_path / 'one'}",
        "model: up.weight: is in no optimizer for SGD, group 0",
        "model: head.weight: is no longer one parameter with words.weight",
    ]


def test_a_receiver_trains_nothing(made, tmp_path, capsys):
    engine = Net()
    shardproof.state(engine, torch.optim.SGD(engine.parameters(), lr=0.1), out=tmp_path / "trainer")
    shardproof.state(engine.requires_grad_(False), out=tmp_path / "engine")
    assert said(capsys, tmp_path / "trainer", tmp_path / "engine", code=0) == "nothing differs"


def test_values_of_extra_that_a_file_lacks_are_named(tmp_path, capsys):
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    shardproof.state(model, optimizer, out=tmp_path / "one", extra={"tokens": 3, "step": 1})
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 1}, tmp_path / "one.pt")
    assert main(["state", str(tmp_path / "one"), str(tmp_path / "one.pt")]) == 0
    text = capsys.readouterr().out
    assert f"not compared: tokens of extra: {tmp_path / 'one.pt'} has no entry of such a name" in text, text


def test_names_with_a_word_inside_share_a_line(tmp_path, capsys):
    model = nn.ModuleDict({"layers": nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])})
    shardproof.state(model, out=tmp_path / "one")
    saved = {name.replace("layers.", "layers._orig_mod."): one for name, one in model.state_dict().items()}
    torch.save(saved, tmp_path / "one.pt")
    text = said(capsys, tmp_path / "one", tmp_path / "one.pt", code=1)
    assert text.endswith("is there with '_orig_mod' behind 'layers' in its name") and len(text.splitlines()) == 1, text


# States that are wrong in themselves --------------------------------------------------------------


def changed(made, tmp_path, rank, change, kind="ddp"):
    """A copy of a state, in which the lines of one rank were changed."""
    shutil.copytree(made / kind, tmp_path / kind)
    path = tmp_path / kind / f"rank{rank:05}.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(line) + "\n" for line in change(lines)))
    return tmp_path / kind


def _numbers_of(lines, name):
    """Where the last line of a rank's file has the numbers of a tensor: its number, and those of its blocks."""
    at = 0
    for number, line in enumerate(line for line in lines if line.get("dtype")):
        count = len(numels_of(box_of(line["shape"], line.get("dims"), line.get("flat"))))
        if line["name"] == name:
            return number, slice(at, at + count)
        at += count
    raise AssertionError(name)


def _with(line, field, change):
    found = bytearray(base64.b64decode(line[field]))
    line[field] = base64.b64encode(change(found)).decode()


def test_replicas_that_differ_have_a_line(made, tmp_path, capsys):
    def change(lines):
        _, places = _numbers_of(lines, "up.bias")

        def flipped(numbers):
            numbers[8 * places.start] ^= 1
            return numbers

        _with(lines[-1], "hashes", flipped)
        return lines

    text = said(capsys, changed(made, tmp_path, 1, change), code=1)
    assert text == "model: up.bias: rank 0 and rank 1 hold different values of the same elements"


def test_a_setting_that_differs_between_ranks_has_a_line(made, tmp_path, capsys):
    def change(lines):
        next(line for line in lines if line.get("key") == "lr")["value"] = "0.5"
        return lines

    text = said(capsys, changed(made, tmp_path, 1, change), code=1)
    assert text == "optimizer: lr of group 0: 0.001 on rank 0, 0.5 on rank 1"


def _of_another_world(lines):
    lines[0]["world"] = 3
    return lines


def _out_of_range(lines):
    next(line for line in lines if line.get("name") == "up.bias")["flat"] = [0, 31]
    return lines


def _short_sketch(lines):
    _with(lines[-1], "sketches", lambda numbers: numbers[:-8])
    return lines


def _no_base64(lines):
    lines[-1]["hashes"] = "%"
    return lines


def _cut(lines):
    return lines[:-1]


def _of_two_ranks(lines):
    return [*lines[:-1], lines[0], lines[-1]]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (_of_another_world, "rank 0 is of 2 ranks, and rank 1 of 3"),
        (_out_of_range, "rank00001.jsonl: line "),
        (_short_sketch, "rank00001.jsonl: the last line: sketches: "),
        (_no_base64, "rank00001.jsonl: the last line: hashes: '%' is no base64"),
        (_cut, "rank00001.jsonl: the last line has no digests"),
        (_of_two_ranks, "rank00001.jsonl: a second line that says the rank"),
    ],
)
def test_a_line_that_cannot_be_is_one_line(made, change, told, tmp_path, capsys):
    assert main(["state", str(changed(made, tmp_path, 1, change))]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert told in line and "internal error" not in line, line


def test_elements_that_no_rank_holds_have_a_line(made, tmp_path, capsys):
    def change(lines):
        number, places = _numbers_of(lines, "up.weight")
        del lines[-1]["digits"][number]
        for field, first, last in (
            ("hashes", places.start, places.stop), ("squares", places.start, places.stop),
            ("sketches", 8 * number, 8 * number + 8),
        ):  # fmt: skip
            _with(lines[-1], field, lambda numbers, a=8 * first, b=8 * last: numbers[:a] + numbers[b:])
        return [line for line in lines if (line.get("name"), line.get("key", "")) != ("up.weight", "")]

    assert (
        said(capsys, changed(made, tmp_path, 1, change, "fsdp2"), code=1)
        == "model: up.weight: rows 15-29 of 30 are in no rank"
    )


def _without_rank(folder):
    (folder / "rank00000.jsonl").unlink()


def _cut(folder):
    path = folder / "rank00001.jsonl"
    path.write_text(path.read_text()[:-20])


def _foreign(folder):
    (folder / "rank00000.jsonl").write_text('{"name": 3}\n')


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (_without_rank, "of 2 ranks it has 1: rank 0 is missing"),
        (_cut, "it is cut off"),
        (_foreign, "rank00000.jsonl: line 1: "),
    ],
)
def test_a_damaged_state_is_one_line(made, damage, told, tmp_path, capsys):
    shutil.copytree(made / "ddp", tmp_path / "ddp")
    damage(tmp_path / "ddp")
    assert main(["state", str(tmp_path / "ddp")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("shardproof: ") and told in line


def test_a_path_that_is_no_state_is_one_line(tmp_path, capsys):
    assert main(["state", str(tmp_path / "gone")]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_a_state_is_not_written_twice(tmp_path):
    model = Net()
    shardproof.state(model, out=tmp_path / "one")
    assert "exists: name a folder that has no state of this rank" in error_of(
        lambda: shardproof.state(model, out=tmp_path / "one")
    )


class Engine(nn.Module):
    """Two linear layers of a trainer as one tensor, as an inference engine has them."""

    def __init__(self, trained):
        super().__init__()
        self.fused = nn.Parameter(torch.cat([trained.q.weight, trained.k.weight]).detach().clone())


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k = nn.Linear(8, 6, bias=False), nn.Linear(8, 4, bias=False)


def _is_late(trained, engine):
    with torch.no_grad():
        trained.q.weight += 1


def _is_exchanged(trained, engine):
    with torch.no_grad():
        engine.fused[:4], engine.fused[4:8] = engine.fused[4:8].clone(), engine.fused[:4].clone()


SENT = {
    "as it is": (lambda trained, engine: None, "nothing differs"),
    "not sent anew": (_is_late, "model: q.weight: is that of {before}, after step 1"),
    "in another order": (
        _is_exchanged,
        "model: q.weight: rows 0-1 of 6 and rows 4-5 of 6 are exchanged; rows 2-3 of 6 have other values",
    ),
}


@pytest.mark.parametrize("mistake", SENT)
def test_a_receiver_has_slices_of_a_fused_tensor(mistake, tmp_path, capsys):
    torch.manual_seed(0)
    trained = Attention()
    engine = Engine(trained)
    shardproof.state(trained, out=tmp_path / "before", step=1)
    change, expected = SENT[mistake]
    change(trained, engine)
    shardproof.state(trained, out=tmp_path / "trainer", step=2)
    shardproof.state(
        engine, out=tmp_path / "engine", views=lambda name, one: {"q.weight": one[:6], "k.weight": one[6:]}
    )
    earlier = () if mistake != "not sent anew" else ("--earlier", tmp_path / "before")
    text = said(capsys, tmp_path / "trainer", tmp_path / "engine", *earlier, code=int(mistake != "as it is"))
    assert text.splitlines()[0].startswith(expected.format(before=tmp_path / "before")), text


def test_a_sharded_tensor_has_no_views(tmp_path):
    layout = Layout(Box((12, 8), flat=(0, 48)))
    assert "views of 'q.weight', which is sharded" in error_of(
        lambda: shardproof.state(
            Attention(), out=tmp_path / "one", layout=lambda name, one: layout, views=lambda name, one: {"x": one}
        )
    )


def test_a_state_changes_nothing(tmp_path):
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.arange(4)).sum().backward()
    before, random = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    shardproof.state(model, optimizer, out=tmp_path / "one")
    assert all(torch.equal(one, before[name]) for name, one in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random) and not optimizer.state


def test_names_of_a_file_are_replaced_by_rules(tmp_path, capsys):
    torch.manual_seed(0)
    model = nn.ModuleDict({"lora_A": nn.ModuleDict({"default": nn.Linear(4, 2)}), "b": nn.Linear(2, 2)})
    shardproof.state(model, out=tmp_path / "one")
    save_file(
        {f"base_model.{name.replace('.default', '')}": one for name, one in model.state_dict().items()},
        tmp_path / "adapter.safetensors",
    )
    ask = (tmp_path / "one", tmp_path / "adapter.safetensors")
    assert said(capsys, *ask, code=0) == "nothing differs"
    assert said(capsys, *ask, "--rename", r"lora_(.)=lora_\1.default", code=0) == "nothing differs"
    assert "is there as x_A.weight" in said(capsys, *ask, "--rename", "lora=x", code=1)


@pytest.mark.parametrize(
    ("rule", "told"),
    [
        ("lora", "--rename lora: expected REGEX=NEW"),
        ("(=x", "--rename (=x: missing ), unterminated subpattern"),
        (r"a=\2", "invalid group reference 2"),
        ("up|down=x", "two entries get the name x.weight, one of them down.weight"),
    ],
)
def test_a_rule_that_is_none_is_one_line(rule, told, tmp_path, capsys):
    shardproof.state(Net(), out=tmp_path / "one")
    assert main(["state", str(tmp_path / "one"), str(tmp_path / "one"), "--rename", rule]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert told in line, line


def test_a_safetensors_file_is_read_without_its_optimizer(tmp_path, capsys):
    torch.manual_seed(0)
    model = Net(is_tied=False)
    shardproof.state(model, out=tmp_path / "one")
    save_file(model.state_dict(), tmp_path / "one.safetensors")
    assert said(capsys, tmp_path / "one", tmp_path / "one.safetensors", code=0) == "nothing differs"
