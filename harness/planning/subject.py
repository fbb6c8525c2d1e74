"""What ``--model`` names: a known shape, or a function of the user that builds a model."""

import dataclasses
import hashlib
import importlib
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from shardproof import extras
from shardproof.harness.adapters.registry import line_of_error
from shardproof.harness.planning import packaged, presets
from shardproof.harness.tensors import private
from shardproof.harness.tensors.trees import map_tensors

_READS = tuple(
    private.take(f"torch._subclasses.fake_tensor.{name}")
    for name in ("DataDependentOutputException", "DynamicOutputShapeException")
)


class ModelError(ValueError):
    """A model cannot be had or has no use here. The message is one line."""


Inputs = Callable[[int, int], tuple[Any, ...]]
"""Takes sequences and tokens of each, and makes the arguments of a forward on the default device."""

Loss = Callable[..., torch.Tensor]
"""Takes a forward's output and after it the arguments, and returns a scalar."""


@dataclasses.dataclass(frozen=True)
class Built:
    """A model, not sharded, with what makes the arguments of its forward and maps its output to a scalar."""

    model: nn.Module
    inputs: Inputs
    loss: Loss


@dataclasses.dataclass(frozen=True)
class Subject:
    """A model that can be built."""

    about: str  # what the model is; empty for the user's own
    length: int  # tokens of a sequence where none are asked for
    build: Callable[[int], Built]  # builds it for a number of tokens, on the default device


_RETURNS = "return a torch.nn.Module, or (module, inputs, loss) with inputs(batch, sequence) and loss(output, *inputs)"

#: Tokens of a sequence, for models of the user.
_LENGTH = 2048

_KNOWN = presets.KNOWN | packaged.KNOWN
_FAMILIES = presets.FAMILIES | {"transformers"}


def subject_of(name: str, *, layers: int | None = None, dim: int | None = None) -> Subject:
    """Return what ``name`` stands for, ``family:size`` of a known shape or ``module:function``, which is imported.

    A known shape is cut down to ``layers`` and ``dim`` as :func:`presets.resized` says.

    Raises:
        ModelError: there is no such shape, or the module does not import or has no such function, or the function needs
            arguments, or sizes are given for it. One line.
    """
    module_name, colon, function_name = name.partition(":")
    if not colon or not module_name or not function_name:
        raise ModelError(f"--model {name!r}: give module:function, or one of {', '.join(_KNOWN)}")
    if module_name in _FAMILIES:
        shape = presets.resized(presets.shape_of(name, _KNOWN), layers=layers, dim=dim)
        about = shape.like
        if layers is not None or dim is not None:
            about += f", cut to {shape.layers} layers of width {shape.dim}"
        return Subject(about, shape.length, lambda length: _known(name, shape, length))
    if layers is not None or dim is not None:
        raise ModelError(f"--model {name!r}: --layers and --dim are for known shapes; this model has its own sizes")
    function = _function(name, module_name, function_name)
    return Subject("", _LENGTH, lambda length: _built(name, function))


def why(error: BaseException) -> str:
    """Return in one line why a model fails on tensors without values."""
    if isinstance(error, _READS):
        return f"it reads values of tensors, and a simulation has none ({error})"
    return line_of_error(error)


