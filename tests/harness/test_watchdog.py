"""Stack dumps are read when they are complete, or are called cut off; and what is read from the board is whole."""

import mmap
import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import pytest

from shardproof.harness.collectives import board
from shardproof.harness.collectives.board import Announcement, Board
from shardproof.harness.worlds import watchdog
from tests.harness.inner import PYTHONPATH, until

# Dumps as a rank does, but into a small pipe that another process empties slowly: the dump takes long, and until then
# only a part of it is in the file.
SLOW = """
import fcntl, os, pathlib, sys, threading, time

source, target = os.pipe()
fcntl.fcntl(target, 1031, 4096)  # F_SETPIPE_SZ
if os.fork() == 0:
    os.close(target)
    with open("rank0.out", "wb", buffering=0) as output:
        while part := os.read(source, 512):
            output.write(part)
            time.sleep(float(sys.argv[2]))
    os._exit(0)

from shardproof.harness.worlds import loop

def deep(depth):
    time.sleep(60) if not depth else deep(depth - 1)

loop._dump_stacks_on_signal(open(target, "wb", buffering=0), pathlib.Path("rank0.dumped"))
for _ in range(int(sys.argv[1])):
    threading.Thread(target=deep, args=(90,), daemon=True).start()
pathlib.Path("ready").touch()
time.sleep(60)
"""


