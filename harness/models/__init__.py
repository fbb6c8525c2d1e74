"""What is trained? Small models, with their losses, tensor-parallel plans, recomputation and compilation.

Imports ``adapters`` (for the type of an optimizer factory) and ``tensors``. Cases import by
``shardproof.testing``; a model of one chapter lies beside its cases.

- ``plain``: models and losses; cases import the module as ``models``.
- ``shapes``: models with unusual parameters, inputs, outputs or state; cases import the module.
- ``drawn``: models described by plain data; ``trainings``: trainings of them, and their source as a case; ``programs``:
  public calls in any order, when each is legal, and which a finding says are wrong.
- ``parallel``: models for tensor parallelism, with their plans, and one with experts that are divided among ranks.
- ``recomputation``: activation checkpointing and ``torch.compile`` of a model's layers.
- ``optim``: optimizer factories.
"""
