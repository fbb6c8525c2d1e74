"""Which state leaves or re-enters a training? Writes states of trainings, reads checkpoints of anybody, compares both.

Imports ``tensors``, for boxes and digests, and ``watching``, for names and places of parameters.

- ``files``: ``read``, the entries of a file or folder, by their format; ``entries``, what an entry is, and the
  names of nested ones; ``folders``, the files that an index names and those of ranks; ``ranks``, entries of all ranks.
- ``archives``: files of torch.save; ``pickles``, an unpickler that makes data alone; ``names``, the closed table of
  names that it knows; ``boxes``, which elements a DTensor or a ShardedTensor has.
- ``headers``: files of safetensors. ``checkpoints``: folders of torch.distributed.checkpoint.
- ``blocks``: digests that add over parts; ``snapshot``: the state of a training, written without a gather;
  ``sides``: a state put together over ranks or files; ``comparing`` and ``differences``: what differs between two.
"""
