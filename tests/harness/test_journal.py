"""The run file is a journal: nothing that has ended is lost, and an incomplete run never looks like a complete one."""

import fcntl
import json
import os
import pathlib
import resource
import signal
import stat
import subprocess
import time

import pytest

from shardproof.door import BadFile
from shardproof.harness.plugin import hooks, resuming
from shardproof.harness.plugin.journal import Journal
from shardproof.runfile import Environment, digest_of, fingerprint, load_run
from tests.harness.inner import CASE, PASSES, PYTHONPATH, QUIET, python, until
from tests.harness.test_chaos import is_alive, started

pytestmark = pytest.mark.sampled

IDS = ["a::test[w2]", "b::test[w2]"]


def record(number, **changes):
    least = {
        "id": IDS[number], "nodeid": IDS[number], "implementation": "ddp", "requirement": "X-1", "world": 2,
        "device": "cpu", "parameters": {}, "seeds": {}, "verdict": "pass", "seconds": 0.5, "missing": [],
        "expected": "", "losses": {}, "distances": [], "collectives": [], "failure": None,
    }  # fmt: skip
    return least | changes


VERSIONS = {"shardproof": "0", "python": "3", "torch": "2", "platform": "Linux"}
ENVIRONMENT = Environment(**VERSIONS, device="cpu", started="now", command=["pytest"])


def begun(path):
    journal = Journal(path)
    journal.describe(ENVIRONMENT)
    journal.select({"ddp": IDS})
    return journal


# The file


@pytest.mark.parametrize("name", ["run.json", "run.json.gz"])
def test_every_record_is_on_the_disk_when_its_case_has_ended(tmp_path, name):
    journal = begun(tmp_path / name)
    for number in range(2):
        journal.add(record(number))
        left = load_run(tmp_path / f"{name}.partial")
        assert [case.id for case in left.cases] == IDS[: number + 1]
        assert left.incomplete == "the run is under way, or its process ended before it could write the reason"
    assert journal.finish(reason="", exit_code=0)
    assert os.listdir(tmp_path) == [name]
    run = load_run(tmp_path / name)
    assert (run.incomplete, run.end.exit_code, run.run_id != "") == ("", 0, True)


@pytest.mark.parametrize("name", ["run.json", "run.json.gz"])
def test_a_journal_that_ends_anywhere_is_read_up_to_its_last_line(tmp_path, name):
    """A process may be killed between any two bytes; a restarted job of torchrun reads on from there too."""
    journal = begun(tmp_path / name)
    journal.add(record(0, parameters={"text": "a\n]\n}\n"}))
    journal.add(record(1))
    journal.finish(reason="stopped", exit_code=2)
    content = (tmp_path / f"{name}.partial").read_bytes()
    counts, resumed = [], []
    for end in range(len(content) + 1):
        cut = tmp_path / f"cut-{name}.partial"
        cut.write_bytes(content[:end])
        resumed.append(len((resuming.read(cut) or {}).get("cases", [])))
        try:
            run = load_run(cut)
        except BadFile as error:
            assert "\n" not in str(error)
        else:
            counts.append(len(run.cases))
            assert run.incomplete
    for found in (counts, resumed):
        assert found == sorted(found) and set(found) == {0, 1, 2}
    assert load_run(cut).incomplete == "stopped"


def test_an_incomplete_run_leaves_the_older_file_and_the_reader_refuses_it(tmp_path):
    path = tmp_path / "run.json"
    for number in range(2):
        journal = begun(path)
        journal.add(record(0))
        journal.add(record(1))
        assert journal.finish(reason="stopped" if number else "", exit_code=0) == (number == 0)
    with pytest.raises(BadFile, match=r"run.json: a newer run is incomplete; read run.json.partial, or delete it"):
        load_run(path)
    os.utime(path, (time.time() + 60,) * 2)
    assert not load_run(path).incomplete, "an older journal does not affect the file"
    path.unlink()
    with pytest.raises(BadFile, match=r"there is no such file, but an incomplete run has left run.json.partial"):
        load_run(path)


