"""Chapter CALLS: what the API of ``FullyShardedDataParallel`` returns and warns of."""

import contextlib
import copy
import functools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardproof.suites.apis import NAMES, Fsdp1, fsdp1, trained
from shardproof.testing import Capability, Rank, contract, each_value, needs, world
from shardproof.testing.axes import subjects
from shardproof.testing.measure import private
from shardproof.testing.refuse import Refusal

pytestmark = [needs(Capability.FSDP1_API), world(2)]

checkpoint_wrapper = private.take("torch.distributed.algorithms._checkpoint.checkpoint_wrapper.checkpoint_wrapper")


# Settings and attributes of a wrapper


@contract("CALLS-1")
def test_strategy_is_reported(rank: Rank) -> None:
    """A wrapper reports the sharding strategy that it follows: the chosen one, or FULL_SHARD by default."""
    names = fsdp1(rank).strategies()
    expected = ["FULL_SHARD", "FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"]
    assert names == expected, f"the strategies are reported as {names}, not {expected}"


@contract("CALLS-1")
def test_offloading_is_reported(rank: Rank) -> None:
    """A wrapper without an option about offloading reports that it offloads nothing."""
    fsdp = fsdp1(rank)
    assert fsdp.wrap(fsdp.layers()).cpu_offload.offload_params is False, "the wrapper reports that it offloads"


@contract("CALLS-1")
def test_items_of_the_wrapped_module(rank: Rank) -> None:
    """A wrapped ``Sequential`` is indexed and sliced through its wrapper."""
    fsdp = fsdp1(rank)
    layers = fsdp.layers()
    first, second = layers
    model = fsdp.wrap(layers)
    assert model[0] is first and model[-1] is second, "an item of the wrapper is not that of its module"
    assert [*model[1:]] == [second], "a slice of the wrapper is not that of its module"


@contract("CALLS-1")
def test_attributes_of_the_wrapped_module(rank: Rank) -> None:
    """An attribute of the wrapped module is read through its wrapper."""
    fsdp = fsdp1(rank)
    found = fsdp.wrap(nn.Linear(4, 3).to(fsdp.device)).out_features
    assert found == 3, f"out_features of a wrapped Linear(4, 3) is {found}"


# Wrappers without parameters of their own, and several wrappers


@contract("CALLS-8")
def test_calls_about_several_wrappers(rank: Rank) -> None:
    """Calls about a plain module act on all wrappers in it: forms of state dicts, full parameters, roots."""
    fsdp = fsdp1(rank)
    model = nn.ModuleDict({name: fsdp.wrap(fsdp.layers()) for name in ("one", "two")})
    optimizer = fsdp.train(model, *model.values())
    with fsdp.sharded_states(model):
        values, states = model.state_dict(), fsdp.kind.optim_state_dict(model, optimizer)["state"]
    expected = [f"{part}.{name}" for part in ("one", "two") for name in NAMES]
    assert sorted(values) == expected, f"the state dict has {sorted(values)}"
    assert sorted(states) == expected, f"the optimizer's state dict has {sorted(states)}"
    averages = {f"average of {name}": state["exp_avg"] for name, state in states.items()}
    plain = [name for name, value in (values | averages).items() if not isinstance(value, DTensor)]
    assert not plain, f"in the sharded state dicts these are not sharded: {plain}"
    with fsdp.kind.summon_full_params(model):
        shapes = sorted({tuple(parameter.shape) for parameter in model.parameters()})
    assert shapes == [(4,), (4, 4)], f"full parameters have the shapes {shapes}"
    roots = fsdp.kind.fsdp_modules(model, root_only=True)
    names = [name for name in model if model[name] in roots]
    assert names == ["one", "two"], f"the roots are {names}"


@contract("CALLS-8")
def test_root_without_parameters_casts(rank: Rank) -> None:
    """A wrapper without parameters of its own casts its inputs, as a root does by default, and its buffers.

    It casts neither in an evaluation, where user code has chosen full precision for those.
    """
    rank.monkeypatch.setenv("FSDP_USE_FULL_PREC_IN_EVAL", "1")  # read when a module is wrapped
    fsdp = fsdp1(rank)
    model = fsdp.without_parameters(mixed_precision=fsdp.low_precision(buffer_dtype=torch.bfloat16))

    def check(module: nn.Module, args: tuple[torch.Tensor]) -> None:
        expected = torch.bfloat16 if model.training else torch.float32
        found = [args[0].dtype, *(one.dtype for one in module.buffers() if one.is_floating_point())]
        assert {*found} == {expected}, f"the input and the buffers are of {found}, not {expected}"

    for module in model.module:
        module.register_forward_pre_hook(check)
    for trains in (True, False, True):
        fsdp.forward(model.train(trains))


