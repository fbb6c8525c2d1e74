"""DeepSpeed ZeRO-3: a module appends to a copy of its caller's list, and changes its input in place unseen by autograd

deepspeed 0.19.8, stage 3. Hooks around each module rebuild lists (`apply_to_tensors_only`) and pass tensors through a function of autograd. What
a module appends to a list is lost. A tensor that it changes in place has the new values for its caller, whose graph does not know of the change: if
the caller uses it again, gradients differ silently. Near F-165, which is about dicts. Seen by INPUTS-1 and INPUTS-4. No report of it was looked for.
"""

# /// finding
# implementations = ["deepspeed.zero3", "deepspeed.zero3_serial"]
# requirements = ["INPUTS-1", "INPUTS-4"]
# reproduces = ["torch 2.13.0 cpu 2026-11-27"]
# packages = ["deepspeed>=0.19.8"]
# shows = '^0 entries 0 of 1, gradient unlike the plain one: True$'
# ///

import copy, os, tempfile


def main(rank, world, path):
    os.environ.update(DS_ACCELERATOR="cpu", LOCAL_RANK=str(rank), RANK=str(rank), WORLD_SIZE=str(world))
    import torch, torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False

    class Unit(torch.nn.Linear):
        def forward(self, x, notes):
            notes.append(1)
            return super().forward(x.mul_(2))

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.entry, self.unit = torch.nn.Linear(4, 4), Unit(4, 4)

        def forward(self, x):
            self.notes, hidden = [], self.entry(x)
            return self.unit(hidden, self.notes) + hidden

    options = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 3},
        "zero_allow_untested_optimizer": True,
    }
    model = Model()
    plain = copy.deepcopy(model)
    for parameter in plain.parameters():
        dist.broadcast(parameter.data, 0)  # as the engine does
    engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.SGD(model.parameters(), 0.1), config=options)
    engine.backward(engine(torch.ones(2, 4)).sum())
    plain(torch.ones(2, 4)).sum().backward()
    found = deepspeed.utils.safe_get_full_grad(model.entry.weight)
    unlike = not torch.allclose(found, plain.entry.weight.grad)
    print(rank, f"entries {len(model.notes)} of 1, gradient unlike the plain one: {unlike}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    import torch.multiprocessing as mp

    mp.spawn(main, (2, tempfile.mktemp()), nprocs=2)
