"""torch `FullyShardedDataParallel`: models are not freed

Of a model that nobody has any more something stays, whatever is collected: the modules whose parameters went into a
flat one (`use_orig_params=False`), and after a forward without a backward the whole model. A process that makes many
models, as a search or a test does, grows with each. The adapter declares it (`frees_models`), so no case fails for it.
Cause not looked for; one way to such a cycle is a post-accumulate-grad hook that holds its own tensor, which the
garbage collector does not see, and which the reference had to avoid (`fsdp_impl/common/hooks.py`). The reproducer
prints what stays.
"""

# /// finding
# implementations = ["torch.fsdp"]
# requirements = ["MEMORY-4"]
# reproduces = ["torch 2.13.0 cpu 2026-11-25", "torch 2.15.0 cpu 2026-11-25"]
# shows = '(flat parameters|no backward): \[\S'
# upstream = [
#     "https://github.com/pytorch/pytorch/pull/183211 closed: Break cross-language ref cycle keeping FlatParameter alive, with the cause",
#     "https://github.com/pytorch/pytorch/pull/182774 closed: Fix CUDA memory leak check failure in test_fsdp_apply, where models were not freed",
# ]
# ///

import gc, tempfile, weakref, torch, torch.distributed as dist, torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel


def left(flat, backward):
    inner = nn.Sequential(nn.Linear(4, 4))
    model = FullyShardedDataParallel(inner, device_id=torch.device("cpu"), use_orig_params=not flat)
    found = [weakref.ref(module) for module in model.modules()]
    loss = model(torch.randn(2, 4)).sum()
    if backward:
        loss.backward()
    del inner, model, loss
    for _ in range(20):
        gc.collect()
    return [type(module()).__name__ for module in found if module() is not None]


def main(rank, world, path):
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)
    print(rank, "flat parameters:", left(True, True), "no backward:", left(False, False), "neither:", left(False, True))
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(main, (2, tempfile.mktemp()), nprocs=2)
