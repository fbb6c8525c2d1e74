"""The plugin: what it selects, refuses, and reports. Inner runs share this process's forkserver where they can."""

import datetime
import json
import re
from types import SimpleNamespace

import pytest
import torch

from shardproof import contract
from shardproof.harness.plugin import environment
from shardproof.harness.plugin.selection import resolve
from shardproof.harness.tensors import devices
from tests.harness.inner import CASE, PASSES, QUIET, ROOT, last_error, python

pytestmark = pytest.mark.sampled

# What cannot exist: exit code 4 and one line


def test_device_that_is_not_there(refused):
    line = "ERROR: --device cuda: torch finds no accelerator here; use cpu or auto"
    assert refused(PASSES, "--device", "cuda") == line


def test_accelerator_of_another_vendor(run, pytester, monkeypatch):
    """As far as it goes without the device: its type and backend are torch's, and what it lacks is named."""
    module = SimpleNamespace(get_device_properties=lambda index: SimpleNamespace(name="HL-225"))
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: torch.device("hpu"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    monkeypatch.setattr(torch, "hpu", module, raising=False)
    backends = torch.distributed.Backend.default_device_backend_map
    monkeypatch.delitem(backends, "hpu", raising=False)  # torch's fake backend, where it is imported, takes the type
    assert devices.accelerator() == ""  # without process groups
    monkeypatch.setitem(backends, "hpu", "hccl")
    assert last_error(run(CASE, "--device", "cuda")).endswith("the accelerator here is hpu; use hpu, cpu or auto")
    assert "gloo does not support tensors on hpu" in last_error(run(CASE, "--ranks-per-gpu", "2"))
    source = CASE.replace("test_case", "test_large").replace("(2)", "(4)") + CASE.replace("@", "@needs(STREAMS)\n@")
    more = "from shardproof.testing import Hardware, needs\nSTREAMS = Hardware.STREAMS\n"
    run(more + source.format(body="pass"), "--report", "run.json").assert_outcomes(skipped=2)
    made = json.loads(pytester.path.joinpath("run.json").read_text())
    assert [case["missing"] for case in made["cases"]] == [["4 hpu devices (there are 2)"], ["streams"]]
    assert made["environment"]["device"] == "hpu" and len(made["environment"]["accelerators"]) == 2
    assert resolve(impl="ddp", device="hpu", world="2").backend == "hccl"
    with pytest.raises(RuntimeError, match=r"has no torch\.hpu\.memory_stats\.requested_bytes, which .+ needs"):
        devices.requested_bytes(torch.device("hpu"), "peak")


@pytest.mark.parametrize("worlds", ["0", "two", "2,,4", "-2"])
def test_worlds_that_are_no_worlds(refused, worlds):
    told = f"--world {worlds}: expected positive numbers of ranks such as 2,4"
    assert told in refused(PASSES, f"--world={worlds}")


@pytest.mark.parametrize(("worlds", "sizes"), [("3", "2"), ("3,5", "2, 4 or 8")])
def test_worlds_that_no_case_has(refused, worlds, sizes):
    source = PASSES + ("" if sizes == "2" else "\n@world(4, 8)\ndef test_other(rank): pass\n")
    told = f"ERROR: --world {worlds}: no case that was collected runs on so many ranks; they run on {sizes}"
    assert refused(source, f"--world={worlds}") == told
    assert refused(source, f"--world={worlds}", "-n", "2") == told


def test_worlds_of_which_some_case_has_one(run):
    assert run(PASSES, "--world=2,3").ret == 0


@pytest.mark.parametrize(
    ("fixture", "instead"),
    [("tmp_path", "use rank.tmp_path"), ("monkeypatch", "use rank.monkeypatch"), ("own", "use a parameter")],
)
def test_fixture_that_cannot_cross_processes(refused, fixture, instead):
    source = "import pytest\n@pytest.fixture\ndef own():\n    return object()\n" + PASSES
    line = refused(source.replace("(rank)", f"(rank, {fixture})"))
    assert f"fixture '{fixture}' cannot cross processes; {instead}" in line


def test_a_case_without_a_world(run):
    result = run(PASSES.replace("@world(2)", ""))
    result.assert_outcomes(errors=1)
    line = "test_*.py::test_case: the case takes 'rank', and no @world(...) says on how many ranks it runs, such as *"
    result.stdout.fnmatch_lines(["*ERROR at setup of test_case*", line])
    result.stdout.no_fnmatch_line("*request*")  # nor the source of a fixture


def test_a_rank_of_ones_own_needs_no_world(run):
    source = "import pytest\n@pytest.fixture\ndef rank():\n    return 7\n"
    result = run(source + "def test_it(rank):\n    assert rank == 7\n")
    result.assert_outcomes(passed=1)


def test_a_case_that_compares_nothing_fails(run):
    body = "import torch; rank.pair(torch.nn.Linear(4, 4)).step(rank.batch(0, shape=(2, 4)))"
    result = run(CASE.format(body=body), "--impl", "ddp")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*AssertionError: step 0 of a pair was trained and never compared: call check*"])


UNASKED = """""
from shardproof.testing import Capability, contract, needs, world
@contract("ACCUMULATION-1")
@world({sizes})
def test_required(rank):
    pass
@contract("ACCUMULATION-6")
@needs(Capability.HYBRID)
@world(8, 4)
def test_required_of_those_with_replicas(rank):
    pass
@contract("ACCUMULATION-2")
@world(4)
def test_not_required_of_every_implementation(rank):
    pass
@contract("ACCUMULATION-7")
@world(4)
def test_required_and_asked_by_another(rank):
    pass
@contract("ACCUMULATION-7")
@world(2)
def test_other(rank):
    pass
"""


@pytest.mark.parametrize("workers", ["0", "2"])
def test_what_is_required_and_not_asked_is_told(run, pytester, workers):
    def lines(sizes, *options):
        selected = ("--impl", "ddp,reference", "--world", "2", "--report", "run.json")
        result = run(UNASKED.format(sizes=sizes), *selected, "-n", workers, *options, own_process=workers != "0")
        told = [line for line in result.outlines if "required of every implementation, not run" in line]
        return told, json.loads(pytester.path.joinpath("run.json").read_text()).get("unasked")

    told, written = lines("4, 8")
    of_all, text = "required of every implementation, not run", "ACCUMULATION-1 (needs 4 ranks)"
    assert told == [f"ddp: {of_all}: {text}", f"reference: {of_all}: {text}, ACCUMULATION-6 (needs 4 ranks)"]
    of_ddp = {"ACCUMULATION-1": "4 ranks"}
    assert written == {"ddp": of_ddp, "reference": of_ddp | {"ACCUMULATION-6": "4 ranks"}}
    if workers == "0":
        assert lines("2, 4")[1] == {"reference": {"ACCUMULATION-6": "4 ranks"}}
        assert lines("4, 8", "-k", "test_other") == ([], None)  # whoever names cases asks for no others


@pytest.mark.parametrize("workers", ["0", "2"])
def test_the_end_of_a_run_of_a_profile_has_its_figures(pytester, workers):
    """The run file says which profile was asked for; the figures are of all its items, whatever was selected."""
    chosen = ("--impl", "ddp", "--device", "cpu", "--profile", "core", "--report", "run.json")
    cases = (ROOT / "suites/test_training.py", "-k", "test_single_unit and w2-16x15-15x8", "-n", workers)
    done = python("-m", "pytest", *cases, *chosen, *QUIET, cwd=pytester.path, code=0)
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("profile ")]
    number = len(contract.items_of_profile("core", "cpu-4"))
    told = "0 failed, 0 failed as expected, 0 skipped, 0 left out for time"
    assert re.fullmatch(rf"profile core on cpu-4: ddp passed 1 of {number} items, {told}, in \d+ s of cases", line)
    effort = json.loads(pytester.path.joinpath("run.json").read_text())["effort"]
    assert (effort["name"], effort["profile"]) == ("standard", "core")


