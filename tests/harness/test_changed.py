"""Cases by what was changed: which ones call it, in which order they run, until when, and what a run says of it."""

import gzip
import json
import pathlib
import subprocess
import types

import pytest

from shardproof import contract
from shardproof.harness.plugin import changed
from shardproof.runfile import load_run
from tests.harness.test_effort import SOURCE, UNMET

GROUP = "torch.distributed.fsdp._group"
STATE = "torch.distributed.fsdp._fully_shard._state"
#: By item, what it calls.
CALLS = {
    "test_inner.py::test_product[ddp-w2-0-0-0]": [f"{GROUP}:Group.unshard", f"{GROUP}:Group.reshard"],
    "test_inner.py::test_product[ddp-w1-0-0-0]": [f"{GROUP}:Group.unshard", f"{GROUP}:Group.reshard"],
    "test_inner.py::test_product[ddp-w1-1-0-0]": [f"{GROUP}:Group.unshard"],
    "test_inner.py::test_one_parameter[ddp-w1-0]": [f"{GROUP}:Group.unshard.inner", f"{STATE}:State.forward"],
    "test_inner.py::test_half_unsupported[ddp-w1-0]": [f"{STATE}:State.forward"],
}


@pytest.fixture
def map_file(pytester):
    """A map of CALLS, packed as planted.coverage packs it."""
    names = sorted({name for called in CALLS.values() for name in called})
    items = {item: [names.index(name) for name in called] for item, called in CALLS.items()}
    path = pytester.path / "functions.json.gz"
    path.write_bytes(gzip.compress(json.dumps({"torch": "2.0.1", "functions": names, "items": items}).encode()))
    return path


@pytest.fixture
def found(map_file):
    """What the options say was changed."""

    def found(*given, since=""):
        return changed.find(types.SimpleNamespace(changed=given, changed_since=since), changed.read(map_file))

    return found


@pytest.mark.parametrize(
    ("given", "cases"),
    [
        # One case of each function first; few ranks before many, and what calls less before what calls more.
        (
            ["_group.py:Group.unshard"],
            [
                "test_product[ddp-w1-1-0-0]",
                "test_one_parameter[ddp-w1-0]",
                "test_product[ddp-w1-0-0-0]",
                "test_product[ddp-w2-0-0-0]",
            ],
        ),
        (["fsdp/_group.py:Group.reshard"], ["test_product[ddp-w1-0-0-0]", "test_product[ddp-w2-0-0-0]"]),
        (["/a/torch/distributed/fsdp/_fully_shard/_state.py:State"], ["test_one_parameter[ddp-w1-0]"]),
        (["_state.py", "_group.py:Group.reshard"], ["test_product[ddp-w1-0-0-0]", "test_one_parameter[ddp-w1-0]"]),
    ],
)
def test_cases_that_call_what_was_changed_run_in_their_order(run, map_file, given, cases):
    options = [word for one in given for word in ("--changed", one)]
    result = run(SOURCE, "--device", "cpu", "--collect-only", "-q", "--map", str(map_file), *options)
    names = [line.partition("::")[2] for line in result.stdout.lines if "::" in line]
    names = [name for name in names if "[" in name]
    assert names[: len(cases)] == cases


def test_chapters_take_turns(monkeypatch):
    """Every second case has a word of the function in its name or its chapter's; the slowest kind is last."""

    def item(chapter, name, size=2, **world):
        mark = types.SimpleNamespace(kwargs=world)
        path, function = pathlib.Path(f"test_{chapter}.py"), types.SimpleNamespace(__name__=f"test_{name}")
        return types.SimpleNamespace(path=path, function=function, size=size, iter_markers=lambda _: [mark])

    a1, a2, a3, b1, b2 = item("a", "one"), item("a", "two"), item("a", "one", 4), item("b", "one"), item("b", "two")
    named, slow = item("prefetching", "c"), item("a", "prefetch", own_hash_seeds=True)
    monkeypatch.setattr(
        changed.cases, "launch_of", lambda item: types.SimpleNamespace(implementation="ddp", size=item.size)
    )
    monkeypatch.setattr(changed.cases, "case_id", lambda item: "other" if item is b2 else "case")
    place = f"{GROUP}:Group._backward_prefetch"
    known = changed.Map("", {"ddp": {"case": frozenset({place}), "other": frozenset({f"{GROUP}:Group.reshard"})}})
    change = changed.Change(functions=frozenset({place}))
    # Half of b's cases call it: after a, all of whose cases do.
    assert changed.ordered([b2, b1, a1, a3, a2, slow, named], change, known) == [a1, named, b1, a2, a3, slow]


