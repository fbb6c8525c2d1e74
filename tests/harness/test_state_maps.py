"""Names by tables: of libraries, of files, by functions; rows of heads in another order, and fused tensors of files."""

import pytest
import torch
from safetensors.torch import save_file

import shardproof
from shardproof.__main__ import main
from shardproof.door import BadFile
from shardproof.harness.states import maps
from tests.errors import error_of

HEADS, SIZE, WIDTH = 4, 8, 32

#: A llama of one layer, by the names of torchtitan, and their shapes.
TITAN = {
    "tok_embeddings.weight": (50, WIDTH), "layers.0.attention.wq.weight": (HEADS * SIZE, WIDTH),
    "layers.0.attention.wk.weight": (2 * SIZE, WIDTH), "layers.0.attention.wv.weight": (2 * SIZE, WIDTH),
    "layers.0.attention.wo.weight": (WIDTH, HEADS * SIZE), "layers.0.feed_forward.w1.weight": (48, WIDTH),
    "layers.0.feed_forward.w2.weight": (WIDTH, 48), "layers.0.feed_forward.w3.weight": (48, WIDTH),
    "layers.0.attention_norm.weight": (WIDTH,), "layers.0.ffn_norm.weight": (WIDTH,), "norm.weight": (WIDTH,),
    "output.weight": (50, WIDTH),
}  # fmt: skip
NAMES = dict(line.split(" -> ") for line in maps.TABLES["hf-names"].strip().splitlines())


def titan():
    torch.manual_seed(0)
    return {name: torch.randn(shape) for name, shape in TITAN.items()}


