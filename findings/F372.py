"""torch `set_model_state_dict`: the caller's state dict has other tensors or other names afterwards

The function works in the dict that it is given. With `full_state_dict=True`, of each rank or of the first one, full
values are replaced there by this rank's shards, whose values change with the next step: a state dict that is loaded
into a second model, or again, is another one. Of a model in `DistributedDataParallel` or `torch.compile`, every form
renames the entries after the wrapper; only the first rank does where its state dict is sent, and other ranks that have
it refuse their own names, if strict. `set_optimizer_state_dict`, `load_state_dict` of FSDP1 and
`optim_state_dict_to_load` leave what they are given. Seen by CALLS-5 and STATE-13.
"""

# /// finding
# implementations = ["torch", "torch.fsdp", "ddp", "torch.zero_optimizer"]
# requirements = ["CALLS-5", "STATE-13"]
# reproduces = ["torch 2.13.0 cpu 2026-11-28", "torch 2.15.0 cpu 2026-11-28"]
# shows = "^fully_shard full: weight Tensor became weight DTensor$"
# ///

import tempfile, torch, torch.distributed as dist, torch.multiprocessing as mp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel


def wrapped(model):
    return FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)


MODELS = {
    "fully_shard": fully_shard,
    "FSDP1": wrapped,
    "DDP": DistributedDataParallel,
    "compile": torch.compile,
    "plain": nn.Identity,
}
FORMS = {"own": {}, "full": {"full_state_dict": True}}
FORMS["first-rank"] = FORMS["full"] | {"broadcast_from_rank0": True}


def main(rank, world, path):
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)
    for kind, make in MODELS.items():
        for form, options in FORMS.items():
            plain = nn.Linear(4, 4, bias=False)
            model = plain if kind == "plain" else make(plain)
            full = StateDictOptions(full_state_dict=form != "own")
            state = dict(get_model_state_dict(model, options=full))
            before = state.copy()
            # Not strict: ranks that do not rename would refuse their own names.
            set_model_state_dict(model, state, options=StateDictOptions(strict=False, **options))
            shown = [
                ", ".join(f"{name} {type(one).__name__}" for name, one in each.items()) for each in (before, state)
            ]
            same = before.keys() == state.keys() and all(state[name] is before[name] for name in before)
            if rank == 0:
                print(f"{kind} {form}:", "as it was" if same else " became ".join(shown), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(main, (2, tempfile.mktemp()), nprocs=2)