def test_the_file_has_a_digest_of_its_records_and_no_home_directory(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "alice"))
    (tmp_path / "alice/my runs").mkdir(parents=True)
    journal = begun(tmp_path / "run.json")
    journal.add(record(1, reproduce=f"(cd '{tmp_path}/alice/my runs' && pwd && cd {tmp_path}/alice && pwd)"))
    journal.add(record(0, parameters={"text": f"at\n{tmp_path}/alice/a.py, {tmp_path}/alice-b and {tmp_path}/alice"}))
    assert journal.finish(reason="", exit_code=0)
    data = json.loads((tmp_path / "run.json").read_text())
    assert data["cases"][1]["parameters"] == {"text": f"at\n~/a.py, {tmp_path}/alice-b and ~"}
    done = subprocess.run(["bash", "-c", data["cases"][0]["reproduce"]], capture_output=True, text=True)
    assert done.stdout == f"{tmp_path}/alice/my runs\n{tmp_path}/alice\n", data["cases"][0]["reproduce"]
    digests = [digest_of(map(fingerprint, cases)) for cases in (data["cases"], data["cases"][::-1], data["cases"][:1])]
    assert [data["digest"] == one for one in digests] == [True, True, False], "in whatever order they ended"
    assert load_run(tmp_path / "run.json").digest == data["digest"]


def test_a_link_is_followed(tmp_path):
    (tmp_path / "runs").mkdir()
    (tmp_path / "latest.json").symlink_to("runs/7.json")
    journal = begun(tmp_path / "latest.json")
    journal.add(record(0))
    journal.add(record(1))
    assert journal.finish(reason="", exit_code=0)
    assert (tmp_path / "latest.json").is_symlink()
    assert len(load_run(tmp_path / "runs/7.json").cases) == 2
    begun(tmp_path / "latest.json").finish(reason="stopped", exit_code=2)
    with pytest.raises(BadFile, match=r"a newer run is incomplete; read 7.json.partial"):
        load_run(tmp_path / "latest.json")


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (pathlib.Path.mkdir, "this is a directory; a run file must be a regular file"),
        (os.mkfifo, "this is a named pipe; a run file must be a regular file"),
        (lambda path: os.mknod(path, stat.S_IFSOCK | 0o600), "this is a socket; a run file must be a regular file"),
        (lambda path: path.symlink_to("/dev/null"), "this is a device; a run file must be a regular file"),
        (lambda path: path.symlink_to(path.name), "Symlink loop|Too many levels"),
        (lambda path: os.mkfifo(f"{path}.partial"), "is a named pipe, not a regular file"),
        (lambda path: path.with_name("run.json.partial").symlink_to("/etc/passwd"), "Too many levels of symbolic"),
    ],
)
def test_what_is_no_regular_file_is_refused_and_left_alone(tmp_path, make, told):
    path = tmp_path / "run.json"
    make(path)
    before = [(entry.name, entry.lstat().st_mode) for entry in tmp_path.iterdir()]
    with pytest.raises(ValueError, match=f"^--report {path}: .*({told})"):
        Journal(path)
    assert [(entry.name, entry.lstat().st_mode) for entry in tmp_path.iterdir()] == before


def test_a_folder_that_is_made_is_told(run, pytester):
    made = pytester.path / "runs/today"
    result = run(PASSES, "--report", "runs/today/run.json")
    result.stdout.fnmatch_lines([f"run file: runs/today/run.json (made the folder {made})"])
    run(PASSES, "--report", "runs/today/run.json").stdout.fnmatch_lines(["run file: runs/today/run.json"])


def test_a_folder_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"^--report .*: (Not a directory|File exists)$"):
        Journal(tmp_path / "file/run.json")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_what_is_not_writable_is_refused(tmp_path):
    path = tmp_path / "run.json"
    path.touch(mode=0o400)
    with pytest.raises(ValueError, match="the file exists and is not writable"):
        Journal(path)
    tmp_path.chmod(0o500)
    with pytest.raises(ValueError, match=r"cannot write .*: Permission denied"):
        Journal(tmp_path / "other.json")
    tmp_path.chmod(0o700)


