"""What is the result of a case? Stages, locations, findings, verdicts and observations.

The rooms above may import from here. This room imports no other part of the harness and no torch, so that the pytest
process can unpickle what the ranks send.

- ``finding``: ``Stage``, the points of a training step, in order; ``Location``, ``Finding`` and ``Divergence``, the
  exception that all ranks of a world raise together.
- ``texts``: what all texts of failures share: their bound, short names of ranks, what differs from rank to rank.
- ``codes``: the signatures of known mistakes and the checks of the doctor, each with its row of one table.
- ``explanation``: ``Explanation``, what a rank returns of a case that ran again with capture on.
- ``observations``: ``Observations``, the measurements of a rank during a case, for the run file.
"""
