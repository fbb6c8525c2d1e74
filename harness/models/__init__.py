"""What is trained? Small models, with their losses, tensor-parallel plans, recomputation and compilation.

Imports ``adapters`` (for the type of an optimizer factory) and ``tensors``. Cases import by
``shardproof.testing``; a model of one chapter lies beside its cases.

- ``plain``: models and losses.
- ``shapes``: models with unusual parameters, inputs, outputs or nesting; cases import the module.
- ``made``: a model whose modules make their own values, on the meta device too.
- ``experts``: a model with experts that may be divided among ranks.
- ``drawn``: models described by plain data.
- ``rows``: a model of which each layer divides among the ranks of a large world in another way.
- ``parallel``: models for tensor parallelism, with their plans.
- ``recomputation``: activation checkpointing of a model's layers.
- ``compilation``: ``torch.compile`` of a model's layers.
- ``stateful``: a model with all that a state dict can hold.
- ``optim``: optimizer factories.
- ``busy``: models that occupy the stream for a chosen time, and models of equal layers, for cases that measure.
"""

from shardproof.harness.models.plain import (
    MLP,
    Branches,
    Container,
    NoInputs,
    NormedStack,
    ReusedInner,
    SkippedModule,
    Stacked,
    Tower,
    Transformer,
    TransformerConfig,
    TwoEncoders,
    TwoHeads,
    TwoPaths,
    TwoStage,
    both_heads,
    copy_of,
    first_head,
    mean_square,
    packed_stack,
    ramp_square,
    two_linear,
)

__all__ = [
    "MLP",
    "Branches",
    "Container",
    "NoInputs",
    "NormedStack",
    "ReusedInner",
    "SkippedModule",
    "Stacked",
    "Tower",
    "Transformer",
    "TransformerConfig",
    "TwoEncoders",
    "TwoHeads",
    "TwoPaths",
    "TwoStage",
    "both_heads",
    "copy_of",
    "first_head",
    "mean_square",
    "packed_stack",
    "ramp_square",
    "two_linear",
]
