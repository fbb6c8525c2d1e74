"""Chapter EVALUATION: forwards without a backward, between training steps."""

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from shardproof.testing import Capability, Rank, contract, models, needs, states, world
from shardproof.testing.axes import FLAT, RESHARD, SHARDS, subjects
from shardproof.testing.compare import check_bits, each_once, in_one_tensor_with, step_label
from shardproof.testing.make import (
    Accumulation,
    Adapter,
    FullParams,
    Precision,
    everywhere,
    pair_by_units,
    run_and_plain,
    run_by_units,
    tower,
)
from shardproof.testing.refuse import Refusal
from shardproof.testing.train import (
    after_microbatches,
    batches,
    check_twins,
    checked_steps,
    optim,
    ties,
    train_and_check,
)

pytestmark = world(2)

READ = needs(Capability.SUMMON_FULL_PARAMS)
WHY = "the same values, gathered or not"
MODES = ["no_grad", "inference_mode"]
DEPTH = 3
ON_CPU = needs(Capability.FULL_PARAMS_ON_CPU)
#: What user code may ask for together of whole parameters.
WHOLE = [
    pytest.param(FullParams(writeback=False), id="read"),
    pytest.param(FullParams(writeback=False, offload_to_cpu=True), id="read-on-cpu", marks=ON_CPU),
    pytest.param(FullParams(writeback=False, rank0_only=True), id="first-rank"),
    pytest.param(
        FullParams(writeback=False, rank0_only=True, offload_to_cpu=True), id="first-rank-on-cpu", marks=ON_CPU
    ),
    pytest.param(FullParams(), id="written"),
    pytest.param(FullParams(offload_to_cpu=True), id="written-on-cpu", marks=ON_CPU),
]


