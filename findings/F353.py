"""torchft with asynchronous quorums: the gradients of the first step are too small

torchft 0.2.0, `Manager` with its defaults (`use_async_quorum=True`, `init_sync=True`). In the first step every replica but
one takes the first one's values, and the all-reduce counts zeros for its gradients; the sum is still divided by the number
of all replicas, since at step 0 none of them is behind. With two replicas the first step has half of one replica's gradients
instead of an average. It is committed. Silent. A replica that joins later is not counted in its first step, whose average is
right. `use_async_quorum=False` has no such step. No report of it was found.
"""

# /// finding
# implementations = ["torchft"]
# reproduces = ["torch 2.13.0 cpu 2026-11-27"]
# packages = ["torchft>=0.2.0"]
# shows = '^asynchronous step 0 committed with 0\.5$'
# related = ["https://github.com/meta-pytorch/torchft/issues/117 closed: replicas always take values at step 0"]
# ///

import time, torch, torch.distributed as dist, torch.multiprocessing as mp


def replica(number, lighthouse, asynchronous):
    from torchft import Manager, ProcessGroupGloo

    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        ProcessGroupGloo(), lambda state: None, dict, min_replica_size=2, use_async_quorum=asynchronous, rank=0,
        world_size=1, store_addr="localhost", store_port=store.port, lighthouse_addr=lighthouse, replica_id=f"r{number}",
    )  # fmt: skip
    for step in range(3):
        manager.start_quorum()
        gradient = torch.ones(1)  # of both replicas, so that their average is 1
        manager.allreduce(gradient).wait()
        if manager.should_commit() and number == 0:
            kind = "asynchronous" if asynchronous else "synchronous"
            print(f"{kind} step {step} committed with {gradient.item()}\n", end="")
    time.sleep(1)  # the other one may still talk to this one
    manager.shutdown(wait=False)


if __name__ == "__main__":
    from torchft.coordination import LighthouseServer

    for asynchronous in (False, True):
        server = LighthouseServer(bind="[::]:0", min_replicas=2)
        mp.spawn(replica, (server.address(), asynchronous), nprocs=2)
        server.shutdown()
