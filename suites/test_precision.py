"""Chapter PRECISION: dtypes of compute, reduction and output."""

import contextlib
import copy
import dataclasses
import functools
from collections.abc import Iterator
from typing import Any, Literal, cast, get_args

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from shardproof.testing import Capability, Rank, Run, contract, meaningful_from, models, needs, states, world
from shardproof.testing.axes import KEEPS, REPLICAS, RESHARD, subjects
from shardproof.testing.casts import (
    CastReplica,
    check_equal,
    check_evaluation,
    check_statistics,
    run_and_replica,
    step_and_check,
)
from shardproof.testing.compare import check_bits, local_of, step_label
from shardproof.testing.make import Accumulation, FullParams, Precision, StateForm, cut_over, sharded
from shardproof.testing.refuse import Refusal, Untouched
from shardproof.testing.train import mixed, optim, parallel, shapes

pytestmark = world(2)

#: The dimension of the batches.
SHAPE = (6, 4)


@dataclasses.dataclass
class Arguments:
    """What :class:`Chooser` takes in a dataclass."""

    x: torch.Tensor
    choice: torch.Tensor


Passing = Literal["position", "keyword", "tuple", "list", "dict", "dataclass"]
"""How :class:`Choosing` calls its unit."""


class Chooser(nn.Module):
    """``x * weight`` where ``choice``, or its real part, is positive, and ``x`` elsewhere.

    Input: both as :data:`Passing` says, (rows, columns) each. Output: a dict of the result and of ``choice``.
    """

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(rows, columns))
        self.seen: list[tuple[torch.dtype, torch.dtype]] = []

    def forward(self, *args: Any, x: Any = None, choice: Any = None) -> dict[str, torch.Tensor]:
        given = args[0] if len(args) == 1 else args
        if isinstance(given, Arguments):
            x, choice = given.x, given.choice
        elif isinstance(given, dict):
            x, choice = given["x"], given["choice"]
        elif given:
            x, choice = given
        self.seen.append((x.dtype, choice.dtype))
        return {"x": torch.where(choice.real > 0, x * self.weight, x), "choice": choice}


class Choosing(nn.Module):
    """A unit ``inner``, a :class:`Chooser`, between two multiplications by a parameter of the root.

    Input: ``x`` and ``choice``, (rows, columns) each. Output: (rows, columns). The dtypes that ``inner`` has got and
    has returned are in ``taken`` and ``returned``; with ``recomputes`` backward computes it again.
    """

    def __init__(self, passing: Passing = "position", *, recomputes: bool = False) -> None:
        super().__init__()
        self.inner = Chooser(6, 4)
        self.gain = nn.Parameter(torch.randn(6, 4))
        self.passing, self.recomputes = passing, recomputes
        self.taken = self.inner.seen
        self.returned: list[tuple[torch.dtype, torch.dtype]] = []

    def forward(self, x: torch.Tensor, choice: torch.Tensor) -> torch.Tensor:
        x = x * self.gain
        if not self.recomputes:
            return self._call(x, choice) * self.gain
        # Otherwise the second computation may end before the call returns.
        with set_checkpoint_early_stop(False):
            part: torch.Tensor = checkpoint(self._call, x, choice, use_reentrant=False)
        return part * self.gain

    def _call(self, x: torch.Tensor, choice: torch.Tensor) -> torch.Tensor:
        match self.passing:
            case "position":
                found = self.inner(x, choice)
            case "keyword":
                found = self.inner(x=x, choice=choice)
            case "tuple":
                found = self.inner((x, choice))
            case "list":
                found = self.inner(given := [x, choice])
                assert given[0] is x, "the caller's list has another tensor after the call"
            case "dict":
                found = self.inner(named := {"x": x, "choice": choice})
                assert named["x"] is x, "the caller's dict has another tensor after the call"
            case "dataclass":
                found = self.inner(record := Arguments(x, choice))
                assert record.x is x, "the caller's dataclass has another tensor after the call"
        self.returned.append((found["x"].dtype, found["choice"].dtype))
        result: torch.Tensor = found["x"]
        return result


def both(rank: Rank, model: nn.Module, *, lr: float = 0.05, **options: Any) -> tuple[Run, CastReplica]:
    """The sharded run and the baseline with the same casts."""
    return run_and_replica(rank, model, optimizer=optim.sgd(lr=lr), **{"units": [["low"], ["high"]]} | options)


def train(rank: Rank, run: Run, replica: CastReplica, *, first: int = 0, steps: int = 3, chooses: bool = False) -> None:
    """Train both and compare every step."""
    for step in range(first, first + steps):
        batch: list[tuple[torch.Tensor, ...]] = []
        for number in range(run.adapter.config.microbatches):
            x = rank.batch(step, SHAPE, microbatch=number, mesh=run.adapter.config.mesh)
            batch.append((x, (x * 7).long()) if chooses else (x,))
        expected = replica.step(batch, loss=torch.sum)
        check_equal(rank, run, run.step(batch, loss=torch.sum), expected, number=step)


def trained(rank: Rank, model: nn.Module, **options: Any) -> Run:
    """A run after three steps, each compared with the baseline with the same casts."""
    run, replica = both(rank, model, **options)
    train(rank, run, replica)
    return run


def set_mode(run: Run, replica: CastReplica, *, trains: bool) -> None:
    """Set both models to training or to evaluation."""
    for module in (run.adapter.module, replica.model):
        module.train(trains)


def evaluate_and_train(rank: Rank, run: Run, replica: CastReplica, *, first: int = 0) -> None:
    """Three times, evaluate and train a step, and compare."""
    for step in range(first, first + 3):
        set_mode(run, replica, trains=False)
        check_evaluation(rank, run, replica, rank.batch(step, SHAPE, microbatch=1), number=step)
        set_mode(run, replica, trains=True)
        train(rank, run, replica, first=step, steps=1)


