"""torch distributed checkpoints: what torch 2.15 writes, 2.13 and 2.14 cannot load

The metadata of a checkpoint has a `TensorProperties` for each tensor, which is pickled as a tuple of its fields. Torch 2.15
writes six; `TensorProperties.__setstate__` of 2.13 and 2.14 takes five. They raise "metadata is None; global metadata read
failed: too many values to unpack (expected 5)", which names neither the version nor the field. Torch 2.15 loads what 2.13
and 2.14 write. Write with torch 2.15 by `python findings/F301.py save PATH`, and load with another by `python findings/F301.py load PATH`.
"""

# /// finding
# implementations = ["torch"]
# since = "2.15"
# reproduces = ["torch 2.15.0 cpu 2026-11-25"]
# does_not_reproduce = ["torch 2.13.0 cpu 2026-11-25", "torch 2.14.1 cpu 2026-11-25"]
# by_hand = "takes two versions of torch: one that saves and one that loads"
# unlisted = "tests/test_other_torch.py, which takes two versions of torch, expects it"
# ///

import sys, torch, torch.distributed.checkpoint as dcp

path, state = sys.argv[2], {"weight": torch.zeros(2)}
if sys.argv[1] == "save":
    dcp.save({"weight": torch.ones(2)}, checkpoint_id=path)
else:
    dcp.load(state, checkpoint_id=path)
    print(torch.__version__, state["weight"])
