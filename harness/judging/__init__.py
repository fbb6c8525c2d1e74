"""How far apart are two tensors, is that too far, which mistake is it, and what is said of it?

It knows neither adapters nor pytest, so that whatever trains can judge. The first five import no other room and no
torch, so that the pytest process can unpickle what the ranks send.

- ``finding``: ``Stage``, the points of a training step, in order; ``Location``, ``Finding`` and ``Divergence``, the
  exception that all ranks of a world raise together.
- ``texts``: what all texts of failures share: their bound, short names of ranks, what differs from rank to rank.
- ``codes``: the signatures of known mistakes and the checks of the doctor, each with its row of one table.
- ``explanation``: ``Explanation``, what a rank returns of a case that ran again with capture on.
- ``observations``: ``Observations``, the measurements of a rank during a case, for the run file.
- ``numerics``: ulps, distances to the oracle, and the tolerances: also those of ``parity`` and ``training``.
- ``elements``: the element in which two tensors differ, and what several runs have in the worst one.
- ``signatures``: guesses why a tensor is wrong, by what common mistakes make of it.
"""