class ScaledBase(nn.Module):
    """``scale * tanh(base x)``, where ``base``, a Linear(dim, dim), is frozen and ``scale`` has one element."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(1))
        self.base = nn.Linear(dim, dim).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scale * torch.tanh(self.base(x))


class ScaledStack(models.Stacked):
    """Layers of :class:`ScaledBase`, and a parameter of one element that is all that the root has of its own.

    What trains has fewer elements than there are ranks, so that an optimizer changes nothing of what most ranks hold.
    """

    def __init__(self, dim: int, depth: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList(ScaledBase(dim) for _ in range(depth))
        self.gain = nn.Parameter(torch.randn(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.run_layers(x) * self.gain


@contract("EVALUATION-1")
@world(2, 4)
@pytest.mark.parametrize("reshard_after_forward", RESHARD)
@pytest.mark.parametrize("mode", MODES)
def test_evaluation_between_steps(rank: Rank, mode: Any, reshard_after_forward: bool | int | None) -> None:
    """Evaluations give the baseline's output for the current parameters, without a graph, and change no training step.

    An evaluation is also the model's first forward.
    """
    pair = tower(rank, reshard_after_forward=reshard_after_forward)
    for step in range(3):
        for number in (1, 2):
            pair.evaluate(rank.batch(step, (2, 9), microbatch=number), mode=mode if step else "no_grad")
        with torch.no_grad():
            output = pair.adapter.forward(rank.batch(step, (2, 9), microbatch=1))
        assert output.grad_fn is None, f"before {step_label(step)} a forward under no_grad records {output.grad_fn}"
        pair.checked_step(rank.batch(step, (4, 9)))


@contract("EVALUATION-1")
@pytest.mark.parametrize("defers", [False, pytest.param(True, marks=needs(Capability.DEFERRED_REDUCTION))])
@pytest.mark.parametrize("reshard_after_forward", RESHARD)
def test_evaluation_between_microbatches(rank: Rank, reshard_after_forward: bool | int | None, defers: bool) -> None:
    """An evaluation between two microbatches of a step changes no gradient of it, reduced or not."""
    how = Accumulation() if defers else None
    pair = tower(rank, reshard_after_forward=reshard_after_forward, microbatches=3, accumulation=how)
    batch = rank.batch(0, (2, 9), microbatch=3)
    after_microbatches(rank, pair, lambda: evaluate(pair.adapter, batch))
    for step in range(3):
        pair.checked_step([rank.batch(step, (2, 9), microbatch=number) for number in range(3)], set_to_none=step != 1)


@contract("EVALUATION-1")
@SHARDS
@subjects("trains", [False, True], ids=["evaluated-again", "trained"])
def test_first_forward_is_in_inference_mode(rank: Rank, trains: bool, shards: bool) -> None:
    """A model whose first forward ran in inference mode is evaluated in that mode, and trains, as any other."""
    pair = tower(rank, shards=shards)
    for microbatch in (1, 2):
        pair.evaluate(rank.batch(0, (2, 9), microbatch=microbatch), mode="inference_mode")
    pair.check()
    if trains:
        train_and_check(pair, batches(rank, 2, (4, 9)))


@contract("EVALUATION-2")
@world(2, 4)
@needs(Capability.REGISTERED_STATE, Capability.ROOT_RESHARD)
@pytest.mark.parametrize("reshard_after_forward", RESHARD)
@pytest.mark.parametrize("mode", MODES)
def test_evaluation_reshards_like_forward(rank: Rank, mode: Any, reshard_after_forward: bool | int | None) -> None:
    """After an evaluation parameters are gathered exactly if they are gathered after a training forward."""
    pair = tower(rank, reshard_after_forward=reshard_after_forward)
    keeps = {True: reshard_after_forward in (None, False), False: reshard_after_forward is False}
    for step in range(2):
        pair.evaluate(rank.batch(step, (2, 9), microbatch=1), mode=mode if step else "no_grad")
        for name, gathered in pair.adapter.gathered().items():
            expected = keeps[not name.startswith("layers.")]
            assert gathered == expected, (
                f"{name}: gathered is {gathered} after the evaluation before {step_label(step)} with "
                f"reshard_after_forward={reshard_after_forward!r}"
            )
        pair.checked_step(rank.batch(step, (4, 9)))


@contract("EVALUATION-2")
@world(2, 4)
@needs(Capability.COUNTED_UNITS, Capability.ROOT_RESHARD, Capability.RESHARD_AFTER_FORWARD)
@pytest.mark.parametrize("mode", MODES)
def test_values_of_an_evaluation_do_not_outlive_the_step(rank: Rank, mode: Any) -> None:
    """An evaluation between backward and the optimizer's step leaves no gathered values for the next forward."""
    evaluates = functools.partial(evaluate, batch=rank.batch(0, (2, 9), microbatch=1), mode=mode)
    pair = tower(rank, reshard_after_forward=True, after_backward=evaluates)
    for _ in checked_steps(pair, batches(rank, 3, (4, 9))):
        pair.check_counts("forward", all_gather=DEPTH + 1)
        pair.check_counts("backward", all_gather=DEPTH + 1, reduce_scatter=DEPTH + 1)


def evaluate_around_steps(rank: Rank, model: Any, reshard_after_forward: bool | int | None) -> None:
    """Train, with an evaluation between backward and the step and another one after it, and compare."""
    batch = rank.batch(0, (2, 9), microbatch=1)
    options: Any = {"after_backward": functools.partial(evaluate, batch=batch)}
    pair = pair_by_units(rank, model, reshard_after_forward=reshard_after_forward, **options)
    for step in range(3):
        if step:
            pair.evaluate(batch)
        pair.checked_step(rank.batch(step, (4, 9)))


def evaluate(adapter: Adapter, batch: torch.Tensor, mode: str = "no_grad") -> None:
    """A forward that no pair compares."""
    with torch.no_grad() if mode == "no_grad" else torch.inference_mode():
        adapter.forward(batch)


@contract("EVALUATION-2")
@world(2, 4)
@pytest.mark.parametrize("reshard_after_forward", RESHARD)
def test_second_evaluation_sees_the_step(rank: Rank, reshard_after_forward: bool | int | None) -> None:
    """Of two evaluations, one between backward and the optimizer's step and one after it, the second sees the step.

    Values that stay gathered after the first one, by default those of the root's own unit, are outdated.
    """
    evaluate_around_steps(rank, models.Tower(dim=9), reshard_after_forward)


