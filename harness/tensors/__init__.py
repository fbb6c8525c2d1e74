"""What can be asked of tensors without knowing whose they are? Containers of tensors, and the bytes that tensors hold.

Every other room may import from here; this room imports nothing of the harness.

- ``trees``: ``tensors_of`` and ``map_tensors``, for whatever a module takes or returns.
- ``memory``: the bytes of the tensors that are alive, and the modules that are.
"""
