"""What do cases call, beyond a rank and its pair?

Imports ``parity`` and the rooms below it. Cases import its names by ``shardproof.testing``.

- ``states``: reads, compares and corrupts state dicts and full parameters; checkpoints; trainings with state.
- ``casts``: ``CastReplica``, the baseline of runs in low precision, and ``check_equal``.
- ``baselines``: gradients averaged over plain copies; one process with the batch of all ranks.
- ``twins``: ``check_exact`` compares two runs of one implementation bit for bit.
- ``refusals``: what an implementation refuses to shard, and what it has done by then.
- ``drawn``: a training described by plain data: a model, a mesh, policies and a schedule.
- ``device_memory``: counts the bytes in which units are gathered; fills memory that was freed too early with NaN.
- ``timeline``: when kernels ran, from a profile.
- ``other_worlds``: worlds of fewer ranks in the same processes.
"""
