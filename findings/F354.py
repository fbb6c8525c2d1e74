"""torchft `DistributedDataParallel` on gloo: a replica that dies in a step takes the others with it

torchft 0.2.0, `ProcessGroupGloo`. The survivor's `Work.wait()` raises in the host, which torchft reports to its manager, so
that the step is not committed. The future of that work was never made: the communication hook then fails in `assert
fut._fut`, and backward raises an AssertionError without a message. Loud. With `manager.allreduce` alone, as a control, the
survivor does not commit the step and goes on. No report of it was found.
"""

# /// finding
# implementations = ["torchft"]
# reproduces = ["torch 2.13.0 cpu 2026-11-27"]
# packages = ["torchft>=0.2.0"]
# shows = '^DistributedDataParallel: AssertionError$'
# ///

import os, torch, torch.distributed as dist, torch.multiprocessing as mp


def replica(number, lighthouse, wraps):
    from torchft import DistributedDataParallel, Manager, ProcessGroupGloo

    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        ProcessGroupGloo(), lambda state: None, dict, min_replica_size=2, use_async_quorum=False, rank=0,
        world_size=1, store_addr="localhost", store_port=store.port, lighthouse_addr=lighthouse, replica_id=f"r{number}",
    )  # fmt: skip
    model = torch.nn.Linear(2, 2)
    wrapped = DistributedDataParallel(manager, model)
    manager.start_quorum()
    loss = wrapped(torch.ones(1, 2)).sum()
    manager.wait_quorum()
    if number == 1:
        os._exit(0)
    title = "DistributedDataParallel" if wraps else "allreduce"
    try:
        if wraps:
            loss.backward()
        else:
            manager.allreduce(torch.ones(1)).wait()
        print(f"{title}: goes on, with the error {type(manager.errored().original_exception).__name__}\n", end="")
    except BaseException as error:
        print(f"{title}: {type(error).__name__}\n", end="")
    os._exit(0)


if __name__ == "__main__":
    from torchft.coordination import LighthouseServer

    for wraps in (False, True):
        server = LighthouseServer(bind="[::]:0", min_replicas=2)
        mp.spawn(replica, (server.address(), wraps), nprocs=2)
        server.shutdown()
