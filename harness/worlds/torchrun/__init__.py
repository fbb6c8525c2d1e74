"""Worlds whose ranks ``torchrun`` has started, also on several hosts; who runs on one host can skip this folder.

- ``meeting``: a process of a job, how processes find each other, and the messages that they exchange.
- ``fleet``, ``fleet_pool``: the processes of a job as the ranks of worlds, on its first process.
- ``supervisor``: what the other processes run.
"""
