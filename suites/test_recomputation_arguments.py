"""Chapter RECOMPUTATION: what user code passes to recomputed units, and the options of each means to recompute them."""

import contextlib
import functools
import inspect
import typing
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, NamedTuple, cast

import pytest
import torch
from torch import nn
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.utils.checkpoint import checkpoint

from shardproof.testing import Capability, Rank, Run, contract, models, needs, world
from shardproof.testing.axes import subjects
from shardproof.testing.compare import exact_difference
from shardproof.testing.make import Precision
from shardproof.testing.measure import private

_HOOKS = private.take("torch.distributed._composable.checkpoint_activation.checkpoint")
_wrapper = private.take("torch.distributed.algorithms._checkpoint.checkpoint_wrapper.checkpoint_wrapper")
_offload = private.take("torch.distributed.algorithms._checkpoint.checkpoint_wrapper.offload_wrapper")
_apply = private.take("torch.distributed.algorithms._checkpoint.checkpoint_wrapper.apply_activation_checkpointing")
_IMPL = "torch.distributed.algorithms._checkpoint.checkpoint_wrapper.CheckpointImpl"

DIM = 6
Means = Literal[
    "hooks", "wrapper", "reentrant-wrapper", "wrapper-with-a-function", "applied", "applied-by-a-policy", "call",
    "reentrant-call", "offloaded",
]  # fmt: skip
#: Options of user code, by name, with which means take them.
_FREE: tuple[Means, ...] = ("hooks", "wrapper", "applied", "call")
_OPTIONS: dict[str, tuple[Mapping[str, Any], tuple[Means, ...]]] = {
    "no option": ({}, ("wrapper-with-a-function", "applied-by-a-policy", "offloaded")),
    "preserve_rng_state=True": ({"preserve_rng_state": True}, (*_FREE, "reentrant-wrapper", "reentrant-call")),
    "preserve_rng_state=False": ({"preserve_rng_state": False}, (*_FREE, "reentrant-wrapper", "reentrant-call")),
    "context_fn": ({}, _FREE),
    "early_stop=False": ({"early_stop": False}, _FREE),
    "early_stop=True": ({"early_stop": True}, _FREE),
    "determinism_check='none'": ({"determinism_check": "none"}, _FREE),
    # Hooks need a context of their own; wrappers hand it on as the other options. Its traces cost seconds.
    "debug=True": ({"debug": True}, ("call",)),
}


#: Arguments that are nothing, where the default is something.
_EMPTY: dict[str, Any] = {"bound": None, "negate": False, "shifts": ()}


class _Inside(NamedTuple):
    shift: torch.Tensor
    weights: list[Any]


class _Notes:
    """What a layer has got and where, by call; passed to it by user code."""

    def __init__(self) -> None:
        self.seen: list[dict[str, Any]] = []
        self.context = "none"
        self.ended = 0

    @contextlib.contextmanager
    def within(self, context: str) -> Iterator[None]:
        """A context of user code."""
        before, self.context = self.context, context
        try:
            yield
        finally:
            self.context = before


class _Receiver(nn.Module):
    """A layer with arguments of every kind, and several outputs; ``flat`` returns no container of tensors.

    Input and first output: (rows, dim).
    """

    def __init__(self, *, flat: bool) -> None:
        super().__init__()
        self.linear, self.side = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)
        self.flat = flat

    def forward(
        self, x: torch.Tensor, power: int, *more: Any, second: torch.Tensor, notes: _Notes, inside: Any,
        beta: torch.Tensor | None = None, alpha: float = 1.0,
        bound: float | None = 0.5, negate: bool = True, shifts: tuple[float, ...] = (1.0,),
    ) -> Any:  # fmt: skip
        drawn = torch.rand(DIM, device=x.device)
        floats = {
            "x": x,
            "second": second,
            "mask": more[0],
            "shift": inside["a"].shift,
            "weight": inside["a"].weights[1],
        }
        notes.seen.append(
            {
                "power": power, "alpha": alpha, "beta": beta, "more": more[1:], "nothing": inside["a"].weights[0],
                "empty": (bound, negate, shifts),
                "kinds": (type(inside).__name__, type(inside["a"]).__name__), "drawn": drawn.tolist(),
                "context": notes.context, "dtypes": {name: value.dtype for name, value in floats.items()},
                "values": {name: value.detach().float().sum().item() for name, value in floats.items()},
            }
        )  # fmt: skip
        hidden = torch.tanh(self.linear(x) + inside["a"].shift) ** power * second
        mixed = torch.sin(self.side(hidden) * inside["a"].weights[1] + drawn.to(x.dtype)) * alpha
        chosen = torch.where(more[0] > 0, mixed, -mixed)
        notes.ended += 1  # backward needs nothing of what follows its last product
        return (chosen, mixed, None, power) if self.flat else ({"chosen": chosen}, [mixed, None], power)


