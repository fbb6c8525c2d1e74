"""How far apart are two tensors, is that too far, and which mistake is it?

Imports ``verdicts``. It knows neither adapters nor pytest, so that whatever trains can judge.

- ``numerics``: ulps, distances to the oracle, and the tolerances: also those of ``parity`` and ``training``.
- ``elements``: the element in which two tensors differ, and what several runs have in the worst one.
- ``signatures``: guesses why a tensor is wrong, by what common mistakes make of it.
"""
