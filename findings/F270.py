"""torch over gloo: two collectives that end at the same time corrupt memory

A gloo group has two worker threads. After each collective the worker writes the collective's name to
`pgStatus_->lastCompletedWorkName`, a string of the group that no lock protects (`ProcessGroupGloo::runLoop`). If both threads
do that at the same time, both free the memory of the old name. The process crashes later, in whatever allocates next:
"malloc(): unaligned tcache chunk detected", or a segmentation fault. Names of up to 15 characters, such as
"_ALLGATHER_BASE", need no heap memory; "ALLGATHER_COALESCED", that of the functional collectives, which DTensor issues, does.
The worker writes after it has woken the waiting thread, so a program that has one collective at a time in flight is affected
too, but rarely: when many processes share few cores. In two of our runs, each of thousands of cases, one case died this way
(torch 2.11.0 and 2.13.0). helgrind (valgrind 3.19) located the race in torch 2.13.0.

`pg_options` is ignored for gloo, so a program cannot ask for one thread. The harness's ranks make gloo groups with one
(`harness/worlds/gloo.py`).
"""

# /// finding
# implementations = ["torch"]
# reproduces = ["torch 2.13.0 cpu 2026-11-25", "torch 2.15.0 cpu 2026-11-25"]
# shows = '^exit code -'
# ///

import tempfile, torch, torch.distributed as dist

dist.init_process_group("gloo", init_method=f"file://{tempfile.mktemp()}", rank=0, world_size=1)
gather, wait = torch.ops._c10d_functional.all_gather_into_tensor, torch.ops._c10d_functional.wait_tensor
while True:  # killed by SIGABRT or SIGSEGV within two seconds
    for gathered in [gather(torch.ones(3), 1, dist.group.WORLD.group_name) for _ in range(64)]:
        wait(gathered)
