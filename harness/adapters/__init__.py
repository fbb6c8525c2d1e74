"""How is one implementation driven? The adapter protocol, and one file for each implementation.

Of the harness it imports ``tensors``; no other room imports ``fsdp_impl``. ``capability`` and ``registry`` import no
torch.

- ``base``: ``Adapter``, the class to implement; with ``Piece`` and the names of ``config`` and ``traits``.
- ``config``: ``Config``, how a case wants its model sharded; a scaler of offloaded gradients.
- ``traits``: ``Traits``, facts about an implementation that comparisons depend on.
- ``capability``: ``Capability`` and ``Hardware``.
- ``declarations``: checks what an adapter class declares, before any rank starts.
- ``registry``: finds adapters by name, or as ``module:Class``; keeps messages about them to one line.
- ``dtensor``: the base class for per-parameter sharding with DTensors.
- ``flat``: the base class for wrappers with flat parameters, and the layout of a flat parameter.
- ``replicas``: ``ddp`` and ``replicated``, which are also the baselines, and ``torch.replicate``.
- one file for each package that shards: ``reference``, ``torch_fully_shard``, ``torch_fsdp``, ``deepspeed`` and others.
  ``docs/implementations.md`` says why each lacks the capabilities that it lacks.
"""
