"""Cuts a model over tensor-parallel ranks, by the plan that its class brings."""

import fnmatch
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, distribute_module
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from shardproof.harness.planning.subject import ModelError
from shardproof.harness.tensors.trees import local_of

#: By the names that ``tp_plan`` of the models of transformers has, and of the known shapes.
_STYLES: dict[str, Callable[[], ParallelStyle]] = {
    "colwise": ColwiseParallel,
    "colwise_gather_output": lambda: ColwiseParallel(output_layouts=Replicate()),
    "rowwise": RowwiseParallel,
    "rowwise_split_input": lambda: RowwiseParallel(input_layouts=Replicate()),
    "embedding_rowwise": lambda: RowwiseParallel(input_layouts=Replicate()),
}


def split(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Cut a model in place over the ranks of a mesh of one dimension, and return it.

    Every parameter becomes a DTensor: one that the plan does not name is replicated, so that gradients can be clipped
    together. Ties are kept. Layers of FSDP2 come after it.

    Raises:
        ModelError: the model brings no plan, or one that cannot be followed here; one line.
    """
    kind, size = type(model).__name__, mesh.size()
    plan: dict[str, str] = getattr(model, "tp_plan", None) or {}
    unknown = sorted(set(plan.values()) - _STYLES.keys())
    if not plan or unknown:
        raise ModelError(f"{kind} has {f'an unknown style {unknown[0]!r}' if unknown else 'no tensor-parallel plan'}")
    config = getattr(model, "config", None)
    heads: int = getattr(model, "key_heads", getattr(config, "num_key_value_heads", size))
    if heads % size:
        raise ModelError(f"{kind} has {heads} key heads, which {size} tensor-parallel ranks do not divide")
    for name, module in model.named_modules():
        style = next((style for pattern, style in plan.items() if fnmatch.fnmatch(name, pattern)), "")
        features = {"colwise": "out_features", "rowwise": "in_features"}.get(style, "")
        if (count := getattr(module, features, size)) % size:
            raise ModelError(
                f"{kind} has {count} features in {name!r}, which {size} tensor-parallel ranks do not divide"
            )
    tied = _tied(model)
    parallelize_module(model, mesh, {name: _STYLES[style]() for name, style in plan.items()})
    for module in model.modules():
        if any(not isinstance(one, DTensor) for one in module.parameters(recurse=False)):
            distribute_module(module, mesh, input_fn=_enter, output_fn=_leave)
    for first, *others in tied:
        for name in others:
            owner, _, own = name.rpartition(".")
            setattr(model.get_submodule(owner), own, model.get_parameter(first))
    return model


def _tied(model: nn.Module) -> list[list[str]]:
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [group for group in names.values() if len(group) > 1]


def _enter(module: nn.Module, inputs: Any, mesh: DeviceMesh) -> Any:
    # Not by the exact class: what a collective returns is of another one until it has arrived.
    def entered(one: Any) -> Any:
        is_plain = isinstance(one, torch.Tensor) and not isinstance(one, DTensor)
        return DTensor.from_local(one, mesh, [Replicate()], run_check=False) if is_plain else one

    return tuple(map(entered, inputs))


def _leave(module: nn.Module, output: Any, mesh: DeviceMesh) -> Any:
    return local_of(output)
