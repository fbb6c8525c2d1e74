"""Models for tensor parallelism, and their parallelization plans.

``parallelize_module`` applies a plan before the implementation shards the model; the baseline is the model without
either. Sizes need not be divisible by the number of tensor-parallel ranks: the activation between the two projections
of an MLP stays a DTensor, which carries its full size.
"""

import functools
import importlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from shardproof.harness.models.plain import MLP, Stacked, Transformer, TransformerConfig
from shardproof.harness.tensors.pieces import chunk_of

SEQUENCE = 1
"""The dimension along which sequence parallelism shards activations of shape (batch, length, dim)."""


class MLPStack(Stacked):
    """Three MLPs and, if ``normed``, a LayerNorm without bias in the root's own unit.

    Input and output: (..., dim); with sequence parallelism (batch, length, dim).
    """

    def __init__(self, dim: int, *, normed: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(MLP(dim, multiplier) for multiplier in (3, 4, 3))
        self.norm = nn.LayerNorm(dim, bias=False) if normed else nn.Identity()
        self.gather = nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.gather(self.norm(self.run_layers(x)))
        return out


def parallelize_mlps(model: nn.Module, mesh: DeviceMesh, *, sequence: bool = False) -> nn.Module:
    """Apply tensor parallelism over a one-dimensional mesh to an :class:`MLPStack`, in place.

    With ``sequence`` the activations between the layers are sharded along the sequence as well.
    """
    assert isinstance(model, MLPStack)
    between: dict[str, Any] = {"input_layouts": Shard(SEQUENCE)} if sequence else {}
    plan: dict[str, Any] = {}
    for index in range(len(model.layers)):
        plan[f"layers.{index}.in_proj"] = ColwiseParallel(**between, use_local_output=False)
        plan[f"layers.{index}.out_proj"] = RowwiseParallel(output_layouts=Shard(SEQUENCE) if sequence else Replicate())
    if sequence:
        plan["norm"] = SequenceParallel()
        plan["gather"] = _gathered()
        parallelize_module(model.layers[0], mesh, _redistributed(Replicate(), Shard(SEQUENCE)))
    return parallelize_module(model, mesh, plan)


def _redistributed(before: Placement, after: Placement) -> PrepareModuleInput:
    """Redistribute a module's input, which it gets as a plain tensor."""
    return PrepareModuleInput(input_layouts=(before,), desired_input_layouts=(after,), use_local_output=True)


def _gathered() -> PrepareModuleInput:
    """Gather a module's input that is sharded along the sequence."""
    return _redistributed(Shard(SEQUENCE), Replicate())


#: The dimensions along which tensor parallelism cuts parameters of an MLP.
ROWS = {"in_proj.weight": 0, "in_proj.bias": 0, "out_proj.weight": 1}


def spread_mlps(model: nn.Module, mesh: DeviceMesh, *, divides: Sequence[str] = ()) -> nn.Module:
    """Let an :class:`MLPStack` compute with DTensors on one mesh of all dimensions, in place.

    Its projections are cut over the dimension "tp", if there is one, and all else is replicated. Its input and output
    stay plain tensors, each rank's own.

    Args:
        mesh: a mesh with names.
        divides: the dimensions along which inputs count as parts of one batch, so that gradients are pending sums over
            them. Along the others they count as equal, although they are not, and gradients are each rank's own.
    """
    assert isinstance(model, MLPStack)
    names = mesh.mesh_dim_names or ()
    for path, module in model.named_modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            dim = ROWS.get(f"{path.rpartition('.')[2]}.{name}")
            placements = [Shard(dim) if dim is not None and one == "tp" else Replicate() for one in names]
            setattr(module, name, nn.Parameter(distribute_tensor(parameter.detach(), mesh, placements)))
    inputs = [Shard(0) if name in divides else Replicate() for name in names]

    def spread(module: nn.Module, args: Any) -> Any:
        return tuple(DTensor.from_local(one, mesh, inputs, run_check=False) for one in args)

    def collect(module: nn.Module, args: Any, output: Any) -> torch.Tensor:
        local: torch.Tensor = output.redistribute(placements=inputs).to_local()
        return local

    model.register_forward_pre_hook(spread)
    model.register_forward_hook(collect)
    return model


def annotate_mlps(model: Any, mesh: DeviceMesh) -> Any:
    """Cut an :class:`MLPStack` over "tp" into plain tensors that are annotated with ``spmd_types``, in place.

    Of the gradients of the second projections' biases each rank has a part (``R``), but for the last (``I``).
    """
    spmd, tp = importlib.import_module("spmd_types"), mesh.get_group("tp")
    last, share = [*model.parameters()][-1], float(mesh.get_local_rank("tp") == 0)
    for name, parameter in model.named_parameters():
        dim = ROWS.get(".".join(name.split(".")[-2:]))
        kind = spmd.S(dim) if dim is not None else spmd.I if parameter is last else spmd.R
        if dim is not None:
            cut: Any = functools.partial(chunk_of, mesh=mesh["tp"], mesh_dim=0, dim=dim)
            parameter.data, parameter.user_cut = cut(parameter.detach()).clone(), cut
        spmd.assert_type(parameter, {mesh.get_group("dp"): spmd.R, tp: kind})

    def rowwise(linear: nn.Linear, x: torch.Tensor) -> Any:
        bias = spmd.invariant_to_replicate(linear.bias, tp) if linear is model.layers[-1].out_proj else linear.bias
        return spmd.all_reduce(F.linear(x, linear.weight, bias * share), tp, dst=spmd.I)

    for layer in model.layers:
        layer.in_proj.register_forward_pre_hook(lambda _, args: (spmd.invariant_to_replicate(args[0], tp),))
        layer.out_proj.forward = functools.partial(rowwise, layer.out_proj)
    return model


class Projections(nn.Module):
    """Three linear layers with a GELU after the first and, if ``normed``, an RMSNorm before it.

    Input: (batch, 5). Output: (batch, 12).
    """

    def __init__(self, *, normed: bool = False) -> None:
        super().__init__()
        self.split = nn.Identity()
        self.norm = nn.RMSNorm(5) if normed else nn.Identity()
        self.net1 = nn.Linear(5, 8)
        self.net2 = nn.Linear(8, 4)
        self.net3: nn.Module = nn.Linear(4, 12)
        self.gather = nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.net2(F.gelu(self.net1(self.norm(self.split(x)))))
        out: torch.Tensor = self.gather(self.net3(hidden))
        return out


def parallelize_projections(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Apply tensor parallelism over a one-dimensional mesh to two layers of :class:`Projections`, in place.

    Before and after these layers, activations are sharded along the batch. ``net3`` stays a plain module, so its
    gradients on a rank cover that rank's part of the batch only, and a training script has to add them over the
    tensor-parallel ranks. The norm's parameters are replicated DTensors, whose gradients are added automatically.
    """
    assert isinstance(model, Projections)
    whole, own = Replicate(), Shard(0)
    plan: dict[str, Any] = {
        "split": _redistributed(whole, own),
        "net1": ColwiseParallel(input_layouts=own),
        "net2": RowwiseParallel(output_layouts=own),
        "gather": _redistributed(own, whole),
    }
    if isinstance(model.norm, nn.RMSNorm):
        plan["norm"] = SequenceParallel(sequence_dim=0, use_local_output=True)
    return parallelize_module(model, mesh, plan)


def replicate(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Convert each parameter and buffer to a DTensor that is replicated over the mesh, in place."""
    return distribute_module(model, mesh)


class Factors(nn.Module):
    """Multiplies the input by a (dim,) parameter of ones. Input and output: (batch, dim)."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight: torch.Tensor = self.weight
        if isinstance(weight, DTensor) and not isinstance(x, DTensor):
            # The rank's own rows: of the full weight's gradient it has a part.
            weight = weight.to_local(grad_placements=[Partial()])
        return x * weight


def split_factors(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Let each rank of a one-dimensional mesh give :class:`Factors` rows of its own, in place.

    Its output is a DTensor, and each rank has a part of the parameter's gradient: a sum over the ranks is pending.
    """
    own = (Shard(0),)
    style = PrepareModuleInput(input_layouts=own, desired_input_layouts=own, use_local_output=False)
    return parallelize_module(distribute_module(model, mesh), mesh, style)


def cut_factors(model: nn.Module, mesh: DeviceMesh, *, replicated: bool = False) -> nn.Module:
    """Cut the parameter of :class:`Factors` over a one-dimensional mesh, whose ranks divide the rows, in place.

    Input and output are full. Of the parameter's gradient each rank has a part, for all elements: a sum over the ranks
    is pending, although the parameter is cut. With ``replicated`` it is not, and the ranks compute with plain tensors.
    """
    how: Placement = Replicate() if replicated else Shard(0)

    def cut(name: str, module: nn.Module, mesh: DeviceMesh) -> None:
        module.weight = nn.Parameter(distribute_tensor(module.get_parameter("weight").detach(), mesh, [how]))

    def divide(module: nn.Module, inputs: Any, mesh: DeviceMesh) -> Any:
        full = [DTensor.from_local(one, mesh, run_check=False) for one in inputs]
        own = [one.redistribute(placements=[Shard(0)]) for one in full]
        return tuple(one.to_local() if replicated else one for one in own)

    def collect(module: nn.Module, output: Any, mesh: DeviceMesh) -> torch.Tensor:
        whole = output if isinstance(output, DTensor) else DTensor.from_local(output, mesh, [Shard(0)])
        return whole.full_tensor()

    # The type of these functions differs between versions of torch.
    return distribute_module(model, mesh, cut, input_fn=divide, output_fn=collect)  # type: ignore[arg-type]


class Attention(nn.Module):
    """Causal attention with separate projections for queries, keys and values, without biases.

    Input and output: (batch, length, dim).
    """

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.width = dim // heads
        self.query, self.key, self.value, self.out = (nn.Linear(dim, dim, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        # The number of heads is inferred (-1), because a tensor-parallel rank has only its part of the projections.
        q, k, v = (
            project(x).view(batch, length, -1, self.width).transpose(1, 2)
            for project in (self.query, self.key, self.value)
        )
        scores = (q @ k.transpose(-2, -1)) * self.width**-0.5
        future = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
        mixed = scores.masked_fill(future, float("-inf")).softmax(-1) @ v
        out: torch.Tensor = self.out(mixed.transpose(1, 2).reshape(batch, length, -1))
        return out


class FeedForward(nn.Module):
    """Linear(dim, 4 dim), GELU, Linear(4 dim, dim). Input and output: (..., dim)."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(dim, 4 * dim)
        self.w2 = nn.Linear(4 * dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.w2(F.gelu(self.w1(x)))
        return out


class SplitBlock(nn.Module):
    """A pre-norm block of attention and feed-forward, as separate modules that a plan can name.

    Input and output: (batch, length, dim).
    """

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(dim)
        self.attention = Attention(dim, heads)
        self.feed_forward_norm = nn.LayerNorm(dim)
        self.feed_forward = FeedForward(dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x))
        out: torch.Tensor = x + self.feed_forward(self.feed_forward_norm(x))
        return out


#: Heads, width and length are divisible by two; the vocabulary is not.
SPLIT_CONFIG = TransformerConfig(layers=2, vocabulary=11, length=8, dim=12, heads=2)


class SplitTransformer(Transformer):
    """A causal language model as ``models.Transformer``, of separate modules that a plan can name.

    Input: int64 tokens, (batch, length). Output: logits, (batch, length, vocabulary).
    """

    block = SplitBlock

    def __init__(self, config: TransformerConfig = SPLIT_CONFIG) -> None:
        super().__init__(config)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device).expand(tokens.shape)
        x = self.run_layers(self.tokens(tokens) + self.positions(positions))
        logits: torch.Tensor = self.output(self.norm(x))
        return logits


def parallelize_transformer(model: nn.Module, mesh: DeviceMesh, *, sequence: bool = False) -> nn.Module:
    """Apply tensor parallelism over a one-dimensional mesh to a :class:`SplitTransformer`, in place.

    With ``sequence`` the residual stream is sharded along the sequence as well.
    """
    assert isinstance(model, SplitTransformer)
    between = Shard(SEQUENCE) if sequence else Replicate()
    plan: dict[str, Any] = {
        "tokens": ColwiseParallel(output_layouts=between),
        "positions": ColwiseParallel(output_layouts=between),
        "output": ColwiseParallel(input_layouts=between, output_layouts=Replicate()),
    }
    if sequence:
        plan["norm"] = SequenceParallel()
    for index in range(len(model.layers)):
        layer = f"layers.{index}."
        plan |= {f"{layer}attention.{name}": ColwiseParallel() for name in ("query", "key", "value")}
        plan[f"{layer}attention.out"] = RowwiseParallel(output_layouts=between)
        plan[f"{layer}feed_forward.w1"] = ColwiseParallel()
        plan[f"{layer}feed_forward.w2"] = RowwiseParallel(output_layouts=between)
        if sequence:
            plan |= {f"{layer}{name}": _gathered() for name in ("attention", "feed_forward")}
            plan |= {f"{layer}{name}_norm": SequenceParallel() for name in ("attention", "feed_forward")}
    return parallelize_module(model, mesh, plan)


class Skipping(MLPStack):
    """A stack that leaves out one of its layers, whose number is given. Input: (..., dim), and the number."""

    def forward(self, x: torch.Tensor, number: int) -> torch.Tensor:  # type: ignore[override]
        for index, layer in enumerate(self.layers):
            x = x if index == number else layer(x)
        return x