def permuted(rows):
    """Rows of heads as converters to Hugging Face's names order them."""
    return rows.view(-1, SIZE // 2, 2, rows.shape[1]).transpose(1, 2).reshape(rows.shape)


def hugging_face(state, *, is_permuted=True):
    new = {}
    for name, old in NAMES.items():
        one = state[old.replace("*", "0")]
        is_rotary = is_permuted and old.rpartition(".attention.")[2] in ("wq.weight", "wk.weight")
        new[name.replace("*", "0")] = permuted(one) if is_rotary else one
    return new


def module(state):
    """A model whose parameters have these names."""
    root = torch.nn.Module()
    for name, one in state.items():
        *path, last = name.split(".")
        inner = root
        for word in path:
            if word not in inner._modules:
                inner.add_module(word, torch.nn.Module())
            inner = inner._modules[word]
        inner.register_parameter(last, torch.nn.Parameter(one))
    return root


def written(folder, name, state, form):
    if form == "live":
        shardproof.state(module(state), out=folder / name)
        return folder / name
    save_file({key: one.contiguous() for key, one in state.items()}, folder / f"{name}.safetensors")
    return folder / f"{name}.safetensors"


def said(capsys, *arguments, code):
    assert main(["state", *map(str, arguments)]) == code, capsys.readouterr()
    return capsys.readouterr().out.partition("\n\n")[2].strip().splitlines()


@pytest.mark.parametrize("forms", ["live file", "file live", "file file", "live live"])
@pytest.mark.parametrize("is_back", [False, True])
def test_hugging_face_and_torchtitan(forms, is_back, tmp_path, capsys):
    a, b = titan(), hugging_face(titan())
    paths = [written(tmp_path, name, state, form) for name, state, form in
             zip("ab", (b, a) if is_back else (a, b), forms.split(), strict=True)]  # fmt: skip
    assert said(capsys, *paths, "--map", "hf-llama", code=0) == ["nothing differs"]


def test_rows_of_heads_in_the_same_order_are_named(tmp_path, capsys):
    a = written(tmp_path, "a", titan(), "live")
    b = written(tmp_path, "b", hugging_face(titan(), is_permuted=False), "file")
    (line,) = said(capsys, a, b, "--map", "hf-llama", code=1)
    assert line == (
        "model: layers.0.attention.wq.weight, layers.0.attention.wk.weight: has the rows of each head in the same "
        "order, which rotary embeddings of these names have otherwise"
    )
    assert said(capsys, a, b, "--map", "hf-names", code=0) == ["nothing differs"]


def test_rows_of_heads_in_the_other_order_are_named(tmp_path, capsys):
    a = written(tmp_path, "a", titan(), "live")
    lines = said(capsys, a, written(tmp_path, "b", hugging_face(titan()), "file"), "--map", "hf-names", code=1)
    assert [line.rpartition(": ")[2] for line in lines] == [
        "has the rows of each head of 8 in the other order of rotary embeddings"
    ]
    assert "layers.0.attention.wq.weight, layers.0.attention.wk.weight: " in lines[0]


def test_another_difference_is_still_named(tmp_path, capsys):
    a, b = titan(), hugging_face(titan())
    b["model.layers.0.self_attn.q_proj.weight"] = b["model.layers.0.self_attn.q_proj.weight"].clone()
    b["model.layers.0.self_attn.q_proj.weight"][:, 0] += 0.5
    b["model.layers.0.self_attn.k_proj.weight"] = b["model.layers.0.self_attn.k_proj.weight"].bfloat16()
    lines = said(
        capsys, written(tmp_path, "a", a, "live"), written(tmp_path, "b", b, "file"), "--map", "hf-llama", code=1
    )
    assert len(lines) == 2, lines
    assert lines[0].startswith("model: layers.0.attention.wq.weight differs, by ")
    assert lines[1].startswith("model: layers.0.attention.wk.weight: is bfloat16 for float32, which cost at most ")


def fused(state):
    """As an engine has a model by the names of Hugging Face."""
    found, before = dict(state), "model.layers.0."
    heads = [found.pop(f"{before}self_attn.{one}_proj.weight") for one in "qkv"]
    found[f"{before}self_attn.qkv_proj.weight"] = torch.cat(heads)
    gates = [found.pop(f"{before}mlp.{one}_proj.weight") for one in ("gate", "up")]
    found[f"{before}mlp.gate_up_proj.weight"] = torch.cat(gates)
    return found


def test_a_fused_file_is_cut(tmp_path, capsys):
    state = hugging_face(titan())
    a, other = written(tmp_path, "a", state, "live"), fused(state)
    assert said(capsys, a, written(tmp_path, "b", other, "file"), "--map", "vllm", code=0) == ["nothing differs"]
    other["model.layers.0.mlp.gate_up_proj.weight"][:48] = 0
    lines = said(capsys, a, written(tmp_path, "c", other, "file"), "--map", "vllm", code=1)
    assert lines == ["model: model.layers.0.mlp.gate_proj.weight: is all zeros"]
    live = written(tmp_path, "d", other, "live")
    assert main(["state", str(a), str(live), "--map", "vllm"]) == 2
    assert "a snapshot has no values to cut: write it with views=shardproof.views(" in capsys.readouterr().err


def test_a_table_of_a_file(tmp_path, capsys):
    torch.manual_seed(0)
    parts = {f"layers.{number}.{one}.weight": torch.randn(6, 8) for number in range(2) for one in "qkv"}
    conv = {f"h.{number}.c_attn.weight": torch.cat([parts[f"layers.{number}.{one}.weight"] for one in "qkv"]).t()
            for number in range(2)}  # fmt: skip
    table = tmp_path / "table.txt"
    table.write_text(
        "## GPT-2\nh.*.c_attn.weight -> layers.*.q.weight + layers.*.k.weight + layers.*.v.weight (transposed)\n"
    )
    a, b = written(tmp_path, "a", parts, "live"), written(tmp_path, "b", conv, "file")
    assert said(capsys, a, b, "--map", table, code=0) == ["nothing differs"]


def test_a_function(tmp_path, capsys):
    state = titan()
    (tmp_path / "own.py").write_text("def name(text):\n    return text.removesuffix('_x') if '_x' in text else None\n")
    b = {f"{name}_x" if "w1" in name else name: one for name, one in state.items()}
    paths = written(tmp_path, "a", state, "live"), written(tmp_path, "b", b, "file")
    assert said(capsys, *paths, "--map", f"{tmp_path}/own.py:name", code=0) == ["nothing differs"]


@pytest.mark.parametrize(
    ("table", "told"),
    [
        ("no-such", "no file, and no table of this name; known: hf-llama, "),
        ("gone.py:name", "no such file"),
        ("a b", "'a b': expected OLD -> NEW"),
        ("a.* -> b.*.*", "the new name has more words to fill in than the old one"),
        ("a -> b (upside)", "expected OLD -> NEW"),
    ],
)
def test_a_table_that_is_none_is_one_line(table, told, tmp_path):
    if " " in table:
        (tmp_path / "table").write_text(table)
        table = str(tmp_path / "table")
    text = error_of(maps.read, table, kind=BadFile)
    assert text.startswith("--map ") and told in text and "\n" not in text, text


PLACES = [
    # heads of queries, of keys; ranks: rows of queries and of keys that a rank has
    ((8, 8), 2, [((0, 4), (0, 4)), ((4, 8), (4, 8))]),
    ((8, 4), 4, [((2 * n, 2 * n + 2), (n, n + 1)) for n in range(4)]),
    ((8, 2), 4, [((2 * n, 2 * n + 2), (n // 2, n // 2 + 1)) for n in range(4)]),
    ((8, 1), 2, [((0, 4), (0, 1)), ((4, 8), (0, 1))]),
]


@pytest.mark.parametrize(("heads", "ranks", "places"), PLACES)
def test_heads_of_a_rank(heads, ranks, places):
    shapes = {"q_proj.weight": (heads[0], 3), "k_proj.weight": (heads[1], 3), "v_proj.weight": (heads[1], 3)}
    rule = maps._rule("**qkv_proj.weight -> **q_proj.weight + **k_proj.weight + **v_proj.weight", "x")
    for rank, (queries, keys) in enumerate(places):
        rows = queries[1] - queries[0] + 2 * (keys[1] - keys[0])
        found = maps.slices(rule, "qkv_proj.weight", torch.zeros(rows, 3), shapes, maps.Parallel(rank, ranks))
        spans = [one.box.dims[0][0] if one.box.dims else (0, one.box.shape[0]) for one in found]
        assert spans == [queries, keys, keys]
