"""torch `FullyShardedDataParallel`: where nothing is sharded, a tied parameter in a compute dtype raises after `no_sync`

`_use_sharded_grad_views` sets the data of the gradients of original parameters, whose dtype is another than theirs, and of
tied ones their `grad`, which must have the parameter's dtype. Under NO_SHARD and `no_sync` the gradient has the compute
dtype until the last backward, and the forward between raises. torch 2.13.0. Seen by DRAWN-2.
"""

# /// finding
# implementations = ["torch.fsdp"]
# requirements = ["DRAWN-2"]
# reproduces = ["torch 2.13.0 cpu 2026-11-27"]
# shows = '^RuntimeError: attempting to assign a gradient with dtype .*BFloat16'
# ///

import tempfile, torch, torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, MixedPrecision, ShardingStrategy

dist.init_process_group("gloo", init_method=f"file://{tempfile.mktemp()}", rank=0, world_size=1)
layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
layers[1].weight = layers[0].weight
policy, strategy = MixedPrecision(param_dtype=torch.bfloat16), ShardingStrategy.NO_SHARD
options = {"device_id": torch.device("cpu"), "use_orig_params": True}
model = FSDP(layers, mixed_precision=policy, sharding_strategy=strategy, **options)
with model.no_sync():
    model(torch.ones(1, 4)).sum().backward()
try:
    model(torch.ones(1, 4)).sum().backward()  # the second microbatch
except RuntimeError as error:
    print(f"RuntimeError: {error}")
