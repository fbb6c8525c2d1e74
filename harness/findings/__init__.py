"""What can be said about a case? Stages, locations, findings, verdicts and observations.

Every other room may import from here; this room imports nothing of the harness, and no torch, so that the controller
can read what its ranks send.

- ``stages``: ``Stage``, the points of a training step, in order.
- ``finding``: ``Location``, ``Finding`` and ``Divergence``, the exception that all ranks of a world raise together.
- ``verdict``: ``Verdict``, and ``combine`` for the verdicts of several ranks.
- ``observations``: ``Observations``, what a rank collects during a case for the run file.
"""
