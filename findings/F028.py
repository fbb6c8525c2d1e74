"""torch 2.11 `fully_shard`: dataclasses, grouped units and frozen smaller shards, all mended in 2.13

Seen with torch 2.11 on the CPU and on two H200s, and no longer with 2.13; each is a line of
`suites/expectations/torch.fully_shard.toml`.

- A unit returns a dataclass with several tensors, and the loss uses any one of them: the unit is not gathered for
  backward (`setStorage: ... out of bounds for storage of size 0`). Seen by AUTOGRAD-6.
- A unit of several modules, of which one does not run, is not resharded after forward. torch warns of it. Seen by
  COLLECTIVES-7 and TRAINING-7.
- Resharded to fewer ranks after forward, a frozen parameter is registered with `requires_grad=True`. Seen by
  REGISTRATION-5.
- A unit of several modules casts its inputs for the first that runs and its outputs for the last, not for those between.
  Seen by PRECISION-5 and PRECISION-6.
"""

# /// finding
# implementations = ["torch.fully_shard", "torch.replicate_with_fsdp"]
# requirements = ["AUTOGRAD-6", "COLLECTIVES-7", "TRAINING-7", "REGISTRATION-5", "PRECISION-5", "PRECISION-6"]
# fixed_in = "2.13"
# by_hand = "has no reproducer: its cases were run, with torch 2.11"
# upstream = [
#     "https://github.com/pytorch/pytorch/pull/173415 closed: support dataclass args/kwargs output, and what replaced it",
#     "https://github.com/pytorch/pytorch/pull/174692 closed: the same without memory leakage",
#     "https://github.com/pytorch/pytorch/pull/180428 closed: Support partial forward of [norm, head] for chunked loss, for the units of several modules",
# ]
# related = [
#     "https://github.com/pytorch/pytorch/issues/185239 closed: `to_sharded_post_forward` omits `requires_grad=`, the cause of the third, reported for integers (F-100)",
# ]
# ///
