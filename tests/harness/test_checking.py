"""What a check says of a step: its judge, its one-line refusals, and the options of its command.

Ranks are trained one after the other in a world of one, so that nothing is reduced between them; a step of the tests
gives each what a reduction would have given, or what a mistake makes of it.
"""

import dataclasses
import sys
import types

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from shardproof.commands.check import _say
from shardproof.commands.check import check as command
from shardproof.harness.judging import numerics
from shardproof.harness.judging.finding import Divergence, Stage
from shardproof.harness.tensors.fingerprints import Box
from shardproof.harness.tensors.layouts import Layout
from shardproof.harness.training import checking, judge
from shardproof.harness.training.initial import compare_initial
from shardproof.harness.training.reference import Worker, file_of, home_of
from shardproof.harness.training.request import NotCheckable, Request, functions_of, parse_mesh
from shardproof.harness.training.starting import name_of
from shardproof.harness.training.trained_model import KeepDouble, TrainedModel, digest_of, plain_root, save
from shardproof.harness.watching.observation import of_parameter
from shardproof.runfile import Verdict
from tests.errors import error_of

HERE = "tests.harness.test_checking"


# A training whose ranks are simulated: `mean` averages gradients over them, because it trains on all their data itself.


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.hidden, self.head = nn.Embedding(16, 8), nn.Linear(8, 8), nn.Linear(8, 16)

    def forward(self, tokens):
        return self.head(torch.tanh(self.hidden(self.embed(tokens))))


def model():
    return Net()


class Routed(Net):
    def forward(self, tokens):
        hidden = torch.tanh(self.hidden(self.embed(tokens)))
        chosen = hidden.topk(2)[1]
        return self.head(torch.zeros_like(hidden).scatter(-1, chosen, hidden.gather(-1, chosen)))


def alone(model, mesh):
    return model


def turned(model, mesh):
    with torch.no_grad():
        model.hidden.weight.copy_(model.hidden.weight.t().clone())
    return model


def narrowed(model, mesh):
    model.head.to(torch.bfloat16)
    return model


def data(step, rank):
    made = torch.Generator().manual_seed(10 * step + rank)
    tokens = torch.randint(16, (2, 8), generator=made)
    labels = tokens.clone()
    labels[:, : 2 * rank + 2] = -100
    return [(tokens, labels), (tokens.flip(0), labels.flip(0))]


def sums(model, microbatches, by):
    for tokens, labels in microbatches:
        losses = F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")
        (losses / by).backward()


RANK = [0]  # which rank trains; None is the reference
TOKENS = sum(int((labels >= 0).sum()) for rank in range(2) for _, labels in data(0, rank))


def right(model, optimizer, microbatches, mesh):
    """Train as a rank whose gradients are reduced: those of the other are computed on a copy, which nobody sees."""
    sums(model, microbatches, TOKENS)
    if RANK[0] is not None:
        with torch.random.fork_rng():
            other = Net()
        other.load_state_dict(model.state_dict())
        losses = [F.cross_entropy(other(tokens).flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")
                  for tokens, labels in data(0, 1 - RANK[0])]  # fmt: skip
        gradients = torch.autograd.grad(sum(losses) / TOKENS, list(other.parameters()))
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            parameter.grad += gradient
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    stepped(optimizer)


def stepped(optimizer):
    optimizer.step()
    optimizer.zero_grad()


def unreduced(model, optimizer, microbatches, mesh):
    sums(model, microbatches, TOKENS)
    stepped(optimizer)


def own_tokens(model, optimizer, microbatches, mesh):
    sums(model, microbatches, sum(int((labels >= 0).sum()) for _, labels in microbatches))
    stepped(optimizer)


def halves(model):
    return torch.optim.SGD(model.parameters(), lr=0.5)


def means(model, optimizer, microbatches, mesh):
    for tokens, labels in microbatches:
        mean = F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten(), ignore_index=-100)
        (mean * 4 / len(microbatches)).backward()
    stepped(optimizer)


