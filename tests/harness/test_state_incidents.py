"""Mistakes of states that leave a training: each of examples/states is named, and its healthy twin is silent."""

import importlib.util
import json
import sys

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import shardproof
from shardproof.__main__ import main
from tests.harness.inner import ROOT, torchrun

FOLDER = ROOT / "examples/states"

sys.path.insert(0, str(FOLDER))
try:
    import common
finally:
    sys.path.remove(str(FOLDER))
    sys.modules.pop("common", None)

#: By script: what is compared with the trainer, the earlier state, and a part of each line.
SAID = {
    "i19_empty_tied_head": ("hf", "", ("model: lm_head.weight: is an empty entry: ",)),
    "i20_fused_and_bias": (
        "engine", "base",
        ("q_proj.weight, model.layers.0.self_attn.k_proj.weight, model.layers.0.self_attn.v_proj.weight and 3 more: is "
         "that of {}, after step 0", "e_score_correction_bias: has values of bfloat16 in float32, which cost at most "),
    ),
    "i21_adapter_of_rank_0": (
        "pytorch_model_fsdp.bin", "",
        ("and 1 more: in {}: rows 2-3 of 4, the shard of rank 1, are in no file",
         "lora_B.default.weight: in {}: rows 16-31 of 32, the shard of rank 1, are in no file",
         "lora_B.default.weight: in {}: rows 8-15 of 16, the shard of rank 1, are in no file"),
    ),
    "i28_rank_0_alone": (
        "export.safetensors", "",
        tuple(f"has the shard of rank 0 alone: has the shape {one}"
              for one in ("[25, 32] for [50, 32]", "[16] for [32]", "[16, 32] for [32, 32]", "[8, 32] for [16, 32]",
                          "[24, 32] for [48, 32]", "[16, 48] for [32, 48]")),
    ),
    "i29_old_weights_after_waking": ("engine", "base.safetensors", ("and 18 more: is that of {}",)),
    "i30_chunks_restore": ("engine", "base", ("and 25 more: is that of {}, after step 0",)),
}  # fmt: skip


def said(capsys, *arguments, code):
    """The lines that the command prints behind its headlines."""
    assert main(["state", *map(str, arguments)]) == code, capsys.readouterr()
    return capsys.readouterr().out.partition("\n\n")[2].strip().splitlines()


def check(capsys, script, folder, *, is_healthy):
    """Compare what a script has written."""
    other, earlier, parts = SAID[script]
    arguments = [folder / "trainer", folder / other, *(["--earlier", folder / earlier] if earlier else [])]
    lines = said(capsys, *arguments, code=int(not is_healthy))
    if is_healthy:
        assert lines == ["nothing differs"]
        return
    assert len(lines) == len(parts), lines
    for line, part in zip(lines, parts, strict=True):
        assert part.format(folder / (earlier or other)) in line, lines


@pytest.mark.nightly
@pytest.mark.parametrize("script", SAID)
@pytest.mark.parametrize("form", ["wrong", "healthy"])
def test_an_incident_is_named_and_its_twin_is_silent(script, form, tmp_path, capsys):
    torchrun(2, FOLDER / f"{script}.py", tmp_path, form, code=0)
    check(capsys, script, tmp_path, is_healthy=form == "healthy")


@pytest.mark.nightly
@pytest.mark.parametrize("form", ["wrong", "healthy"])
def test_an_adapter_of_peft(form, tmp_path, capsys):
    if importlib.util.find_spec("peft") is None:
        pytest.skip("peft is not installed")
    torchrun(2, FOLDER / "i21_adapter_of_rank_0.py", tmp_path, form, "peft", code=0)
    check(capsys, "i21_adapter_of_rank_0", tmp_path, is_healthy=form == "healthy")


@pytest.mark.nightly
def test_an_export_that_waits_for_others_writes_nothing_and_is_named_by_its_line(tmp_path, capsys):
    script = (FOLDER / "i28_rank_0_alone.py", tmp_path, "wrong", "gather")
    done = torchrun(2, "-m", "shardproof", "doctor", "--steps", "0", *script, code=1)
    assert "this rank waited in a collective that it began at common.py:" in done.stderr, done.stderr
    assert " in full(): each rank of its group must begin it, and another one may be elsewhere" in done.stderr
    assert main(["state", str(tmp_path / "trainer"), str(tmp_path / "export.safetensors")]) == 2
    assert "export.safetensors: No such file or directory" in capsys.readouterr().err


def test_each_script_is_in_the_readme_with_what_is_said():
    text = (FOLDER / "README.md").read_text()
    assert {path.stem for path in FOLDER.glob("i*.py")} == {*SAID}
    assert all(f"[{name}.py]({name}.py)" in text for name in SAID)


