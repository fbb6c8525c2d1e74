"""fully_shard: gather hooks that send several tensors get one of them back where shards have one rank

A group of one rank has nothing to gather, and a shortcut copies what would have been sent: the first tensor of each
parameter alone. `fsdp_post_all_gather` is called with one tensor instead of two, so that a quantised parameter has its
values and no scale. With two ranks it gets both. Seen by EXTENSION-1 on replicas of one rank.
"""

# /// finding
# implementations = ["torch.fully_shard"]
# requirements = ["EXTENSION-1"]
# reproduces = ["torch 2.13.0 cpu 2026-11-27", "torch 2.15.0 cpu 2026-12-01"]
# severity = "silent"
# shows = 'world 1: sent 2, got 1'
# ///

import tempfile, torch, torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard


class Pair(torch.Tensor):
    @staticmethod
    def __new__(cls, held):
        return torch.Tensor._make_wrapper_subclass(cls, held.size(), dtype=held.dtype)

    def __init__(self, held):
        self.held = held

    def __tensor_flatten__(self):
        return ["held"], None

    @classmethod
    def __tensor_unflatten__(cls, inner, *_):
        return cls(inner["held"])

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        opened = [one.held if isinstance(one, cls) else one for one in args]
        found = func(*opened, **(kwargs or {}))
        return cls(found) if isinstance(found, torch.Tensor) else found

    def fsdp_pre_all_gather(self, mesh, size, stride, module, mp_policy):
        return (self.held, torch.ones(1)), None

    def fsdp_post_all_gather(self, outputs, metadata, param_dtype, *, out=None):
        print(f"world {dist.get_world_size()}: sent 2, got {len(outputs)}", flush=True)
        return outputs[0].clone(), outputs


if __name__ == "__main__":
    dist.init_process_group("gloo", init_method=f"file://{tempfile.mktemp()}", rank=0, world_size=1)
    model = nn.Linear(2, 2, bias=False)
    model.weight = nn.Parameter(Pair(model.weight.detach()))
    fully_shard(model)
    model(torch.ones(1, 2))
    dist.destroy_process_group()
