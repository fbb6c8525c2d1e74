"""A job of torchrun on one host: one run, with the verdicts of an ordinary one, whatever its ranks do."""

import json

import pytest

from shardproof.runfile import load_run
from tests.harness.hosts import torchrun, verdicts
from tests.harness.inner import QUIET

pytestmark = pytest.mark.sampled

CASES = """
import os, pathlib, signal, sys
import torch.distributed as dist
from shardproof.testing import world, deadline

@world(2, 8)
def test_sound(rank):
    assert rank.exchange(rank.index) == list(range(rank.world_size))

@world(1, 2)
def test_wrong(rank):
    if rank.index == rank.world_size - 1:
        raise ValueError("the last rank is wrong")

@world(2)
def test_that_crashes(rank):
    if rank.index == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    rank.exchange(None)

@world(2)
@deadline(1)
def test_that_hangs(rank):
    if rank.index == 0:
        dist.barrier()
    while True:
        pass
"""

PLACE = """

@world(2)
def test_place(rank):
    job = {name: os.environ[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "GROUP_RANK")}
    assert job == {"RANK": str(rank.index), "LOCAL_RANK": str(rank.index), "WORLD_SIZE": "2", "GROUP_RANK": "0"}
    assert os.environ["NCCL_SOCKET_IFNAME"] == "of-the-job" and "GLOO_SOCKET_IFNAME" not in os.environ
    assert not [name for name in os.environ if name.startswith("TORCHELASTIC_")]
    print("rank", rank.index, "was here", file=sys.stderr)

@world(2, own_hash_seeds=True)
def test_seed(rank):
    assert os.environ["PYTHONHASHSEED"] == "7", "not that of the process that torchrun has started"
"""


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    folder = tmp_path_factory.mktemp("job")
    (folder / "test_inner.py").write_text(CASES + PLACE)
    arguments = ["--impl", "reference", "--device", "cpu", "--report", "run.json"]
    completed = torchrun(folder, 2, *arguments, NCCL_SOCKET_IFNAME="of-the-job", PYTHONHASHSEED="7")
    return completed, folder / "run.json"


def test_the_verdicts_are_those_of_an_ordinary_run(job, pytester):
    _, report = job
    pytester.path.joinpath("test_inner.py").write_text(CASES)
    pytester.runpytest_inprocess(*QUIET, "--impl", "reference", "--device", "cpu", "--report", "run.json")
    ordinary = verdicts(pytester.path / "run.json")
    assert ordinary["test_sound[w8]"] == "pass"
    launched = verdicts(report)
    assert launched == ordinary | {"test_sound[w8]": "unmet", "test_place[w2]": "pass", "test_seed[w2]": "pass"}
    assert set(launched.values()) == {"pass", "fail", "crash", "hang", "unmet"}
    runs = [json.loads(path.read_text()) for path in (pytester.path / "run.json", report)]
    texts = [{case["id"]: case["failure"] for case in run["cases"]} for run in runs]
    one, two = (text["test_inner.py::test_wrong[w2]"] for text in texts)
    assert one["rank"] == two["rank"] == 1
    assert one["text"].replace("~", "") == two["text"].replace(str(report.parent), "")
    assert all("killed by SIGKILL" in text["test_inner.py::test_that_crashes[w2]"]["text"] for text in texts)
    assert all(text["test_inner.py::test_that_hangs[w2]"]["rank"] == 1 for text in texts)


def test_a_world_larger_than_the_job_is_unmet(job):
    cases = {case["id"]: case for case in json.loads(job[1].read_text())["cases"]}
    assert cases["test_inner.py::test_sound[w8]"]["missing"] == ["8 ranks (torchrun started 2)"]


def test_one_process_reports_and_its_exit_code_is_that_of_the_job(job):
    completed, report = job
    assert completed.stdout.count("test session starts") == completed.stdout.count("= shardproof =") == 1
    assert completed.returncode == 1
    assert "exitcode  : 1" in completed.stdout.partition("Root Cause")[2]
    assert "rank      : 0" in completed.stdout.partition("Root Cause")[2]
    place = json.loads(report.read_text())["environment"]["torchrun"]
    assert (place["attempt"], place["ranks"], place["hosts"]) == (0, 2, 1)
    assert not [*report.parent.glob("run.json.*")]


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("-n", "2"), "-n 2: torchrun has started the processes of this run; xdist's workers cannot share them, so "),
        (("--world", "4"), "--world 4: torchrun started 1 rank; start 4 or leave it out"),
        (("--impl", "no.such"), "'no.such'"),
        (("--simulate", "8"), "--simulate: torchrun started ranks, which simulated worlds do not need"),
    ],
    ids=["xdist", "world", "implementation", "simulated"],
)
def test_what_cannot_be_is_one_line(tmp_path, arguments, line):
    (tmp_path / "test_inner.py").write_text(CASES)
    completed = torchrun(tmp_path, 1, "--device", "cpu", "--impl", "reference", *arguments)
    errors = [one for one in completed.stdout.splitlines() if one.startswith("ERROR: ")]
    assert len(errors) == 1 and line in errors[0], completed.stdout
    assert "exitcode  : 4" in completed.stdout