def assert_collectives(run: Run, *, gathers: set[torch.dtype], reduces: set[torch.dtype]) -> None:
    """Check the dtypes of all collectives of a run among its data-parallel ranks."""
    # Parameters that are not sharded are not gathered.
    gathers = gathers if "parameters" in run.adapter.traits.shards else set()
    kinds = {"all_gather": gathers, "reduce_scatter": reduces, "all_reduce": reduces}
    trace = [item for item in run.trace if set(item.group) <= set(run.adapter.config.data_ranks)]
    for item in trace:
        expected = {str(dtype).removeprefix("torch.") for dtype in kinds[item.kind]}
        assert item.dtype in expected, f"{item} should be of {' or '.join(sorted(expected))}"
    found = {item.dtype for item in trace if item.kind == "all_gather"}
    assert len(found) == len(gathers), f"units are gathered in {', '.join(sorted(found))} alone"


WHOLE = needs(Capability.NO_SHARD)
HALF, BRAIN, FULL = torch.float16, torch.bfloat16, torch.float32
POLICIES = {
    "bf16": Precision(param_dtype=BRAIN),
    "bf16-fp32": Precision(param_dtype=BRAIN, reduce_dtype=FULL),
    "fp32-bf16": Precision(reduce_dtype=BRAIN),
    "fp16-fp32": Precision(param_dtype=HALF, reduce_dtype=FULL),
    "inputs-as-they-are": Precision(param_dtype=BRAIN, cast_forward_inputs=False),
}


def each_policy(*names: str) -> pytest.MarkDecorator:
    """The names of policies as values of a parameter, each with what it needs."""
    values = [pytest.param(name, marks=needs(*POLICIES[name].needs())) for name in names]
    return pytest.mark.parametrize("policy", values)


FLAT = pytest.mark.parametrize(
    "flat_parameters", [False, pytest.param(True, marks=needs("flat_parameters"))], ids=["originals", "flat"]
)
#: Where compute and reduction have one dtype, unreduced gradients can add up in no other.
ADDED = pytest.mark.parametrize(
    "policy",
    [
        pytest.param("bf16", marks=needs(*POLICIES["bf16"].needs())),
        *(
            pytest.param(one, marks=needs(*POLICIES[one].needs(), Capability.ACCUMULATION_DTYPES))
            for one in ("bf16-fp32", "fp32-bf16")
        ),
    ],
)
MIXED = needs(*POLICIES["bf16-fp32"].needs())
NORMS = ("inner.1", "norm", "last")

ROWS = 7
#: Twice the smallest float16.
TINY = 2.0**-23
#: Of the gradients of all ranks; the largest float16 is 65504.
LARGE_SUM = 81920


@contract("PRECISION-1", "PRECISION-2")
@pytest.mark.parametrize("reshard_after_forward", RESHARD)
@each_policy(*POLICIES)
def test_training(rank: Rank, policy: str, reshard_after_forward: bool | int | None) -> None:
    """Compute and collectives have the dtypes of the policy; gradients, shards and optimizer state are float32."""
    precision, model = POLICIES[policy], mixed.Mixed()
    run = trained(rank, model, precision=precision, reshard_after_forward=reshard_after_forward)
    assert_seen(model.low.seen, precision)
    assert_dtypes(run, precision)


@contract("PRECISION-1", "PRECISION-5")
@needs(Capability.RECOMPUTATION)
@each_policy(*POLICIES)
@pytest.mark.parametrize("name", ["low", "high"], ids=["around", "reentrant-inside"])
def test_recomputation(rank: Rank, name: str, policy: str) -> None:
    """A unit that backward recomputes has the same dtypes in both computations, and its gradients are reduced."""
    precision, model = POLICIES[policy], mixed.Mixed(recomputes=name == "low")

    def prepare(model: Any) -> nn.Module:
        if name == "high":  # a re-entrant one needs an input that requires a gradient
            model.high.forward = functools.partial(checkpoint, model.high.forward, use_reentrant=True)
        return model  # type: ignore[no-any-return]

    run = trained(rank, model, unit_precision={name: precision}, prepare=prepare)
    seen = cast(mixed.Scale, run.original_module(name)).seen
    assert len(seen) == 6, f"in three steps the unit was computed {len(seen)} times, not 6"
    assert_seen(seen, precision)


@contract("PRECISION-1")
@each_policy("bf16", "inputs-as-they-are")
def test_evaluation(rank: Rank, policy: str) -> None:
    """An evaluation has a training forward's dtypes and values, and the next step the dtypes and values of any step."""
    precision, model = POLICIES[policy], mixed.Mixed()
    run, replica = both(rank, model, precision=precision)
    evaluate_and_train(rank, run, replica)
    assert_seen(model.low.seen, precision)


@contract("PRECISION-1")
@needs("precision.param_dtype")
@pytest.mark.parametrize(("stored", "compute"), [(HALF, BRAIN), (BRAIN, HALF)], ids=["fp16-to-bf16", "bf16-to-fp16"])
def test_dtypes_of_one_size(rank: Rank, stored: torch.dtype, compute: torch.dtype) -> None:
    """Parameters are cast to a compute dtype that has as many bytes as their own."""
    run, replica = both(rank, mixed.Mixed().to(stored), precision=Precision(param_dtype=compute))
    check_evaluation(rank, run, replica, rank.batch(0, SHAPE), number=0)
    assert_collectives(run, gathers={compute}, reduces=set())


@contract("PRECISION-1")
@MIXED
@needs(Capability.REGISTERED_STATE)  # flat parameters have one dtype
def test_frozen_of_another_dtype(rank: Rank) -> None:
    """Forward uses a frozen parameter of another floating-point dtype in the compute dtype; its shards keep theirs."""
    precision, model = POLICIES["bf16-fp32"], mixed.Mixed()
    model.low.weight = nn.Parameter(model.low.weight.detach().half(), requires_grad=False)
    trained(rank, model, precision=precision)
    assert_seen(model.low.seen, precision)