def test_lists_take_turns_by_time():
    """What is slow waits until the other lists have had as much; without times, by count."""
    lists = [["a9", "a1"], ["b1", "b2", "b7"], [], ["c3"]]
    assert changed.in_turn(lists) == ["a9", "b1", "c3", "a1", "b2", "b7"]
    assert changed.in_turn(lists, lambda one: float(one[1])) == ["b1", "b2", "c3", "a9", "a1", "b7"]


def test_workers_get_case_after_case():
    """Of 200 cases a worker would otherwise begin with 25, and another one with the next 25."""
    config = types.SimpleNamespace(option=types.SimpleNamespace(maxschedchunk=None))
    changed.one_at_a_time(config)
    assert config.option.maxschedchunk == 1
    config.option.maxschedchunk = 7
    changed.one_at_a_time(config)
    assert config.option.maxschedchunk == 7
    changed.one_at_a_time(types.SimpleNamespace(option=types.SimpleNamespace()))  # without xdist


def test_a_function_that_is_unknown_counts_as_its_module(found):
    change = found("_group.py:Group.prefetch")
    assert (change.functions, change.modules) == (frozenset(), {GROUP})
    assert change.lines[-1] == f"the map does not know {GROUP}:Group.prefetch: all that call its module count"


def test_a_module_that_is_unknown_counts_as_the_chapters_that_import_it(found):
    change = found("torch/distributed/pipelining/__init__.py:Schedule")
    assert "test_accumulation.py" in change.chapters and "test_tied.py" not in change.chapters
    (line,) = change.lines
    assert line.startswith("the map does not know the module torch.distributed.pipelining: test_accumulation.py")
    assert found("torch/nowhere.py").lines == ("the map does not know the module torch.nowhere: no chapter imports it",)


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ("README.md", "ERROR: --changed README.md: expected FILE.py or FILE.py:Class.function, such as _fsdp_param.py"),
        ("other.py", "ERROR: --changed other.py: the map has no such file, and its path names no module of torch"),
    ],
)
def test_what_cannot_have_been_changed_is_one_line(refused, map_file, given, line):
    assert refused(SOURCE, "--device", "cpu", "--map", str(map_file), "--changed", given) == line


def test_a_file_that_may_be_two_is_one_line(found, map_file):
    content = json.loads(gzip.decompress(map_file.read_bytes()))
    content["functions"] += ["torch.other._group:other"]
    content["items"]["test_inner.py::test_product[ddp-w1-1-1-0]"] = [len(content["functions"]) - 1]
    map_file.write_bytes(gzip.compress(json.dumps(content).encode()))
    with pytest.raises(ValueError, match=rf"it may be {GROUP} or torch.other._group; give more of its path"):
        found("_group.py")


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (["--seconds", "3"], "--seconds: it is for --profile, --changed or --changed-since, and none is given"),
        (["--map", "m"], "--map: it is for --changed or --changed-since, and neither is given"),
        (["--changed", "a.py", "--seconds", "0"], "--seconds 0: expected a positive number of seconds"),
        (["--changed", "a.py", "--profile", "core"], "--changed a.py: * leave out --profile core"),
        (
            ["--changed-since", "main", "--contract", contract.version()],
            "--changed-since main: * leave out --contract *",
        ),
        (["--changed", "a.py", "--map", "nowhere"], "the map nowhere cannot be read: No such file or directory; *"),
        (["--changed", "a.py", "--map", "test_inner.py"], "the map test_inner.py cannot be read: it is none *"),
        (["--changed-since", "no-revision"], "--changed-since no-revision: *where torch is imported from)"),
    ],
)
def test_options_that_do_not_fit_are_one_line(run, pytester, options, line):
    result = run(SOURCE, "--device", "cpu", *options)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"ERROR: {line}"])


