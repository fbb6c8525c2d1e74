"""What is compared with what? The implementation beside its baseline, a float64 oracle, and twins of itself.

Imports ``adapters``, ``collectives``, ``models``, ``findings`` and ``tensors``. Cases import the names below from here;
the other rooms import the module that they mean.

- ``rank``: ``Rank``, the context that a case receives; ``member`` and ``rank_state``, what it stands on.
- ``run``: ``Run`` drives an adapter through steps; ``sharded_run`` proves that what it drives is sharded.
- ``pair``: ``Pair``, the sharded run beside the baseline and the oracle; ``comparison`` compares one step of them.
- ``twins``: ``check_exact``, two runs of one implementation.
- ``oracle``, ``numerics``, ``explanations``: the float64 replay, the tolerances, and guesses at a cause.
- ``units``: which unit a collective serves, by its bytes; ``resume``: checkpoints.
"""

from shardproof.harness.parity.comparison import exact_difference
from shardproof.harness.parity.pair import Pair
from shardproof.harness.parity.rank import Rank
from shardproof.harness.parity.run import Run
from shardproof.harness.parity.twins import check_exact

__all__ = ["Pair", "Rank", "Run", "check_exact", "exact_difference"]
