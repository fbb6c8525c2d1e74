"""Per-parameter sharding: every parameter is a DTensor, a unit's parameters share one collective.

In the order in which to read them; imports point upward in this list alone:

1. ``options``: policies, options of a group, replaced communication.
2. ``mesh``: over which ranks parameters are sharded, and what ``reshard_after_forward`` means there.
3. ``layout``: where the numbers of a group lie, sharded and unsharded.
4. ``param``: one parameter: how it is cut, what modules hold of it, and extensions.
5. ``shards``: the buffer of a group's shards, and what happens when something moves a parameter out of its slot.
6. ``group``: unshard and reshard, also to fewer ranks.
7. ``reduction``: the way of a gradient: taken, copied in, reduced, accumulated.
8. ``unit``: what happens around forward and backward, and when; prefetching.
9. ``lazy_init``: what waits for the first forward, and who is the root.
10. ``module``: ``FSDPModule``, what a user may call and set.
11. ``construct``: ``fully_shard``: find the parameters, cut them, make a unit.

Invariants that several files rely on have a name and stand where they are kept: ``Note: unsharded parameters``
(layout), ``Note: slots`` (shards), ``Note: gather memory`` (group), ``Note: units of several meshes`` (unit).
"""
