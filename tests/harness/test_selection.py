"""What can be asked for, on hosts of other kinds too; the marks' own checks; and options whose names others have."""

import os
from pathlib import Path

import pytest
import torch

from shardproof import contract
from shardproof.harness.plugin import command_line, reproduction
from shardproof.harness.plugin.options import OPTIONS, Effort, options_table
from shardproof.harness.plugin.records import combine
from shardproof.harness.plugin.selection import resolve
from shardproof.runfile import Verdict
from shardproof.testing import Hardware, deadline, needs, world
from tests.errors import error_of
from tests.harness.inner import CASE, QUIET, ROOT


@pytest.fixture
def gpus(monkeypatch):
    """Pretend that the host has this many GPUs."""

    def pretend(count):
        device = torch.device("cuda") if count else None
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: device)
        monkeypatch.setattr(torch.accelerator, "device_count", lambda: count)

    return pretend


def ask(impl="ddp", device="auto", **options):
    return resolve(impl=impl, device=device, **options)


@pytest.mark.parametrize(("count", "device"), [(0, "cpu"), (1, "cpu"), (2, "cuda"), (8, "cuda")])
def test_auto_takes_devices_that_can_make_a_world(gpus, count, device):
    gpus(count)
    assert ask().device == device


def test_world_larger_than_the_devices(gpus):
    gpus(4)
    assert ask(world="2,4").world == (2, 4)
    assert not ask(world="8", device="cpu").lacking_for(8)


def test_case_larger_than_the_devices_is_no_error(gpus):
    gpus(2)
    chosen = ask()
    assert chosen.allows(4) and not chosen.lacking_for(2)
    assert chosen.lacking_for(4) == "4 cuda devices (there are 2)"


@pytest.mark.parametrize(("shared", "backend"), [(None, "nccl"), (1, "nccl"), (2, "gloo")])
def test_ranks_that_share_a_gpu_use_gloo(gpus, shared, backend):
    gpus(1)
    chosen = ask(device="cuda", ranks_per_gpu=shared)
    assert chosen.backend == backend
    assert (Hardware.STREAMS in chosen.hardware) is (backend == "nccl")
    assert {Hardware.ACCELERATOR, Hardware.LATE_COPIES} <= chosen.hardware
    assert bool(chosen.lacking_for(2)) is (backend == "nccl")
    assert ask(device="cpu").backend == "gloo"
    assert not ask(device="cpu").hardware


def test_world_larger_than_the_devices_have_ranks(gpus):
    gpus(2)
    chosen = ask(ranks_per_gpu=2, world="4")
    assert chosen.device == "cuda"
    assert chosen.lacking_for(8) == "8 cuda devices (there are 2, 2 ranks on each)"


def test_auto_takes_one_device_that_ranks_may_share(gpus):
    gpus(1)
    assert ask(ranks_per_gpu=2).device == "cuda"