def equal_data(step, rank):
    """Equal on all ranks, so that what one rank computes is what all would."""
    (tokens, labels), (others, more) = data(0, 0)
    more[:, :6] = -100
    return [(tokens, labels), (others, more)]


def two_only(model, optimizer, microbatches, mesh):
    unreduced(model, optimizer, microbatches[:2], mesh)


def needs_method(model, optimizer, microbatches, mesh):
    if RANK[0] is None:
        model.my_sync()
    unreduced(model, optimizer, microbatches, mesh)


def never_steps(model, optimizer, microbatches, mesh):
    sums(model, microbatches, TOKENS)


CALLS = [0]


def hand_clipped(model, optimizer, microbatches, mesh):
    """Clips by the root of the sum of squares of both ranks, which read equal data and hold the same elements."""
    sums(model, microbatches, 8.0 if RANK[0] is not None else 16.0)
    scale = 0.01 / torch.cat([one.grad.flatten() for one in model.parameters()]).norm()
    for parameter in model.parameters():
        parameter.grad *= scale if RANK[0] is None else scale / 2**0.5
    stepped(optimizer)


def scaled(factor):
    """Makes a step that scales gradients by a constant on the ranks, which read equal data, and not on one."""

    def step(model, optimizer, microbatches, mesh):
        sums(model, microbatches, 8.0 if RANK[0] is not None else 16.0)
        for parameter in model.parameters():
            parameter.grad *= factor if RANK[0] is not None else 1.0
        stepped(optimizer)

    return step


halved, other_factor = scaled(0.5), scaled(0.3)


def other_data(step, rank):
    CALLS[0] += 1
    return data(step, CALLS[0])


@pytest.fixture(autouse=True)
def detached(monkeypatch):
    """Detach the trained models of references, which in a run live as long as their process."""
    made, start = [], TrainedModel.__init__

    def remember(self, *args, **kwargs):
        made.append(self)
        start(self, *args, **kwargs)

    monkeypatch.setattr(TrainedModel, "__init__", remember)
    yield
    for one in made:
        if hasattr(one, "watch"):
            one.watch.detach()


@pytest.fixture
def world():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def asked(**fields):
    """A request of two ranks."""
    given = {"model": f"{HERE}:model", "parallelize": f"{HERE}:alone", "mesh": (("dp", 2),), "data_dims": ("dp",)}
    return Request(**given | fields)


def trained_model(request, what="run"):
    mesh = dist.init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
    return TrainedModel(request, functions_of(request), what, mesh, torch.device("cpu"))


def worker(folder, request):
    return Worker(request, {"folder": str(folder), "explains": False, "device": "cpu", "backend": "gloo"})


def answer(folder, *, seen=None, **fields):
    """What the reference says of the first step of two ranks."""
    request = asked(**{"data": f"{HERE}:data", "step": f"{HERE}:right", "steps": 1} | fields)
    for rank in range(2):
        RANK[0] = rank
        trained = trained_model(request)
        save(file_of(str(folder), rank, -1), trained.state())
        microbatches = trained.data(0, rank)
        one = trained.step(microbatches)
        if seen is not None:
            seen(rank, one)
        more = {"data": [digest_of(batch) for batch in microbatches], "forwards": one.forwards, "norm_types": [2.0]}
        more["is_fully_sharded"] = one.is_fully_sharded
        save(file_of(str(folder), rank, 0, "events"), one.events, **more)
        save(file_of(str(folder), rank, 0), one.state)
        trained.close()
    RANK[0] = None
    return worker(folder, request).step(0)


def test_a_right_step_has_no_finding_and_one_factor(world, tmp_path):
    said = answer(tmp_path)
    assert said["found"] == [] and said["lines"] == []
    assert not any("counts alike" in text for text in said["notes"])
    assert said["factor"] == 1 and said["loss_factor"] == 1 and said["compared"] > 50
    assert {one["stage"] for one in said["measured"]} >= {"output", "loss", "clipped gradient", "total norm",
                                                         "parameter after step", "optimizer state"}  # fmt: skip


