"""``shardproof plan``: what it prints of a small model, its file, and bad input, of which each is one line."""

import json
import re

import pytest
from expecttest import assert_expected_inline

from shardproof.__main__ import main
from shardproof.planfile import load_plan
from shardproof.reports.plan_text import render_plan
from tests.harness.planned_models import objects_of_others_rest  # noqa: F401

MODELS = "tests.harness.planned_models"
SMALL = ["--model", f"{MODELS}:gpt", "--batch", "2", "--sequence", "16"]


@pytest.fixture(autouse=True)
def path_as_before(monkeypatch):
    # The command appends the current directory.
    monkeypatch.syspath_prepend(".")


@pytest.mark.parametrize(
    ("chosen", "units"), [([], "the root's own alone"), (["--unit", "Linear"], "1 of Linear")], ids=["none", "all"]
)
def test_root_has_a_unit_if_parameters_are_left_for_it(chosen, units, capsys):
    assert main(["plan", "--model", f"{MODELS}:one_layer", "--mesh", "2", "--impl", "reference", *chosen]) == 0
    assert capsys.readouterr().out.splitlines()[0].endswith(f" parameters; units: {units}")


def test_a_mesh_that_is_named_twice_is_planned_once(tmp_path, capsys):
    file = tmp_path / "plan.json"
    mesh = ["--mesh", "2", "--worlds", "2,4"]
    assert main(["plan", *SMALL, *mesh, "--impl", "reference", "--json", str(file)]) == 0
    assert [world.ranks for world in load_plan(file).worlds] == [2, 4]


def test_a_small_model(tmp_path, capsys):
    """Hosts of two ranks: shards within a host, replicas across. The file has what was printed."""
    file = tmp_path / "plan.json"
    mesh = ["--mesh", "2x2", "--node-size", "2", "--worlds", "8", "--optimizer", "momentum"]
    assert main(["plan", *SMALL, *mesh, "--impl", "reference", "--param-dtype", "bfloat16", "--json", str(file)]) == 0
    printed = capsys.readouterr().out
    assert printed == render_plan(load_plan(file))
    assert json.loads(file.read_text())["command"][:2] == ["shardproof", "plan"]
    tables, _, assumptions = printed.partition("\n- ")
    assert assumptions.count("\n- ") == 3
    assert_expected_inline(
        re.sub(r"reference \S+,", "reference VERSION,", tables),
        """\
tests.harness.planned_models:gpt: 21,760 parameters; units: 2 of GptBlock and the root's own
reference VERSION, mesh 2 (replicate) x 2 (shard): 4 ranks on 2 hosts
batch 2 x 16 tokens, parameters float32, gathered as bfloat16, reduced as float32, optimizer momentum, resharded after
  forward by default, activations kept

memory of rank 0 in KiB, when it holds most in each phase

                 between steps  forward  backward     step
shards                  42.500   42.500    42.500   42.500
gradients                0.000    0.000    16.688   42.500
optimizer               42.500   42.500    42.500   42.500
gathered                 0.000   46.688    46.688    0.000
whole gradients          0.000    0.000     4.125    0.000
reduction                0.000    0.000    33.375    0.000
activations              0.000   53.875    27.133    0.000
all                     85.000  185.562   213.008  127.500

the most of each kind in KiB, each at its own moment

                 between steps  forward  backward    step
shards                  42.500   42.500    42.500  42.500
gradients                0.000    0.000    42.500  42.500
optimizer               42.500   42.500    42.500  42.500
gathered                 0.000   46.688    46.688   0.000
whole gradients          0.000    0.000    20.812   0.000
reduction                0.000    0.000    33.375   0.000
activations              0.000   74.008    78.008   0.000

traffic of rank 0 in a step, in KiB

group          kind            dtype     collectives  gathered or reduced     sent  sent to other hosts
shard (2)      all_gather      bfloat16            5               75.875   37.938                0.000
shard (2)      reduce_scatter  float32             3               85.000   42.500                0.000
replicate (2)  all_reduce      float32             3               42.500   42.500               42.500
all                                               11                       122.938               42.500

closed formulas, in KiB

quantity                            formula           by the formula  simulated  difference
shards                              P x 4 B / S               42.500     42.500        none
gradients                           P x 4 B / S               42.500     42.500        none
optimizer state                     P x 4 B / S               42.500     42.500        none
gathers                             2 U - 1                        5          5        none
bytes of gathers                    (2 P - P0) x 2 B          75.875     75.875        none
reductions                          U                              3          3        none
bytes of reductions                 P x 4 B                   85.000     85.000        none
all-reduces over replicas           U                              3          3        none
bytes of all-reduces over replicas  P x 4 B / S               42.500     42.500        none

world sizes, in KiB

ranks                      4        8
mesh                     2x2      4x2
hosts                      2        4
shards                42.500   42.500
gradients             16.688   16.688
optimizer             42.500   42.500
gathered              46.688   46.688
whole gradients        4.125    4.125
reduction             33.375   33.375
activations           27.133   27.133
peak                 213.008  213.008
sent                 122.938  144.188
sent to other hosts   42.500   63.750
collectives               11       11
""",
    )