@contract("EVALUATION-2")
@needs(Capability.NON_ROOT_FORWARD, Capability.OWN_OPTIMIZER)
@pytest.mark.parametrize("reshard_after_forward", RESHARD[:3])
@pytest.mark.parametrize("submodule", ["layers.1", ""], ids=["a-unit", "the-root"])
def test_forward_after_that_of_a_unit(rank: Rank, submodule: str, reshard_after_forward: bool | None) -> None:
    """A forward uses no gathered values older than the last parameter change, whichever module was evaluated before."""
    run, plain = run_and_plain(rank, models.Tower(dim=9), reshard_after_forward=reshard_after_forward)
    batch = (rank.batch(0, (2, 9)),)
    run.evaluate(batch)  # this makes it known as the root
    for _ in range(2):
        for name in ("layers.1", submodule):
            (found,) = run.evaluate(batch, submodule=name)
            with torch.no_grad():
                expected = plain.get_submodule(name)(*batch)
            assert torch.equal(found, expected), f"the forward of {name or 'the root'} uses outdated values"
            states.halve(run, plain)


@contract("EVALUATION-2")
@pytest.mark.parametrize("reshard_after_forward", RESHARD)
def test_step_that_changes_nothing_on_some_ranks(rank: Rank, reshard_after_forward: bool | int | None) -> None:
    """After a step, all ranks gather a unit again or none does, also where a rank holds frozen or no elements of it."""
    evaluate_around_steps(rank, ScaledStack(dim=9), reshard_after_forward)


@contract("EVALUATION-2")
@needs(Capability.COUNTED_UNITS)
@pytest.mark.parametrize("mode", MODES)
def test_evaluation_gathers_each_unit_once(rank: Rank, mode: Any) -> None:
    """An evaluation gathers each unit once, and the next training step gathers the units that reshard by default."""
    pair = tower(rank)
    for step in range(2):
        before = len(pair.sharded.trace)
        pair.evaluate(rank.batch(step, (2, 9), microbatch=1), mode=mode if step else "no_grad")
        gathered = [item.unit for item in pair.sharded.trace[before:]]
        expected = ["(root)", *(f"layers.{index}" for index in range(DEPTH))]
        assert sorted(gathered) == expected, f"the evaluation before {step_label(step)} gathers {gathered}"
        pair.checked_step(rank.batch(step, (4, 9)))
        in_forward = {item.unit for item in pair.last_trace() if item.phase == "forward"}
        missing = set(expected[1:]) - in_forward
        assert not missing, f"{step_label(step)} uses what the evaluation gathered of {', '.join(sorted(missing))}"
        pair.check_counts("backward", all_gather=DEPTH, reduce_scatter=DEPTH + 1)


@contract("EVALUATION-3")
@world(2, 4)
@needs(Capability.COUNTED_UNITS, Capability.RESHARD_AFTER_FORWARD)
@pytest.mark.parametrize("by_call", [False, pytest.param(True, marks=needs(Capability.ASYNC_UNSHARD))])
def test_many_forwards_with_one_gather(rank: Rank, by_call: bool) -> None:
    """Units that stay gathered, by a call or after a forward, serve many forwards, and are right after a step."""
    pair = tower(rank, reshard_after_forward=False)
    for step in range(3):
        before = len(pair.sharded.trace)
        if by_call:
            pair.adapter.unshard()
        for number in range(3):
            pair.evaluate(rank.batch(step, (2, 9), microbatch=number + 1))
        gathered = sorted(item.unit for item in pair.sharded.trace[before:])
        expected = [] if by_call else ["(root)", *(f"layers.{index}" for index in range(DEPTH))]
        assert gathered == expected, f"three evaluations before {step_label(step)} gather {gathered}"
        pair.checked_step(rank.batch(step, (4, 9)))


@contract("EVALUATION-3")
@needs(Capability.SINGLE_RANK)
@pytest.mark.parametrize("reshard_after_forward", RESHARD[:3])
def test_steps_of_a_model_on_one_rank(rank: Rank, reshard_after_forward: bool | None) -> None:
    """A model that lives on one rank, as a critic may, steps between two evaluations of a model on all ranks."""
    run, plain = run_and_plain(rank, models.Tower(dim=9), reshard_after_forward=reshard_after_forward)
    batch = (rank.batch(0, (2, 9)),)
    alone = rank.mesh((rank.world_size, 1), ("models", "dp"))["dp"]
    critic = rank.run(models.MLP(9), mesh=alone, optimizer=optim.sgd())
    for step in range(2):
        run.evaluate(batch)
        if rank.index == 0:
            critic.step([batch], loss=models.mean_square)
        (found,) = run.evaluate(batch)
        with torch.no_grad():
            check_bits("output", found, plain(*batch), sides=f"sharded, plain in {step_label(step)}")


