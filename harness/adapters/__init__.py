"""How is one implementation driven? The adapter protocol, and one file for each implementation.

Imports no other room of the harness, and no other room imports ``fsdp_impl``. ``capability``, ``lines`` and
``registry`` import no torch.

- ``base``: ``Adapter``, the class to implement, and ``Piece``; with the names of ``config`` and ``traits``.
- ``config``: ``Config``, how a case wants its model sharded.
- ``traits``: ``Traits``, facts about an implementation that comparisons depend on.
- ``capability``: ``Capability`` and ``Hardware``.
- ``declarations``: checks what an adapter class declares, before any rank starts; ``lines`` keeps its messages short.
- ``registry``: finds adapters by name, or as ``module:Class``.
- ``dtensor``: the base class for per-parameter sharding with DTensors.
- ``flat``, ``flat_layout``: the base class for wrappers with flat parameters, and the layout of a flat parameter.
- ``reference``, ``reference_flat``, ``torch_fully_shard``, ``torch_fsdp``, ``deepspeed_zero3``, ``replicas``: the
  built-in adapters. The two in ``replicas`` are also the baselines.
"""
