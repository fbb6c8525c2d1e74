"""What would one rank of a world do that does not exist? Collectives, layouts and memory without ranks or devices.

Imports ``adapters``, ``models``, ``collectives`` and ``tensors``.

- ``world``: ``simulated_world``, a context in which this process is rank r of N; meshes of it. Hides the process's own.
- ``tensors``: tensors without memory.
- ``training``: ``Simulation``, a model that an adapter shards and trains there; which implementations can be simulated.
- ``memory``: ``Ledger``, the bytes that the rank holds, by kind, step and phase, and their extremes.

One simulation, from its world to its figures::

    with simulated_world(512, rank=1) as world:
        mesh = world.mesh((64, 8), ("replicate", "shard"))
        config = Config(mesh=mesh, units=(("layers.0",), ("layers.1",)), clip=Clip(1.0))
        one = Simulation(world, registry.load(name), build, config=config, optimizer=optim.adamw())
        for _ in range(2):
            trace = one.step(lambda: (torch.zeros(1, 2048, dtype=torch.int64),), loss=loss)
        one.held()                              # between steps: Usage, bytes by kind
        one.ledger.peaks(step=1)                # the peak of each phase of the second step, by kind
        one.layout()                            # the local shape of each parameter
        one.close()

The first step makes what lives as long as the model (optimizer state, streams, caches); the second is like all later
ones. An implementation that cannot be simulated raises what it raises, in the constructor or in the first
step: :func:`shardproof.harness.simulation.training.why_not` says why in one line.
"""