def test_gradients_that_are_not_reduced_are_named(world, tmp_path):
    said = answer(tmp_path, step=f"{HERE}:unreduced")
    assert said["found"][0]["stage"] == "GRADIENT" and said["signature"] == "S2"
    assert "each gradient of every rank is this rank's own gradient" in said["lines"][0]


def test_means_over_own_tokens_are_named(world, tmp_path):
    said = answer(tmp_path, step=f"{HERE}:own_tokens")
    assert said["found"][0]["stage"] == "LOSS" and said["signature"] == "S5"
    line = "each rank counts alike [S5]: the sum of its losses is divided by its own tokens (24, 16)"
    assert line in said["lines"][1]


def test_means_of_microbatches_are_noted(world, tmp_path):
    said = answer(tmp_path, step=f"{HERE}:means", data=f"{HERE}:equal_data")
    line = "each microbatch counts alike [S5], whatever the number of its tokens (12, 4, 12, 4)"
    assert said["found"] == [] and any(text.startswith(line) for text in said["notes"])


def test_what_parallelize_changes_on_one_rank_too_is_said(world, tmp_path):
    said = answer(tmp_path, parallelize=f"{HERE}:turned")
    assert not [text for text in answer(tmp_path)["notes"] if "parallelize()" in text]
    (text,) = [text for text in said["notes"] if "parallelize()" in text]
    assert text.endswith("change initial values (1 of 5 parameters: 'hidden.weight'; 'hidden.weight': the transpose)")
    (text,) = worker(tmp_path, asked(parallelize=f"{HERE}:narrowed"))._notes
    assert text.endswith("make parameters bfloat16, which model() has in float32: 'head.weight', 'head.bias'")


def test_parameters_that_are_loaded_as_their_transpose_are_named(world):
    starts = []
    for way in ("alone", "turned"):
        trained = trained_model(asked(parallelize=f"{HERE}:{way}"))
        starts.append(trained.state())
        trained.close()
    outcome = compare_initial([starts[1], starts[1]], starts[0])
    assert outcome.lines == ["'hidden.weight': the transpose of the reference's"]
    assert {one.location.rank for one in outcome.found} == {0, 1}


@pytest.mark.parametrize(
    "held, line",
    [
        ((1, 0, 1, 0), "shards are in another order of ranks than that of the mesh"),
        ((0, 0, 0, 0), "some shards are on several ranks, and others on none"),
        ((1, 1, 1, 1), "some shards are on several ranks, and others on none"),
    ],
)
def test_shards_on_other_ranks_are_told_by_who_holds_them(held, line):
    """Two replicas of two shards; of each rank, the shard that it holds in place of its own."""
    whole = torch.arange(8.0).view(4, 2)

    def seen(box, tensor):
        one = of_parameter(Stage.PARAMETER, "weight", Layout(box), tensor)
        return {one.key: one}

    boxes = [Box((4, 2), (((2 * number, 2 * number + 2),), ((0, 2),))) for number in range(2)]
    starts = [seen(boxes[rank % 2], whole[2 * part : 2 * part + 2]) for rank, part in enumerate(held)]
    outcome = compare_initial(starts, seen(Box((4, 2)), whole))
    assert outcome.signature == "S12" and outcome.lines[1] == line
    assert "has the shard of rank" in outcome.lines[0]


def test_a_norm_that_counts_replicas_is_told_from_the_gradients_that_it_scales(world, tmp_path):
    said = answer(tmp_path, step=f"{HERE}:hand_clipped", data=f"{HERE}:equal_data")
    assert said["found"][0]["stage"] == "CLIPPED_GRADIENT" and said["signature"] == "S6"
    assert said["lines"] == [
        "gradients agree after backward and are 0.7071 x the reference's at the optimizer's step on every rank: they "
        "are scaled by another norm",
        "it sums the shards of all ranks of dp, and counts an element once for each rank that has it [S6]",
    ]


