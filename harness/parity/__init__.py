"""What is compared with what? The implementation with its baseline, with a float64 oracle, and with twins of itself.

Imports ``simulation``, ``adapters``, ``collectives``, ``models``, ``verdicts`` and ``tensors``. Cases import names of
this room by ``shardproof.testing``; the other rooms import from its modules.

- ``rank``: ``Rank``, the context object that a case receives. It builds on ``member`` and ``rank_state``.
- ``run``: ``Run`` drives an adapter through training steps; ``sharded_run`` also checks that its model is sharded.
  ``snapshots`` copies what a step shows.
- ``pair``: ``Pair`` trains the sharded run, the baseline and the oracle; ``comparison`` compares one step of them.
- ``coverage``, ``claims``: check by positions and by sizes that the shards of all ranks make up the model.
- ``ties``: which parameters a model shares between modules, and which of them sharding has untied.
- ``protocol``: checks in a rank that an adapter keeps to the protocol.
- ``twins``: ``check_exact`` compares two runs of one implementation bit for bit.
- ``casts``: ``CastReplica``, the baseline of runs in low precision, and ``check_equal``.
- ``plain``: averages the gradients of plain copies, for cases of two models or of several backwards.
- ``oracle``, ``numerics``, ``explanations``: the float64 replay, the tolerances, and probable causes of an error.
- ``capture``: copies what modules compute; ``explainer``, ``divergences``: the first tensor of it that diverges.
- ``census``: counts the bytes in which units are gathered while a step runs.
- ``timeline``: when kernels ran, from a profile; ``poison``: fills memory that was freed too early with NaN.
- ``refusals``: what an implementation refuses to shard, and what it has done by then.
- ``drawn``: a training described by plain data: a model, a mesh, policies and a schedule.
- ``exchange``, ``host_exchange``: how ranks exchange values outside of process groups.
- ``resume``: saves and loads checkpoints.
- ``states``: reads state dicts whole and compares them.
- ``other_worlds``: worlds of fewer ranks in the same processes; ``undivided``: one process with the batch of all ranks.
"""

from shardproof.harness.casework.casts import (
    CastReplica,
    check_equal,
    check_evaluation,
    check_statistics,
    run_and_replica,
    step_and_check,
)
from shardproof.harness.casework.device_memory import Census
from shardproof.harness.casework.timeline import Timeline
from shardproof.harness.casework.twins import check_exact
from shardproof.harness.parity.comparison import exact_difference
from shardproof.harness.parity.inputs import Inputs
from shardproof.harness.parity.pair import Pair
from shardproof.harness.parity.poison import Poison
from shardproof.harness.parity.rank import Rank
from shardproof.harness.parity.run import Run

__all__ = [
    "CastReplica",
    "Census",
    "Inputs",
    "Pair",
    "Poison",
    "Rank",
    "Run",
    "Timeline",
    "check_equal",
    "check_evaluation",
    "check_exact",
    "check_statistics",
    "exact_difference",
    "run_and_replica",
    "step_and_check",
]