@contract("PRECISION-2")
@MIXED
@needs(Capability.CAST_AFTER_INIT)
def test_cast_after_sharding(rank: Rank) -> None:
    """A model that is cast to a wider dtype after sharding computes and reduces in the dtype of its policy."""
    precision = Precision(param_dtype=BRAIN, reduce_dtype=BRAIN)
    run, replica = both(rank, mixed.Mixed().half(), precision=precision, cast=FULL)
    replica.model.float()
    train(rank, run, replica)
    assert_dtypes(run, precision)


@contract("PRECISION-11")
@needs("precision.param_dtype", "precision.full_precision_in_eval", "precision.buffer_dtype")
@KEEPS
def test_evaluation_in_full_precision(rank: Rank, reshard_after_forward: bool | None) -> None:
    """With full precision in evaluation, evaluations cast nothing, and training steps before and after them do."""
    precision = Precision(param_dtype=BRAIN, buffer_dtype=HALF, full_precision_in_eval=True)
    model, keeps = mixed.Mixed(), reshard_after_forward
    run, replica = both(rank, model, units=[["high"]], precision=precision, reshard_after_forward=keeps)
    # Whether buffers are rounded to their dtype in training before the first step is the implementation's choice.
    train(rank, run, replica, steps=1)
    evaluate_and_train(rank, run, replica, first=1)
    found = {seen for unit in (model.low, model.high) for seen in unit.seen[1::2]}
    assert found == {mixed.ForwardDtypes(FULL, FULL, FULL)}, f"in evaluations the dtypes are {found}"


@contract("PRECISION-11")
@needs("precision.param_dtype", "precision.full_precision_in_eval", "precision.buffer_dtype")
def test_a_part_in_full_precision(rank: Rank) -> None:
    """With full precision in evaluation, a unit whose module alone is in evaluation mode is not cast; others are."""
    model, precision = mixed.Mixed(), Precision(param_dtype=BRAIN, buffer_dtype=HALF, full_precision_in_eval=True)
    run, _ = both(rank, model, precision=precision)
    for trains in (True, False, True):
        run.original_module("low").train(trains)
        run.forward_backward((rank.batch(0, SHAPE),), loss=torch.sum)
        found = [unit.seen[-1][1:] for unit in (model.low, model.high)]
        wrong = found != [(BRAIN, HALF) if trains else (FULL, FULL), (BRAIN, HALF)]
        assert not wrong, f"weights and buffers are of {found} where the first trains: {trains}"


@contract("PRECISION-11")
@needs("precision.full_precision_in_eval")
@KEEPS
@each_policy("bf16", "fp32-bf16")
def test_gradients_in_full_precision(rank: Rank, policy: str, reshard_after_forward: bool | None) -> None:
    """With full precision in evaluation, a step in evaluation mode reduces in full precision; other steps do not."""
    precision = dataclasses.replace(POLICIES[policy], full_precision_in_eval=True)
    run, replica = both(rank, mixed.Mixed(), precision=precision, reshard_after_forward=reshard_after_forward)
    for step in range(4):
        set_mode(run, replica, trains=step % 2 == 0)
        before = len(run.trace)
        train(rank, run, replica, first=step, steps=1)
        found = {item.dtype for item in run.trace[before:] if item.kind == "reduce_scatter"}
        used = Precision() if step % 2 else precision
        expected = str(used.reduced_in(FULL, run.adapter.traits)).removeprefix("torch.")
        assert found == {expected}, f"{step_label(step)} reduces in {found}, not in {expected}"


@contract("PRECISION-11")
@needs("precision.param_dtype", "precision.full_precision_in_eval", Capability.DEFERRED_REDUCTION)
@pytest.mark.parametrize(
    "options",
    [
        {},
        pytest.param({"reshard_after_forward": False}, marks=needs(Capability.RESHARD_AFTER_FORWARD)),
        pytest.param({"flat_parameters": True}, marks=needs("flat_parameters")),
        pytest.param({"shards": False}, marks=WHOLE),
    ],
    ids=["None", "False", "flat", "replicas-alone"],
)
def test_full_precision_between_microbatches(rank: Rank, options: dict[str, Any]) -> None:
    """With full precision in evaluation, evaluations between deferred microbatches leave their gradients alone."""
    precision = Precision(param_dtype=BRAIN, full_precision_in_eval=True)
    how: dict[str, Any] = {"microbatches": 3, "accumulation": Accumulation()} | options
    run, replica = both(rank, mixed.Mixed(), precision=precision, **how)
    context = run.adapter.microbatch

    @contextlib.contextmanager
    def evaluating(*, is_last: bool) -> Iterator[None]:
        with context(is_last=is_last):
            yield
        run.adapter.module.eval()
        run.evaluate((rank.batch(0, SHAPE),))
        run.adapter.module.train()

    rank.monkeypatch.setattr(run.adapter, "microbatch", evaluating)
    train(rank, run, replica)


@contract("PRECISION-12")
@needs("precision.keep_low_precision_grads")
@pytest.mark.parametrize(
    "flat_parameters", [False, pytest.param(True, marks=needs("flat_parameters"))], ids=["original", "flat"]
)
@each_policy("bf16", "fp32-bf16", "bf16-fp32")
@pytest.mark.parametrize("moves", [False, True], ids=["stays", "moves"])
def test_gradients_that_stay_low(rank: Rank, moves: bool, policy: str, flat_parameters: bool) -> None:
    """With gradients kept in the reduce dtype, they have it after a move too, and updates are float32."""
    options: dict[str, Any] = {"precision": dataclasses.replace(POLICIES[policy], keep_low_precision_grads=True)}
    if moves:
        options["after_backward"] = lambda one: getattr(one, "module", None) and one.module.to(rank.device)
    trained(rank, mixed.Mixed(), flat_parameters=flat_parameters, **options)