@contract("CALLS-8")
def test_root_without_parameters_names_full_ones(rank: Rank) -> None:
    """While the parameters of a wrapper without any of its own are full, those inside have the model's names."""
    fsdp = fsdp1(rank)
    model = fsdp.without_parameters()
    with fsdp.kind.summon_full_params(model):
        names = [name for name, _ in model.named_parameters()]
    assert names == ["0.weight", "0.bias"], f"the full parameters are named {names}"


# Activation checkpointing


@contract("CALLS-9")
def test_module_behind_activation_checkpointing(rank: Rank) -> None:
    """The module of a wrapper around a checkpointed module is the latter, without the wrapper of checkpointing."""
    fsdp = fsdp1(rank)
    layers = fsdp.layers()
    found = fsdp.wrap(checkpoint_wrapper(layers)).module
    assert found is layers, f"the wrapped module is a {type(found).__name__}, not the checkpointed one"


@contract("CALLS-9")
def test_names_of_checkpointed_modules(rank: Rank) -> None:
    """Names in a state dict have nothing of the wrappers of checkpointing, which are inside wrappers or around them."""
    fsdp = fsdp1(rank)
    first, second = map(checkpoint_wrapper, fsdp.layers())
    names = sorted(fsdp.wrap(nn.Sequential(fsdp.wrap(first), second)).state_dict())
    assert names == NAMES, f"the names in the state dict are {names}"


@contract("CALLS-9")
def test_load_into_a_checkpointed_module(rank: Rank) -> None:
    """A wrapped checkpointed module loads its own state dict, with no name missing and none unexpected."""
    fsdp = fsdp1(rank)
    model = fsdp.wrap(checkpoint_wrapper(fsdp.layers()), use_orig_params=False)
    found = model.load_state_dict(model.state_dict())
    left = (found.missing_keys, found.unexpected_keys)
    assert left == ([], []), f"missing and unexpected are {left}"


@contract("CALLS-9")
def test_buffers_of_a_checkpointed_module(rank: Rank) -> None:
    """A checkpointed module's buffer is cast by the policy while the model trains, and saved in its own dtype."""
    fsdp = fsdp1(rank)
    first, second = fsdp.layers()
    second.register_buffer("mean", torch.zeros(4, device=fsdp.device))
    precision = fsdp.api.MixedPrecision(buffer_dtype=torch.float64)
    model = fsdp.wrap(nn.Sequential(first, checkpoint_wrapper(second)), mixed_precision=precision)
    fsdp.forward(model)
    assert second.mean.dtype is torch.float64, f"the buffer has {second.mean.dtype} while the model trains"
    saved = model.state_dict()["1.mean"].dtype
    assert saved is torch.float32, f"the buffer of float32 is saved as {saved}"


# Dtypes


