"""A job of torchrun on two hosts: the verdicts of one, and a verdict that names the host that is lost.

The hosts are network namespaces of this machine, with a cable between them that a test can pull.
"""

import json
import os

import pytest

from tests.harness.hosts import torchrun, two_hosts, verdicts, why_no_namespaces
from tests.harness.inner import ROOT

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif("why_no_namespaces()", reason=why_no_namespaces() or "not skipped"),
]

CASES = """
import os, pathlib, time
import torch
import torch.distributed as dist
from shardproof.testing import deadline, models, world

SIZE = int(os.environ["RANKS"])

@world(SIZE)
def test_trains(rank):
    assert len(set(rank.nodes)) == 2 and rank.nodes[0] == 0
    mesh = rank.mesh((2, SIZE // 2), ("replicate", "shard")) if SIZE > 2 else rank.mesh()
    model = models.Tower(dim=9)
    pair = rank.pair(model, units=model.units(), mesh=mesh)
    for step in range(2):
        pair.step(rank.batch(step, (4, 9)))
        pair.check()
    big = rank.exchange(bytes([rank.index]) * 3_000_000)
    assert [(len(one), one[0], one[-1]) for one in big] == [(3_000_000, index, index) for index in range(SIZE)]

@world(SIZE)
@deadline(DEADLINE)
def test_fault(rank):
    dist.all_reduce(torch.ones(4))
    if rank.index == SIZE - 1:
        pathlib.Path("ready").touch()
    if WHAT == "wrong":
        assert rank.index < SIZE - 1, "the last rank is wrong"
    while WHAT != "none":
        dist.all_reduce(torch.ones(4))
        time.sleep(0.02)

@world(SIZE // 2)
def test_the_rest(rank):
    assert rank.nodes == (0,) * (SIZE // 2)
    assert rank.exchange(rank.index) == list(range(SIZE // 2))

@world(SIZE)
def test_all(rank):
    assert rank.exchange(rank.index) == list(range(SIZE))
"""

RUN = ("--impl", "reference", "--device", "cpu", "--report", "run.json")


@pytest.fixture
def hosts(tmp_path):
    with two_hosts(tmp_path) as both:
        yield both


def write(folder, what, *, deadline=60):
    text = CASES.replace("DEADLINE", str(deadline)).replace("WHAT", repr(what))
    (folder / "test_inner.py").write_text(text)


def lose(hosts, folder, ranks, *, kill=False, deadline=60):
    """Run cases on both hosts with so many ranks each, and kill the second or cut it off in the one that is endless."""
    write(folder, "endless", deadline=deadline)
    hosts.start(ranks, *RUN, RANKS=str(2 * ranks))
    hosts.await_file(folder / "ready")
    hosts.kill(1) if kill else hosts.cut()
    assert hosts.wait(0) == 1


def failures(folder):
    run = json.loads((folder / "run.json").read_text())
    return {case["id"].partition("::")[2].partition("[")[0]: case["failure"] for case in run["cases"]}


def assert_lost(hosts, folder, ranks, verdict):
    """The second host costs the case that it ran, which has this verdict, and those that need it."""
    size = 2 * ranks
    expected = {f"test_trains[w{size}]": "pass", f"test_fault[w{size}]": verdict, f"test_the_rest[w{ranks}]": "pass"}
    assert verdicts(folder / "run.json") == expected | {f"test_all[w{size}]": "harness-error"}, hosts.output(0)


def test_a_killed_host_is_a_crash_that_names_it(hosts, tmp_path):
    lose(hosts, tmp_path, 1, kill=True)
    assert_lost(hosts, tmp_path, 1, "crash")
    lost, after = (failures(tmp_path)[name] for name in ("test_fault", "test_all"))
    assert lost["host"] == "hostb" and lost["rank"] == 1
    assert "host hostb closed its connection: the host or its processes ended" in lost["text"]
    assert "rank 0 on hosta; rank 1 on hostb" in lost["text"]
    assert "2 ranks are needed, and 1 of 2 are left: host hostb closed its connection" in after["text"]
    assert hosts.output(1) == "" or "test session starts" not in hosts.output(1)


@pytest.mark.parametrize("rendezvous", ["c10d", "static"])
def test_two_hosts_give_the_verdicts_of_one(hosts, tmp_path, rendezvous):
    arguments = [
        f"{ROOT}/suites/test_hybrid.py", "--impl", "reference,torch.fully_shard", "--device", "cpu", "--world", "4",
        "--effort", "quick", "--report",
    ]  # fmt: skip
    hosts.start(2, *arguments, "two.json", rendezvous=rendezvous)
    assert hosts.wait(0) == 0, hosts.output(0)
    assert hosts.wait(1) == 0, hosts.output(1)
    assert torchrun(tmp_path, 4, *arguments, "one.json").returncode == 0
    runs = [json.loads((tmp_path / name).read_text()) for name in ("one.json", "two.json")]
    assert runs[0]["environment"]["torchrun"]["hosts"] == 1 and runs[1]["environment"]["torchrun"]["hosts"] == 2
    one, two = ({(c["implementation"], c["id"]): c for c in run["cases"]} for run in runs)
    assert {key: case["verdict"] for key, case in one.items()} == {key: case["verdict"] for key, case in two.items()}
    differ = {key[1].partition("::")[2] for key, case in one.items() if case["collectives"] != two[key]["collectives"]}
    # On one host the case declares hosts for its ranks, in turn; on two it takes the real ones.
    assert differ == {"test_bytes_between_hosts[w4-cyclic-None-True]"}
    crossing = two["reference", f"suites/test_hybrid.py::{min(differ)}"]["collectives"][0]["trace"]
    assert {line.partition(" ranks ")[2][:3] for line in crossing if line.startswith("backward all_reduce")} == {"0,2"}
    assert any(case["verdict"] == "pass" for case in two.values())
    assert all(case["hosts"] == ["hosta", "hosta", "hostb", "hostb"] for case in two.values() if case["collectives"])


def test_a_host_that_is_cut_off_is_a_hang_that_names_it(hosts, tmp_path):
    lose(hosts, tmp_path, 2, deadline=5)
    assert_lost(hosts, tmp_path, 2, "hang")
    lost = failures(tmp_path)["test_fault"]
    assert lost["host"] == "hostb" and lost["rank"] == 2
    assert "ranks 2-3 are out of reach: host hostb does not answer" in lost["text"]
    assert "ranks 0-1 on hosta; ranks 2-3 on hostb" in lost["text"]


def test_a_silent_host_is_noticed_before_a_distant_deadline(hosts, tmp_path):
    lose(hosts, tmp_path, 1, deadline=200)
    (case,) = (c for c in json.loads((tmp_path / "run.json").read_text())["cases"] if "test_fault" in c["id"])
    assert case["verdict"] == "hang" and case["failure"]["host"] == "hostb" and case["seconds"] < 100


def test_failures_and_crashes_of_ranks_name_host_and_rank(hosts, tmp_path):
    write(tmp_path, "wrong")
    hosts.start(2, *RUN, RANKS="4")
    assert hosts.wait(0) == 1
    assert os.path.exists(tmp_path / "run.json"), hosts.output(0)
    wrong = failures(tmp_path)["test_fault"]
    assert (wrong["rank"], wrong["host"]) == (3, "hostb")
    assert "rank 3 of 4" in wrong["text"] and "ranks 0-1 on hosta; ranks 2-3 on hostb" in wrong["text"]
    assert verdicts(tmp_path / "run.json")["test_all[w4]"] == "pass"