def test_functions_that_a_checkout_has_changed(found, tmp_path, monkeypatch):
    """A line counts for the innermost function around it that the map knows; one outside of functions for the file."""
    checkout = tmp_path / "checkout"
    package = checkout / "torch"
    file = package / "distributed/fsdp/_group.py"
    file.parent.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    before = """\
LIMIT = 1

class Group:
    def unshard(self):
        def helper():
            return 1
        return helper()

    @property
    def reshard(self):
        a = 1
        b = 2
        return a

    def untouched(self):
        return 3
"""
    file.write_text(before)
    (checkout / "notes.txt").write_text("a")

    def git(*words):
        identity = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
        subprocess.run(["git", *identity, *words], cwd=checkout, check=True, capture_output=True)

    git("init", "-q")
    git("add", "-A")
    git("commit", "-qm", "before")
    spec = types.SimpleNamespace(origin=str(package / "__init__.py"))
    monkeypatch.setattr(changed.importlib.util, "find_spec", lambda name: spec)
    (checkout / "notes.txt").write_text("b")
    assert found(since="HEAD") == changed.Change()
    file.write_text(before.replace("return 1", "return 10").replace("        b = 2\n", ""))
    changed.functions_in.cache_clear()
    assert found(since="HEAD").functions == {
        f"{GROUP}:Group.unshard",
        f"{GROUP}:Group.unshard.inner",
        f"{GROUP}:Group.reshard",
    }
    file.write_text(before.replace("LIMIT = 1", "LIMIT = 2"))
    changed.functions_in.cache_clear()
    assert found(since="HEAD").modules == {GROUP}
    with pytest.raises(ValueError, match="--changed-since nowhere: fatal: "):
        found(since="nowhere")


@pytest.mark.parametrize("seconds", ["1e-9", "500"])
def test_what_no_time_is_left_for_is_left_out(run, pytester, map_file, seconds):
    """The run file is complete: it has the reason of each case that did not run."""
    report = pytester.path / "run.json"
    options = ["--map", str(map_file), "--changed", "_group.py:Group.unshard", "--seconds", seconds]
    result = run(UNMET, "--device", "cpu", "--report", str(report), *options)
    found = load_run(report)
    kept = {case.id for case in found.cases}
    reasons = {one.reason for one in found.left_out}
    if seconds == "500":
        assert len(kept) == 4 and not reasons
        result.stdout.fnmatch_lines(["*4 cases call what was changed, 4 ran in 500 s: all of them"])
    else:
        # The first case begins in time.
        assert kept == {"test_inner.py::test_product[w1-1-0-0]"}
        assert reasons == {f"--seconds {float(seconds):g} are over"}
        result.stdout.fnmatch_lines(
            ["Group.unshard, Group.unshard.inner (map of torch 2.0.1)", "*, 1 ran in 1e-09 s, 3 were not run"]
        )


@pytest.mark.parametrize(("profile", "ran"), [((), 2), (("core",), 1)], ids=["first-case", "run"])
def test_the_time_begins_with_the_first_case_or_with_the_run_of_a_profile(monkeypatch, profile, ran):
    now = iter([97.0, 100.0, 104.0, 105.0])
    chosen = types.SimpleNamespace(seconds=5.0, profile=profile)
    ending = changed.Ending(lambda: chosen, clock=lambda: next(now))
    monkeypatch.setattr(changed.cases, "is_case", lambda item: item == "case")
    ending.pytest_runtest_setup("other")
    for _ in range(ran):
        ending.pytest_runtest_setup("case")
    with pytest.raises(pytest.skip.Exception, match="--seconds 5 are over"):
        ending.pytest_runtest_setup("case")


def test_the_packed_map_knows_this_shardproof():
    """It is small, and nearly all of its cases are there: made anew after many were added or renamed."""
    known = changed.read(changed.PACKED)
    assert changed.PACKED.stat().st_size < 300_000
    assert "torch.distributed.fsdp._fully_shard._fsdp_param_group:FSDPParamGroup.unshard" in known.functions
    suites = pathlib.Path(changed.packaged.SUITES)
    functions = {
        f"suites/{path.name}::{line[4:].partition('(')[0]}"
        for path in suites.glob("test_*.py")
        for line in path.read_text().splitlines()
        if line.startswith("def test_")
    }
    named = {case.partition("[")[0] for same in known.items.values() for case in same}
    assert len(named - functions) <= 0.02 * len(named), sorted(named - functions)
    assert len(functions - named) <= 0.2 * len(functions), sorted(functions - named)


def test_a_run_that_ends_early_has_not_run_the_rest(run, map_file):
    """It counts what has no record, as after ``--maxfail``."""
    options = ["--device", "cpu", "--map", str(map_file), "--changed", "_group.py:Group.unshard", "-x"]
    result = run(SOURCE.replace("a, b, c):\n    pass", "a, b, c):\n    assert not a"), *options)
    result.stdout.fnmatch_lines(["*4 cases call what was changed, 1 ran in 60 s, 3 were not run"])