BESIDE = """
import os, pathlib, signal, time
import pytest
from shardproof.testing import alone, deadline, world

def wait_for(count):
    while len([*pathlib.Path("there").iterdir()]) < count:
        time.sleep(0.01)

@world(2)
def test_meets(rank):
    pathlib.Path("there", f"one{rank.index}").touch()
    wait_for(4)

@world(2)
def test_is_met(rank):
    pathlib.Path("there", f"other{rank.index}").touch()
    wait_for(4)

@world(2)
def test_that_crashes(rank):
    pathlib.Path("there", f"crashed{rank.index}").touch()
    wait_for(8)
    os.kill(os.getpid(), signal.SIGKILL)

@world(2)
def test_sound(rank):
    pathlib.Path("there", f"sound{rank.index}").touch()
    wait_for(8)
    time.sleep(1)
    assert rank.exchange(rank.index) == [0, 1]

@world(2)
@alone()
@pytest.mark.parametrize("name", ["one", "other"])
def test_alone(rank, name):
    mark = pathlib.Path("there", f"alone-{name}{rank.index}")
    mark.touch()
    time.sleep(0.5)
    marks = [path.name for path in pathlib.Path("there").glob("alone-*")]
    assert all(found.startswith(f"alone-{name}") for found in marks), marks
    rank.exchange(None)
    mark.unlink()

@world(4)
def test_all(rank):
    pathlib.Path("there", f"all{rank.index}").touch()
    rank.exchange(None)

@world(2)
def test_wrong(rank):
    assert rank.index, "rank 0 is wrong"

@world(2)
@deadline(300)
def test_after_the_last(rank):
    while True:
        time.sleep(1)
"""


def test_cases_run_beside_each_other_on_ranks_that_they_do_not_share(tmp_path):
    (tmp_path / "test_inner.py").write_text(BESIDE)
    (tmp_path / "there").mkdir()
    arguments = ["--impl", "reference", "--device", "cpu", "--report", "run.json", "--deadline", "20"]
    completed = torchrun(tmp_path, 4, *arguments, "-k", "not after")
    passing = ("meets[w2]", "is_met[w2]", "sound[w2]", "alone[w2-one]", "alone[w2-other]", "all[w4]")
    expected = {f"test_{name}": "pass" for name in passing}
    expected |= {"test_that_crashes[w2]": "crash", "test_wrong[w2]": "fail"}
    assert verdicts(tmp_path / "run.json") == expected, completed.stdout
    # The case for which pytest does not ask any more would take longer than a job may.
    stopped = torchrun(tmp_path, 4, *arguments, "-x", "-k", "wrong or after")
    assert "1 failed" in stopped.stdout


RESTARTED = """
import os, pathlib, signal
from shardproof.testing import world

@world(2)
def test_first(rank):
    with open("first.txt", "a") as file:
        print(rank.index, file=file)

@world(2)
def test_wrong(rank):
    assert rank.index, "rank 0 is wrong"

@world(2)
def test_that_ends_the_controller(rank):
    if rank.index == 0:
        forkserver = pathlib.Path(f"/proc/{os.getppid()}/stat").read_text()
        os.kill(int(forkserver.rpartition(")")[2].split()[1]), signal.SIGKILL)

@world(2)
def test_last(rank):
    assert rank.exchange(rank.index) == [0, 1]
"""


@pytest.mark.parametrize("options", [(), ("--max-restarts=2",)], ids=["given up", "restarted"])
def test_a_restarted_job_goes_on_from_its_journal(tmp_path, options):
    (tmp_path / "test_inner.py").write_text(RESTARTED)
    arguments = ["--impl", "reference", "--device", "cpu", "--report", "run.json"]
    completed = torchrun(tmp_path, 2, *arguments, options=options)
    report = tmp_path / "run.json"
    if not options:
        kept = load_run(report.with_name("run.json.partial")).cases
        assert [str(case.verdict) for case in kept] == ["pass", "fail"], "the journal stays readable"
        return
    expected = {"test_first[w2]": "pass", "test_wrong[w2]": "fail", "test_last[w2]": "pass"}
    assert verdicts(report) == expected | {"test_that_ends_the_controller[w2]": "crash"}
    assert sorted((tmp_path / "first.txt").read_text().split()) == ["0", "1"], "what is finished is not run again"
    run = json.loads(report.read_text())
    assert run["environment"]["torchrun"]["attempt"] == 1
    assert "torchrun restarted the job" in run["cases"][2]["failure"]["text"]
    assert "rank 0 is wrong" in run["cases"][1]["failure"]["text"]
    assert completed.stdout.count("the run is complete, with exit code 1") == 1, "the last attempt runs nothing"
    assert sorted(path.name for path in tmp_path.glob("run.json*")) == ["run.json"]
