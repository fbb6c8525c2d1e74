"""How is one implementation driven? The protocol, and one file for each implementation.

Imports nothing of the harness; only this room imports ``fsdp_impl``. ``capability`` and ``registry`` import no torch.

- ``base``: ``Adapter``, ``Config``, ``Traits``, ``Piece``: what an adapter implements, receives and declares.
- ``capability``: ``Capability`` and ``Hardware``; ``registry``: adapters by name, or as ``module:Class``.
- ``dtensor``, ``flat``, ``flat_layout``: what adapters of one kind share.
- ``reference``, ``reference_flat``, ``torch_fully_shard``, ``torch_fsdp``, ``deepspeed_zero3``, ``replicas``: the
  built-in adapters; those in ``replicas`` are the baselines as well.
"""
