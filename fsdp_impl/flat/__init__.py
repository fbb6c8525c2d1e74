"""Flat parameters: the parameters of a unit are one tensor, which is sharded, gathered and reduced as a whole.

In the order in which to read them; imports point upward in this list alone:

1. ``options``: what a user may choose.
2. ``layout``: where each parameter lies in a flat parameter, and which part of it each rank holds.
3. ``ranks``: over which ranks it is sharded and replicated, and on which device it is computed with.
4. ``shards``: this rank's shard, and what the modules hold instead of the parameters.
5. ``group``: unshard and reshard, and the memory between the two.
6. ``reduction``: gradients reduced, accumulated, shown to optimizers, and their norm.
7. ``unit``: what happens around forward and backward, and which unit is gathered ahead.
8. ``registry``: which modules are wrappers, and what wrapping adds to names.
9. ``wrapping``: which modules are wrapped, and which parameters each wrapper takes.
10. ``construct``: from the constructor's arguments to a unit, and at the first forward to units under one root.
11. ``summon``: whole parameters on request.
12. ``state_dict``: state dicts, and parameters whole or sharded by rows.
13. ``module``: ``FullyShardedDataParallel``, whose methods are names for all of this.

An appendix, which of these files ``module`` alone imports, for its methods:

14. ``optim_state``: state dicts of optimizers, and the older calls for them.

Invariants that several files rely on have a name and stand where they are kept: ``Note: held by modules`` (shards),
``Note: window of buffers`` (group), ``Note: unreduced gradients`` (reduction), ``Note: references`` (unit).
"""
