"""What a case imports: the vocabulary of every case here, and modules with what some of them use.

Marks (``contract``, ``world``, ``needs`` and the others of :mod:`shardproof.harness.plugin.marks`), what they require
(``Capability``, ``Hardware``), what a rank makes (``Rank``, ``Pair``, ``Run``), and the ``models``. The modules:

- ``axes``: values of parameters that several chapters share.
- ``adapters``: the options of an implementation.
- ``trained``: models of more kinds, optimizers, recomputation.
- ``baselines`` and ``casts``: what a run is compared with.
- ``checks``: what is compared, counted and refused.
- ``tensors``: what tensors hold.

The docstring of each name says what it is; ``docs/cases.md`` shows them at work. ``X as X`` means that ``X`` is public.
"""

from shardproof.harness import models as models
from shardproof.harness.adapters.capability import Capability as Capability
from shardproof.harness.adapters.capability import Hardware as Hardware
from shardproof.harness.parity.pair import Pair as Pair
from shardproof.harness.parity.rank import Rank as Rank
from shardproof.harness.parity.run import Run as Run
from shardproof.harness.plugin.marks import alone as alone
from shardproof.harness.plugin.marks import contract as contract
from shardproof.harness.plugin.marks import deadline as deadline
from shardproof.harness.plugin.marks import drawn as drawn
from shardproof.harness.plugin.marks import each_value as each_value
from shardproof.harness.plugin.marks import meaningful_from as meaningful_from
from shardproof.harness.plugin.marks import needs as needs
from shardproof.harness.plugin.marks import simulated as simulated
from shardproof.harness.plugin.marks import takes as takes
from shardproof.harness.plugin.marks import world as world