@contract("EVALUATION-3")
@world(2, 4)
@needs(Capability.ASYNC_UNSHARD, Capability.REGISTERED_STATE)
@pytest.mark.parametrize("reshard_after_forward", RESHARD)
def test_unshard_yields_current_parameters(rank: Rank, reshard_after_forward: bool | int | None) -> None:
    """An unshard that waits yields the current full parameters: first of all, after an evaluation and after a step.

    A forward uses them, the first one too.
    """
    run, plain = run_and_plain(rank, models.Tower(dim=9), reshard_after_forward=reshard_after_forward)
    batch = (rank.batch(0, (2, 9)),)
    for number in range(3):
        run.adapter.unshard(waits=True)
        sharded = [name for name, gathered in run.adapter.gathered().items() if not gathered]
        assert not sharded, f"after call {number} these are not gathered: {', '.join(sharded)}"
        states.check_whole(rank, FullParams(), run.adapter.named_parameters(), plain)
        if number > 0:
            run.adapter.reshard()
        (found,) = run.evaluate(batch)
        with torch.no_grad():
            check_bits("output", found, plain(*batch), sides=f"sharded, plain after call {number}")
        states.halve(run, plain)


@contract("EVALUATION-3")
@world(2, 4)
@needs(Capability.ASYNC_UNSHARD)
@pytest.mark.parametrize("reshard_after_forward", RESHARD)
def test_gathers_in_flight_do_not_outlive_the_step(rank: Rank, reshard_after_forward: bool | int | None) -> None:
    """The next forward does not use values whose gather began between backward and the optimizer's step."""
    pair = tower(rank, reshard_after_forward=reshard_after_forward, after_backward=lambda adapter: adapter.unshard())
    train_and_check(pair, batches(rank, 3, (4, 9)))


@contract("EVALUATION-3")
@needs(Capability.ASYNC_UNSHARD, Capability.CAST_AFTER_INIT)
def test_gathers_in_flight_do_not_outlive_a_cast(rank: Rank) -> None:
    """The next forward does not use values whose gather began before the model was cast to bfloat16 and back."""
    run, plain = run_and_plain(rank, models.Tower(dim=9))
    batch = (rank.batch(0, (4, 9)),)
    run.adapter.unshard()
    for module in (run.adapter.module, plain):
        module.to(torch.bfloat16).to(torch.float32)
    (found,) = run.evaluate(batch)
    with torch.no_grad():
        assert torch.equal(found, plain(*batch)), "the forward uses what was gathered before the cast"


@contract("EVALUATION-3")
@needs("flat_parameters")
@subjects(
    ("changed", "flat", "reads"),
    [
        *(("all", False, False), ("all", True, False), ("out_proj.weight", False, False)),
        *(("out_proj.bias", False, False), pytest.param("out_proj.bias", False, True, marks=READ)),
    ],
    ids=["all", "flat", "first", "last", "read"],
)
@pytest.mark.parametrize("reshard_after_forward", [None, False])
def test_new_data_after_an_evaluation(
    rank: Rank, reshard_after_forward: bool | None, changed: str, flat: bool, reads: bool
) -> None:
    """The next evaluation uses new data that user code assigns after one, whichever ranks hold the parameters."""
    model = models.MLP(9)
    pair = rank.pair(model, units=[["in_proj"]], reshard_after_forward=reshard_after_forward, flat_parameters=flat)
    batch = rank.batch(0, (4, 9), microbatch=1)
    for step in range(3):
        pair.evaluate(batch)
        pair.step(rank.batch(step, (4, 9)))
        pair.evaluate(batch)
        pair.check()
        # Where several parameters of a unit are one tensor, user code can only change them together.
        together = in_one_tensor_with({changed}, pair.adapter.named_parameters())
        for named in everywhere(pair):
            for name, parameter in each_once(named).items():
                if changed == "all" or name in together:
                    parameter.data = parameter.data * 0.5
        if reads:
            with pair.adapter.summon_full_params(FullParams(writeback=False)):
                pass


