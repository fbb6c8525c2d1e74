"""Worlds whose ranks ``torchrun`` has started, also on several hosts; who runs on one host can skip this folder.

- ``roles``: what a process that torchrun has started is, read from its environment.
- ``meeting``: how the processes of a job find each other, and the authenticated messages that they exchange.
- ``fleet``, ``fleet_pool``: the processes of a job as the ranks of worlds, on its first process.
- ``remote``: a rank of another process, as its world sees it; ``supervisor``: what the other processes run.
"""
