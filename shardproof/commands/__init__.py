"""The commands of the command line, one module each: each is imported when it is chosen.

``run``, ``plan``, ``implementations`` and ``torch_names`` import torch or the harness; the others read files, and
``findings`` runs some.
"""