class _Probe(nn.Module):
    """Multiplies by a weight in the weight's dtype, and notes the dtypes of its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.seen: list[torch.dtype] = []

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        self.seen.append(batch.dtype)
        return batch.float() * self.weight


@contract("CALLS-10")
def test_inputs_that_are_cast_by_default(rank: Rank) -> None:
    """In lower precision the inputs of the root are cast by default, and those of a unit inside are not."""
    fsdp = fsdp1(rank)
    outer, inner = (_Probe().to(fsdp.device) for _ in range(2))
    units = fsdp.wrap(inner, mixed_precision=fsdp.low_precision())
    fsdp.forward(fsdp.wrap(nn.Sequential(outer, units), mixed_precision=fsdp.low_precision()))
    assert outer.seen == [torch.bfloat16], f"the root gets {outer.seen}"
    assert inner.seen == [torch.float32], f"the unit inside gets {inner.seen}"


@contract("CALLS-10")
@each_value("of_all", "of_the_root")
@pytest.mark.parametrize("of_the_root", [True, False])
@pytest.mark.parametrize("of_all", [True, False])
def test_inputs_of_the_root(rank: Rank, of_all: bool, of_the_root: bool) -> None:
    """The inputs of the root are cast if the setting for all units or its own says so."""
    fsdp, probe = fsdp1(rank), _Probe().to(rank.device)
    precision = fsdp.low_precision(cast_forward_inputs=of_all, cast_root_forward_inputs=of_the_root)
    fsdp.forward(fsdp.wrap(probe, mixed_precision=precision))
    expected = torch.bfloat16 if of_all or of_the_root else torch.float32
    assert probe.seen == [expected], f"the root gets {probe.seen}, not {expected}"


@contract("CALLS-10")
def test_batch_normalisation_of_a_rule(rank: Rank) -> None:
    """A rule leaves batch normalisation in full precision, and casts its inputs, by position or by keyword."""
    fsdp, seen = fsdp1(rank), dict[str, set[torch.dtype]](inputs=set(), weights=set())

    class Norm(nn.BatchNorm2d):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            seen["inputs"].add(input.dtype)
            seen["weights"].add(self.weight.dtype)
            return super().forward(input)

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.enter, self.norm = nn.Conv2d(2, 4, 1), Norm(4)

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            entered = self.enter(images)
            output: torch.Tensor = self.norm(self.norm(entered).to(entered.dtype))
            again: torch.Tensor = self.norm(input=entered)
            return output + again

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that it stays in full precision
        model = _wrapped_by_a_rule(fsdp, Both())
    output = model(torch.ones(2, 2, 3, 3, device=fsdp.device))
    assert seen == {"inputs": {torch.float32}, "weights": {torch.float32}}, f"batch normalisation gets and has {seen}"
    assert output.dtype is torch.bfloat16, f"the output of the model is of {output.dtype}"


def _wrapped_by_a_rule(fsdp: Fsdp1, model: nn.Module) -> nn.Module:
    """Wrap each module that has parameters, in lower precision."""
    rule = functools.partial(fsdp.api.wrap.size_based_auto_wrap_policy, min_num_params=1)
    wrapped: nn.Module = fsdp.wrap(model.to(fsdp.device), auto_wrap_policy=rule, mixed_precision=fsdp.low_precision())
    return wrapped


@contract("CALLS-10")
def test_buffers_are_saved_in_their_dtypes(rank: Rank) -> None:
    """Buffers that a policy casts, the wrapped module's own and deeper ones, are saved in the dtypes that they had.

    One that is not persistent is cast too, and not saved. Those of an ignored module are saved in the dtypes that they
    have, also if user code has cast it since.
    """
    fsdp = fsdp1(rank)
    layers, ignored = fsdp.layers(), nn.BatchNorm1d(4).to(fsdp.device)
    for module in (layers, layers[1]):
        module.register_buffer("scale", torch.ones(4, dtype=torch.float64, device=fsdp.device))
        module.register_buffer("scratch", torch.ones(4, device=fsdp.device), persistent=False)
    precision = fsdp.api.MixedPrecision(buffer_dtype=torch.bfloat16)
    model = fsdp.wrap(nn.Sequential(layers, ignored), mixed_precision=precision, ignored_modules=[ignored])
    fsdp.forward(model)  # which casts them
    cast = {buffer.dtype for buffer in layers.buffers()}
    assert cast == {torch.bfloat16}, f"after forward the buffers are of {cast}"
    ignored.double()
    saved = model.state_dict()
    dtypes = [saved[name].dtype for name in ("0.scale", "0.1.scale", "1.running_mean")]
    assert dtypes == [torch.float64] * 3, f"buffers of float64, the last of an ignored module, are saved as {dtypes}"
    extra = [name for name in saved if "scratch" in name]
    assert not extra, f"the state dict has buffers that are not persistent: {', '.join(extra)}"


@contract("CALLS-10")
@subjects("dtype", ["param_dtype", "reduce_dtype"])
def test_the_only_buffer_in_evaluations(rank: Rank, dtype: str) -> None:
    """Where user code has chosen full precision for evaluations, the only buffer of a model has it there alone.

    The policy casts buffers, and computes or only reduces in lower precision.
    """
    rank.monkeypatch.setenv("FSDP_USE_FULL_PREC_IN_EVAL", "1")  # read when a module is wrapped
    fsdp = fsdp1(rank)
    layers = fsdp.layers()
    layers[0].register_buffer("scale", torch.ones(4, device=fsdp.device))
    low = torch.bfloat16
    precision = fsdp.api.MixedPrecision(**{dtype: low}, buffer_dtype=low)
    model, found = fsdp.wrap(layers, mixed_precision=precision), list[torch.dtype]()
    layers[0].register_forward_pre_hook(lambda layer, args: found.append(layer.scale.dtype))
    for trains in (True, False, True, False):
        fsdp.forward(model.train(trains))
    expected = [low, torch.float32] * 2
    assert found == expected, f"in training and in evaluation in turn the buffer is of {found}, not of {expected}"


@contract("CALLS-10")
def test_norm_of_gradients_in_lower_precision(rank: Rank) -> None:
    """Where gradients stay in lower precision, the norm that clipping returns has their dtype, or the widest of all.

    It counts the gradients of a unit without shards once, next to those of sharded ones.
    """
    fsdp = fsdp1(rank)
    low = fsdp.low_precision(keep_low_precision_grads=True)
    model = fsdp.wrap(fsdp.layers(), mixed_precision=low)
    fsdp.forward(model).sum().backward()
    found = model.clip_grad_norm_(1.0).dtype
    assert found is torch.bfloat16, f"the norm of gradients of bfloat16 is of {found}"
    layers = fsdp.layers()
    with torch.no_grad():
        for parameter in layers.parameters():
            parameter.fill_(0.25 if parameter.ndim == 2 else 0)  # so that each of 40 gradients is 2
    single = fsdp.api.MixedPrecision(param_dtype=torch.float32, cast_forward_inputs=True)
    layers[1] = fsdp.without_shards(layers[1], mixed_precision=single)
    model = fsdp.wrap(layers, mixed_precision=low)
    fsdp.forward(model).sum().backward()
    norm = model.clip_grad_norm_(1.0, norm_type=1)
    assert (norm, norm.dtype) == (80, torch.float32), f"of bfloat16 and float32, 80 in all, the norm is {norm!r}"


@contract("CALLS-10")
def test_cast_of_a_model_casts_gradients(rank: Rank) -> None:
    """A cast of the model between backward and the step casts the gradients too."""
    fsdp = fsdp1(rank)
    model = fsdp.nested()
    fsdp.forward(model).sum().backward()
    model.double()
    dtypes = {one.grad.dtype for one in model.parameters() if one.grad is not None}
    assert dtypes == {torch.float64}, f"after the cast to float64 the gradients are of {dtypes}"


@contract("CALLS-10")
def test_cast_keeps_the_order_of_parameters(rank: Rank) -> None:
    """A cast of the model keeps the order of a module's parameters, of which the last is ignored."""
    fsdp = fsdp1(rank)
    layer = nn.Linear(4, 4).to(fsdp.device)
    model = fsdp.wrap(layer, ignored_states=[layer.bias])
    fsdp.forward(model)
    model.double()
    names = [name for name, _ in layer.named_parameters()]
    assert names == ["weight", "bias"], f"after the cast the order is {names}"


