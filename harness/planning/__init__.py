"""What would a user's own model cost? Memory and traffic of one rank, simulated, with closed formulas beside them.

Imports ``simulation``, ``collectives``, ``adapters`` and ``tensors``. The command is ``shardproof plan``.

- ``request``: what is asked for (``PlanRequest``), meshes as a command line names them, and what an implementation must
  be capable of.
- ``presets``: models of known shapes.
- ``subject``: what ``--model`` names, a known shape or a function of the user's.
- ``anatomy``: which modules become units, the units and sizes of a model, and how it is built.
- ``planned``: a plan: one rank's step on each mesh, what a ring sends and which part of it leaves a host, and closed
  formulas.
"""
