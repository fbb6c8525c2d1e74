"""Per-parameter sharding: every parameter is a DTensor, a unit's parameters share one collective.

In the order in which to read them; imports point upward in this list alone:

1. ``options``: policies, and options of a group.
2. ``mesh``: over which ranks parameters are sharded.
3. ``layout``: where the numbers of a group lie, sharded and unsharded.
4. ``param``: one parameter: how it is cut, what modules hold of it, and a dtype of gradients that user code has set.
5. ``shards``: the buffer of a group's shards, and what happens when something moves a parameter out of its slot.
6. ``group``: unshard and reshard.
7. ``reduction``: the way of a gradient: taken, copied in, reduced, accumulated.
8. ``unit``: what happens around forward and backward, and when; prefetching.
9. ``lazy_init``: what waits for the first forward, and who is the root.
10. ``module``: ``FSDPModule``, what a user may call and set.
11. ``construct``: ``fully_shard``: find the parameters, cut them, make a unit.

An appendix of rare features, which of these files ``construct`` and ``module`` alone import. The others reach each
through a class or a protocol of their own, and without the feature it does what that class does:

12. ``smaller``: sharding over fewer ranks between forward and backward.
13. ``extension``: parameters that choose themselves what is gathered.
14. ``spmd``: parameters on one mesh of all dimensions, by ``dp_mesh_dims``.
15. ``communication``: memory of buffers, and the process group of reductions.

Invariants that several files rely on have a name and stand where they are kept: ``Note: unsharded parameters``
(layout), ``Note: slots`` (shards), ``Note: gather memory`` (group), ``Note: units of several meshes`` (unit).
"""