def test_two_runs_do_not_write_one_file(tmp_path):
    journal = begun(tmp_path / "run.json")
    with pytest.raises(ValueError, match=r"another run is writing .*run.json.partial; use another file"):
        Journal(tmp_path / "run.json")
    journal.add(record(0))
    assert load_run(tmp_path / "run.json.partial").cases, "the refused run has emptied nothing"


def test_a_run_file_that_is_completed_while_another_run_opens_it_is_not_emptied(tmp_path, monkeypatch):
    """Between its open and its lock, what was the journal becomes the run file."""
    journal = begun(tmp_path / "run.json")
    for number in range(2):
        journal.add(record(number))
    lock = fcntl.flock

    def complete_then_lock(descriptor, how):
        journal.finish(reason="", exit_code=0)
        lock(descriptor, how)

    monkeypatch.setattr(fcntl, "flock", complete_then_lock)
    with pytest.raises(ValueError, match=r"another run is writing"):
        Journal(tmp_path / "run.json")
    assert len(load_run(tmp_path / "run.json").cases) == 2


@pytest.fixture
def limit():
    """Let files of this process grow to so many bytes, as on a full disk; None lifts the limit."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (before[0] if size is None else size, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("name", ["run.json", "run.json.gz"])
def test_what_a_full_disk_refused_is_written_later(tmp_path, name, limit):
    journal = begun(tmp_path / name)
    size = journal.partial.stat().st_size
    limit(size + 10)
    journal.add(record(0))
    error, size_after = journal.error, journal.partial.stat().st_size
    limit(None)
    assert (error, size_after) == ("File too large", size), "half a record would hide the next"
    journal.add(record(1))
    assert journal.finish(reason="", exit_code=0)
    assert [case.id for case in load_run(tmp_path / name).cases] == IDS


def test_a_disk_that_stays_full_leaves_no_complete_file(tmp_path, limit):
    journal = begun(tmp_path / "run.json")
    journal.add(record(0))
    limit(journal.partial.stat().st_size)
    journal.add(record(1))
    done = journal.finish(reason="", exit_code=0)
    limit(None)
    assert (done, journal.error) == (False, "File too large")
    assert [case.id for case in load_run(journal.partial).cases] == IDS[:1]
    limit(10)
    with pytest.raises(ValueError, match=r"^--report .*other.json: File too large$"):
        try:
            Journal(tmp_path / "other.json")
        finally:
            limit(None)


# Runs


def left_by(pytester, name="run.json"):
    return load_run(pytester.path / f"{name}.partial")


THREE = CASE.format(body="assert rank.world_size == 1").replace("2", "1, 2, 3")
ENDED_EARLY = {
    "wrong-path": (PASSES, ["no_such_file.py"], 4, "no case was selected"),
    "no-match": (PASSES, ["-k", "nothing"], 5, "no case was selected"),
    "no-world": (PASSES, ["--world", "3"], 4, "--world 3: no case that was collected runs on so many ranks"),
    "wrong-option": (PASSES, ["--impl", "nobody"], 4, "unknown implementation 'nobody'"),
    "import-error": ("import nothing_of_that_name", [], 2, "1 error during collection"),
    "stop-at-first": (THREE, ["-x"], 1, "stopping after 1 fail"),
    "wrong-case": (PASSES.replace("rank)", "rank, tmp_path)"), [], 4, "fixture 'tmp_path' cannot cross processes"),
    "exit": (PASSES, ["-p", "exiting"], 2, "enough"),
    "internal-error": (PASSES, ["-p", "failing_inside"], 3, "pytest failed: RuntimeError: in a hook"),
    "no-record": (PASSES, ["-p", "swallowing"], 7, "1 of 1 selected cases have no record; the first is "),
}


@pytest.mark.parametrize(("source", "options", "code", "reason"), ENDED_EARLY.values(), ids=ENDED_EARLY)
def test_a_run_that_ended_early_keeps_the_older_file_and_says_why(run, pytester, source, options, code, reason):
    for name, body in {
        "exiting": "import pytest; pytest.exit('enough')",
        "failing_inside": "raise RuntimeError('in a hook')",
        "swallowing": "return True",
    }.items():
        pytester.path.joinpath(f"{name}.py").write_text(f"def pytest_runtest_protocol(item):\n    {body}\n")
    pytester.syspathinsert()
    path = pytester.path / "run.json"
    path.write_text("as it was")
    assert run(source, "--report", "run.json", *options).ret == code
    assert path.read_text() == "as it was"
    left = left_by(pytester)
    assert reason in left.incomplete
    assert left.end.exit_code == code


def test_collecting_alone_writes_nothing(run, pytester):
    path = pytester.path / "run.json"
    path.write_text("as it was")
    assert run(PASSES, "--report", "run.json", "--collect-only").ret == 0
    assert path.read_text() == "as it was"
    assert not pytester.path.joinpath("run.json.partial").exists()


def test_the_next_complete_run_takes_the_place_of_a_journal(run, pytester):
    run(PASSES, "--report", "run.json", "-k", "nothing")
    assert run(PASSES, "--report", "run.json").ret == 0
    assert not pytester.path.joinpath("run.json.partial").exists()
    assert len(load_run(pytester.path / "run.json").cases) == 1


def test_a_report_that_cannot_be_written_is_refused_before_the_first_case(refused, pytester, capsys):
    pytester.mkdir("folder")
    line = "ERROR: --report folder: this is a directory; a run file must be a regular file"
    assert refused(PASSES, "--report", "folder") == line
    assert not capsys.readouterr().out, "nothing was even collected"


def test_a_run_file_that_cannot_be_completed_fails_the_run(run, pytester):
    pytester.makepyfile(in_the_way="def pytest_runtest_teardown(item):\n    __import__('os').mkdir('run.json')\n")
    pytester.syspathinsert()
    result = run(PASSES, "--report", "run.json", "-p", "in_the_way")
    assert result.ret == hooks.INCOMPLETE
    result.stdout.fnmatch_lines(["ERROR: the run file could not be completed: --report *: this is a directory;*"])
    left = left_by(pytester)
    assert len(left.cases) == 1 and left.incomplete


@pytest.mark.parametrize(
    ("mark", "told"),
    [("skip(reason='on a whim')", "on a whim"), ("xfail(run=False, reason='on a whim')", "[NOTRUN] on a whim")],
    ids=["skip", "xfail"],
)
def test_a_case_that_pytest_skips_is_named_and_does_not_make_the_run_incomplete(run, pytester, mark, told):
    source = "import pytest\n" + PASSES + f"\n@pytest.mark.{mark}\n@world(2)\ndef test_other(rank): pass"
    assert run(source, "--report", "run.json").ret == 0
    (left_out,) = load_run(pytester.path / "run.json").left_out
    assert (left_out.id, left_out.reason) == ("test_inner.py::test_other[w2]", told)


RAISING = """
import pytest
@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem):
    {before}
    result = yield
    {after}
    return result
