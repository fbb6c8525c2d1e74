"""What a case imports: the one import of case modules, here and in other repositories.

- Marks: ``contract``, ``world``, ``needs`` and the others of :mod:`shardproof.harness.plugin.marks`, with
  ``Capability`` and ``Hardware``; parameter sets that several chapters share, such as ``RESHARD``.
- What a rank does: ``Rank``, ``Pair``, ``Run``, and the options of a model: ``Accumulation``, ``Clip``, ``Precision``.
- What is trained: ``models`` and its modules ``mixed``, ``optim``, ``shapes``, ``ties``, with single models of others.
- What is compared, counted and refused: ``check_exact``, ``Census``, ``Trace``, ``Refusal`` and the like.

The docstring of each name says what it is; ``docs/cases.md`` shows them at work.
"""

from shardproof.harness import models
from shardproof.harness.adapters.base import (
    Accumulation,
    Adapter,
    Clip,
    OptimizerFactory,
    Piece,
    Precision,
    Settings,
    StateForm,
    Trainee,
    Traits,
    WholeParameters,
    WrapPolicy,
    original_name,
    padded_to_rows,
    uncut,
)
from shardproof.harness.adapters.capability import Capability, Hardware
from shardproof.harness.adapters.config import NamedDimensions
from shardproof.harness.adapters.dtensor import piece_of
from shardproof.harness.adapters.registry import built_in_with
from shardproof.harness.casework import states
from shardproof.harness.casework.baselines import Undivided, backward_of_copies, check_gradients, check_parameters
from shardproof.harness.casework.casts import (
    CastReplica,
    check_equal,
    check_evaluation,
    check_statistics,
    run_and_replica,
    step_and_check,
)
from shardproof.harness.casework.device_memory import Census, Poison, bytes_of
from shardproof.harness.casework.drawn import Step, Training, needs_of, train_drawn
from shardproof.harness.casework.other_worlds import other_worlds
from shardproof.harness.casework.refusals import Refusal, Untouched, error_of_all, sharded
from shardproof.harness.casework.timeline import Interval, Timeline
from shardproof.harness.casework.twins import check_exact
from shardproof.harness.collectives.delays import Delay
from shardproof.harness.collectives.trace import Collective, Trace, first_difference
from shardproof.harness.collectives.units import ROOT
from shardproof.harness.models import mixed, optim, parallel, shapes, ties
from shardproof.harness.models.drawn import Block, Part, Plan
from shardproof.harness.models.parallel import (
    Buffered,
    ExpertModel,
    Factors,
    MLPStack,
    Projections,
    Router,
    Skipping,
    SplitTransformer,
    divide_experts,
    parallelize_mlps,
    parallelize_projections,
    parallelize_transformer,
    replicate,
    split_factors,
    spread_mlps,
)
from shardproof.harness.models.plain import Stacked
from shardproof.harness.models.recomputation import (
    Computations,
    Means,
    Span,
    SpanBesideAHead,
    SpanTower,
    compiler,
    recompute,
    recompute_span,
)
from shardproof.harness.models.shapes import WIDTH, Drawn, DrawnStack, Offset, Rows, Stateful, by_columns
from shardproof.harness.models.ties import RepeatedTower, TiedMLP, TiedStack, TwoNames
from shardproof.harness.parity.comparison import exact_difference, numbers_of
from shardproof.harness.parity.coverage import state_numel
from shardproof.harness.parity.numerics import distance
from shardproof.harness.parity.oracle import Oracle
from shardproof.harness.parity.pair import Pair
from shardproof.harness.parity.rank import Rank
from shardproof.harness.parity.run import Loss, Run, StepPicture
from shardproof.harness.plugin.axes import (
    DELAY_MS,
    DELAYED,
    DELAYS,
    FLAT,
    KEEPS,
    RESHARD,
    RESHARD_CHOICES,
    RESHARD_EXPLICIT,
    RESHARD_FREES,
    RESHARD_ROOT,
    RESHARD_TO_PARTS,
    RESHARD_UNEVEN,
    SHARDS,
    WHOLE,
    with_first,
)
from shardproof.harness.plugin.marks import (
    alone,
    contract,
    deadline,
    drawn,
    each_value,
    meaningful_from,
    needs,
    simulated,
    world,
)
from shardproof.harness.simulation.memory import Kind
from shardproof.harness.simulation.training import Simulation
from shardproof.harness.tensors import memory, private
from shardproof.harness.tensors.streams import occupy
from shardproof.harness.tensors.trees import map_leaves, map_tensors, tensors_of
from shardproof.harness.verdicts.finding import Finding, Location, Stage, step_label

__all__ = [
    "DELAYED",
    "DELAYS",
    "DELAY_MS",
    "FLAT",
    "KEEPS",
    "RESHARD",
    "RESHARD_CHOICES",
    "RESHARD_EXPLICIT",
    "RESHARD_FREES",
    "RESHARD_ROOT",
    "RESHARD_TO_PARTS",
    "RESHARD_UNEVEN",
    "ROOT",
    "SHARDS",
    "WHOLE",
    "WIDTH",
    "Accumulation",
    "Adapter",
    "Block",
    "Buffered",
    "Capability",
    "CastReplica",
    "Census",
    "Clip",
    "Collective",
    "Computations",
    "Delay",
    "Drawn",
    "DrawnStack",
    "ExpertModel",
    "Factors",
    "Finding",
    "Hardware",
    "Interval",
    "Kind",
    "Location",
    "Loss",
    "MLPStack",
    "Means",
    "NamedDimensions",
    "Offset",
    "OptimizerFactory",
    "Oracle",
    "Pair",
    "Part",
    "Piece",
    "Plan",
    "Poison",
    "Precision",
    "Projections",
    "Rank",
    "Refusal",
    "RepeatedTower",
    "Router",
    "Rows",
    "Run",
    "Settings",
    "Simulation",
    "Skipping",
    "Span",
    "SpanBesideAHead",
    "SpanTower",
    "SplitTransformer",
    "Stacked",
    "Stage",
    "StateForm",
    "Stateful",
    "Step",
    "StepPicture",
    "TiedMLP",
    "TiedStack",
    "Timeline",
    "Trace",
    "Trainee",
    "Training",
    "Traits",
    "TwoNames",
    "Undivided",
    "Untouched",
    "WholeParameters",
    "WrapPolicy",
    "alone",
    "backward_of_copies",
    "built_in_with",
    "by_columns",
    "bytes_of",
    "check_equal",
    "check_evaluation",
    "check_exact",
    "check_gradients",
    "check_parameters",
    "check_statistics",
    "compiler",
    "contract",
    "deadline",
    "distance",
    "divide_experts",
    "drawn",
    "each_value",
    "error_of_all",
    "exact_difference",
    "first_difference",
    "map_leaves",
    "map_tensors",
    "meaningful_from",
    "memory",
    "mixed",
    "models",
    "needs",
    "needs_of",
    "numbers_of",
    "occupy",
    "optim",
    "original_name",
    "other_worlds",
    "padded_to_rows",
    "parallel",
    "parallelize_mlps",
    "parallelize_projections",
    "parallelize_transformer",
    "piece_of",
    "private",
    "recompute",
    "recompute_span",
    "replicate",
    "run_and_replica",
    "shapes",
    "sharded",
    "simulated",
    "split_factors",
    "spread_mlps",
    "state_numel",
    "states",
    "step_and_check",
    "step_label",
    "tensors_of",
    "ties",
    "train_drawn",
    "uncut",
    "with_first",
    "world",
]