# Siblings, in one process -----------------------------------------------------------------------------------------


def of_ranks(out, write, size=2):
    """A snapshot of several ranks that one process writes: ``write`` writes that of one to a folder."""
    out.mkdir()
    for rank in range(size):
        write(rank, out / f"r{rank}")
        head, *lines = (out / f"r{rank}/rank00000.jsonl").read_text().splitlines()
        head = json.dumps(json.loads(head) | {"rank": rank, "world": size})
        (out / f"rank{rank:05}.jsonl").write_text("\n".join([head, *lines]) + "\n")


class Sent:
    """A trainer, whose state before and after a change is written, and an engine of two ranks."""

    def __init__(self, folder, *, has_experts=False, dtype=torch.float32):
        torch.manual_seed(0)
        self.folder = folder
        self.model = common.Language(has_experts=has_experts)
        self.engines = [common.Engine(has_experts=has_experts, place=(rank, 2)) for rank in range(2)]
        self.send()
        shardproof.state(self.model, out=folder / "before", step=1)
        self.write("engine-before")
        with torch.no_grad():
            for one in self.model.parameters():
                one += torch.randn(one.shape) / 9
        shardproof.state(self.model, out=folder / "trainer", step=2)

    def send(self, names=lambda name: True, ranks=(0, 1)):
        for rank in ranks:
            self.engines[rank].load_weights(
                (name, one.detach()) for name, one in self.model.state_dict().items() if names(name)
            )

    def write(self, name):
        like = self.folder / ("trainer" if name == "engine" else "before")
        views = [shardproof.views(like=like, tensor_parallel=(rank, 2)) for rank in range(2)]
        of_ranks(self.folder / name, lambda rank, out: shardproof.state(self.engines[rank], out=out, views=views[rank]))

    def said(self, capsys, *arguments, code=1):
        self.write("engine")
        return said(capsys, self.folder / "trainer", self.folder / "engine", *arguments, code=code)


def test_heads_of_each_rank_are_those_of_the_trainer(tmp_path, capsys):
    sent = Sent(tmp_path)
    sent.send()
    assert sent.said(capsys, code=0) == ["nothing differs"]


def test_experts_of_each_rank_are_those_of_the_trainer(tmp_path, capsys):
    sent = Sent(tmp_path, has_experts=True)
    sent.send()
    assert sent.said(capsys, code=0) == ["nothing differs"]


def test_a_rank_that_was_not_sent_to(tmp_path, capsys):
    sent = Sent(tmp_path)
    sent.send(ranks=[0])
    lines = sent.said(capsys, "--earlier", tmp_path / "engine-before")
    assert any("and 13 more: has the shard of rank 1 of " in line for line in lines), lines
    assert any("rank 0 and rank 1 hold different values of the same elements" in line for line in lines)


def test_keys_and_values_that_are_exchanged(tmp_path, capsys):
    sent = Sent(tmp_path)
    sent.send()
    with torch.no_grad():
        for engine in sent.engines:
            _, key, value = engine.model.layers[0].self_attn.qkv_proj.weight.split([16, 8, 8])
            kept = key.clone()
            key.copy_(value)
            value.copy_(kept)
    assert sent.said(capsys) == [
        "model: model.layers.0.self_attn.k_proj.weight: has the values of model.layers.0.self_attn.v_proj.weight",
        "model: model.layers.0.self_attn.v_proj.weight: has the values of model.layers.0.self_attn.k_proj.weight",
    ]


@pytest.mark.nightly
def test_experts_in_another_order(tmp_path, capsys):
    sent = Sent(tmp_path, has_experts=True)
    sent.send()
    with torch.no_grad():
        for engine in sent.engines:
            for one in engine.model.layers[1].mlp.experts.parameters():
                one.copy_(one[[1, 0, 2, 3]].clone())
    lines = sent.said(capsys)
    assert [line.rpartition(": ")[2] for line in lines] == [
        "has the values of its like in model.layers.1.mlp.experts.1",
        "has the values of its like in model.layers.1.mlp.experts.0",
    ]
    assert all(line.count("_proj.weight") == 3 for line in lines)


@pytest.mark.nightly
def test_a_buffer_that_is_not_sent(tmp_path, capsys):
    sent = Sent(tmp_path, has_experts=True)
    with torch.no_grad():
        for engine in sent.engines:
            for layer in engine.model.layers:
                layer.mlp.e_score_correction_bias.zero_()
    sent.send(lambda name: "correction" not in name)
    (line,) = sent.said(capsys)
    assert line == (
        "model: model.layers.0.mlp.e_score_correction_bias, model.layers.1.mlp.e_score_correction_bias: is all zeros"
    )