@contract("CALLS-10")
def test_gradients_of_a_communication_hook(rank: Rank) -> None:
    """A communication hook gets gradients in the dtype of reductions."""
    fsdp, seen = fsdp1(rank), set[torch.dtype]()
    model = fsdp.wrap(fsdp.layers(), mixed_precision=fsdp.low_precision(reduce_dtype=torch.float32))
    model.register_comm_hook(seen, lambda seen, gradient, shard: seen.add(gradient.dtype))
    fsdp.forward(model).float().sum().backward()
    assert seen == {torch.float32}, f"with reductions in float32 the hook gets gradients of {seen}"


# Where parameters lie


@contract("CALLS-11")
@subjects("view", ["transposed", "every-other-column", "no-row"])
def test_parameter_that_is_a_view(rank: Rank, view: str) -> None:
    """A parameter that is a view of a larger tensor, transposed, with gaps or without a row, keeps its values."""
    fsdp = fsdp1(rank)
    layers, numbers = fsdp.layers(), torch.arange(32.0, device=fsdp.device)
    views = {
        "transposed": numbers[8:24].view(4, 4).t(),
        "every-other-column": numbers.view(4, 8)[:, ::2],
        "no-row": numbers.view(8, 4)[:0],
    }
    layers[0].weight = nn.Parameter(views[view])
    expected = layers[0].weight.detach().clone()
    saved = fsdp.wrap(layers).state_dict()["0.weight"]
    assert torch.equal(saved, expected), f"the weight was {expected.tolist()} and is {saved.tolist()}"


