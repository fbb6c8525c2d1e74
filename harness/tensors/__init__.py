"""What do tensors hold? Parts of full tensors, containers of tensors, and the memory that tensors use.

Every other room may import from here; this room imports nothing of the harness.

- ``trees``: ``tensors_of`` and ``map_tensors``, for any value that a module takes or returns; copies on the host.
- ``pieces``: ``Piece``, the part of a tensor that one rank holds; cuts by placements, spans of positions.
- ``lines``: boxes in lines of files of JSON, as they are checked when they are read.
- ``memory``: the bytes of all live tensors, and the classes of all live modules; frees it.
- ``streams``: work that occupies a stream.
- ``notes``: what functions of the harness tell a recorder of a case; nobody, in an ordinary run.
- ``private``: the private names of torch, with what happens where torch lacks one.
"""
