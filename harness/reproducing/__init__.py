"""What is the smallest program of plain torch that fails as a case does? ``shardproof reproduce``.

Imports ``tensors``. No room imports it: ``worlds`` loads ``tape`` by name, as an instrument of a run.

- ``tape``: writes down, on each rank, the calls of torch that a case makes; the harness's notes (``tensors.notes``) say
  what was drawn, counted and checked.
- ``expressions``: values as code; ``sources``, what it takes along of models and losses.
- ``program``: ``Program``, made of the tapes of all ranks, whose calls can be left out.
- ``shrinking``: tries programs, and leaves out what the failure does not need, until a time is over.
"""