@contract("CALLS-11")
@subjects("use_orig_params", [True, False])
def test_memory_layout_in_forward(rank: Rank, use_orig_params: bool) -> None:
    """In forward a weight has the values and the strides that it had, in channels-last order too, of one pixel too."""
    fsdp, wrong = fsdp1(rank), list[str]()
    layers: Any = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1)).to(fsdp.device)
    layers[:2].to(memory_format=torch.channels_last)
    plain = [layer.weight.detach().clone() for layer in layers]

    def look(layer: nn.Module, args: Any) -> None:
        found: Any = layer.weight
        number = [*layers].index(layer)
        if found.stride() != plain[number].stride():
            wrong.append(f"the strides of weight {number} were {plain[number].stride()} and are {found.stride()}")
        if not torch.equal(found, plain[number]):
            wrong.append(f"weight {number} has other values")

    for layer in layers:
        layer.register_forward_pre_hook(look)
    model = fsdp.wrap(layers, use_orig_params=use_orig_params)
    model(torch.ones(2, 4, 3, 3, device=fsdp.device))
    assert not wrong, "in forward " + ", ".join(wrong)


class _Aliased(nn.Linear):
    """Computes with what was last set as its weight, as a module does that keeps a second name of it."""

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "weight":
            self.__dict__["alias"] = value

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(batch, self.__dict__["alias"], self.bias)


@contract("CALLS-11")
@subjects("use_orig_params", [True, False])
def test_module_with_a_setattr_of_its_own(rank: Rank, use_orig_params: bool) -> None:
    """A module whose own ``__setattr__`` keeps a second name of its weight computes with the full one."""
    fsdp = fsdp1(rank)
    layer = _Aliased(4, 4).to(fsdp.device)
    expected = fsdp.forward(copy.deepcopy(layer))
    found = fsdp.forward(fsdp.wrap(layer, use_orig_params=use_orig_params))
    # The same kernels on the same numbers.
    assert torch.equal(found, expected), f"the output is {found.tolist()}, and that of the plain module another"


@contract("CALLS-11")
@subjects("use_orig_params", [True, False])
def test_default_device_of_user_code(rank: Rank, use_orig_params: bool) -> None:
    """A default device that user code has set, here the meta device, changes no place of parameters and gradients.

    A step, a norm, full parameters with gradients and state dicts are those of the model's own device.
    """
    fsdp = fsdp1(rank)
    layers, one = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 5)), nn.Linear(1, 1, bias=False)
    twins = [[copy.deepcopy(module).to(fsdp.device) for module in (layers, one)] for _ in range(2)]
    batches = [torch.ones(2, 4, device=fsdp.device), torch.ones(2, 1, device=fsdp.device)]

    def results(modules: list[Any]) -> list[torch.Tensor]:
        found: list[torch.Tensor] = []
        for module, batch in zip(modules, batches, strict=True):
            model = fsdp.wrap(module, use_orig_params=use_orig_params)
            model(batch).sum().backward()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # that a rank has no gradient
                found.append(model.clip_grad_norm_(1.0))
            with fsdp.kind.summon_full_params(model, with_grads=use_orig_params):
                found += [parameter.detach().clone() for parameter in model.parameters()]
                found += [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
            found += model.state_dict().values()
        return found

    expected = results(twins[0])
    with torch.device("meta"):
        found = results(twins[1])
    devices = {str(tensor.device) for tensor in found}
    assert devices == {str(fsdp.device)}, f"with a default device of meta, values are on {devices}"
    # The same kernels on the same numbers.
    assert all(map(torch.equal, found, expected)), "with another default device a step has other values"


@contract("CALLS-11")
@subjects("use_orig_params", [True, False])
def test_frozen_units_stay_frozen(rank: Rank, use_orig_params: bool) -> None:
    """A unit of frozen parameters has none that is trainable, flat or not, from the beginning on; others have some."""
    fsdp = fsdp1(rank)
    layers = fsdp.layers()
    layers[0].requires_grad_(False)
    options: dict[str, Any] = {"use_orig_params": use_orig_params}
    layers[0] = fsdp.wrap(layers[0], **options)
    model = fsdp.wrap(layers, **options)
    for when in ("before the first forward", "after it"):
        inner, outer = ({one.requires_grad for one in unit.parameters()} for unit in (model.module[0], model))
        assert inner == {False}, f"{when} parameters of the frozen unit have requires_grad {inner}"
        assert True in outer, f"{when} no parameter is trainable"
        fsdp.forward(model).sum().backward()


@contract("CALLS-11")
def test_parameters_begin_at_multiples_of_16_bytes(rank: Rank) -> None:
    """While a unit computes in lower precision, its original parameters of odd sizes begin at multiples of 16 bytes."""
    fsdp, past = fsdp1(rank), set[int]()
    layers = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 3), nn.Linear(3, 1)).to(fsdp.device)
    for layer in layers:
        layer.register_forward_pre_hook(
            lambda module, args: past.update(one.data_ptr() % 16 for one in (module.weight, module.bias))
        )
    fsdp.forward(fsdp.wrap(layers, mixed_precision=fsdp.low_precision()))
    assert past == {0}, f"parameters begin {sorted(past)} bytes past multiples of 16"