@pytest.mark.parametrize(
    "step, told",
    [
        ("halved", "0.5 x the reference's at the optimizer's step on every rank: user code multiplies them by 1 / the "
         "size of dp x the reference's multiplier"),
        ("other_factor", "0.3 x the reference's at the optimizer's step on every rank: --off clipping shows whether "
         "clip_grad_norm_() scales them"),
    ],
)  # fmt: skip
def test_a_scale_that_is_no_norm_is_none(world, tmp_path, step, told):
    said = answer(tmp_path, step=f"{HERE}:{step}", data=f"{HERE}:equal_data")
    assert said["found"][0]["stage"] == "CLIPPED_GRADIENT" and said["signature"] == ""
    assert said["lines"] == [f"gradients agree after backward and are {told}"]


def test_a_wrong_element_of_the_optimizers_step_is_found(world, tmp_path):
    def spoil(rank, one):
        for seen in one.state.values():
            if rank == 1 and seen.stage.value == "parameter after step" and seen.parameter == "hidden.weight":
                seen.value[3, 2] += 1e-3

    said = answer(tmp_path, seen=spoil)
    (found,) = said["found"]
    assert (found["stage"], found["name"], found["rank"], found["element"]) == ("PARAMETER", "hidden.weight", 1, (3, 2))


@pytest.mark.parametrize("oracle, stages", [("float64", {"TOTAL_NORM"}), ("float32", set()), ("none", set())])
def test_an_oracle_that_is_no_finer_says_nothing_of_the_rounding_of_a_norm(world, tmp_path, oracle, stages):
    def spoil(rank, one):
        for seen in one.events.values():
            if seen.stage.value == "total norm":
                seen.value.mul_(1 + 30 * torch.finfo(torch.float32).eps)

    said = answer(tmp_path, seen=spoil, oracle=oracle)
    assert {one["stage"] for one in said["found"]} == stages
    assert said["lines"] == []  # no sum over ranks is that near


def test_what_the_baseline_cannot_compute_judges_nothing_unless_it_is_most(world, tmp_path, monkeypatch):
    far = [8]  # elements of the tensors of which the baseline is far off: the hidden layer's bias

    def measured(sharded, *others, magnitude):
        found = distance(sharded, *others, magnitude=magnitude)
        return dataclasses.replace(found, baseline_ulps=1e6) if sharded.numel() in far else found

    distance = judge.distance
    monkeypatch.setattr(judge, "distance", measured)
    said = answer(tmp_path, step=f"{HERE}:unreduced", data=f"{HERE}:equal_data", optimizer=f"{HERE}:halves")
    assert "hidden.bias" not in {one["name"] for one in said["found"]}
    assert "ill-conditioned: gradient of 'hidden.bias'" in said["notes"]
    far[:] = [8, 16, 64, 128]
    said = answer(tmp_path)
    assert said["found"][0]["stage"] == "GRADIENT"
    assert "on one rank, the model of parallelize() is 1e+06 ulps off that of model()" in said["found"][0]["text"]


@pytest.mark.parametrize("ulps, stages", [(0.0, {"ROUTING"}), (float("inf"), set())])
def test_other_choices_judge_nothing_after_them_unless_they_are_wrong(world, tmp_path, monkeypatch, ulps, stages):
    def spoil(rank, one):
        for seen in one.events.values():
            if seen.stage.value == "routing" and rank == 1:
                seen.value[0, 3, 0] = next(i for i in range(8) if i not in seen.value[0, 3])

    monkeypatch.setattr(numerics, "ROUTING_ULPS", ulps)
    said = answer(tmp_path, seen=spoil, model=f"{HERE}:Routed", step=f"{HERE}:unreduced")
    assert {one["stage"] for one in said["found"]} == stages
    notes = [text for text in said["notes"] if text.startswith("routing: 1 of 16 choices differ, by a margin of ")]
    assert len(notes) == (not stages)