#: Words of a command line for each option, and the checked value.
GIVEN = {
    "impl": (["ddp, reference"], ("ddp", "reference")),
    "device": (["cuda"], "cuda"),
    "world": (["2,1,2"], (2, 1)),
    "report": (["run.json"], "run.json"),
    "effort": (["quick"], Effort.QUICK),
    "contract": ([contract.version()], contract.version()),
    "profile": (["core, zero3"], ("core", "zero3")),
    "changed": (["_fsdp_param.py:FSDPParam"], ("_fsdp_param.py:FSDPParam",)),
    "changed_since": (["main"], "main"),
    "seconds": (["9", "--changed", "_fsdp_param.py"], 9.0),
    "map": (["map.json", "--changed", "_fsdp_param.py"], Path("map.json")),
    "deadline": (["55.5"], 55.5),
    "fuzz": (["9"], 9.0),
    "expectations": (["ddp.toml"], (Path("ddp.toml"),)),
    "explain": ([], True),
    "ranks_per_gpu": (["2"], 2),
    "check_collectives": ([], True),
    "simulate": (["1024,2048"], (1024, 2048)),
    "isolate": ([], True),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_an_option_is_parsed_checked_and_repeated(gpus, pytester, name):
    """The command that repeats a case has it as it was given, if it has it at all."""
    gpus(2)
    (values, checked), flag = GIVEN[name], f"--{name.replace('_', '-')}"
    config = pytester.parseconfig(*QUIET, flag, *values)
    assert command_line.asks_for_a_run(config)
    assert getattr(resolve(**command_line.values(config)), name) == checked
    again = reproduction.invocation_of(config).options({})
    assert again == ([flag, *values] if OPTIONS[name].repeats else [])


def test_without_an_option_of_ours_a_run_is_none_of_shardproof(pytester):
    config = pytester.parseconfig(*QUIET, "-k", "x")
    assert not command_line.asks_for_a_run(config)
    assert command_line.values(config) == {name: option.absent for name, option in OPTIONS.items()}


def test_the_page_has_the_table_of_the_options():
    """``EXPECTTEST_ACCEPT=1`` writes it."""
    page = ROOT / "docs/options.md"
    before, begin, rest = page.read_text().partition("<!-- The rows of shardproof.harness.plugin.options -->\n")
    written, end, after = rest.partition("\n<!-- end -->\n")
    if os.environ.get("EXPECTTEST_ACCEPT") == "1":
        page.write_text(before + begin + (written := options_table()) + end + after)
    assert end and written == options_table()


SECONDS = "expected a positive number of seconds, at most 1500"
LISTED = "says which items run; leave out"
PROFILES = "core, zero1, zero3, hsdp, composition, experts, engine, fsdp1-api"
#: The GPUs of the host, what is asked, and the line that refuses it.
REFUSED = [
    (0, {"impl": "ddp,"}, "--impl ddp,: expected names such as reference,torch.fully_shard"),
    (
        0,
        {"device": "gpu"},
        "--device gpu: torch has no device type of this name, as it has cuda or xpu; torch finds no accelerator here; "
        "use cpu or auto",
    ),
    (
        0,
        {"device": "cuda:0"},
        "--device cuda:0: a type has no number, each rank has a device of its own; use cuda, cpu or auto",
    ),
    (4, {"world": "2,8"}, "--world 8: there are 4 cuda devices; a rank needs one of its own"),
    (2, {"world": "8", "ranks_per_gpu": 2}, "--world 8: there are 2 cuda devices, 2 ranks on each"),
    (0, {"world": "2,x"}, "--world 2,x: expected positive numbers of ranks such as 2,4, not 'x'"),
    (0, {"effort": "most"}, "--effort most: expected quick, standard, full"),
    (0, {"contract": "1"}, "--contract 1: this is version 2026.12; known are 2026.12, 2025.6"),
    (0, {"contract": "2025.6"}, "--contract 2025.6: this is version 2026.12; commit c0ffee1 has it"),
    (0, {"contract": "2026.12", "effort": "quick"}, f"--contract 2026.12: a version {LISTED} --effort quick"),
    (0, {"contract": "2026.12", "simulate": "8"}, f"--contract 2026.12: a version {LISTED} --simulate"),
    (
        0,
        {"profile": "cor"},
        f"--profile cor: expected {PROFILES}, or several of them, separated by commas",
    ),
    (0, {"profile": "core,x"}, f"--profile core,x: expected {PROFILES}, or several of them, separated by commas"),
    (0, {"profile": ","}, f"--profile ,: expected {PROFILES}, or several of them, separated by commas"),
    (0, {"profile": "core", "effort": "quick"}, f"--profile core: a profile {LISTED} --effort quick"),
    (0, {"profile": "core", "contract": "2026.12"}, f"--profile core: a profile {LISTED} --contract 2026.12"),
    (0, {"profile": "core", "simulate": "8"}, f"--profile core: a profile {LISTED} --simulate"),
    (2, {"profile": "hsdp", "device": "cuda"}, "--profile hsdp: it is of cpu-4, and --device cuda is nccl-2"),
    (
        2,
        {"profile": "core,hsdp", "device": "cuda", "ranks_per_gpu": 2},
        "--profile hsdp: it is of cpu-4, and --device cuda is accelerator-2",
    ),
    (0, {"seconds": 9.0}, "--seconds: it is for --profile, --changed or --changed-since, and none is given"),
    (0, {"deadline": 0.0}, f"--deadline 0: {SECONDS}"),
    (0, {"deadline": -1.0}, f"--deadline -1: {SECONDS}"),
    (0, {"deadline": float("inf")}, f"--deadline inf: {SECONDS}"),
    (0, {"deadline": float("nan")}, f"--deadline nan: {SECONDS}"),
    (0, {"deadline": 1e9}, f"--deadline 1e+09: {SECONDS}"),
    (0, {"fuzz": 0.0}, "--fuzz 0: expected a positive number of seconds"),
    (0, {"ranks_per_gpu": 0}, "--ranks-per-gpu 0: expected a positive number of ranks"),
    (
        0,
        {"ranks_per_gpu": 2, "device": "cpu"},
        "--ranks-per-gpu 2: --device cpu uses no GPU; leave one of them out",
    ),
    (0, {"ranks_per_gpu": 2}, "--ranks-per-gpu 2: torch finds no accelerator here; leave it out"),
    (
        0,
        {"ranks_per_gpu": 2, "simulate": "64"},
        "--simulate: a simulated world uses no GPU; leave out --ranks-per-gpu 2",
    ),
    (0, {"simulate": "0"}, "--simulate 0: expected positive numbers of ranks such as 1024,16384, not '0'"),
    (0, {"simulate": "64,x"}, "--simulate 64,x: expected positive numbers of ranks such as 1024,16384, not 'x'"),
    (
        0,
        {"simulate": "100000"},
        "--simulate 100000: a simulated world of 100000 ranks: expected 1 to 65536",
    ),
    (
        0,
        {"simulate": "64", "device": "cuda"},
        "--simulate: the tensors of a simulated world are on no device; leave out --device cuda",
    ),
    (0, {"simulate": "64", "world": "2"}, "--world 2 cannot be combined with --simulate, which has no real ranks"),
]


@pytest.mark.parametrize(("count", "options", "told"), REFUSED)
def test_one_line_names_what_is_wrong(gpus, monkeypatch, count, options, told):
    gpus(count)
    monkeypatch.setattr(contract, "versions", lambda: {"2026.12": "", "2025.6": "c0ffee1"})
    assert error_of(ask, **options) == told


def test_the_hardware_classes_of_profiles(gpus):
    gpus(2)
    assert ask(device="cuda", profile="core").hardware_class == "nccl-2"
    assert ask(device="cuda", profile="core,zero3", ranks_per_gpu=2).hardware_class == "accelerator-2"
    assert ask(device="cpu", profile="hsdp").hardware_class == "cpu-4"


def test_a_run_of_profiles_on_the_devices_of_another_vendor(gpus, monkeypatch):
    gpus(2)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: torch.device("xpu"))
    chosen = ask(device="xpu", profile="core,zero3")
    assert (chosen.device, chosen.backend, chosen.hardware_class) == ("xpu", "xccl", "accelerator-2")
    items = contract.items_of_profile("core", chosen.hardware_class)
    assert items and all(contract.items()[one].hardware <= chosen.hardware for one in items)


