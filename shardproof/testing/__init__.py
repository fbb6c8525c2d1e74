"""All that a case calls. Each module is an act, and this one has what every case is made of.

The marks, what they require (``Capability``, ``Hardware``), what a rank makes (``Rank``, ``Pair``, ``Run``), and the
``models``. The modules:

- ``make``: what is sharded, and how; ``other_worlds``, worlds of fewer ranks; ``axes``, the values of parameters.
- ``train``: models of more kinds, optimizers, recomputation; batches and steps.
- ``compare``: with plain copies, twins and the oracle; ``casts``, with copies that make each cast; ``states``, by state
  dicts; ``measure``, by collectives and by memory.
- ``refuse``: what an implementation refuses; ``calls``: public calls in any order, on a run and on plain copies.

A module defines what it exports. The harness imports nothing of this package, so what it needs itself is defined there,
and ``__all__`` of a module here has its name: a case, here or in another repository, imports no room of the harness.
``docs/cases.md`` shows them at work.
"""

from shardproof.harness.adapters.capability import Capability, Hardware
from shardproof.harness.models import plain as models
from shardproof.harness.parity.pair import Pair
from shardproof.harness.parity.rank import Rank
from shardproof.harness.parity.run import Run
from shardproof.harness.plugin.marks import (
    alone,
    contract,
    deadline,
    drawn,
    each_value,
    meaningful_from,
    needs,
    simulated,
    takes,
    world,
)

__all__ = [
    "Capability",
    "Hardware",
    "Pair",
    "Rank",
    "Run",
    "alone",
    "contract",
    "deadline",
    "drawn",
    "each_value",
    "meaningful_from",
    "models",
    "needs",
    "simulated",
    "takes",
    "world",
]