def test_a_shape_that_does_not_fit_is_one_line(tmp_path):
    sent = Sent(tmp_path)
    with pytest.raises(ValueError, match=r"state: model.embed_tokens.weight: its shape \[32, 32\] is no part of"):
        shardproof.state(
            sent.engines[0],
            out=tmp_path / "x",
            views=shardproof.views(like=tmp_path / "before", tensor_parallel=(0, 1)),
        )


# Files --------------------------------------------------------------------------------------------------------------


def model_of(folder, **extra):
    torch.manual_seed(0)
    model = common.Language()
    shardproof.state(model, out=folder / "trainer", step=3, extra=extra)
    return model, {name: one.detach().clone() for name, one in model.state_dict().items()}


def after(capsys, folder, saved, *arguments, code=1):
    save_file({name: one.contiguous() for name, one in saved.items()}, folder / "one.safetensors")
    return said(capsys, folder / "trainer", folder / "one.safetensors", *arguments, code=code)


def test_the_average_is_saved_for_the_model(tmp_path, capsys):
    average = {name: one.detach() * 0.9 + 0.01 for name, one in common.Language().state_dict().items()}
    model_of(tmp_path, ema=average)
    (line,) = after(capsys, tmp_path, average)
    assert line.endswith("and 18 more: has the values of its like in ema"), line


def test_layers_in_another_order(tmp_path, capsys):
    _, saved = model_of(tmp_path)
    other = {name.replace("layers.0", "layers.x").replace("layers.1", "layers.0").replace("x", "1"): one
             for name, one in saved.items()}  # fmt: skip
    lines = after(capsys, tmp_path, other)
    assert [line.rpartition(": ")[2] for line in lines] == [
        "has the values of its like in model.layers.1", "has the values of its like in model.layers.0",
    ]  # fmt: skip


def test_names_with_a_word_too_much(tmp_path, capsys):
    _, saved = model_of(tmp_path)
    other = {f"module.{name}" if "layers.1" in name else name: one for name, one in saved.items()}
    lines = after(capsys, tmp_path, other)
    assert [line.rpartition(": ")[2] for line in lines] == ["is there with 'module.' before its name"], lines


def test_a_load_that_loads_nothing(tmp_path, capsys):
    _, saved = model_of(tmp_path)
    torch.manual_seed(1)
    fresh = common.Language()
    shardproof.state(fresh, out=tmp_path / "init", step=0)
    fresh.load_state_dict({f"model.{name}": one for name, one in saved.items()}, strict=False)
    shardproof.state(fresh, out=tmp_path / "loaded")
    (line,) = said(capsys, tmp_path / "trainer", tmp_path / "loaded", "--earlier", tmp_path / "init", code=1)
    assert line.endswith(f"is that of {tmp_path / 'init'}, after step 0"), line
    (line,) = said(capsys, tmp_path / "trainer", tmp_path / "loaded", code=1)
    assert "or more: 16 of 21" in line, line


def test_a_quantised_tensor_is_scaled(tmp_path, capsys):
    _, saved = model_of(tmp_path)
    name = "model.layers.0.mlp.up_proj.weight"
    scale = saved[name].abs().max() / 448
    quantised = {name: (saved[name] / scale).to(torch.float8_e4m3fn), f"{name}_scale": scale}
    lines = after(capsys, tmp_path, saved | quantised)
    assert f"{name}: is float8_e4m3fn for float32, and scaled, by " in lines[0], lines


def test_values_that_were_rounded_on_the_way(tmp_path, capsys):
    _, saved = model_of(tmp_path)
    for narrow in (torch.bfloat16, torch.float16):
        lines = after(capsys, tmp_path, {name: one.to(narrow).float() for name, one in saved.items()})
        name = str(narrow).removeprefix("torch.")
        assert len(lines) == 1 and f": has values of {name} in float32, which cost at most " in lines[0], lines


def test_a_square_of_a_snapshot_that_is_transposed(tmp_path, capsys):
    model, _ = model_of(tmp_path)
    with torch.no_grad():
        model.model.layers[0].self_attn.o_proj.weight.copy_(model.model.layers[0].self_attn.o_proj.weight.t().clone())
        model.model.layers[0].mlp.down_proj.weight = nn.Parameter(
            model.model.layers[0].mlp.down_proj.weight.t().clone()
        )
    shardproof.state(model, out=tmp_path / "loaded")
    lines = said(capsys, tmp_path / "trainer", tmp_path / "loaded", code=1)
    assert lines[0].endswith("o_proj.weight: has an equal norm, and its values at other places, as transposed or "
                             "permuted, or with other signs")  # fmt: skip
    assert "down_proj.weight: is transposed, by its norm: has the shape [48, 32] for [32, 48]" in lines[1]