class _Caller(models.Stacked):
    """Calls two receivers, the second with the outputs of the first. Input and output: (rows, dim)."""

    def __init__(self, *, flat: bool) -> None:
        super().__init__()
        self.entry = nn.Linear(DIM, DIM)
        self.layers = nn.ModuleList(_Receiver(flat=flat) for _ in range(2))
        self.flat = flat
        self.notes = [_Notes(), _Notes()]
        self.around: Callable[..., Any] | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = second = self.entry(x)
        text = "text"
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32  # which units of lower precision cast
        for layer, notes in zip(self.layers, self.notes, strict=True):
            # A re-entrant function sees no gradients of tensors in containers, as torch documents.
            shift = (second * 0.5).detach() if self.flat else second * 0.5
            inside = {"b": text, "a": _Inside(shift, [None, torch.full((DIM,), 0.75, device=x.device, dtype=wide)])}
            call = layer if self.around is None else functools.partial(self.around, layer)
            mask = torch.arange(DIM, device=x.device) % 3
            output = call(hidden, 2, mask, text, second=second.cos(), notes=notes, inside=inside, alpha=0.5, **_EMPTY)
            hidden, second = (output[0], output[1]) if self.flat else (output[0]["chosen"], output[1][0])
            assert output[-1] == 2 and (output[2] if self.flat else output[1][1]) is None, "outputs are others"
        output = hidden + second
        return cast(torch.Tensor, output)


def _recompute(model: _Caller, means: Means, options: Mapping[str, Any]) -> _Caller:
    """Change a model in place so that its layers are recomputed, or their activations offloaded."""
    wrappers: dict[str, Callable[[nn.Module], Any]] = {
        "hooks": lambda layer: _HOOKS(layer, **options),
        "wrapper": lambda layer: _wrapper(layer, **options),
        "reentrant-wrapper": lambda layer: _wrapper(layer, private.need(_IMPL).REENTRANT, **options),
        "wrapper-with-a-function": lambda layer: _wrapper(layer, checkpoint_fn=checkpoint, use_reentrant=False),
        "offloaded": _offload,
    }
    if means in ("applied", "applied-by-a-policy"):
        made = functools.partial(_wrapper, **options)
        if means == "applied":
            _apply(model, checkpoint_wrapper_fn=made, check_fn=lambda module: isinstance(module, _Receiver))
        else:
            _apply(model, checkpoint_wrapper_fn=made, auto_wrap_policy=ModuleWrapPolicy({_Receiver}))
    elif means == "call":
        model.around = functools.partial(checkpoint, use_reentrant=False, **options)
    elif means == "reentrant-call":
        model.around = functools.partial(_reentrant, options)
    else:
        for index, layer in enumerate(model.layers):
            model.layers[index] = wrappers[means](layer)
    return model


def _reentrant(options: Mapping[str, Any], layer: nn.Module, *args: Any, second: torch.Tensor, **keywords: Any) -> Any:
    """The re-entrant function takes positional arguments alone, as torch documents."""

    def call(second: torch.Tensor, *args: Any) -> Any:
        return layer(*args, second=second, **keywords)

    return checkpoint(call, second, *args, use_reentrant=True, **options)


