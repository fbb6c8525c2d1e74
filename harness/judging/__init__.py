"""How far apart are two tensors, is that too far, and which mistake is it?

Imports no other room. It knows neither adapters nor pytest, so that whatever trains can judge.

- ``numerics``: ulps, distances to the oracle, and the tolerances.
"""