@pytest.mark.parametrize(("options", "seconds"), [({"profile": "core"}, 530), ({"profile": "core", "seconds": 9.0}, 9)])
def test_the_time_of_a_run_of_profiles(options, seconds):
    """With the deadline of the last case it is less than ten minutes."""
    chosen = ask(device="cpu", **options)
    assert chosen.seconds == seconds and chosen.seconds + chosen.deadline <= 590


@pytest.mark.parametrize(
    ("mark", "told"),
    [
        (lambda: world(0), "world(0): a world's size is a positive integer"),
        (lambda: world(True), "world(True)"),
        (lambda: world(2, 2), "each size may be given once"),
        (lambda: world(2, debug_level="LOUD"), "debug_level='LOUD'"),
        (
            lambda: needs("shard_dims"),
            "needs('shard_dims'): there is no capability 'shard_dims': did you mean shard_dim",
        ),
        (lambda: deadline(0), "deadline(0)"),
        (lambda: deadline(float("inf")), "deadline(inf): expected a positive number of seconds, at most 1500"),
    ],
)
def test_marks_refuse_what_makes_no_sense(mark, told):
    assert told in error_of(mark)


@pytest.mark.parametrize(
    ("said", "verdict"),
    [
        *((["pass", "pass"], "pass"), (["pass", "hang"], "hang"), (["hang", "fail"], "fail")),
        *((["fail", "crash"], "crash"), (["crash", "harness-error"], "harness-error")),
        *((["unmet", "unmet"], "unmet"), (["unmet", "pass"], "fail"), (["unsupported", "pass"], "fail")),
    ],
)
def test_verdicts_of_ranks_become_one(said, verdict):
    assert combine(map(Verdict, said)) == Verdict(verdict)