REFUSED = {
    "two_only": "check: step() used 2 of the 4 microbatches of the reference: it must train on all of them",
    "needs_method": "check: step() raised in the reference (1 rank, 4 microbatches): AttributeError: 'Net' object has "
    "no attribute 'my_sync'",
    "never_steps": "check: step() made 0 optimizer steps that count: it must make one",
}


@pytest.mark.parametrize("step", REFUSED)
def test_a_step_that_cannot_be_checked_is_refused(world, tmp_path, step):
    assert error_of(answer, tmp_path, step=f"{HERE}:{step}", kind=NotCheckable).startswith(REFUSED[step])


def test_data_that_change_are_refused(world, tmp_path):
    with pytest.raises(NotCheckable, match=r"^check: data\(step=0, rank=0\) returned other values in the reference"):
        answer(tmp_path, data=f"{HERE}:other_data")


# Before anything is trained.

OWN = ("--model", f"{HERE}:model", "--parallelize", f"{HERE}:alone", "--mesh", "2", "--device", "cpu")
LINES = [
    (("--mesh", "2y2"), "--mesh '2y2' is not a mesh: give ranks (512), or replicas x shards (64x8), or names ("),
    (("--mesh", "dp=2,tp"), "--mesh 'dp=2,tp' is not a mesh"),
    (("--mesh", "dp=2,dp=2"), "has two dimensions of one name"),
    (("--mesh", "dp=2,tp=2", "--data-dims", "dpp"), "--data-dims dpp: no mesh dimension of this name; known: dp, tp"),
    (
        ("--mesh", "x=2"),
        "--data-dims: name the dimensions of x over which data differ; if they differ over none, give one of size",
    ),
    (("--model", f"{HERE}:sums"), "sums(model, microbatches, by) needs arguments"),
    (("--model", "no_such:model"), "'no_such' does not import"),
    (("--model", "no_such.py:model"), "there is no file"),
    (("--step", f"{HERE}:nothing"), "has no function 'nothing'"),
    (("--step", f"{HERE}:data"), "it is called as data(model, optimizer, microbatches, mesh): too many"),
    (("--step", "step"), "give module:function or file.py:function"),
    (("--impl", "torch.fuly_shard"), "did you mean torch.fully_shard"),
    (("--device", "gpu"), "--device gpu: torch has no device type of this name"),
    (("--impl", "own", "--parallelize", ""), "--impl own needs --parallelize module:function"),
    (("--axis", "tp=1"), "parallelize() has no keyword argument 'tp'; it has none"),
    (("--param-dtype", "bfloat16"), "parallelize() has no keyword argument 'param_dtype'"),
    (("--impl", "ddp", "--param-dtype", "bfloat16"), "ddp has no --param-dtype; --dtype bfloat16"),
    (
        ("--impl", "torch.zero_optimizer", "--reduce-dtype", "bfloat16"),
        "torch.zero_optimizer lacks the capability precision.reduce_dtype, for --reduce-dtype",
    ),
    (("--impl", "ddp", "--mesh", "dp=2,tp=2"), "ddp does not shard over 'tp': give --parallelize"),
    (("--layers", "2"), "--layers and --dim are for known shapes"),
    (("--keep", f"{__file__}/values"), "Not a directory: give a folder that can be written"),
]


@pytest.mark.parametrize("options, text", LINES)
def test_an_option_that_is_not_valid_is_one_line(options, text, monkeypatch, capsys):
    monkeypatch.setattr(sys, "path", [*sys.path])
    assert command([*OWN, *options]) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.count("\n") == 1
    assert said.err.startswith("shardproof check: ") and text in said.err, said.err


