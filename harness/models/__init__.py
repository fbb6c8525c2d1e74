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

from shardproof.harness.models.plain import MLP as MLP
from shardproof.harness.models.plain import Branches as Branches
from shardproof.harness.models.plain import Container as Container
from shardproof.harness.models.plain import NoInputs as NoInputs
from shardproof.harness.models.plain import NormedStack as NormedStack
from shardproof.harness.models.plain import ReusedInner as ReusedInner
from shardproof.harness.models.plain import SkippedModule as SkippedModule
from shardproof.harness.models.plain import Stacked as Stacked
from shardproof.harness.models.plain import Tower as Tower
from shardproof.harness.models.plain import Transformer as Transformer
from shardproof.harness.models.plain import TransformerConfig as TransformerConfig
from shardproof.harness.models.plain import TwoEncoders as TwoEncoders
from shardproof.harness.models.plain import TwoHeads as TwoHeads
from shardproof.harness.models.plain import TwoPaths as TwoPaths
from shardproof.harness.models.plain import TwoStage as TwoStage
from shardproof.harness.models.plain import both_heads as both_heads
from shardproof.harness.models.plain import copy_of as copy_of
from shardproof.harness.models.plain import first_head as first_head
from shardproof.harness.models.plain import mean_square as mean_square
from shardproof.harness.models.plain import packed_stack as packed_stack
from shardproof.harness.models.plain import ramp_square as ramp_square
from shardproof.harness.models.plain import two_linear as two_linear
