"""What is trained? Small models, the losses for them, and how they are recomputed, compiled and cut.

Imports ``adapters`` (for the type of an optimizer factory) and ``tensors``. Cases take the names below from here.

- ``plain``: models and losses; ``parallel``: models that tensor parallelism can cut, with their plans.
- ``recomputation``, ``compilation``: activation checkpointing and ``torch.compile`` of a model's layers.
- ``optim``: factories of optimizers.
"""

from shardproof.harness.models.plain import (
    MLP,
    Container,
    NoInputs,
    NormedStack,
    ReusedInner,
    SkippedModule,
    Stacked,
    Tower,
    Transformer,
    TransformerConfig,
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
    "Container",
    "NoInputs",
    "NormedStack",
    "ReusedInner",
    "SkippedModule",
    "Stacked",
    "Tower",
    "Transformer",
    "TransformerConfig",
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