@pytest.mark.parametrize(
    ("stage", "explanation", "is_told"),
    [("output", None, True), ("output", "said", False), ("total norm", None, False)],
)
def test_how_a_module_is_named_is_told_where_an_output_diverges(stage, explanation, is_told, capsys):
    record = types.SimpleNamespace(own=None, verdict=Verdict.FAIL, missing=[], explanation=explanation, reproduction="",
                                   failure=types.SimpleNamespace(text="text", stage=stage))  # fmt: skip
    assert _say(Request(model="m", mesh=(("dp", 2),)), record) == 1
    assert ("--explain names the first module" in capsys.readouterr().out) is is_told


def test_names_of_meshes():
    assert parse_mesh("4") == (("dp", 4),)
    assert parse_mesh("2x4") == (("replicate", 2), ("shard", 4))
    request = Request(model="m", mesh=parse_mesh("dp=2,tp=3"), data_dims=("dp",), axes={"a": 1})
    assert Request.loads(request.dumps()) == request and request.size == 6
    assert [request.data_rank(rank) for rank in range(6)] == [0, 0, 0, 1, 1, 1]


def test_ranks_with_other_parameters_and_random_models_are_refused():
    line = r"^check: parallelize\(\) gave 'a' \(8, 16\) on rank 0 and \(16, 16\) on rank 1"
    with pytest.raises(Divergence, match=line):
        checking._refuse([{"a": (8, 16)}, {"a": (16, 16)}], ["", ""])
    dropout = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.1))
    assert checking._random(dropout) == "draws random numbers in forward (dropout in '1'): eval(), or p=0"
    assert not checking._random(dropout.eval())
    assert "statistics of a batch in '0'" in checking._random(nn.Sequential(nn.BatchNorm1d(2)))


# The reference.


def test_the_oracle_stays_in_float64_and_takes_what_wrappers_have():
    net = Net().double()
    plain_root(net)
    net.set_requires_gradient_sync(False)
    with net.no_sync(), KeepDouble():
        out = net.module(torch.ones(1, 2, dtype=torch.int64)).float().to(torch.bfloat16).sum(dtype=torch.float32)
    assert out.dtype == torch.float64 and len(list(net.modules())) == 4
    assert net.clip_grad_norm_(1.0) == 0


def test_a_reference_is_kept_where_it_fits():
    request, there = Request(model="m", mesh=(("dp", 2),)), torch.device("cuda", 1)
    assert home_of(request, 10**9, 90 << 30, there) == there
    assert home_of(request, 10**9, 64 << 30, there) == torch.device("cpu")
    given = "--oracle float32 (29.8), --oracle none (14.9), fewer layers"
    line = f"check: the reference needs 44.7 GiB (1 B parameters, float64), 31 GiB are free: {given}"
    assert error_of(home_of, request, 10**9, 31 << 30, there, kind=NotCheckable) == line


def test_the_optimizer_of_the_reference_takes_the_gradients_of_the_run(world):
    request = asked(data=f"{HERE}:data", step=f"{HERE}:unreduced", optimizer=f"{HERE}:halves")
    trained = trained_model(request, "oracle")
    before = {name: parameter.detach().clone() for name, parameter in trained.model.named_parameters()}
    trained.given = {name: torch.ones(value.shape) for name, value in before.items()}
    trained.step(trained.cast(trained.data(0, 0)))
    assert all(torch.equal(after, before[name] - 0.5) for name, after in trained.model.named_parameters())
    trained.close()


# From Python.


def test_functions_are_named_by_where_they_can_be_imported():
    assert name_of(model) == f"{HERE}:model"
    with pytest.raises(ValueError, match="is not at the top of a module"):
        name_of(lambda: None)
    cell = types.FunctionType(model.__code__, {}, "cell")
    cell.__module__, cell.__qualname__ = "__main__", "cell"
    notebook = types.ModuleType("__main__")
    before, sys.modules["__main__"] = sys.modules["__main__"], notebook
    try:
        with pytest.raises(ValueError, match=r"^check: cell\(\) is defined in a cell of a notebook: .* %%writefile"):
            name_of(cell)
    finally:
        sys.modules["__main__"] = before