@contract("EVALUATION-3")
@needs("flat_parameters", "precision.param_dtype", "precision.full_precision_in_eval")
@needs(Capability.RESHARD_AFTER_FORWARD)
@pytest.mark.parametrize("trains", [False, True])
def test_new_data_after_evaluations_in_full_precision(rank: Rank, trains: bool) -> None:
    """An evaluation in full precision gathers for the next one too; new data are used, in whatever mode."""
    model, batch = models.Tower(dim=9), (rank.batch(0, (4, 9)),)
    precision = Precision(param_dtype=torch.bfloat16, full_precision_in_eval=True)
    options: dict[str, Any] = {"units": model.units(), "precision": precision, "reshard_after_forward": False}
    run = rank.run(models.copy_of(model), **options)
    run.adapter.module.eval()
    run.evaluate(batch)
    before = len(run.trace)
    run.evaluate(batch)
    assert len(run.trace) == before, f"a second evaluation gathers {run.trace[before:]}"
    for parameters in (each_once(run.adapter.named_parameters()).values(), model.parameters()):
        for parameter in parameters:
            parameter.data = parameter.data * 0.5
    twin = rank.run(model, **options)
    for one in (run, twin):
        one.adapter.module.train(trains)
    (found,), (expected,) = run.evaluate(batch), twin.evaluate(batch)
    # The same kernels on the same numbers.
    check_bits("output", found, expected, sides="found and of a model made with the new data")


@contract("EVALUATION-4")
@needs(Capability.SUMMON_FULL_PARAMS)
@FLAT
@pytest.mark.parametrize("how", WHOLE)
@pytest.mark.parametrize("reshard_after_forward", RESHARD)
@pytest.mark.filterwarnings("ignore:offload_to_cpu=True and rank0_only=False")
def test_full_parameters(rank: Rank, reshard_after_forward: bool | int | None, how: FullParams, flat: bool) -> None:
    """Full parameters have the unsharded names and values, and writes are retained if asked, after evaluations too."""
    model = models.Tower(dim=9)
    model.layers[0].register_buffer("spare", torch.zeros(2))
    options: Any = {"optimizer": optim.sgd(), "flat_parameters": flat, "reshard_after_forward": reshard_after_forward}
    run, plain = run_and_plain(rank, model, **options)
    for number in range(2):
        run.evaluate((rank.batch(0, (2, 9)),))
        if number:
            states.halve(run, plain)  # values that the evaluation may have left gathered are outdated
        with run.adapter.summon_full_params(how) as found:
            has_them = states.check_whole(rank, how, found, plain)
            named = {name for name, _ in run.adapter.module.named_parameters()}
            assert not has_them or named == found.keys(), f"the model names its parameters {sorted(named)}"
            buffers = [name for name, _ in run.adapter.module.named_buffers()]
            assert not has_them or buffers == ["layers.0.spare"], f"the model names its buffers {buffers}"
            if has_them:
                states.write(found)
        if how.writeback:
            states.write(dict(plain.named_parameters()))
        states.check_values(run, plain)
    twin = run_by_units(rank, plain, **options)
    batch = (rank.batch(0, (2, 9)),)
    outputs, expected = run.evaluate(batch), twin.evaluate(batch)
    assert torch.equal(outputs[0], expected[0]), "the forward after the context has other values"
    check_twins(rank, (run, twin), batches(rank, 2, (4, 9)), why=WHY)


@contract("EVALUATION-4")
@needs(Capability.SUMMON_FULL_PARAMS)
@FLAT
@SHARDS
def test_function_for_every_module(rank: Rank, shards: bool, flat: bool) -> None:
    """A function that user code applies to every module sees full parameters, and its writes are retained."""
    options: Any = {"flat_parameters": flat, "shards": shards}
    run, plain = run_and_plain(rank, models.Tower(dim=9), **options)
    for number in range(3):
        if number:
            run.evaluate((rank.batch(0, (2, 9)),))
        name = "" if number else "layers.1"  # a unit first, before any forward has run
        for one in (run.adapter.module, plain):
            part = one.get_submodule(name)
            returned = part.apply(lambda module: states.write(dict(module.named_parameters(recurse=False))))
            assert returned is part, f"apply returns a {type(returned).__name__}, not the module"
        states.check_values(run, plain)
    batch = (rank.batch(0, (2, 9)),)
    outputs, expected = run.evaluate(batch), run_by_units(rank, plain, **options).evaluate(batch)
    assert torch.equal(outputs[0], expected[0]), "the forward after the function has other values"


