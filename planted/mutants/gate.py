"""How many mutants a run of ``--changed`` finds in its seconds: the gate for a change, asked with known mistakes.

Each mutant is planted in the ranks of a run of its own, which names the function as whoever edits it would, and which
ends with the first item that fails. An item that does not pass without a mutant finds nothing.
"""

import concurrent.futures
import dataclasses
import os
import pathlib
import queue
import tempfile
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

from planted import run
from planted.mutants import plant, rules, tries
from planted.mutants.rules import Mutant
from shardproof.harness.worlds import instruments
from shardproof.runfile import Verdict

Asked = tuple[str, Mutant, Sequence[str]]
"""The group of a mutant, the mutant, and the implementations that are asked."""


def asked(
    mutants: Iterable[Asked], *, unsound: Collection[str], known: pathlib.Path, seconds: float, jobs: int
) -> Iterator[dict[str, Any]]:
    """Ask for each mutant, and yield what a run said when it ends: the fields of a line of ``run``.

    Args:
        mutants: those to ask for.
        unsound: the ids of items that do not pass without a mutant.
        known: the map.
        seconds: of each run, for its items.
        jobs: how many runs there are at once, each on two cores that no other one has.

    Raises:
        ValueError: there are fewer cores than two for each job.
    """
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2 * jobs:
        raise ValueError(f"--jobs {jobs}: each has two cores of its own, and there are {len(cores)}")
    pairs: queue.SimpleQueue[set[int]] = queue.SimpleQueue()
    for job in range(jobs):
        pairs.put(set(cores[2 * job : 2 * job + 2]))

    def begin() -> None:  # of a thread, which hands its cores on to the processes that it starts
        os.sched_setaffinity(0, pairs.get())

    with concurrent.futures.ThreadPoolExecutor(jobs, initializer=begin) as pool:
        ends = [pool.submit(_asked, *one, unsound, known, seconds) for one in mutants]
        for end in concurrent.futures.as_completed(ends):
            yield end.result()


def _asked(
    group: str, mutant: Mutant, names: Sequence[str], unsound: Collection[str], known: pathlib.Path, seconds: float
) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="m") as name:
        folder = pathlib.Path(name)
        (folder / plant.FILE).write_bytes(tries.packed_of(mutant))
        change = f"{rules.path_of(mutant.module)}:{mutant.place.partition(':')[2]}"
        options = ["--changed", change, "--seconds", str(seconds), "--map", str(known)]
        options += ["--maxfail", str(1 + len(unsound)), "--device", "cpu", "-n", "2"]
        environment = {"TMPDIR": str(folder), **instruments.environment(folder, "planted.mutants.plant:planted")}
        began = time.monotonic()
        # A run that ends with the first item that fails has written only what ran until then.
        records = run.records_of(["suites"], names, folder, *options, environment=environment, early=True)
        took = round(time.monotonic() - began, 1)
    failed = [item for item, record in records.items() if Verdict(record["verdict"]).fails]
    found_by = next((one for one in failed if one not in unsound), "")
    ran = list(records)
    return {"group": group, **dataclasses.asdict(mutant), "ran": ran, "seconds": took, "found_by": found_by}