def test_nobody_said_anything():
    with pytest.raises(ValueError, match="no rank has a verdict"):
        combine([])


# Options that another plugin or a conftest has too: it keeps the short form, and ours has the prefixed one

THEIRS = """
def pytest_addoption(parser):
    parser.addoption("--device", help="theirs")
    parser.getgroup("theirs").addoption("--report", action="store_true")

def pytest_report_header(config):
    return f"their device is {config.getoption('--device')}, their report {config.getoption('--report')}"
"""
NAMES_US = 'pytest_plugins = ["shardproof.plugin"]\n'
WANTED = ("--shardproof-impl", "ddp", "--shardproof-device", "cpu", "--shardproof-report", "run.json")


def named_by_a_conftest(pytester):
    pytester.makeconftest(NAMES_US + THEIRS)
    return (), pytester.path / "conftest.py"


def named_by_a_conftest_before_another(pytester):
    """pytest loads the conftest of a folder that it is given after that of the root."""
    pytester.makeconftest(NAMES_US)
    folder = pytester.mkdir("folder")
    (folder / "conftest.py").write_text(THEIRS)
    return ("folder", "test_inner.py"), folder / "conftest.py"


def named_by_p_before_a_conftest(pytester):
    pytester.makeconftest(THEIRS)
    return ("-p", "shardproof.plugin"), pytester.path / "conftest.py"


def named_by_p_after_a_plugin(pytester):
    pytester.syspathinsert()
    pytester.makepyfile(their_plugin=THEIRS)
    return ("-p", "their_plugin", "-p", "shardproof.plugin"), pytester.path / "their_plugin.py"


def named_by_p_before_a_plugin(pytester):
    options, path = named_by_p_after_a_plugin(pytester)
    return options[2:] + options[:2], path


NAMED = [named_by_a_conftest, named_by_a_conftest_before_another, named_by_p_before_a_conftest]


@pytest.mark.parametrize(
    "named", [*NAMED, named_by_p_after_a_plugin, named_by_p_before_a_plugin], ids=lambda named: named.__name__
)
def test_another_owner_keeps_its_options(pytester, named):
    pytester.makepyfile(test_inner=CASE.format(body="pass"))
    arguments, owner = named(pytester)
    result = pytester.runpytest_inprocess(
        "-p", "no:cacheprovider", *arguments, "--device", "tpu", "--report", "--world", "2", *WANTED
    )
    result.assert_outcomes(passed=1)
    lines = [line for line in result.stdout.lines if line.startswith("shardproof: --")]
    told = "shardproof: --{0} is an option of {1}; shardproof's own is --shardproof-{0}"
    assert lines == [told.format(name, owner) for name in ("device", "report")]
    result.stdout.fnmatch_lines(["their device is tpu, their report True", "ddp: 1 pass", "run file: run.json"])
    assert (pytester.path / "run.json").exists()


def test_without_another_owner_nothing_is_printed_and_both_forms_mean_the_same(pytester):
    pytester.makeconftest(NAMES_US)
    pytester.makepyfile(test_inner=CASE.format(body="pass"))
    for prefix in ("--", "--shardproof-"):
        result = pytester.runpytest_inprocess("-p", "no:cacheprovider", f"{prefix}impl", "ddp", f"{prefix}world=2")
        result.assert_outcomes(passed=1)
        result.stdout.no_fnmatch_line("shardproof: --*")


def test_help_names_both_forms(pytester):
    text = pytester.runpytest_inprocess(*QUIET, "--help").stdout.str()
    for name in OPTIONS:
        assert f"--shardproof-{name.replace('_', '-')}" in text
        assert f" --{name.replace('_', '-')}" in text


def test_an_owner_that_cannot_be_asked_is_no_error(pytester):
    """Its hook fails with the stand-in for a parser, after it has added its option."""
    theirs = 'def pytest_addoption(parser):\n    parser.addoption("--world")\n    parser.prog\n'
    pytester.makeconftest(NAMES_US + theirs)
    pytester.makepyfile(test_inner=CASE.format(body="pass"))
    result = pytester.runpytest_inprocess("-p", "no:cacheprovider", "--impl", "ddp", "--shardproof-world", "2")
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["shardproof: --world is an option of *conftest.py; shardproof's own is *-world"])