"""


@pytest.mark.parametrize(
    ("before", "after", "verdict"),
    [
        ("raise TimeoutError('too slow')", "", "harness-error"),
        ("", "raise TimeoutError('too slow')", "harness-error"),
        ("", "pytest.skip('too slow')", "left out"),
        ("pytest.skip('too slow')", "", "left out"),
    ],
    ids=["before", "after", "skip-after", "skip-before"],
)
def test_a_record_never_passes_where_pytest_does_not(run, pytester, before, after, verdict):
    """As when pytest-timeout raises after the ranks have answered and before the case has ended."""
    pytester.path.joinpath("raising.py").write_text(RAISING.format(before=before, after=after))
    pytester.syspathinsert()
    run(PASSES, "--report", "run.json", "-p", "raising")
    found = load_run(pytester.path / "run.json")
    if verdict == "left out":
        assert (found.cases, [case.reason for case in found.left_out]) == ((), ["too slow"])
    else:
        (case,) = found.cases
        assert case.verdict == verdict
        assert "the pytest process stopped waiting for the case: TimeoutError: too slow" in case.failure.text


@pytest.mark.parametrize(("strict", "code"), [(True, 1), (False, 0)])
def test_a_case_that_passes_against_an_xfail_mark(run, pytester, strict, code):
    source = "import pytest\n" + PASSES.replace("@world", f"@pytest.mark.xfail(strict={strict})\n@world")
    assert run(source, "--report", "run.json").ret == code
    assert [str(case.verdict) for case in load_run(pytester.path / "run.json").cases] == ["unexpected-pass"]


NOTHING_TO_ASK = """
from shardproof.testing import Capability, needs, world
@world(2)
@needs(Capability.SHARDED)
def test_case(rank):
    pass