def test_method_and_unpicklable_parameter_are_refused(refused):
    method = "class TestGroup:\n    @world(2)\n    def test_method(self, rank):\n        pass\n"
    assert "a case is a plain function, not a method" in refused("from shardproof.testing import world\n" + method)
    mark = "@pytest.mark.parametrize('function', [lambda: None])\n@world"
    source = PASSES.replace("@world", mark).replace("(rank)", "(rank, function)")
    assert "parameter 'function' = <function <lambda>" in refused("import pytest\n" + source)


# What is reported

FAILS_ON_ONE_RANK = CASE.format(body="print('said before', rank.index)\n    assert [rank.index] == [0]")


def test_failure_shows_the_rank_its_traceback_and_every_output(run, pytester):
    result = run(FAILS_ON_ONE_RANK, "--report", "out/run.json")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            "fail: rank 1 of 2:",
            "Traceback (most recent call last):",
            '  File "*test_inner.py", line 6, in test_case',
            "*AssertionError: assert [[]1] == [[]0]",
            "reproduce: (cd * -m pytest * 'test_inner.py::test_case[[]ddp-w2]' --impl ddp --device cpu)",
            "*output of rank 0*",
            "said before 0",
            "*output of rank 1*",
            "said before 1",
        ]
    )
    (case,) = json.loads(pytester.path.joinpath("out/run.json").read_text())["cases"]
    assert (case["verdict"], case["failure"]["rank"]) == ("fail", 1)


