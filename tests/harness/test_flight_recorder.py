"""What torch's flight recorder has of a hang on NCCL: asked for, read when it is complete, and put in words."""

import os
import pickle
import threading
import time

from shardproof.harness.worlds import flight_recorder
from tests.harness.inner import CASE


def entry(number, operation="all_reduce", state="completed", *, group=("0", "default_pg"), is_p2p=False):
    """One entry as torch 2.11 to 2.15 writes it, less what is not read."""
    numbers = {"collective_seq_id": 0 if is_p2p else number, "p2p_seq_id": number if is_p2p else 0, "is_p2p": is_p2p}
    given = {"input_dtypes": ["Float"], "input_sizes": [[3, 2]], "profiling_name": f"nccl:{operation}"}
    return {**numbers, **given, "process_group": group, "state": state}


def dump(*entries, ranks="[0, 1]"):
    return pickle.dumps({"version": "2.10", "entries": [*entries], "pg_config": {"0": {"ranks": ranks}}})


#: Rank 1 has skipped the second collective of the default group; rank 0 has another one behind it.
SKIPPED = {
    0: dump(entry(1), entry(2, "_allgather_base", "started"), entry(3, state="scheduled")),
    1: dump(entry(1), entry(1, "broadcast", group=("1", "tp"))),
}
SAID = [
    "torch's flight recorder:",
    "  2 of group 0 (default_pg): _allgather_base Float [[3, 2]], started, rank 0; "
    "rank 1 is behind, after 1: all_reduce Float [[3, 2]], completed",
]


def test_a_dump_in_words():
    said = flight_recorder.summary
    assert said(SKIPPED) == SAID
    assert said({0: dump(entry(1, state="started")), 1: dump(entry(1, "barrier", "started"))})[1:] == [
        "  1 of group 0 (default_pg): all_reduce Float [[3, 2]], started, rank 0",
        "  1 of group 0 (default_pg): barrier Float [[3, 2]], started, rank 1",
    ]
    (line,) = said({0: dump(entry(1, state="started"), ranks="[0, 1, 2]"), 2: dump()})[1:]
    assert line.endswith(", rank 0; rank 1 wrote no dump; rank 2 is behind, before its first")
    (line,) = said({0: dump(entry(4, "send 0->1", "started", is_p2p=True)), 1: dump()})[1:]
    assert line == "  4 of group 0 (default_pg): send 0->1 Float [[3, 2]], started, rank 0"
    assert said({0: dump(entry(1))})[1:] == ["  all that was enqueued has ended"]
    assert said({0: pickle.dumps([])})[1].startswith("  not understood: TypeError")
    assert said({}) == []


def test_a_dump_is_read_when_it_is_complete(tmp_path):
    """Rank 0 has a pipe, and writes in two halves; rank 1 has ended, and nobody reads its pipe; rank 2 has none."""
    for rank in (0, 1):
        os.mkfifo(tmp_path / f"flight{rank}.pipe")
    reader = os.open(tmp_path / "flight0.pipe", os.O_RDONLY | os.O_NONBLOCK)

    def write():
        while not os.read(reader, 128):
            time.sleep(0.01)
        with open(tmp_path / "flight0", "wb", buffering=0) as file:
            file.write(SKIPPED[0][:100])
            time.sleep(0.2)
            file.write(SKIPPED[0][100:])

    thread = threading.Thread(target=write)
    thread.start()
    assert flight_recorder.dumps(tmp_path, range(3)) == {0: SKIPPED[0]}
    thread.join()
    os.close(reader)


def test_a_hang_has_the_dumps_beside_the_run_file(run, monkeypatch, pytester):
    """On the CPU, with dumps as of NCCL. A rank that fails does not have the others write any."""
    asked = []
    monkeypatch.setattr(flight_recorder, "dumps", lambda *given: asked.append(given) or SKIPPED)
    body = "import time; time.sleep(60 * (1 - rank.index))"
    lines = run(CASE.format(body=body), "--deadline", "2", "--report", "run.json").stdout
    folder = "run.json.flight/test_inner-py-test_case-ddp-w2-"
    lines.fnmatch_lines(
        [*(line.replace("[", "[[]") for line in SAID), f"dumps of torch's flight recorder: {folder}, *"]
    )
    assert (pytester.path / folder / "rank1").read_bytes() == SKIPPED[1]
    run(CASE.format(body="assert rank.index; rank.exchange(1)"))
    assert len(asked) == 1