"""


def test_an_implementation_that_was_asked_nothing_has_an_exit_code_of_its_own(run):
    result = run(NOTHING_TO_ASK, "--impl", "ddp,reference")
    assert result.ret == hooks.ASKED_NOTHING
    result.stdout.fnmatch_lines(["ERROR: no case ran on ddp: every case was skipped or deselected"])
    assert run(NOTHING_TO_ASK, "--impl", "ddp").ret == pytest.ExitCode.NO_TESTS_COLLECTED, "nothing ran at all"
    assert run(NOTHING_TO_ASK, "--impl", "reference").ret == 0
    assert run(NOTHING_TO_ASK + "    assert False", "--impl", "ddp,reference").ret == 1, "a failure is more urgent"


def test_ordinary_tests_alone_are_no_conformance_run(run):
    source = PASSES + "\ndef test_ordinary():\n    pass\n"
    code = run(source, "-k", "ordinary", "--shardproof-device", "cpu", "--impl", "ddp").ret
    assert code == pytest.ExitCode.NO_TESTS_COLLECTED
    assert run(source, "-k", "ordinary", named=False).ret == 0


def test_reruns_keep_every_attempt_and_count_the_last(run, pytester):
    pytest.importorskip("pytest_rerunfailures")
    source = """
from shardproof.testing import world
@world(1)
def test_case(rank):
    import pathlib
    tries = pathlib.Path("tries")
    tries.write_text(tries.read_text() + "x" if tries.exists() else "x")
    assert len(tries.read_text()) == 3
"""
    result = run(source, "--report", "run.json", "-p", "pytest_rerunfailures", "--reruns", "5")
    assert result.ret == 0
    result.stdout.fnmatch_lines(["ddp: 1 pass"])
    run_file = load_run(pytester.path / "run.json")
    assert [(case.attempt, case.verdict) for case in run_file.cases] == [(3, "pass")]
    assert [(case.attempt, case.verdict) for case in run_file.earlier] == [(1, "fail"), (2, "fail")]


def test_a_record_is_bounded(run, pytester):
    source = """
import pytest
from shardproof.testing import world
@world(2)
@pytest.mark.parametrize("text", ["x" * 100_000], ids=["long"])
@pytest.mark.parametrize("many", [list(range(100_000))], ids=["many"])
def test_case(rank, text, many):
    rank.record.add_trace([f"line {i}" for i in range(100_000)])
    rank.record.add_losses(**{f"run {i}": float("nan") for i in range(1000)})
"""
    assert run(source, "--report", "run.json").ret == 0
    assert pytester.path.joinpath("run.json").stat().st_size < 1 << 18
    (case,) = load_run(pytester.path / "run.json").cases
    assert case.shortened == ("collectives", "distances", "losses", "parameters")


# Processes that die

#: Functions, because the cases of one function do not come in the order of their parameters.
MANY = """
import os, pathlib, time
from shardproof.testing import world

def begin(rank, n):
    pathlib.Path(f"{n}-{rank.index}-{os.getpid()}.pid").touch()
    assert n != 1, "a failure of case 1"
    if n >= 3:
        time.sleep(120)
""" + "".join(
    f"""
@world(2)
def test_case_{n}(rank):
    begin(rank, {n})