@contract("EVALUATION-4")
@needs(Capability.SUMMON_FULL_PARAMS)
@FLAT
def test_full_parameters_that_ranks_write_differently(rank: Rank, flat: bool) -> None:
    """Of what ranks write to full parameters each retains the part that it holds."""
    run, plain = run_and_plain(rank, models.Tower(dim=9), flat_parameters=flat)
    with run.adapter.summon_full_params(FullParams()) as found:
        states.check_whole(rank, FullParams(), found, plain)
        for parameter in found.values():
            parameter.detach().fill_(rank.index + 1)
    values = {name: piece.tensor.flatten().tolist() for name, piece in run.adapter.parameters().items()}
    wrong = [name for name, mine in values.items() if {*mine} - {rank.index + 1.0}]
    assert not wrong, f"after the context rank {rank.index} has other values than it wrote: {', '.join(wrong)}"


@contract("EVALUATION-4")
@needs(Capability.SUMMON_FULL_PARAMS, Capability.NO_SHARD)
@FLAT
@pytest.mark.parametrize("writeback", [True, False])
def test_full_parameters_of_replicas(rank: Rank, writeback: bool, flat: bool) -> None:
    """Where nothing is sharded the full parameters are those that ranks hold, and writes to them are retained."""
    how = FullParams(writeback=writeback)
    options: Any = {"optimizer": optim.sgd(), "flat_parameters": flat, "shards": False}
    run, plain = run_and_plain(rank, models.Tower(dim=9), **options)
    for _ in range(2):
        run.evaluate((rank.batch(0, (2, 9)),))
        with run.adapter.summon_full_params(how) as found:
            states.check_whole(rank, how, found, plain)
            states.write(found)
        states.write(dict(plain.named_parameters()))
        states.check_values(run, plain)
    check_twins(rank, (run, run_by_units(rank, plain, **options)), batches(rank, 2, (4, 9)), why=WHY)


@contract("EVALUATION-4")
@needs(Capability.SUMMON_FULL_PARAMS, Capability.TIED_PARAMETERS)
def test_full_tied_parameters(rank: Rank) -> None:
    """Both modules of a tied parameter have the full one, with the new data that user code has assigned to it."""
    run, plain = run_and_plain(rank, ties.TiedStack(dim=9))
    for parameter in [*each_once(run.adapter.named_parameters()).values(), *plain.parameters()]:
        parameter.data = parameter.data * 0.5
    with run.adapter.summon_full_params(FullParams(writeback=False)) as found:
        states.check_whole(rank, FullParams(), found, plain)
        for layer in ("layers.0", "layers.1"):
            first, second = (run.original_module(f"{layer}.{name}").weight for name in ("first", "second"))
            assert first is second, f"the weights of {layer} are not tied inside the context"


