"""torch 2.11 `fully_shard`: a recomputed unit does not cast its inputs and outputs again, mended in 2.13

The forward that backward runs again skips the casts of `MixedPrecisionPolicy`, so that `torch.utils.checkpoint` raises
where the inputs or the outputs of the unit are of another dtype. Seen by PRECISION-5 and PRECISION-6. The reproducer is
that of F-38 with `fully_shard(nn.Linear(4, 4), mp_policy=MixedPrecisionPolicy(torch.bfloat16))` for the unit and
`fully_shard(Model(unit))` around it.
"""

# /// finding
# implementations = ["torch.fully_shard", "torch.replicate_with_fsdp"]
# requirements = ["PRECISION-5", "PRECISION-6"]
# fixed_in = "2.13"
# by_hand = "has no reproducer of its own: it is that of F-38 with the two lines of the text"
# upstream = [
#     "https://github.com/pytorch/pytorch/issues/159359 closed: Activation Checkpointing dtype Mismatch in Recomputed Activations Due to Skipped Type Casting in FSDPv2 _pre_forward",
#     "https://github.com/pytorch/pytorch/pull/182580 closed: its fix, Cast forward inputs during AC recompute",
#     "https://github.com/pytorch/pytorch/pull/176650 closed: Preserve FSDP mixed precision during non-reentrant checkpoint recompute, inputs and outputs",
# ]
# related = [
#     "https://github.com/pytorch/pytorch/issues/148831 open: FSDP2 and autocast compatibility issue, where the recomputed unit computes in another dtype too",
# ]
# ///