"""
    for n in range(6)
)


def has_ended(folder, count):
    """Whether the journal has the records of so many cases."""
    try:
        return len(load_run(folder / "run.json.partial").cases) >= count
    except BadFile:
        return False


@pytest.mark.parametrize(
    ("number", "workers", "reason"),
    [
        (signal.SIGTERM, 0, "SIGTERM"),
        (signal.SIGHUP, 0, "SIGHUP"),
        (signal.SIGINT, 0, "interrupted by Ctrl-C"),
        (signal.SIGKILL, 0, "the run is under way, or its process ended before it could write the reason"),
        (signal.SIGTERM, 2, "SIGTERM"),
        (signal.SIGKILL, 2, "the run is under way, or its process ended before it could write the reason"),
    ],
)
def test_what_had_ended_when_the_run_was_ended_is_in_the_journal(tmp_path, number, workers, reason):
    tmp_path.joinpath("test_inner.py").write_text(MANY)
    tmp_path.joinpath("run.json").write_text("as it was")
    options = ["--impl", "ddp", "--report", "run.json", "-n", str(workers), "--deadline", "300"]
    with started(tmp_path, *QUIET, *options) as process:
        # Cases 3 to 5 sleep, on all cores: the first of them that begins, which may be another worker's than case 3, is
        # the last. Its worker has sent the records of its cases before; the other worker may have more of them.
        asleep = until(100, lambda: [*tmp_path.glob("[345]-1-*.pid")] and has_ended(tmp_path, 1 if workers else 3))
        assert asleep, "no case that sleeps has begun"
        process.send_signal(number)
        code = process.wait(30)
    assert code == (2 if number != signal.SIGKILL else -9)
    assert tmp_path.joinpath("run.json").read_text() == "as it was"
    left = load_run(tmp_path / "run.json.partial")
    assert left.incomplete == reason
    verdicts = {case.id: str(case.verdict) for case in left.cases}
    known = {f"test_inner.py::test_case_{n}[w2]": verdict for n, verdict in enumerate(["pass", "fail", "pass"])}
    assert verdicts.items() <= known.items() and (workers or verdicts == known)
    assert len(left.cases) + len(left.not_run) == 6
    ranks = [int(path.stem.rpartition("-")[2]) for path in tmp_path.glob("*.pid")]
    assert until(5, lambda: not any(map(is_alive, ranks)))


def test_a_worker_that_dies_takes_no_other_record_with_it(run, pytester, monkeypatch):
    pytester.makepyfile(dying="import os\ndef pytest_runtest_setup(item):\n    'n1' in item.name and os._exit(1)\n")
    source = """
import pytest
from shardproof.testing import world
@world(1)
@pytest.mark.parametrize("n", ["n0", "n1", "n2", "n3"])
def test_case(rank, n):
    pass
"""
    monkeypatch.setenv("PYTHONPATH", f"{pytester.path}{os.pathsep}{PYTHONPATH}")
    result = run(source, "-n", "2", "--report", "run.json", "-p", "dying", own_process=True)
    assert result.ret == 1
    left = left_by(pytester)
    line = "1 of 4 selected cases have no record; the first is test_inner.py::test_case[w1-n1] on ddp"
    assert left.incomplete == line
    assert sorted(case.parameters["n"] for case in left.cases) == ["n0", "n2", "n3"]


def test_a_signal_that_is_ignored_stays_ignored(tmp_path):
    """As under nohup."""
    tmp_path.joinpath("test_inner.py").write_text(PASSES)
    script = f"""
import os, signal, sys, pytest
signal.signal(signal.SIGHUP, signal.SIG_IGN)
class Sender:
    def pytest_runtest_setup(self, item):
        os.kill(os.getpid(), signal.SIGHUP)
sys.exit(pytest.main([*{QUIET!r}, "--impl", "ddp", "--report", "run.json"], plugins=[Sender()]))
"""
    python("-c", script, cwd=tmp_path, code=0)
    assert not load_run(tmp_path / "run.json").incomplete


def test_a_run_file_is_one_json_document_with_a_record_on_each_line(run, pytester):
    """For `jq` and `grep` alike."""
    run(PASSES, "--report", "run.json")
    text = pytester.path.joinpath("run.json").read_text()
    assert json.loads(text)["end"]["complete"] is True
    assert sum(line.lstrip(",").startswith('{"id": ') for line in text.splitlines()) == 1


def test_the_handlers_of_signals_are_restored(run):
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGHUP)
    run(PASSES)
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGHUP)) == before