@contract("EVALUATION-4")
@needs(Capability.SUMMON_FULL_PARAMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("writeback", [False, True])
@pytest.mark.parametrize("reshard_after_forward", RESHARD)
def test_full_gradients(
    rank: Rank, reshard_after_forward: bool | int | None, writeback: bool, dtype: torch.dtype
) -> None:
    """Between backward and the step full gradients are those of the shards; writes reach the step if written back."""
    how = FullParams(writeback=writeback, with_grads=True)

    def double(adapter: Adapter) -> None:
        pieces = adapter.gradients()
        with adapter.summon_full_params(how) as found:
            for name, parameter in found.items():
                piece, gradient = pieces[name], parameter.grad
                assert gradient is not None and gradient.shape == parameter.shape, f"{name} has no full gradient"
                if piece is not None:
                    assert torch.equal(piece.cut(gradient), piece.tensor), f"{name} has another gradient than its shard"
                gradient.mul_(2)

    def double_shards(adapter: Adapter) -> None:
        for piece in adapter.gradients().values():
            if piece is not None and writeback:
                piece.tensor.mul_(2)

    model = models.Tower(dim=9).to(dtype)
    options: Any = {"optimizer": optim.sgd(), "reshard_after_forward": reshard_after_forward}
    twin = run_by_units(rank, models.copy_of(model), after_backward=double_shards, **options)
    run = run_by_units(rank, model, after_backward=double, **options)
    drawn = (batch.to(dtype) for batch in batches(rank, 3, (4, 9)))
    check_twins(rank, (run, twin), drawn, why="a product with two has no rounding")


@contract("EVALUATION-4")
@needs(Capability.SUMMON_FULL_PARAMS)
def test_full_gradients_of_some(rank: Rank) -> None:
    """Gradients that user code set to None stay None after full ones were read: momentum does not move these.

    Before any backward there are no full ones.
    """

    def drop(adapter: Adapter, *, reads: bool) -> None:
        for name, parameter in adapter.held_parameters().items():
            if name.endswith("in_proj.weight") and adapter.optimizer and adapter.optimizer.state.get(parameter):
                parameter.grad = None
        with adapter.summon_full_params(how) if reads else contextlib.nullcontext():
            pass

    how = FullParams(writeback=False, with_grads=True)
    model, drops = models.Tower(dim=9), [functools.partial(drop, reads=reads) for reads in (True, False)]
    run, twin = (run_by_units(rank, models.copy_of(model), optimizer=optim.sgd(), after_backward=one) for one in drops)
    with run.adapter.summon_full_params(how) as found:
        made = [name for name, parameter in found.items() if parameter.grad is not None]
    assert not made, f"full gradients before any backward: {', '.join(made)}"
    check_twins(rank, (run, twin), batches(rank, 3, (4, 9)), why=WHY)


@contract("EVALUATION-4")
@needs(Capability.SUMMON_FULL_PARAMS, Capability.DEFERRED_REDUCTION)
def test_full_gradients_between_microbatches(rank: Rank) -> None:
    """Full gradients can be read also where gradients are not reduced yet, and the step is the same."""
    pair = tower(rank, microbatches=2, accumulation=Accumulation())

    def read() -> None:
        with pair.adapter.summon_full_params(FullParams(writeback=False, with_grads=True)):
            pass

    after_microbatches(rank, pair, read)
    train_and_check(pair, batches(rank, 2, (2, 9), microbatches=2))


@contract("EVALUATION-4")
@needs(Capability.SUMMON_FULL_PARAMS)
@FLAT
def test_full_frozen_parameters(rank: Rank, flat: bool) -> None:
    """Full parameters of a frozen unit are frozen, before, within and after the context."""
    model = models.Tower(dim=9)
    model.layers[1].requires_grad_(False)
    expected = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    run = rank.run(model, units=model.units(), flat_parameters=flat)
    for _ in range(2):
        with run.adapter.summon_full_params(FullParams(writeback=False)) as found:
            shown = {name: parameter.requires_grad for name, parameter in found.items()}
        assert shown == expected, f"requires_grad of full parameters: {shown}"
        run.forward_backward((rank.batch(0, (4, 9)),), loss=models.mean_square)
        trained = {name: piece is not None for name, piece in run.adapter.gradients().items()}
        wrong = [name for name in trained if trained[name] and not expected[name]]
        assert not wrong, f"frozen parameters have gradients after the context: {', '.join(wrong)}"


@contract("EVALUATION-5")
@needs(Capability.SUMMON_FULL_PARAMS)
@subjects(
    "what",
    [
        *("changes-of-the-first-rank", "within-another", "in-a-forward", "in-a-backward"),
        pytest.param("gradients-of-flat", marks=needs("flat_parameters")),
        pytest.param("gradients-on-the-cpu", marks=needs(Capability.FULL_PARAMS_ON_CPU)),
    ],
)
def test_refused_full_parameters(rank: Rank, what: str) -> None:
    """Full parameters are refused if writes or gradients could not be kept, or if they are full or in use already.

    Flat parameters have no gradients of their parts, and on the CPU full parameters are copies.
    """
    run = run_by_units(rank, models.Tower(dim=9), flat_parameters=what == "gradients-of-flat")
    how = FullParams(
        writeback=what == "changes-of-the-first-rank",
        rank0_only=what in ("changes-of-the-first-rank", "in-a-forward", "gradients-on-the-cpu"),
        with_grads=what.startswith("gradients"),
        offload_to_cpu=what == "gradients-on-the-cpu",
    )

    def enter(*_: Any) -> None:
        with run.adapter.summon_full_params(how):
            pass

    def twice() -> None:
        with run.adapter.summon_full_params(FullParams(writeback=False)):
            enter()

    if what == "in-a-forward":
        run.original_module("layers.1").register_forward_hook(enter)
    if what == "in-a-backward":
        run.original_module("layers.1").register_full_backward_hook(enter)
    batch = rank.batch(0, (2, 9))
    attempts: dict[str, Callable[[], Any]] = {
        "within-another": twice,
        "in-a-forward": functools.partial(run.adapter.forward, batch),
        "in-a-backward": functools.partial(run.forward_backward, (batch,), loss=models.mean_square),
    }
    refusal = Refusal(rank, attempts.get(what, enter), may_send=True)
    assert refusal.text is not None, "full parameters are not refused"


@contract("EVALUATION-5")
@needs(Capability.SUMMON_FULL_PARAMS, Capability.DISTRIBUTED_CHECKPOINT, Capability.FULL_STATE_DICT)
@FLAT
@pytest.mark.parametrize("where", ["in-the-context", "in-a-forward", "in-a-backward"])
def test_saving_full_parameters(rank: Rank, where: str, flat: bool) -> None:
    """A state dict of full parameters, or within a pass, is refused or has the visible values; it changes nothing."""
    run, plain = run_and_plain(rank, models.Tower(dim=9), flat_parameters=flat)
    batch = rank.batch(0, (2, 9))
    run.evaluate((batch,))
    attempts: list[Refusal] = []

    def save(*_: Any) -> None:
        attempts.append(Refusal(rank, lambda: run.adapter.checkpoint(form="full"), may_send=True))

    if where == "in-the-context":
        with run.adapter.summon_full_params(FullParams()) as found:
            states.write(found)
            save()
        states.write(dict(plain.named_parameters()))
    elif where == "in-a-forward":
        run.original_module("layers.1").register_forward_hook(save)
    else:
        run.original_module("layers.1").register_full_backward_hook(save)
        run.forward_backward((batch,), loss=models.mean_square)
    (output,) = run.evaluate((batch,))
    saved = (attempts[0].result or {"model": {}})["model"]
    wrong = [name for name, value in saved.items() if not torch.equal(value, plain.get_parameter(name))]
    assert not wrong, f"saved with other values than those that are seen: {', '.join(wrong)}"
    with torch.no_grad():
        assert torch.equal(output, plain(batch)), "the forward after an attempt to save uses other values"


@contract("EVALUATION-5")
@needs(Capability.SUMMON_FULL_PARAMS)
@FLAT
@pytest.mark.parametrize("trains", [False, True])
@pytest.mark.parametrize("writeback", [False, True])
def test_forward_and_backward_on_full_parameters(rank: Rank, writeback: bool, trains: bool, flat: bool) -> None:
    """A forward of full parameters, with a backward or without, is refused, or it is right and changes no value."""
    run, plain = run_and_plain(rank, models.Tower(dim=9), flat_parameters=flat)
    batch = rank.batch(0, (2, 9))
    with torch.no_grad():
        expected = plain(batch)
    outputs = [*run.evaluate((batch,))]

    def attempt() -> None:
        with run.adapter.summon_full_params(FullParams(writeback=writeback)):
            if trains:
                run.forward_backward((batch,), loss=models.mean_square)
            else:
                outputs.extend(run.evaluate((batch,)))

    if Refusal(rank, attempt, may_send=True).text is None:
        states.check_values(run, plain)
        outputs += run.evaluate((batch,))
        wrong = [number for number, output in enumerate(outputs) if not torch.equal(output, expected)]
        assert not wrong, f"of forwards before, within and after the context, these are wrong: {wrong}"


@contract("EVALUATION-5")
@needs(Capability.SUMMON_FULL_PARAMS)
def test_full_parameters_of_another_shape(rank: Rank) -> None:
    """A full parameter that user code replaces by one of another shape is refused, also of equally many elements."""
    run = run_by_units(rank, models.Tower(dim=9))
    layer = run.original_module("layers.1.in_proj")

    def replace() -> None:
        with run.adapter.summon_full_params(FullParams()) as found:
            layer.weight = nn.Parameter(found["layers.1.in_proj.weight"].detach().t().contiguous())

    refusal = Refusal(rank, replace, may_send=True)
    refusal.check_names("shape")