@contract("PRECISION-13")
@needs(Capability.GRADIENT_DTYPE, Capability.CAST_AFTER_INIT)
@pytest.mark.parametrize("defers", [False, pytest.param(True, marks=needs(Capability.DEFERRED_REDUCTION))])
@pytest.mark.parametrize("dtype", [FULL, None], ids=str)
@subjects("how", ["sharded", "cast", "assigned", "later"])
def test_gradient_dtype(rank: Rank, how: str, dtype: torch.dtype | None, defers: bool) -> None:
    """A bfloat16 parameter's gradients add up and are shown in its ``grad_dtype``, also after casts and loads.

    In bfloat16 they would add up to other values. A ``grad_dtype`` of None is the dtype that autograd computes in.
    """
    model = shapes.TwoScales(6, 4, 4).to(HALF if how in ("cast", "later") else BRAIN)
    if how in ("sharded", "cast"):
        model.weight.grad_dtype = dtype
    run = rank.run(model, units=[["low"]], microbatches=3, accumulation=Accumulation() if defers else None)
    module, named = run.adapter.module, run.adapter.named_parameters
    if how in ("assigned", "later"):
        named()["weight"].grad_dtype = dtype
    if how == "assigned":
        module.load_state_dict({name: value.clone() for name, value in module.state_dict().items()}, assign=True)
    module.to(BRAIN)
    for number, value in enumerate((256.0, 1.0 + rank.index, -256.0)):
        with run.adapter.microbatch(is_last=number == 2):
            run.forward_backward((torch.full((6, 4), value, device=rank.device),), loss=torch.sum)
    reduced = {item.dtype for item in run.trace if item.kind in ("reduce_scatter", "all_reduce")}
    assert reduced == {"float32", "bfloat16"}, f"gradients are reduced in {reduced}"
    for of_others in (BRAIN, HALF):
        module.to(of_others)
        found = {name: parameter.grad.dtype for name, parameter in named().items() if parameter.grad is not None}
        assert found == {"weight": FULL, "low.weight": of_others}, f"with parameters of {of_others}: {found}"
        values = local_of(cast(torch.Tensor, named()["weight"].grad))
        assert (values == (rank.world_size + 1) / 2).all(), f"the gradient of weight is {values}"


@contract("PRECISION-13")
@needs(Capability.GRADIENT_DTYPE, "precision.reduce_dtype", Capability.RANKS_DIFFER)
def test_zeros_of_any_dtype(rank: Rank) -> None:
    """Zeros for what a rank does not use are refused by name if gradients may have any dtype and no policy has one."""
    for reduce in (FULL, None):
        model = models.Branches(8, 2)
        for parameter in model.parameters():
            parameter.grad_dtype = None
        run = rank.run(model, units=[], ranks_differ=True, precision=Precision(reduce_dtype=reduce))
        batch = (rank.batch(0, (4, 8)), rank.index)
        refusal = Refusal(rank, functools.partial(run.forward_backward, batch, loss=torch.sum), may_send=True)
        if reduce is None:
            refusal.check_names("grad_dtype")
        else:
            assert refusal.text is None, f"refused in {reduce}: {refusal.text}"


@contract("PRECISION-14")
@needs("parameter_dtypes")
@pytest.mark.parametrize("reshard_after_forward", RESHARD)
@each_policy("bf16", "bf16-fp32")
def test_parameters_of_their_own_dtype(rank: Rank, policy: str, reshard_after_forward: bool | int | None) -> None:
    """Single parameters compute in their own dtype; a gather moves the bytes of both, and all are reduced once."""
    precision, model = POLICIES[policy], mixed.Mixed()
    own = {"low.weight": FULL, "high.weight": BRAIN, "high.shift": FULL}
    options: Any = {"precision": precision, "parameter_dtypes": own, "reshard_after_forward": reshard_after_forward}
    run = trained(rank, model, **options)
    assert_seen(model.high.seen, precision)
    assert set(model.low.seen) == {mixed.ForwardDtypes(BRAIN, FULL, FULL)}, (
        f"in forward the dtypes are {set(model.low.seen)}"
    )
    moved = {item.nbytes for item in run.trace if item.kind == "all_gather"}
    # Of 24 elements each; those of the root are all of bfloat16.
    assert moved <= {24 * 2, 24 * (2 + 4)}, f"gathers have {moved} bytes"
    reduced = [item.dtype for item in run.trace if item.kind in ("reduce_scatter", "all_reduce")]
    assert reduced == ["float32"] * 9, f"in three steps three units are reduced in {reduced}"


@contract("PRECISION-14")
@needs("precision.param_dtype", "parameter_dtypes")
@subjects("dtype", [HALF, "float32"], ids=["another", "no-dtype"])
def test_wrong_dtypes_of_parameters(rank: Rank, dtype: Any) -> None:
    """What is neither a parameter's own dtype nor that of compute is refused by name, and the model is unchanged."""
    model = mixed.Mixed().to(rank.device)
    untouched = Untouched(model)
    options: Any = {"precision": POLICIES["bf16"], "parameter_dtypes": {"low.shift": dtype}}
    Refusal(rank, lambda: sharded(rank, model, **options)).check_names("param_dtype_override_fn")
    untouched.check(rank.batch(0, SHAPE))


@contract("PRECISION-1", "PRECISION-2")
@world(4)
@needs(Capability.TENSOR_PARALLEL)
@each_policy("bf16", "bf16-fp32", "fp32-bf16")
def test_tensor_parallel_shards(rank: Rank, policy: str) -> None:
    """Tensor-parallel parameters are gathered, used and reduced in the dtypes of the policy."""
    precision, mesh = POLICIES[policy], rank.mesh((2, 2), ("dp", "tp"))
    run = trained(rank, mixed.Mixed(), precision=precision, **cut_over(mesh, mixed.split_columns))
    assert_dtypes(run, precision)