RESHARD = ["--reshard-after-forward"]
BAD = {
    "no mesh": (["--mesh", "64y8"], "--mesh '64y8' is not a mesh: give ranks (512), or replicas x shards (64x8)"),
    "dimensions": (["--mesh", "2x2x2"], "--mesh '2x2x2' has 3 dimensions: give ranks (512), or replicas x shards"),
    "no ranks": (["--mesh", "4x0"], "--mesh '4x0' has no ranks: sizes begin at 1"),
    "hosts": (["--mesh", "12"], "a world of 12 ranks does not divide into hosts of 8 (--node-size)"),
    "worlds": (["--mesh", "2x8", "--worlds", "8,12"], "a world of 12 ranks does not divide into replicas of 8 shards"),
    "no world": (["--mesh", "8", "--worlds", "8,x"], "--worlds '8,x': 'x' is no number of ranks"),
    "rank": (["--rank", "4"], "--rank 4: a world of 4 ranks has 0 to 3"),
    "shape": (["--model", "llama:9b"], "no shape is called 'llama:9b'; known are gpt:0.1b, gpt:0.4b, "),
    "size": (["--layers", "2"], "gpt': --layers and --dim are for known shapes; this model has its own"),
    "width": (["--model", "llama:8b", "--dim", "9"], "--dim 9 does not divide into heads of an even size of at least"),
    "no name": (["--model", "llama"], "--model 'llama': give module:function, or one of gpt:0.1b, "),
    "module": (["--model", "no.module:build"], "'no.module' does not import: ModuleNotFoundError: "),
    "function": (["--model", f"{MODELS}:nothing"], f"module '{MODELS}' has no 'nothing'"),
    "constant": (["--model", f"{MODELS}:NO_FUNCTION"], ", not a function that returns a model"),
    "arguments": (["--model", f"{MODELS}:of_data"], "of_data(path) needs arguments; give a function "),
    "file": (["--model", f"{MODELS}:of_a_file"], "cannot be built without data: FileNotFoundError: "),
    "values": (["--model", f"{MODELS}:of_values"], "it reads values of tensors, and a simulation has "),
    "no model": (["--model", f"{MODELS}:no_model"], "returned str: return a torch.nn.Module, or (module, "),
    "empty": (["--model", f"{MODELS}:no_parameters"], "the model has no parameters: there is nothing"),
    "forward": (["--model", f"{MODELS}:Reads"], "cannot be simulated under torch.fully_shard: it "),
    "logits": (["--model", f"{MODELS}:Flat"], "the model returned () for tokens (batch, sequence)"),
    "unit": (["--unit", "Layer"], "--unit Layer: no module with parameters has this class or name; "),
    "name": (["--impl", "torch.fsdp3"], "unknown implementation 'torch.fsdp3': did you mean torch.fsdp"),
    "ddp": (["--impl", "ddp"], "implementation 'ddp' cannot be simulated: RuntimeError: The tensor has"),
    "capability": (["--impl", "torch.fsdp", *RESHARD, "2"], "torch.fsdp lacks the capability reshard-to-size: --resh"),
    "param dtype": (
        ["--impl", "torch.zero_optimizer", "--param-dtype", "bfloat16"],
        "torch.zero_optimizer lacks the capability precision.param_dtype: --param-dtype cannot be planned",
    ),
    "reduce dtype": (
        ["--impl", "torch.zero_optimizer", "--reduce-dtype", "bfloat16"],
        "torch.zero_optimizer lacks the capability precision.reduce_dtype: --reduce-dtype cannot be planned",
    ),
    "groups": (
        [*RESHARD, "3"],
        "cannot be simulated under torch.fully_shard: ValueError: If passing reshard_after_for",
    ),
    "folder": (["--json", "no/such/plan.json"], "--json no/such/plan.json: there is no folder no/such"),
}


@pytest.mark.parametrize("given, said", BAD.values(), ids=BAD)
def test_bad_input_is_one_line(given, said, capsys):
    assert main(["plan", *SMALL, "--mesh", "4", *given]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("shardproof: ") and said in printed.err and printed.err.count("\n") == 1


@pytest.mark.parametrize("given", [["--batch", "0"], ["--rank", "-1"], ["--reshard-after-forward", "maybe"]])
def test_an_option_of_another_kind_is_refused(given, capsys):
    with pytest.raises(SystemExit) as exit:
        main(["plan", *SMALL, "--mesh", "4", *given])
    assert exit.value.code == 2
    assert f"error: argument {given[0]}: " in capsys.readouterr().err


def test_a_torch_that_simulation_does_not_know(monkeypatch, capsys):
    from shardproof.commands import plan
    from shardproof.harness.tensors import private

    complaint = private.complaint_about("torch._subclasses.fake_tensor.FakeTensor")

    def fails(error):
        monkeypatch.setattr(plan, "_made", lambda options, command: (_ for _ in ()).throw(error))
        return plan.plan(["--model", "gpt:0.1b", "--mesh", "2"])

    assert fails(private.MissingName(complaint)) == 2
    assert capsys.readouterr().err == f"shardproof: {complaint}\n"
    with pytest.raises(RuntimeError, match="of another kind"):
        fails(RuntimeError("of another kind"))


def test_a_known_shape_that_is_cut_down(capsys):
    assert main(["plan", "--model", "llama:8b", "--layers", "2", "--dim", "64", "--mesh", "2"]) == 0
    said = "llama:8b (Llama 3 8B, cut to 2 layers of width 64): "
    assert capsys.readouterr().out.startswith(said)
