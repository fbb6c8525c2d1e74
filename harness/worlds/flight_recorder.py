"""torch's flight recorder, for a hang on NCCL: which collectives of a rank have not ended, as torch itself knows.

The board has what ranks were about to enter; the recorder has what NCCL was given and has finished. A thread of torch
in each rank reads a pipe once a second and writes what is recorded, also while the rank's Python waits for its device.
"""

import contextlib
import json
import os
import pathlib
import pickle
import time
from collections.abc import Collection, Mapping
from typing import Any

from shardproof.harness.judging.texts import ranks_of

#: How the names of the pipes and of the dumps in a world's directory begin; torch adds the rank, and ".pipe".
_PREFIX = "flight"

#: Seconds that ranks may take: torch reads the pipe once a second, and then looks up the lines of its stacks.
_DUMP_SECONDS = 5.0


def enable(directory: str) -> None:
    """Let torch open a pipe for requests in a world's directory, before this rank joins its process groups.

    What is recorded does not depend on it: torch records unless ``TORCH_FR_BUFFER_SIZE`` is 0. Names that the user has
    set are replaced, because another world has a rank of the same number.
    """
    for name in ("TORCH_NCCL_DEBUG_INFO_PIPE_FILE", "TORCH_FR_DUMP_TEMP_FILE"):
        os.environ[name] = f"{directory}/{_PREFIX}"


def dumps(directory: pathlib.Path, ranks: Collection[int]) -> dict[int, bytes]:
    """Have ranks write what is recorded, all at once; return the dumps of those that do so in time, if they can."""
    asked = {}
    for rank in ranks:
        with contextlib.suppress(OSError):  # there is no pipe, or nobody reads it
            with open(os.open(directory / f"{_PREFIX}{rank}.pipe", os.O_WRONLY | os.O_NONBLOCK), "wb") as pipe:
                pipe.write(b"1")
            asked[rank] = directory / f"{_PREFIX}{rank}"
    until = time.monotonic() + _DUMP_SECONDS
    while True:
        found = {rank: data for rank, path in asked.items() if (data := _complete(path))}
        if len(found) == len(asked) or time.monotonic() >= until:
            return found
        time.sleep(0.05)


def _complete(path: pathlib.Path) -> bytes:
    """Return a dump; nothing while torch still writes it."""
    with contextlib.suppress(Exception):  # of half a pickle, any
        data = path.read_bytes()
        pickle.loads(data)
        return data
    return b""


def summary(dumps: Mapping[int, bytes]) -> list[str]:
    """Describe which collectives have not ended on which ranks, and which ranks are behind; nothing without dumps."""
    if not dumps:
        return []
    try:
        lines = _unfinished({rank: pickle.loads(dump) for rank, dump in dumps.items()})
    except Exception as error:  # the form is torch's own, and no reason to lose a verdict
        lines = [f"not understood: {type(error).__name__}: {error}"]
    return ["torch's flight recorder:", *(f"  {line}" for line in lines or ["all that was enqueued has ended"])]


def _unfinished(read: Mapping[int, Any]) -> list[str]:
    groups: dict[tuple[str, str], dict[int, list[Any]]] = {}
    members: dict[str, set[int]] = {}
    for rank, dump in read.items():
        for entry in dump["entries"]:
            groups.setdefault(tuple(entry["process_group"]), {}).setdefault(rank, []).append(entry)
        for name, config in dump["pg_config"].items():
            members.setdefault(name, set()).update(json.loads(config["ranks"]))
    lines = []
    for (name, description), entries in groups.items():
        waiting: dict[tuple[int, bool, str], list[int]] = {}
        for rank, own in entries.items():
            if first := [entry for entry in own if entry["state"] != "completed"][:1]:
                waiting.setdefault((_number(first[0]), first[0]["is_p2p"], _text(first[0])), []).append(rank)
        for (number, is_p2p, text), ranks in waiting.items():
            line = f"{number} of group {name} ({description}): {text}, {ranks_of(ranks)}"
            for rank in sorted({*entries, *members.get(name, ())} - {*ranks}):
                last = [entry for entry in entries.get(rank, ()) if not entry["is_p2p"]][-1:]
                if rank not in read:
                    line += f"; {ranks_of([rank])} wrote no dump"
                elif not is_p2p and (not last or _number(last[0]) < number):
                    after = f"after {_number(last[0])}: {_text(last[0])}" if last else "before its first"
                    line += f"; {ranks_of([rank])} is behind, {after}"
            lines.append(line)
    return lines


def _number(entry: Any) -> int:
    return int(entry["p2p_seq_id" if entry["is_p2p"] else "collective_seq_id"])


def _text(entry: Any) -> str:
    operation = entry["profiling_name"].rpartition(":")[2]
    return f"{operation} {', '.join(entry['input_dtypes'])} {entry['input_sizes']}, {entry['state']}"