@contract("CALLS-11")
@subjects("use_orig_params", [True, False])
def test_tied_names_after_full_parameters(rank: Rank, use_orig_params: bool) -> None:
    """A tied weight has the same names after full parameters have been summoned as before."""
    fsdp = fsdp1(rank)
    layers = fsdp.layers()
    layers[1].weight = layers[0].weight
    model = fsdp.wrap(layers, use_orig_params=use_orig_params)
    fsdp.forward(model)

    def names() -> list[str]:
        return [name for name, _ in model.named_parameters(remove_duplicate=False)]

    before = names()
    with fsdp.kind.summon_full_params(model):
        pass
    assert names() == before, f"the names of parameters were {before} and are {names()}"


# Rules that wrap


@contract("CALLS-12")
@subjects("shared", [False, True])
def test_elements_count_once(rank: Rank, shared: bool) -> None:
    """A rule by size counts each element once: for the unit that takes it, and for the first place of a module."""
    fsdp = fsdp1(rank)
    if shared:
        layer = nn.Linear(4, 4)
        model = nn.Sequential(nn.Sequential(layer, nn.Linear(4, 2)), nn.Sequential(nn.Linear(2, 4), layer))
    else:
        inner = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2), nn.Linear(2, 4))
        model = nn.Sequential(nn.Sequential(inner, nn.Linear(4, 2)))
    rule = functools.partial(fsdp.api.wrap.size_based_auto_wrap_policy, min_num_params=18)
    names, expected = _wrapped(fsdp, model, rule), ["", "0.0"] if shared else ["", "0.0", "0.0.0"]
    assert names == expected, f"wrapped are {names}, and 18 elements are left for {expected}"


def _wrapped(fsdp: Fsdp1, model: nn.Module, rule: Callable[..., Any]) -> list[str]:
    """The names of the modules that a rule wraps, by their shortest names."""
    names = {child: name for name, child in model.named_modules()}
    wrapper = fsdp.wrap(model.to(fsdp.device), auto_wrap_policy=rule)
    return sorted(names[one.module] for one in fsdp.kind.fsdp_modules(wrapper))


@contract("CALLS-12")
def test_rule_that_wraps_every_module(rank: Rank) -> None:
    """``always_wrap_policy`` wraps every module, also one without parameters."""
    fsdp = fsdp1(rank)
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), nn.Linear(4, 2))
    names = _wrapped(fsdp, model, fsdp.api.wrap.always_wrap_policy)
    assert names == ["", "0", "0.0", "0.1", "1"], f"wrapped are {names}"


@contract("CALLS-12")
def test_wrap_outside_of_its_context(rank: Rank) -> None:
    """``wrap`` returns the module itself outside of ``enable_wrap``."""
    fsdp, layer = fsdp1(rank), nn.Linear(4, 4)
    found = fsdp.api.wrap.wrap(layer, device_mesh=fsdp.mesh)
    assert found is layer, f"outside of its context wrap returns a {type(found).__name__}"


