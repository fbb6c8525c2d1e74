"""torch over gloo: a process that ends after collectives may abort

With torch 2.13.0 and Python 3.11, a process that exits soon after its last collective sometimes dies of SIGABRT with
`terminate called without an active exception`, also after `destroy_process_group`. The stack of a core file shows how:
a thread of gloo (`ProcessGroupGloo::runLoop`) destroys the finished work and with it the last C++ reference to a tensor
(`AsyncAllreduceWork::~AsyncAllreduceWork`, `c10::TensorImpl::decref_pyobject`), and asks for the GIL to release the
tensor's Python object. Meanwhile the main thread finalizes the interpreter (`Py_FinalizeEx`), and Python before 3.14
ends any other thread that asks for the GIL with `pthread_exit`. The exit unwinds through destructors that are
`noexcept`, and C++ calls `std::terminate`.

`destroy_process_group` does not help where somebody holds the group, as a `DeviceMesh` does: the group's destructor
would join the threads. Once the mesh of the reproducer is deleted and garbage is collected, no thread of gloo is left
after `destroy_process_group`; after `fully_shard`, torch's or ours, the threads stay, because DTensor's caches hold the
mesh. A process is safe if it ends by `os._exit` after flushing its streams. The harness's ranks end so
(multiprocessing's forkserver does it).

Run it several times, as `torchrun --nproc-per-node 2 findings/F020.py`.
"""

# /// finding
# implementations = ["torch"]
# does_not_reproduce = ["torch 2.13.0 cpu 2026-11-25", "torch 2.15.0 cpu 2026-11-25"]
# by_hand = "takes luck: run it several times, by `torchrun --nproc-per-node 2 findings/F020.py`"
# unlisted = "the ranks of the harness end by os._exit, so that no case can see it"
# upstream = [
#     "https://github.com/pytorch/pytorch/pull/179291 closed: Register atexit handler to destroy process groups before interpreter finalization, abandoned",
# ]
# related = [
#     "https://github.com/pytorch/pytorch/issues/190489 open: the same message where `destroy_process_group` was not called",
# ]
# ///

import torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
dist.all_reduce(torch.ones(4), group=mesh.get_group())
dist.destroy_process_group()