@contract("PRECISION-9")
@KEEPS
def test_autocast(rank: Rank, reshard_after_forward: bool | None) -> None:
    """Under autocast a model computes in low precision, trains its float32 parameters, and sees each of their steps."""
    model = models.TwoHeads(dim=8)
    run, replica = both(
        rank, model, units=[["head0"], ["head1"]], reshard_after_forward=reshard_after_forward, lr=2.0**-3
    )
    for step in range(3):
        with torch.autocast(rank.device.type, BRAIN):
            step_and_check(rank, run, replica, [(rank.batch(step, (4, 8)),)], number=step, loss=models.both_heads)
        with torch.autocast(rank.device.type, BRAIN):
            check_evaluation(rank, run, replica, rank.batch(step, (4, 8)), number=step + 1)


@contract("PRECISION-1")
@MIXED
@needs(Capability.SUMMON_FULL_PARAMS)
@FLAT
@KEEPS
def test_dtypes_of_full_parameters(rank: Rank, reshard_after_forward: bool | None, flat_parameters: bool) -> None:
    """Full parameters have the dtype and the values of the shards, not the compute dtype, whatever is gathered.

    The next forward uses what user code has written to them.
    """
    options: Any = {"flat_parameters": flat_parameters, "reshard_after_forward": reshard_after_forward}
    run, replica = both(rank, mixed.Mixed(), precision=POLICIES["bf16-fp32"], **options)
    for step in range(3):
        train(rank, run, replica, first=step, steps=1)
        gather_between_steps(rank, run, step)
        with run.adapter.summon_full_params(FullParams()) as found:
            for name, expected in replica.model.named_parameters():
                assert found[name].dtype == FULL, f"{name} is of {found[name].dtype}"
                assert torch.equal(found[name], expected), f"{name} has other values than the shards"
            states.write(found)
        states.write(dict(replica.model.named_parameters()))
    check_evaluation(rank, run, replica, rank.batch(3, SHAPE), number=3)


def gather_between_steps(rank: Rank, run: Run, step: int) -> None:
    """Leave parameters gathered by an evaluation, or after the last of three steps by a forward with autograd."""
    with torch.set_grad_enabled(step == 2):
        run.adapter.forward(rank.batch(step, SHAPE))


@contract("PRECISION-1")
@MIXED
@needs(Capability.DISTRIBUTED_CHECKPOINT)
@FLAT
@KEEPS
@pytest.mark.parametrize("form", ["sharded", pytest.param("full", marks=needs(Capability.FULL_STATE_DICT))])
def test_state_dicts(rank: Rank, form: StateForm, reshard_after_forward: bool | None, flat_parameters: bool) -> None:
    """Saved states of a model and its optimizer have the dtype and the values of the shards, whatever is gathered.

    The next forward uses what was loaded, and training goes on.
    """
    options: Any = {"flat_parameters": flat_parameters, "reshard_after_forward": reshard_after_forward}
    run, replica = both(rank, mixed.Mixed(), precision=POLICIES["bf16-fp32"], **options)
    for step in range(3):
        train(rank, run, replica, first=step, steps=1)
        states.check_held(rank, run, states.read(rank, run, form=form))
        saved = copy.deepcopy(run.adapter.checkpoint(form=form))
        states.halve(run, replica.model)
        gather_between_steps(rank, run, step)
        run.adapter.restore(saved, form=form)
        for parameter in replica.model.parameters():
            parameter.data *= 2
    check_evaluation(rank, run, replica, rank.batch(3, SHAPE), number=3)


@contract("PRECISION-2")
@MIXED
@FLAT
def test_forward_that_is_dropped(rank: Rank, flat_parameters: bool) -> None:
    """A forward in another dtype whose output is dropped leaves the next steps right."""
    run, replica = both(rank, mixed.Mixed(), precision=POLICIES["bf16-fp32"], flat_parameters=flat_parameters)
    run.adapter.forward(rank.batch(0, SHAPE))
    train(rank, run, replica)


@contract("PRECISION-1")
@world(4)
@MIXED
@needs("precision.output_dtype", Capability.RESHARD_TO_SIZE, Capability.REGISTERED_STATE)
def test_smaller_shards(rank: Rank) -> None:
    """Shards over fewer ranks, from which backward gathers, have the compute dtype."""
    # Outputs of units are rounded, so gradients are bfloat16 values: float32 sums four of them exactly in any order.
    precision = dataclasses.replace(POLICIES["bf16-fp32"], output_dtype=BRAIN)
    run, replica = both(rank, mixed.Mixed(), precision=precision, reshard_after_forward=2)
    run.adapter.forward(rank.batch(0, SHAPE))
    for name, parameter in run.adapter.named_parameters().items():
        dtypes = (parameter.dtype, local_of(parameter).dtype)
        assert dtypes == (BRAIN, BRAIN), f"after forward {name} claims {dtypes[0]} and has {dtypes[1]}"
    train(rank, run, replica)
    assert_collectives(run, gathers={BRAIN}, reduces={FULL})


@contract("PRECISION-2")
@world(4)
@needs(Capability.HYBRID)
@each_policy("bf16-fp32", "fp32-bf16")
def test_replicas(rank: Rank, policy: str) -> None:
    """Replicas reduce in the same dtype as shards."""
    precision = POLICIES[policy]
    mesh = rank.mesh((2, 2), ("replicate", "shard"))
    run = trained(rank, mixed.Mixed(), precision=precision, mesh=mesh)
    assert_dtypes(run, precision)


