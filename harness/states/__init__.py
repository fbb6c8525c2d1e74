"""Which state leaves or re-enters a training? Reads checkpoints of anybody; loads no tensor and executes nothing.

Imports ``tensors``, for the boxes of parts.

- ``files``: ``read``, the entries of a file or folder, by their format; ``entries``, what an entry is, and the
  names of nested ones; ``folders``, the files that an index names and those of ranks; ``ranks``, entries of all ranks.
- ``archives``: files of torch.save; ``pickles``, an unpickler that makes data alone; ``names``, the closed table of
  names that it knows; ``boxes``, which elements a DTensor or a ShardedTensor has.
- ``headers``: files of safetensors. ``checkpoints``: folders of torch.distributed.checkpoint.
"""
