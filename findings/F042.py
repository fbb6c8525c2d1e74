"""torch `set_model_state_dict` with `fully_shard`: whole values are not loaded while parameters are gathered

`set_model_state_dict` with `full_state_dict=True` fails while the root is unsharded, as it is after a forward without
backward (an evaluation). It looks at the registered parameters, which are plain tensors then, and leaves the full
values as they are. `load_state_dict` reshards first, and DTensors do not take the plain values: `aten.copy_.default got
mixed torch.Tensor and DTensor`. `model.reshard()` before the call avoids it.

torch 2.13.0. The adapters reshard before they load whole values, which scripts have to do as well.
"""

# /// finding
# implementations = ["torch.fully_shard"]
# reproduces = ["torch 2.13.0 cpu 2026-11-25", "torch 2.15.0 cpu 2026-12-01"]
# severity = "exception"
# right = 'The state dict loads, as it does without the forward, and nothing is printed.'
# places = [
#     "torch.distributed.checkpoint.state_dict:_load_model_state_dict",
# ]
# shows = 'got mixed torch\.Tensor and DTensor'
# ///

import tempfile, torch, torch.distributed as dist, torch.multiprocessing as mp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import fully_shard


def main(rank, world, path):
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)
    model, saved = fully_shard(nn.Linear(4, 4)), nn.Linear(4, 4).state_dict()
    with torch.no_grad():
        model(torch.ones(2, 4))  # without it, or with model.reshard() after it, loading works
    try:
        set_model_state_dict(model, saved, options=StateDictOptions(full_state_dict=True))
    except RuntimeError as error:
        print(rank, error)  # aten.copy_.default got mixed torch.Tensor and DTensor
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(main, (2, tempfile.mktemp()), nprocs=2)