@contract("CALLS-12")
def test_text_of_a_rule(rank: Rank) -> None:
    """The text of a ``ModuleWrapPolicy`` names its classes."""
    text = repr(fsdp1(rank).api.wrap.ModuleWrapPolicy({nn.Linear}))
    assert "Linear" in text, f"the text of a rule for Linear is {text}"


@contract("CALLS-12")
def test_options_of_a_rule_for_batch_normalisation(rank: Rank) -> None:
    """Batch normalisation that a rule leaves in full precision has the other options that the rule gives it."""
    fsdp = fsdp1(rank)
    kinds = fsdp.api.ShardingStrategy
    rule = fsdp.api.wrap.CustomPolicy(
        lambda module: {"sharding_strategy": kinds.SHARD_GRAD_OP} if isinstance(module, nn.BatchNorm1d) else False
    )
    layers = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).to(fsdp.device)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that it stays in full precision
        model = fsdp.wrap(layers, auto_wrap_policy=rule, mixed_precision=fsdp.low_precision())
    names = [one.sharding_strategy.name for one in (model.module[1], model)]
    assert names == ["SHARD_GRAD_OP", "FULL_SHARD"], (
        f"the batch normalisation and the model have the strategies {names}"
    )


@contract("CALLS-12")
def test_ignored_buffer_on_the_meta_device(rank: Rank) -> None:
    """No module is materialised because an ignored one has a buffer on the meta device."""
    fsdp, made = fsdp1(rank), list[nn.Module]()
    layers = nn.Sequential(fsdp.layers(), nn.Identity())
    layers[1].register_buffer("unused", torch.ones(4, device="meta"))
    fsdp.wrap(layers, ignored_modules=[layers[1]], param_init_fn=made.append)
    assert not made, f"materialised are {[type(module).__name__ for module in made]}"


# Warnings


@contextlib.contextmanager
def _warns(kind: type[Warning], words: str, *, expected: bool = True, at_the_call: bool = False) -> Iterator[None]:
    """Check whether a warning of this class has these words, and perhaps that it points at a line of this file."""
    with warnings.catch_warnings(record=True) as recorded:
        warnings.simplefilter("always")
        yield
    texts = [str(one.message) for one in recorded if issubclass(one.category, kind)]
    assert any(words in text for text in texts) == expected, (
        f"{'no' if expected else 'a'} {kind.__name__} names {words!r} among {texts}"
    )
    places = {one.filename for one in recorded if issubclass(one.category, kind) and words in str(one.message)}
    assert not at_the_call or places == {__file__}, f"the warning of {words!r} points at {places}, not at the call"


@contract("CALLS-2")
@subjects("container", [nn.ModuleList, nn.ModuleDict])
def test_warning_of_a_container(rank: Rank, container: type[nn.Module]) -> None:
    """Wrapping a container without a forward warns."""
    fsdp = fsdp1(rank)
    layers = fsdp.layers()
    module = nn.ModuleDict({"one": layers}) if container is nn.ModuleDict else nn.ModuleList([*layers])
    with _warns(UserWarning, "containers"):
        fsdp.wrap(module)


@contract("CALLS-2")
def test_warning_of_no_shards(rank: Rank) -> None:
    """The strategy that shards nothing warns that it is deprecated."""
    fsdp = fsdp1(rank)
    with _warns(FutureWarning, "NO_SHARD"):
        fsdp.wrap(fsdp.layers(), sharding_strategy=fsdp.api.ShardingStrategy.NO_SHARD)


@contract("CALLS-2")
@world(1)
@needs(Capability.SINGLE_RANK)
def test_warning_of_one_rank(rank: Rank) -> None:
    """Sharding over a single rank warns, and the wrapper reports that it shards nothing, whatever was chosen."""
    fsdp = fsdp1(rank)
    with _warns(UserWarning, "world size is 1"):
        fsdp.wrap(fsdp.layers())
    names = fsdp.strategies()
    assert names == ["NO_SHARD"] * 4, f"wrappers of one rank report the strategies {names}"