@contract("PRECISION-3")
@ADDED
@pytest.mark.parametrize(
    "defers",
    [
        pytest.param(False, marks=needs(Capability.ACCUMULATION_DTYPES)),
        pytest.param(True, marks=needs(Capability.DEFERRED_REDUCTION)),
    ],
)
def test_microbatches(rank: Rank, defers: bool, policy: str) -> None:
    """Reduced gradients add up in float32, and those whose reduction is deferred in the reduce dtype."""
    later = Accumulation() if defers else None
    trained(rank, mixed.Mixed(), precision=POLICIES[policy], microbatches=4, accumulation=later)


@contract("PRECISION-3")
@needs(Capability.DEFERRED_REDUCTION, Capability.UNUSED_MODULE)
@ADDED
def test_parameters_of_one_microbatch(rank: Rank, policy: str) -> None:
    """Gradients that have accumulated in the reduce dtype keep it next to new ones in the compute dtype."""
    run, replica = both(
        rank, models.Branches(8, 2), units=[], precision=POLICIES[policy], microbatches=3,
        accumulation=Accumulation(), find_unused_parameters=True,
    )  # fmt: skip
    for step in range(3):
        batch = [(rank.batch(step, (4, 8), microbatch=number), used) for number, used in enumerate((0, 0, 1))]
        step_and_check(rank, run, replica, batch, number=step)


@contract("PRECISION-2")
@needs("precision.param_dtype", Capability.RANKS_DIFFER)
def test_parameters_of_one_rank(rank: Rank) -> None:
    """Zeros that a rank contributes for parameters that it does not use have the dtype of its real gradients."""
    precision = POLICIES["bf16"]
    run, replica = both(rank, models.Branches(8, 2), units=[], precision=precision, ranks_differ=True)
    for step in range(3):
        batch = [(rank.batch(step, (4, 8)), (rank.index + step) % 2)]
        step_and_check(rank, run, replica, batch, number=step)


@contract("PRECISION-3")
@world(4)
@needs("accumulation.skips", Capability.ACCUMULATION_DTYPES)
@needs(Capability.HYBRID)
@each_policy("bf16-fp32", "fp32-bf16")
def test_deferred_all_reduces(rank: Rank, policy: str) -> None:
    """Shards whose all-reduce is deferred add up in the reduce dtype."""
    mesh = rank.mesh((2, 2), ("replicate", "shard"))
    later = Accumulation(skips="all-reduce")
    trained(rank, mixed.Mixed(), precision=POLICIES[policy], mesh=mesh, microbatches=4, accumulation=later)


