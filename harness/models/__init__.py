"""What is trained? Small models, with their losses, tensor-parallel plans, recomputation and compilation.

Imports ``adapters`` (for the type of an optimizer factory) and ``tensors``. Cases import by
``shardproof.testing``; a model of one chapter lies beside its cases.

- ``plain``: models and losses.
- ``shapes``: models with unusual parameters, inputs, outputs or state; cases import the module.
- ``drawn``: models described by plain data.
- ``parallel``: models for tensor parallelism, with their plans, and one with experts that are divided among ranks.
- ``recomputation``: activation checkpointing and ``torch.compile`` of a model's layers.
- ``optim``: optimizer factories.
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