@contract("RECOMPUTATION-6")
@world(2)
@needs(Capability.RECOMPUTATION, Capability.CONTAINER_OUTPUT)
@subjects("means", typing.get_args(Means))
@pytest.mark.parametrize(
    "precision", [None, pytest.param(torch.bfloat16, marks=needs("precision.param_dtype"))], ids=["float32", "bfloat16"]
)
def test_arguments_of_recomputed_units(rank: Rank, precision: torch.dtype | None, means: Means) -> None:
    """A recomputation gets what forward got: objects, containers, dtypes, keywords, random numbers, contexts.

    Gradients are, bit for bit, those without recomputation, with each option that the means takes.
    """
    flat = means.startswith("reentrant")
    plain = _Caller(flat=flat)
    if means == "offloaded" and precision is None:
        # Offloaded matrices come back in another layout, and products in another order: compared as float32.
        plain = plain.double()
    assert any(means in takers for _, takers in _OPTIONS.values()), f"{means} is used with no option"
    expected = _gradients(rank, _copy_of(plain), precision, None, {})[0]
    known = inspect.signature(checkpoint).parameters
    for name, (options, takers) in _OPTIONS.items():
        if means not in takers or ("early_stop" in options and "early_stop" not in known):
            continue
        chosen = dict(options)
        model = _copy_of(plain)
        if name == "context_fn":
            chosen["context_fn"] = functools.partial(_contexts, model)
        found, seen = _gradients(rank, model, precision, means, chosen)
        _check_seen(name, means, seen)
        for parameter, gradient in expected.items():
            if name == "preserve_rng_state=False" or gradient is None:
                continue
            difference = exact_difference(found[parameter], gradient)  # type: ignore[arg-type]
            assert difference is None, (
                f"with {name}, gradient of {parameter!r}: element, recomputed and not: {difference}"
            )


def _copy_of(model: _Caller) -> _Caller:
    return cast(_Caller, models.copy_of(model))


def _contexts(model: _Caller) -> tuple[Any, Any]:
    """Contexts of user code for forward and for the recomputation, of all layers."""
    return _within(model.notes, "of forward"), _within(model.notes, "of the recomputation")


@contextlib.contextmanager
def _within(notes: list[_Notes], context: str) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for one in notes:
            stack.enter_context(one.within(context))
        yield


def _check_seen(name: str, means: Means, notes: list[_Notes]) -> None:
    """Check that each layer got the same in forward and in the recomputation, except what the option changes."""
    computations = 1 if means == "offloaded" else 2
    for index, one in enumerate(notes):
        where = f"with {name}, layers.{index}"
        assert len(one.seen) == 2 * computations, f"{where} has computed {len(one.seen)} times in two steps"
        for step in range(2):
            first, *again = one.seen[step * computations : (step + 1) * computations]
            assert first["empty"] == (*_EMPTY.values(),), f"{where} gets {first['empty']} for {_EMPTY}"
            contexts = [first["context"], *(other["context"] for other in again)]
            expected = ["of forward", "of the recomputation"] if name == "context_fn" else ["none"] * computations
            assert contexts == expected, f"{where} computes in the contexts {contexts}"
            for other in again:
                changed = [key for key in first if key != "context" and first[key] != other[key]]
                allowed = ["drawn"] if name == "preserve_rng_state=False" else []
                assert changed == allowed, (
                    f"{where} gets others in the recomputation than in forward: "
                    f"{ {key: (first[key], other[key]) for key in changed} or 'random numbers are the same' }"
                )
        if name.startswith("early_stop"):
            ended = 2 * computations if name == "early_stop=False" else 2
            assert one.ended == ended, f"{where} has ended {one.ended} times in two steps, not {ended}"


def _gradients(
    rank: Rank, model: _Caller, precision: torch.dtype | None, means: Means | None, options: Mapping[str, Any]
) -> tuple[dict[str, torch.Tensor | None], list[_Notes]]:
    """Run forward and backward twice, and return the gradients and what the layers have noted (collective)."""
    dtype = next(model.parameters()).dtype
    run: Run = rank.run(
        model, units=model.units(), precision=Precision(param_dtype=precision),
        prepare=None if means is None else lambda plain: _recompute(plain, means, options),
    )  # fmt: skip
    for step in range(2):
        torch.manual_seed(step + 2 * rank.index)
        run.forward_backward((rank.batch(step, (4, DIM)).to(dtype),), loss=models.mean_square)
    gradients = {name: None if one is None else one.tensor.float() for name, one in run.adapter.gradients().items()}
    return gradients, model.notes