@contract("PRECISION-3")
@world(2, 4)
@meaningful_from(4)
@needs("precision.reduce_dtype", "accumulation.skips", Capability.ACCUMULATION_DTYPES)
@needs(Capability.HYBRID, Capability.SINGLE_RANK, Capability.UNUSED_MODULE)
def test_deferred_all_reduces_of_different_parameters(rank: Rank) -> None:
    """Deferred shards add up in the reduce dtype, also where microbatches use different parameters.

    In a world of two each replica has one shard, which is deferred without any reduction before.
    """
    run, replica = both(
        rank, models.Branches(8, 2), units=[], precision=POLICIES["fp32-bf16"], microbatches=3,
        find_unused_parameters=True, mesh=rank.mesh((2, rank.world_size // 2), ("replicate", "shard")),
        accumulation=Accumulation(skips="all-reduce"),
    )  # fmt: skip
    for step in range(2):
        batch = [(rank.batch(step, (4, 8), microbatch=number), used) for number, used in enumerate((0, 1, 1))]
        step_and_check(rank, run, replica, batch, number=step)
        dtypes = {item.dtype for item in run.trace if item.kind == "all_reduce"}
        assert dtypes == {"bfloat16"}, f"all-reduces are in {dtypes}"


@contract("PRECISION-5")
@MIXED
@pytest.mark.parametrize("cast_forward_inputs", [True, False])
@subjects("passing", [*get_args(Passing)[:-1], pytest.param("dataclass", marks=needs(Capability.DATACLASS_OUTPUT))])
def test_inputs(rank: Rank, passing: Passing, cast_forward_inputs: bool) -> None:
    """A unit casts its floating-point inputs if configured to, in any container, and no integers."""
    model = Choosing(passing)
    inner = Precision(param_dtype=BRAIN, reduce_dtype=FULL, cast_forward_inputs=cast_forward_inputs)
    run, replica = both(rank, model, units=[["inner"]], unit_precision={"inner": inner})
    train(rank, run, replica, chooses=True)
    expected = (BRAIN if cast_forward_inputs else FULL, torch.int64)
    assert set(model.taken) == {expected}, f"the unit got {set(model.taken)} instead of {expected}"


@contract("PRECISION-5", "PRECISION-6")
@MIXED
@needs("precision.output_dtype")
@subjects("dtype", [torch.bool, torch.complex64, torch.float64], ids=lambda one: str(one)[6:])
def test_masks_and_rotations(rank: Rank, dtype: torch.dtype) -> None:
    """Masks and complex numbers, as of rotary embeddings, are not cast as inputs or outputs; wide floats are."""
    model = Choosing()
    inner = Precision(param_dtype=BRAIN, reduce_dtype=FULL, output_dtype=FULL)
    run = rank.run(model, units=[["inner"]], unit_precision={"inner": inner})
    x = rank.batch(0, SHAPE)
    run.forward_backward((x, (x * 7).long().to(dtype)), loss=torch.sum)
    inside, outside = (BRAIN, FULL) if dtype.is_floating_point else (dtype, dtype)
    assert set(model.taken) == {(BRAIN, inside)}, f"the unit got {set(model.taken)}"
    assert set(model.returned) == {(FULL, outside)}, f"the unit returned {set(model.returned)}"


@contract("PRECISION-5")
@MIXED
@pytest.mark.parametrize(
    ("root", "low", "high"), [("bf16-fp32", "fp32-bf16", "fp16-fp32"), ("fp32-bf16", "bf16", "inputs-as-they-are")]
)
def test_policies_of_units(rank: Rank, root: str, low: str, high: str) -> None:
    """Units of different dtypes hand each other their outputs, and each reduces in its own."""
    policies = {"low": POLICIES[low], "high": POLICIES[high]}
    run = trained(rank, mixed.Mixed(), precision=POLICIES[root], unit_precision=policies)
    assert_dtypes(run, *(POLICIES[name] for name in (root, low, high)))


@contract("PRECISION-6")
@MIXED
@needs("precision.output_dtype")
@pytest.mark.parametrize("recomputes", [False, pytest.param(True, marks=needs(Capability.RECOMPUTATION))])
def test_outputs(rank: Rank, recomputes: bool) -> None:
    """A unit's output is cast to the output dtype, in a container too, in each computation; integers are not."""
    model = Choosing(recomputes=recomputes)
    inner = Precision(param_dtype=BRAIN, reduce_dtype=FULL, output_dtype=HALF)
    root = Precision(param_dtype=BRAIN, reduce_dtype=FULL, output_dtype=FULL)
    run, replica = both(rank, model, units=[["inner"]], precision=root, unit_precision={"inner": inner})
    train(rank, run, replica, chooses=True)
    assert len(model.returned) == (6 if recomputes else 3)
    assert set(model.returned) == {(HALF, torch.int64)}, f"the unit returned {set(model.returned)}"


@contract("PRECISION-5", "PRECISION-6")
@MIXED
@needs("precision.output_dtype", Capability.FORWARD_METHOD)
def test_casts_of_a_registered_method(rank: Rank) -> None:
    """A method that is registered in addition to forward has its inputs and its output cast as forward has."""
    inner = Precision(param_dtype=BRAIN, reduce_dtype=FULL, output_dtype=FULL)
    run = rank.run(models.TwoStage(dim=9), units=[["encoder"], ["projector"]], unit_precision={"encoder": inner})
    run.adapter.register_forward_method("encoder", "features")
    seen: dict[str, torch.dtype] = {}
    for name in ("encoder.inner", "projector"):
        note = functools.partial(lambda name, module, args: seen.update({name: args[0].dtype}), name)
        run.original_module(name).register_forward_pre_hook(note)
    for _ in range(2):
        run.forward_backward((rank.batch(0, (4, 9)),), loss=models.mean_square)
        assert seen == {"encoder.inner": BRAIN, "projector": FULL}, f"inputs: {seen}"


@contract("PRECISION-5", "PRECISION-6")
@MIXED
@needs("precision.output_dtype", Capability.GROUPED_UNIT)
def test_casts_of_several_modules(rank: Rank) -> None:
    """Each of several modules that form one unit has its inputs and its output cast, not just the first or last."""
    inner, layers = (
        Precision(param_dtype=BRAIN, reduce_dtype=FULL, output_dtype=FULL),
        [f"layers.{index}" for index in range(3)],
    )
    run = rank.run(models.Tower(dim=9, depth=3), units=[layers], unit_precision={"layers.0": inner})
    seen: list[torch.dtype] = []
    for name in layers:
        run.original_module(f"{name}.in_proj").register_forward_pre_hook(lambda one, args: seen.append(args[0].dtype))
        run.original_module(name).register_forward_hook(lambda one, args, output: seen.append(output.dtype))
    for _ in range(2):
        run.forward_backward((rank.batch(0, (4, 9)),), loss=models.mean_square)
    assert seen == [BRAIN, FULL] * 6, f"inputs and outputs of the modules: {seen}"


@contract("PRECISION-7")
@needs("precision.param_dtype", "precision.buffer_dtype")
@pytest.mark.parametrize("saves", [False, pytest.param(True, marks=needs(Capability.DISTRIBUTED_CHECKPOINT))])
def test_buffers(rank: Rank, saves: bool) -> None:
    """Floating-point buffers have the buffer dtype while the model trains, and their own in a checkpoint."""
    model = mixed.Mixed()
    policies = {"high": Precision(param_dtype=BRAIN, buffer_dtype=BRAIN)}
    run = trained(rank, model, precision=Precision(param_dtype=BRAIN, buffer_dtype=HALF), unit_precision=policies)
    for unit, dtype in ((model.low, HALF), (model.high, BRAIN)):
        assert {one.offset for one in unit.seen} == {dtype}, f"in forward the dtypes are {set(unit.seen)}, not {dtype}"
    assert model.low.calls.dtype == torch.int64
    if saves:
        saved = run.adapter.checkpoint()["model"]
        wrong = [name for name in saved if name.endswith("offset") and saved[name].dtype != FULL]
        assert not wrong, f"{wrong[0]} is saved in {saved[wrong[0]].dtype}"


@contract("PRECISION-7")
@needs("precision.buffer_dtype")
def test_buffers_with_full_parameters(rank: Rank) -> None:
    """Floating-point buffers have the buffer dtype where parameters are computed with, and reduced, in their own."""
    precision, model = Precision(buffer_dtype=HALF), mixed.Mixed()
    run = trained(rank, model, precision=precision)
    found = {seen for unit in (model.low, model.high) for seen in unit.seen}
    assert found == {mixed.ForwardDtypes(FULL, FULL, HALF)}, f"in forward the dtypes are {found}"
    assert_dtypes(run, precision)


@contract("PRECISION-7")
@needs("precision.param_dtype")
@pytest.mark.parametrize("buffers", [None, pytest.param(BRAIN, marks=needs("precision.buffer_dtype"))], ids=str)
def test_running_statistics(rank: Rank, buffers: torch.dtype | None) -> None:
    """Batch norms amid bfloat16 train and evaluate as the baseline does, with the same statistics after each."""
    # A batch norm has parameters and statistics of one dtype; its input may have a lower one.
    own = Precision(param_dtype=buffers, buffer_dtype=buffers, cast_forward_inputs=False)
    run, replica = both(
        rank, mixed.Normed(*SHAPE), units=[["inner"], *([name] for name in NORMS)],
        precision=Precision(param_dtype=BRAIN, buffer_dtype=buffers), unit_precision=dict.fromkeys(NORMS, own),
    )  # fmt: skip
    for step in range(3):
        training, evaluation = ((rank.batch(step, SHAPE, microbatch=number),) for number in range(2))
        check_statistics(rank, run, replica, training, evaluation, number=step, loss=models.ramp_square)


@contract("PRECISION-8")
@needs(Capability.UNUSED_OUTPUT)
@each_policy("bf16-fp32", "fp32-bf16")
def test_thawed_unit(rank: Rank, policy: str) -> None:
    """A unit that is frozen in the first step and thawed later is reduced in the same dtype as the others."""
    precision, model = POLICIES[policy], mixed.Mixed()
    model.low.requires_grad_(False)
    run, replica = both(rank, model, precision=precision)
    train(rank, run, replica, steps=1)
    for parameters in (run.adapter.named_parameters(), dict(replica.model.named_parameters())):
        for name in ("low.weight", "low.shift"):
            parameters[name].requires_grad_(True)
    train(rank, run, replica, first=1)
    assert_dtypes(run, precision)


@contract("PRECISION-10")
@MIXED
def test_small_updates(rank: Rank) -> None:
    """Updates below an ulp of the compute dtype are not lost."""
    run, replica = both(rank, mixed.Mixed(), precision=POLICIES["bf16-fp32"], lr=2.0**-20)
    before = {name: value.detach().clone() for name, value in replica.model.named_parameters()}
    train(rank, run, replica)
    for name, value in replica.model.named_parameters():
        assert not torch.equal(value, before[name]), f"{name} did not change"
        assert (value - before[name]).abs().max() < 2.0**-12, f"an update of {name} is not small"


@contract("PRECISION-2")
@world(4)
@MIXED
@needs(Capability.TENSOR_PARALLEL, Capability.DTENSOR_PARAMETERS)
def test_sums_over_tensor_parallel_ranks(rank: Rank) -> None:
    """The tensor-parallel ranks' parts of a gradient are summed in the reduce dtype: 257 is not a bfloat16 number."""
    mesh = rank.mesh((2, 2), ("dp", "tp"))
    run = rank.run(parallel.Factors(4), precision=POLICIES["bf16-fp32"], **cut_over(mesh, parallel.split_factors))
    mine = torch.full((1, 4), 1.0 if mesh.get_local_rank("tp") else 256.0, device=rank.device)
    for step in range(2):
        run.forward_backward((mine,), loss=lambda output: cast(DTensor, output).to_local().sum())
        for name, piece in run.adapter.gradients().items():
            assert piece is not None, f"{name} has no gradient in {step_label(step)}"
            assert (piece.tensor == 257).all(), f"gradient of {name!r} in {step_label(step)}: {piece.tensor} is not 257"
        run.adapter.zero_grad(set_to_none=step == 0)


@contract("PRECISION-4")
@world(2, 4)
@needs(Capability.CAST_AFTER_INIT)
def test_sums_beyond_float16(rank: Rank) -> None:
    """The average of float16 gradients is right where their sum exceeds float16."""
    average(rank, None)


@contract("PRECISION-4")
@world(4)
@needs(Capability.CAST_AFTER_INIT, Capability.HYBRID)
@REPLICAS
def test_sums_of_replicas_beyond_float16(rank: Rank, shape: tuple[int, int]) -> None:
    """The average of float16 gradients over shards, replicas or both is right where their sum exceeds float16."""
    average(rank, shape)


def average(rank: Rank, shape: tuple[int, int] | None) -> None:
    """Two backwards, the second of which adds to gradients of zeros.

    The sum of the large gradients exceeds float16 unless part of the division precedes it. The small ones are lost if
    the whole division does, at four ranks. Every partial sum is exact, in any order.
    """
    size = rank.world_size
    mesh = rank.mesh(shape, ("replicate", "shard")) if shape else None
    run = rank.run(shapes.TwoScales(ROWS, 4, 4), units=[["low"]], mesh=mesh, cast=torch.float16)
    mine, averaged = torch.full((2, ROWS, 4), TINY, dtype=torch.float16, device=rank.device)
    averaged[::2] = LARGE_SUM / size
    mine[::2] = LARGE_SUM / size + 64 * (rank.index - (size - 1) / 2)
    for step in range(2):
        run.forward_backward((mine,), loss=torch.sum)
        for name, piece in run.adapter.gradients().items():
            where = f"gradient of {name!r} in {step_label(step)}"
            assert piece is not None, f"{where}: there is none"
            assert piece.tensor.dtype == torch.float16, f"{where}: it is of {piece.tensor.dtype}"
            check_bits(where, piece.tensor, piece.cut(averaged), sides="gradient and average of the ranks")
        run.adapter.zero_grad(set_to_none=False)
    # Integers are compared by count and value; they have no gradients.
    other = [str(item) for item in run.trace if item.dtype != "float16" and not item.dtype.startswith("int")]
    assert not other, f"the parameters are of float16, these collectives are not: {other}"


def assert_dtypes(run: Run, *policies: Precision) -> None:
    """Check the dtypes of all collectives of a run of float32 parameters whose units have these policies."""
    reduces = {one.reduced_in(FULL, run.adapter.traits) for one in policies}
    assert_collectives(run, gathers={one.param_dtype or FULL for one in policies}, reduces=reduces)


def assert_seen(seen: list[mixed.ForwardDtypes], precision: Precision) -> None:
    """Check the dtypes in every forward of a policy's unit, whose inputs were float32; buffers keep their dtypes."""
    compute = precision.param_dtype or FULL
    expected = mixed.ForwardDtypes(compute if precision.cast_forward_inputs else FULL, compute, FULL)
    assert set(seen) == {expected}, f"in forward the dtypes are {set(seen)} instead of {expected}"