def microbatch(built: Built, *, step: int, rank: int, index: int, batch: int, sequence: int) -> tuple[Any, ...]:
    """Draw the arguments of a forward on the CPU by these numbers alone: whoever asks gets the same values.

    They are those of ``built.inputs``, under a seed. Tensors of zeros, which do for a plan, are drawn anew: integers as
    rows of the model's first embedding, floating-point numbers from a normal distribution.

    Args:
        rank: the data-parallel rank that reads them.
        index: the microbatch's in the step.
        batch: sequences, of ``sequence`` tokens each.
    """
    rows = next((one.num_embeddings for one in built.model.modules() if isinstance(one, nn.Embedding)), None)

    def drawn(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dtype == torch.bool or tensor.count_nonzero():
            return tensor
        if tensor.is_floating_point():
            return torch.randn_like(tensor)
        return tensor if rows is None else torch.randint_like(tensor, rows)

    seed = hashlib.blake2b(f"{step} {rank} {index}".encode(), digest_size=8).digest()
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        # Not torch.manual_seed: it would seed the generators of devices too.
        torch.default_generator.manual_seed(int.from_bytes(seed, "big"))
        values: tuple[Any, ...] = map_tensors(drawn, built.inputs(batch, sequence))
    return values


def _known(name: str, shape: presets.Shape, length: int) -> Built:
    if shape.family != "transformers":
        return _of_tokens(presets.build(shape, length))
    try:
        model = packaged.build(name, shape, length)
    except ModuleNotFoundError as error:
        if error.name != "transformers":
            raise ModelError(f"--model {name!r}: transformers does not import: {line_of_error(error)}") from error
        raise ModelError(f"--model {name!r} needs transformers: {extras.command('transformers')}") from error
    if name == "transformers:vit":
        return Built(model, packaged.image_inputs, packaged.image_loss)
    return _of_tokens(model)


def _of_tokens(model: nn.Module) -> Built:
    return Built(model, token_inputs, token_loss)


def token_inputs(batch: int, sequence: int) -> tuple[torch.Tensor]:
    """Tokens (batch, sequence), int64, all 0."""
    return (torch.zeros(batch, sequence, dtype=torch.int64),)


def token_loss(output: Any, tokens: torch.Tensor) -> torch.Tensor:
    """The cross-entropy of a token for each position, in float32, as most scripts for language models compute it.

    Args:
        output: logits (batch, sequence, vocab), or an object or a mapping with ``logits``, or a tuple that begins with
            them.
        tokens: int64 (batch, sequence).
    """
    return functional.cross_entropy(_logits(output).flatten(0, 1).float(), tokens.flatten())


def _logits(output: Any) -> torch.Tensor:
    if isinstance(output, dict):
        output = output.get("logits")
    elif not isinstance(output, torch.Tensor):
        output = getattr(output, "logits", output)
    if isinstance(output, (tuple, list)) and output:
        output = output[0]
    if not isinstance(output, torch.Tensor) or output.ndim != 3:
        found = tuple(output.shape) if isinstance(output, torch.Tensor) else type(output).__name__
        raise ModelError(
            f"the model returned {found} for tokens (batch, sequence), not logits (batch, sequence, vocab): "
            "let the function return the model, inputs(batch, sequence) and loss(output, *inputs)"
        )
    return output


def _function(name: str, module_name: str, function_name: str) -> Callable[[], Any]:
    # A ValueError alone becomes one line: a module may raise anything, such as the SystemExit of user code.
    try:
        module = importlib.import_module(module_name)
    except BaseException as error:
        known = "" if "." in module_name else f"; known families of shapes are {', '.join(sorted(_FAMILIES))}"
        raise ModelError(f"--model {name!r}: {module_name!r} does not import: {line_of_error(error)}{known}") from error
    function: Any = getattr(module, function_name, None)
    if function is None:
        raise ModelError(f"--model {name!r}: module {module_name!r} has no {function_name!r}")
    if not callable(function) or isinstance(function, nn.Module):
        kind = type(function).__name__
        raise ModelError(f"--model {name!r}: {function_name!r} is of type {kind}, not a function that returns a model")
    needed = _needed(function)
    if needed:
        raise ModelError(
            f"--model {name!r}: {function_name}({', '.join(needed)}) needs arguments; give a function that builds the "
            "model without any, and without data"
        )
    return function  # type: ignore[no-any-return]


def _needed(function: Callable[..., Any]) -> list[str]:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # written in C
        return []
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [one.name for one in parameters if one.default is one.empty and one.kind not in variadic]


def _built(name: str, function: Callable[[], Any]) -> Built:
    """Call the user's function, which may raise or return no model, or one without its two functions."""
    try:
        made = function()
    except BaseException as error:
        raise ModelError(f"--model {name!r} cannot be built without data: {why(error)}") from error
    if isinstance(made, nn.Module):
        return _of_tokens(made)
    if isinstance(made, tuple) and len(made) == 3 and isinstance(made[0], nn.Module) and all(map(callable, made[1:])):
        return Built(*made)
    raise ModelError(f"--model {name!r} returned {type(made).__name__}: {_RETURNS}")