def test_run_file_names_what_was_skipped_and_why(run, pytester):
    source = """
from shardproof.testing import Capability, Hardware, contract, needs, world
@contract("X-1")
@world(2)
@needs(Capability.SHARDED)
def test_capability(rank):
    pass
@world(2)
@needs(Hardware.STREAMS)
def test_hardware(rank):
    pass
@world(2)
@needs(Capability.SHARDED, Capability.OFFLOAD, Hardware.STREAMS)
def test_both(rank):
    pass
"""
    result = run(source, "--report", "run.json", "-rs", "--device", "cpu", "-v")
    result.assert_outcomes(skipped=3)
    both = "unsupported: offload, sharded, which ddp does not declare; this host lacks streams"
    told = ("unsupported: sharded alone, which ddp does not declare", "unmet: streams", both)
    result.stdout.fnmatch_lines_random([f"SKIPPED * {one}" for one in told])
    run_file = json.loads(pytester.path.joinpath("run.json").read_text())
    assert run_file["schema_version"] == 2
    missing = [("unsupported", ["sharded"]), ("unmet", ["streams"]), ("unsupported", ["offload", "sharded", "streams"])]
    assert [(case["verdict"], case["missing"]) for case in run_file["cases"]] == missing
    assert [case["requirement"] for case in run_file["cases"]] == ["X-1", "", ""]
    assert run_file["environment"]["implementations"]["ddp"]["version"]
    assert run_file["environment"]["contract"] == contract.version()


PEAKS = """
import pytest
from shardproof.testing import world

@world(2)
@pytest.mark.parametrize("sharded", [True, False])
def test_case(rank, sharded):
    model = torch.nn.Linear(8, 4)
    rank.run(model) if sharded else model(torch.zeros(2, 8))
"""


def test_the_record_has_the_bytes_of_the_sharded_parameters(run, pytester):
    """The allocator of a CPU does not count: a rank of two has two of four rows, and two of four biases."""
    run("import torch\n" + PEAKS, "--impl", "reference,ddp", "--report", "run.json")
    made = json.loads(pytester.path.joinpath("run.json").read_text())
    shares = {
        (case["implementation"], case["id"].partition("[")[2]): case.get("peak_bytes", []) for case in made["cases"]
    }
    assert shares.pop(("reference", "w2-True]")) == [72, 72] and not any(shares.values()) and len(shares) == 3


def test_the_environment_says_what_is_sharded():
    chosen, now = resolve(impl="torch.zero_optimizer", device="cpu"), datetime.datetime.now(datetime.UTC)
    (told,) = environment.describe(chosen, command=(), started=now).implementations.values()
    assert told.shards == ["optimizer"]


def test_a_case_outside_of_the_root_directory_has_the_name_of_its_file(run, pytester):
    other = pytester.mkdir("other")
    run(PASSES, "--rootdir", other, "--report", "run.json", pytester.path / "test_inner.py").assert_outcomes(passed=1)
    (case,) = json.loads(pytester.path.joinpath("run.json").read_text())["cases"]
    assert case["id"] == "test_inner.py::test_case[w2]"


def test_collection_errors_reach_the_user_through_xdist(refused):
    line = refused(PASSES.replace("(rank)", "(rank, tmp_path)"), "-n", "2", own_process=True)
    assert "fixture 'tmp_path' cannot cross processes; use rank.tmp_path" in line


def test_inline_texts_are_compared_and_accepted_in_the_controller(run, pytester, monkeypatch):
    source = '''
from shardproof.testing import world
@world(2)
def test_case(rank):
    rank.expect("one\\ntwo\\n", """\\
one
""")
'''
    result = run(source)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*test_inner.py:5: *", "*+two*"])
    monkeypatch.setenv("EXPECTTEST_ACCEPT", "1")
    run(source).assert_outcomes(passed=1)
    monkeypatch.delenv("EXPECTTEST_ACCEPT")
    accepted = pytester.path.joinpath("test_inner.py").read_text()
    assert '"""\\\none\ntwo\n"""' in accepted
    run(accepted).assert_outcomes(passed=1)


def test_ranks_that_disagree_on_an_inline_text_fail(run):
    source = CASE.format(body='rank.expect(f"rank {rank.index}", """rank 0""")')
    result = run(source)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*ranks 0 and 1 rendered different texts for one inline literal*"])
