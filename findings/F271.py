"""torch over gloo: ranks that share cores spend them on polling

A gloo worker locks a connection while it sends on it. Sending wakes the thread of the receiving process that polls for
messages, and the scheduler lets that thread interrupt whoever runs on its core: where ranks share cores, often another
worker that holds such a lock. When a message arrives for that connection, the polling thread of the interrupted worker's
own process tries to take the lock, fails, and returns (`Pair::handleEvents` in gloo's `transport/tcp/pair.cc`). The message
is still there, so that `epoll_wait` returns at once, and the thread polls in a loop, on a core, until the worker gets one
and gives the lock back. On 2 cores `perf stat -e syscalls:sys_enter_epoll_wait` counted 1.4 million calls a second below
four ranks that train with 2-D parallelism; a fifth of the time of both cores went into these threads.

Under `SCHED_BATCH`, which anybody may choose, a thread that wakes does not interrupt others. What the program below printed
on 2 cores (torch 2.13.0, Linux 6.18), with the usual policy (0) and `SCHED_BATCH` (3) in turn; the polling thread is that
of rank 0 alone:

```text
policy 0: 14.4 s, polling thread 4.8 s
policy 3: 2.6 s, polling thread 0.4 s
policy 0: 13.8 s, polling thread 4.1 s
policy 3: 2.6 s, polling thread 0.4 s
```

Gloo groups of the harness's ranks start their threads with `SCHED_BATCH` (`harness/worlds/gloo.py`). A program of yours
gets the same by `chrt --batch 0 torchrun ...`. Where there are cores enough it changes nothing: the suites with `-n 18` on 32
cores (torch 2.11.0) took 123, 132 and 130 s with it and 120 s without.
"""

# /// finding
# implementations = ["torch"]
# reproduces = ["torch 2.13.0 cpu 2026-11-25"]
# by_hand = "times two policies of the scheduler on cores that nothing else uses"
# ///

import os, tempfile, time, torch, torch.distributed as dist, torch.multiprocessing as mp


def main(rank, world, path, policy):
    torch.set_num_threads(1)
    os.sched_setscheduler(0, policy, os.sched_param(0))
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)
    start = time.time()
    for _ in range(1000):
        reductions = [dist.all_reduce(torch.ones(64), async_op=True) for _ in range(4)]
        sum(range(10000))  # as if the rank computed
        for reduction in reductions:
            reduction.wait()
    seconds, polling = time.time() - start, 0
    for thread in os.listdir("/proc/self/task"):
        if "gloo_tcp" in open(f"/proc/self/task/{thread}/comm").read():
            polling += sum(map(int, open(f"/proc/self/task/{thread}/stat").read().rsplit(")", 1)[1].split()[11:13]))
    if rank == 0:
        print(f"policy {policy}: {seconds:.1f} s, polling thread {polling / os.sysconf('SC_CLK_TCK'):.1f} s")
    dist.destroy_process_group()


if __name__ == "__main__":
    for policy in [os.SCHED_OTHER, os.SCHED_BATCH] * 2:
        mp.spawn(main, args=(4, tempfile.mktemp(), policy), nprocs=4)
