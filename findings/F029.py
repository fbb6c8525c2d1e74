"""torch `fully_shard`, `FullyShardedDataParallel`: an evaluation after a step uses the parameters from before the step

After a forward under `no_grad` the root's parameters stay unsharded (the root does not reshard after forward by
default), because no backward follows that reshards them. If the optimizer steps next, the shards change and the
unsharded parameters do not: the next forward, of an evaluation or of training, silently computes with the values from
before the step. The same holds for every unit with `reshard_after_forward=False`, for evaluations with averaged weights
that are copied into the parameters and back, and for `FullyShardedDataParallel`. `model.reshard()` after the evaluation
avoids it.

Units of `fully_shard` that reshard to a smaller size keep the old smaller shards alike. Data that a script gives
parameters of `FullyShardedDataParallel` by `parameter.data = ...` after an evaluation are not used either. Seen by
EVALUATION-2, EVALUATION-3, OPTIMIZER-1 and OPTIMIZER-3.
"""

# /// finding
# implementations = ["torch.fully_shard", "torch.fsdp", "torch.replicate_with_fsdp", "accelerate.fsdp"]
# requirements = ["EVALUATION-2", "EVALUATION-3", "OPTIMIZER-1", "OPTIMIZER-3"]
# reproduces = ["torch 2.13.0 cpu 2026-11-25", "torch 2.15.0 cpu 2026-12-01"]
# severity = "silent"
# right = '`0.0` for both: the output moves by 0.1 with the step, as it does after `reshard()`. It is off by 0.1.'
# places = [
#     "torch.distributed.fsdp._fully_shard._fsdp_param_group:FSDPParamGroup.unshard",
#     "torch.distributed.fsdp._fully_shard._fsdp_state:FSDPState._root_pre_forward",
# ]
# shows = '^\d \w+ 0\.1'
# related = [
#     "https://github.com/pytorch/pytorch/issues/117421 closed: a state dict loaded after a forward without backward is not used by the next forward",
#     "https://github.com/pytorch/pytorch/issues/117742 closed: an average of weights that is written into the shards by hand does not change what forward returns",
#     "https://github.com/pytorch/pytorch/pull/106858 closed: Fix train -> EMA -> eval with mixed precision, where an evaluation used values gathered by the one before",
#     "https://github.com/pytorch/pytorch/issues/149029 closed: the root of `fully_shard` stays gathered after a forward under `no_grad`, reported for its memory",
# ]
# ///

import tempfile, torch, torch.distributed as dist, torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard


def main(rank, world, path):
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)
    mesh = init_device_mesh("cpu", (world,))
    x = torch.ones(1, 4)
    for shard in (fully_shard, FullyShardedDataParallel):
        options = {"mesh": mesh} if shard is fully_shard else {"device_mesh": mesh, "device_id": torch.device("cpu")}
        model = shard(nn.Linear(4, 4, bias=False), **options)
        model(x).sum().backward()
        with torch.no_grad():
            before = model(x)
            torch.optim.SGD(model.parameters(), lr=0.025).step()  # moves each output by 4 * 0.025
            print(rank, shard.__name__, float((model(x) - (before - 0.1)).abs().max()))
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(main, (2, tempfile.mktemp()), nprocs=2)
