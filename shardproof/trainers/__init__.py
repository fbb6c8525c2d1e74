"""Where trainers expect a callback: the doctor or a recording in transformers, Lightning and torchtitan.

Each module imports its trainer's package, and is imported by nothing else here; docs/trainers.md says how to use it.
"""