@pytest.fixture
def rank(tmp_path):
    """Start a process with so many deep threads, whose dump pauses so many seconds after each half kilobyte."""
    processes = []

    def start(threads, pause):
        command = [sys.executable, "-c", SLOW, str(threads), str(pause)]
        process = subprocess.Popen(command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": PYTHONPATH})
        processes.append(process)
        until(60, (tmp_path / "ready").exists)
        return process.pid

    yield start
    for process in processes:
        process.kill()
        process.wait()


def dump(pid, folder):
    """What a report would show of the stacks."""
    complete = watchdog.dump_stacks({0: (pid, folder / "rank0.dumped")})
    time.sleep(0.3)  # the rest of the pipe, which a rank does not have
    return watchdog.stacks(pid, (folder / "rank0.out").read_text(), is_complete=0 in complete)


def test_a_dump_is_read_when_it_is_complete(rank, tmp_path):
    """Some 30 KiB that take half a second: the size of a file that grows does not show its end."""
    text = dump(rank(threads=8, pause=0.01), tmp_path)
    assert text.count(" in deep\n") == 8 * 91
    # The main thread comes last.
    assert re.search(r"most recent call first\):\n  File \"<string>\", line \d+ in <module>\n$", text)


@pytest.mark.nightly
def test_a_dump_that_takes_too_long_is_called_cut_off(rank, tmp_path, monkeypatch):
    monkeypatch.setattr(watchdog, "_STACK_SECONDS", 0.5)
    text = dump(rank(threads=8, pause=0.05), tmp_path)
    assert text.endswith("(cut off: the rank did not finish its stack dump within 0.5 s)\n")


@pytest.mark.nightly
def test_stopped_ranks_share_one_wait(rank, tmp_path, monkeypatch):
    pid = rank(threads=1, pause=0)
    os.kill(pid, signal.SIGSTOP)
    monkeypatch.setattr(watchdog, "_STACK_SECONDS", 0.5)
    started = time.monotonic()
    assert watchdog.dump_stacks(dict.fromkeys(range(8), (pid, tmp_path / "rank0.dumped"))) == set()
    assert time.monotonic() - started < 1


def test_the_stack_of_a_rank_that_waits_keeps_its_ends():
    frames = [f'  File "/x.py", line {number} in f' for number in range(20)]
    short = ["its stacks:", "Current thread 0x1 (most recent call first):", *frames[:7]]
    assert watchdog.ends_of_stacks("\n".join(short)) == "\n".join(short)
    long = ["Thread 0x2 (most recent call first):", *frames, "", *short]
    expected = [long[0], *frames[:3], "  ... 14 frames left out ...", *frames[-3:], "", *short]
    assert watchdog.ends_of_stacks("\n".join(long)) == "\n".join(expected)


def announced(*texts, ranks=(0, 1)):
    return [Announcement(1, number, "g", ranks, text) for number, text in enumerate(texts, start=1)]


def test_collectives_that_ranks_share_take_one_line():
    entries = {0: announced("a", "b", "c"), 1: announced("a", "x"), 2: []}
    assert watchdog.collectives(entries) == [
        "last collectives, and the ranks that entered them:", "  1 on ranks 0-1: a, all",
        "  2 on ranks 0-1: b, rank 0 only", "  2 on ranks 0-1: x, rank 1 only", "  3 on ranks 0-1: c, rank 0 only",
        watchdog.ADVICE,
    ]  # fmt: skip
    assert watchdog.collectives({0: [], 1: []}) == []


def test_a_rank_that_is_far_ahead_has_entered_what_it_shows_no_more():
    many = announced(*map(str, range(1, 41)))
    lines = watchdog.collectives({0: many[9:], 1: many[:5]})
    assert "  5 on ranks 0-1: 5, all" in lines
    assert "  40 on ranks 0-1: 40, rank 0 only" in lines
    assert watchdog.ADVICE not in lines


@pytest.mark.parametrize(
    "ranks",
    [
        *((0,), (3, 1), tuple(range(1024)), tuple(range(3, 4096, 8))),
        *((0, 1, 4, 5, 8, 9, 12, 13), (5, 4, 3, 2), (0, 2, 3, 7, 7)),
    ],
    ids=lambda ranks: f"{len(ranks)} ranks",
)
def test_an_announcement_of_many_ranks_is_whole(ranks):
    entry = Announcement(7, 3, "group 12", ranks, "all_gather float32 64 B " + "x" * 500)
    read = Announcement.unpack(entry.pack())
    assert (read.job, read.number, read.group, read.ranks) == (7, 3, "group 12", ranks)
    assert read.text.startswith("all_gather float32 64 B x")


def test_a_group_that_does_not_fit_is_one_line():
    irregular = tuple(index * index for index in range(100))
    with pytest.raises(ValueError, match="the group 'g' has 100 ranks too irregular for the board"):
        Announcement(1, 1, "g", irregular, "").pack()


class Overtaken(mmap.mmap):
    """A rank that writes while it is read: ``posts`` entries, after the reader took the counter."""

    posts = 0
    behind: Board

    def __getitem__(self, index):
        posts, self.posts = self.posts, 0
        for number in range(posts):
            self.behind.post(0, Announcement(1, 1000 + number, "g", (0,), "new"))
        return super().__getitem__(index)


@pytest.mark.parametrize("posts", [0, 1, 5, 200])
def test_entries_that_are_overwritten_meanwhile_are_left_out(tmp_path, monkeypatch, posts):
    behind = Board(tmp_path / "board", 1)
    for number in range(1, 101):
        behind.post(0, Announcement(1, number, "g", (0,), "old"))
    monkeypatch.setattr(board.mmap, "mmap", Overtaken)
    overtaken = Board(pathlib.Path(tmp_path / "board"), 1)
    overtaken._memory.behind, overtaken._memory.posts = behind, posts
    numbers = [entry.number for entry in overtaken.entries(0, job=1)]
    assert numbers == list(range(70 + posts, 101))


def test_ranks_out_of_reach_are_to_blame_and_unknown():
    one = Announcement(1, 1, "0", (0, 1, 2, 3), "all_reduce")
    lost = {2: "host b does not answer", 3: "host b does not answer"}
    found = watchdog.diagnose({0: [one], 1: [one], 2: [], 3: []}, stuck={0: "", 1: ""}, case_path="a.py", lost=lost)
    assert (found.rank, found.text) == (2, "ranks 2-3 are out of reach: host b does not answer")
    lines = watchdog.collectives({0: [one], 1: [one], 2: [], 3: []}, lost)
    assert lines[1:] == ["  1 on ranks 0-3: all_reduce, all of those that can be asked"]


def test_a_rank_that_only_waits_is_not_to_blame():
    """Rank 0 waits for rank 1, which waits in another group for rank 2, which is in no collective."""
    first, second = Announcement(1, 1, "a", (0, 1), "all_reduce"), Announcement(1, 1, "b", (1, 2), "all_gather")
    found = watchdog.diagnose({0: [first], 1: [second], 2: []}, stuck={0: "", 1: "", 2: ""}, case_path="a.py", lost={})
    assert found.rank == 2, found.text
