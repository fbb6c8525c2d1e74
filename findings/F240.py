"""torch `DistributedDataParallel` over gloo: user code that destroys its process groups before its model may hang

`destroy_process_group` leaves the group to the reducer of DDP, which then is the last to hold it, and releases it where
the model is deleted: in most scripts where the function ends that has destroyed the groups. The destructor of the gloo
group joins the group's threads with the GIL held. One that has just finished a collective lets go of its tensor, and if
that has a Python object it waits for the GIL (`c10::TensorImpl::decref_pyobject`). Neither goes on, and no timeout of a
process group ends it. A script is safe that deletes the model first. Python objects of process groups release the GIL
before they end; a reducer does not. torch 2.13.0, Python 3.11, two cores. Seen once in RECOVERY-2, whose worlds the
harness keeps since then.

The reproducer ends a process that makes no progress for 20 seconds. Each of ten runs ended so, in the second to the
eighth of its hundred times, and each of three with `del model` before `destroy_process_group` reached the last. py-spy
showed both stacks.
"""

# /// finding
# implementations = ["ddp"]
# requirements = ["RECOVERY-2"]
# reproduces = ["torch 2.13.0 cpu 2026-11-25", "torch 2.15.0 cpu 2026-11-25"]
# shows = '^Timeout \(0:00:20\)!'
# related = [
#     "https://github.com/pytorch/pytorch/issues/56297 open: destructors of classes bound by pybind11 that can block",
#     "https://github.com/pytorch/pytorch/pull/154976 closed: the change by which the Python object of a process group releases the GIL",
# ]
# ///

import faulthandler, tempfile, torch, torch.distributed as dist, torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def train(rank, world, path):
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)
    model = DistributedDataParallel(nn.Linear(4, 4))
    model(torch.ones(2, 4)).sum().backward()
    dist.destroy_process_group()  # and then the model, where the function ends


def main(rank, world, path):
    for number in range(100):
        faulthandler.dump_traceback_later(20, exit=True)
        print(rank, "time", number, flush=True)
        train(rank, world, f"{path}{number}")
    faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    mp.spawn(main, (2, tempfile.mktemp()), nprocs=2)
