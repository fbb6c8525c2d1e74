"""Lightning Fabric `no_backward_sync` with FSDP2: leaving it does not restore what was

lightning-fabric 2.6.6, `ModelParallelStrategy`. Leaving the context sets the synchronization to `enabled` instead of to what
it was: an inner context ends the outer one, and after a context with `enabled=False` no backward outside of one is reduced.
Silent. Seen by ACCUMULATION-12 ("12 reduce_scatter instead of 4"), and by COLLECTIVES-10, where the first microbatch of the
next step is not reduced ("4 reduce_scatter instead of 8"). No report of it was found.
"""

# /// finding
# implementations = ["lightning.fabric"]
# requirements = ["ACCUMULATION-12", "COLLECTIVES-10"]
# reproduces = ["torch 2.13.0 cpu 2026-11-25", "torch 2.15.0 cpu 2026-11-25"]
# packages = ["lightning-fabric>=2.6.6"]
# shows = '^inside of the outer context \[\[|^after a context that is not enabled not reduced$'
# ///

import tempfile, torch, torch.distributed as dist, torch.multiprocessing as mp


def main(rank, world, path):
    import os

    os.environ["LOCAL_RANK"] = str(rank)
    from lightning_fabric import Fabric
    from lightning_fabric.plugins.environments import LightningEnvironment
    from lightning_fabric.strategies import ModelParallelStrategy
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)
    strategy = ModelParallelStrategy(lambda model, mesh: fully_shard(model), world, 1)
    fabric = Fabric(accelerator="cpu", devices=world, strategy=strategy, plugins=[LightningEnvironment()])
    fabric.launch()
    model = fabric.setup_module(torch.nn.Linear(2, 2, bias=False))

    def reduces(title):
        model.zero_grad()
        fabric.backward(model(torch.full((1, 2), rank + 1.0)).sum())
        gradient = model.weight.grad
        if rank == 0:
            print(title, "not reduced" if gradient is None else gradient.to_local().tolist())

    reduces("before")  # [[1.5, 1.5]]
    with fabric.no_backward_sync(model, enabled=True):
        with fabric.no_backward_sync(model, enabled=True):
            pass
        reduces("inside of the outer context")  # [[1.5, 1.5]]: reduced
    with fabric.no_backward_sync(model, enabled=False):
        pass
    reduces("after a context that is not enabled")  # not reduced
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(main, (2, tempfile.mktemp()), nprocs=2)