@contract("CALLS-2")
def test_warning_of_an_ignored_root(rank: Rank) -> None:
    """Ignoring the module that is wrapped warns."""
    fsdp = fsdp1(rank)
    layers = fsdp.layers()
    with _warns(UserWarning, "top-level module"):
        fsdp.wrap(layers, ignored_modules=[layers])


@contract("CALLS-2")
def test_no_warning_without_a_device(rank: Rank) -> None:
    """Without a device and a mesh a model computes where it lies, of which nobody is warned; or it is refused."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if (accelerator.type if accelerator else "cpu") != rank.device.type:
        return  # ranks on the CPU of a host with an accelerator
    fsdp = fsdp1(rank)
    with _warns(UserWarning, "", expected=False):
        attempt = Refusal(rank, lambda: fsdp.wrap(fsdp.layers(), device_mesh=None, device_id=None))
    if attempt.text is not None:
        attempt.check_names("accelerator")
        return
    found = attempt.result.compute_device
    assert found == rank.device, f"a model on {rank.device} computes on {found}"


@contract("CALLS-2")
def test_warning_of_batch_normalisation(rank: Rank) -> None:
    """A rule that leaves batch normalisation in full precision warns; where there is none, it does not."""
    fsdp = fsdp1(rank)
    for last in (nn.BatchNorm2d(4), nn.Conv2d(4, 4, 1)):
        with _warns(UserWarning, "mixed precision disabled", expected=isinstance(last, nn.BatchNorm2d)):
            _wrapped_by_a_rule(fsdp, nn.Sequential(nn.Conv2d(2, 4, 1), last))


@contract("CALLS-2")
@subjects("separate", [False, True])
def test_warning_of_frozen_parameters(rank: Rank, separate: bool) -> None:
    """A rule that puts frozen and trainable parameters into one unit warns; one that separates them does not."""
    fsdp = fsdp1(rank)
    layers = fsdp.layers()
    layers[0].requires_grad_(False)
    classes = {nn.Sequential, nn.Linear} if separate else {nn.Sequential}
    with _warns(UserWarning, "requires_grad", expected=not separate):
        fsdp.wrap(nn.Sequential(layers), auto_wrap_policy=fsdp.api.wrap.ModuleWrapPolicy(classes))


@contract("CALLS-2")
@subjects("use_orig_params", [False, True])
def test_the_first_unit_of_frozen_parameters_is_named(rank: Rank, use_orig_params: bool) -> None:
    """Of several units with frozen and trainable parameters, the warning or the error names the first.

    The error names the option with which they are allowed, too.
    """
    fsdp = fsdp1(rank)
    model: Any = nn.Sequential(*(fsdp.layers() for _ in range(3)))
    for layers in model[1:]:
        layers[0].requires_grad_(False)
    policy = fsdp.api.wrap.ModuleWrapPolicy({nn.Sequential})
    wraps = functools.partial(fsdp.wrap, model, auto_wrap_policy=policy, use_orig_params=use_orig_params)
    if use_orig_params:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            wraps()
        text = next((str(one.message) for one in caught if "requires_grad" in str(one.message)), "no warning")
    else:
        text = Refusal(rank, wraps).text or "no error"
    said = text.splitlines()[0]
    assert " 1 has both parameters" in f" {said}", f"the first of the units 1 and 2 is not named: {said}"
    assert use_orig_params or "use_orig_params" in said, f"the option that allows such units is not named: {said}"


@contract("CALLS-2")
@subjects("first_rank", [False, True])
def test_warning_of_full_parameters_on_the_cpu(rank: Rank, first_rank: bool) -> None:
    """Full parameters on the CPU of every rank warn; on that of the first rank alone they do not."""
    fsdp = fsdp1(rank)
    model = fsdp.nested()
    with (
        _warns(UserWarning, "rank0_only", expected=not first_rank),
        fsdp.kind.summon_full_params(model, writeback=False, rank0_only=first_rank, offload_to_cpu=True),
    ):
        pass


@contract("CALLS-2")
def test_warning_of_older_arguments(rank: Rank) -> None:
    """Parameters in place of the optimizer (``optim_input``) warn, at the call, that the argument is deprecated."""
    fsdp, model, optimizer = trained(rank)
    with _warns(FutureWarning, "optim_input", at_the_call=True):
        fsdp.kind.full_optim_state_dict(model, optimizer, optim_input=[*model.parameters()])
