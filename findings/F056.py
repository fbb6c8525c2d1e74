"""torch 2.11 `fully_shard`: a parameter that two units share stays whole on every rank

`second.weight` is `first.weight`, and `first` is a unit. In torch 2.11 each rank holds the bytes of the whole model after
sharding; in torch 2.13 of its share. Seen by INIT-6, which fails with "the model is not sharded". The model is
`models.ties.TiedMLP(9)` of the suites; no reproducer was run apart from the case. `replicate_with_fsdp`, which shares the
code, unties the parameter there, on two H200s.
"""

# /// finding
# implementations = ["torch.fully_shard", "torch.replicate_with_fsdp"]
# requirements = ["INIT-6"]
# fixed_in = "2.12"
# by_hand = "has no reproducer: its case was run"
# related = [
#     "https://github.com/pytorch/pytorch/issues/176076 closed: such a parameter is not updated on the last rank where sizes are uneven",
#     "https://github.com/pytorch/pytorch/pull/176225 closed: Fix tied weights with uneven sharding across separate FSDP groups",
#     "https://github.com/pytorch/pytorch/pull/179532 closed: Detect shared modules/parameters across FSDP groups at init",
# ]
# ///
