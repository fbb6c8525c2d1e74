"""Whose case fails: that of the adapter that did it, whatever runs before or after."""

import json
import re
import shlex

import pytest

pytestmark = pytest.mark.sampled

ADAPTERS = """
import dataclasses, threading, time
import torch
import torch.distributed as dist
from shardproof.harness.adapters.reference import ReferenceAdapter

class Untidy(ReferenceAdapter):
    name = "untidy"
    kept = []

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.start()

    def start(self):
        pass

    def teardown(self):
        pass

class Sound(Untidy):
    name = "sound"
"""

CASES = """
import os, torch, pathlib
from shardproof.testing import models, world

def train(rank):
    pathlib.Path(f"{{rank.implementation.name}}-{{rank.index}}.log").open("a").write(f"{{os.getpid()}}\\n")
    for _ in range({pairs}):
        pair = rank.pair(models.Tower(dim=16))
        pair.step(rank.batch(0, (2, 16)))
        pair.check()

@world(2)
def test_one(rank):
    train(rank)

@world(2)
def test_two(rank):
    train(rank)
"""


@pytest.fixture
def verdicts(pytester, run):
    """Run an adapter with this method before a sound one; {(case, implementation): (verdict, text)} and the result."""
    pytester.syspathinsert()

    def verdicts(method="", *options, traits="", pairs=1, impl="planted_adapters:Untidy,planted_adapters:Sound"):
        body = "\n".join(f"    {line}" for line in (traits + "\n" + method).splitlines())
        source = ADAPTERS.replace("    kept = []\n", f"    kept = []\n{body}\n", 1)
        source = source.replace("\n    def teardown(self):\n        pass\n", "") if "def teardown" in method else source
        source = source.replace("\n    def start(self):\n        pass\n", "") if "def start" in method else source
        source = source.replace("class Sound(Untidy)", "class Sound(ReferenceAdapter)")
        pytester.path.joinpath("planted_adapters.py").write_text(source)
        monkey = [*options, "--impl", impl, "--device", "cpu", "--report", "run.json"]
        result = run(CASES.format(pairs=pairs), *monkey)
        cases = json.loads(pytester.path.joinpath("run.json").read_text())["cases"]
        found = {}
        for case in cases:
            key = case["id"].partition("::test_")[2].partition("[")[0], case["implementation"].rpartition(":")[2]
            found[key] = case["verdict"], (case["failure"] or {"text": ""})["text"]
        return result, found

    return verdicts


def assert_only_the_untidy_fail(found, text, *, cases=("one", "two")):
    for (case, implementation), (verdict, told) in found.items():
        if implementation == "Untidy" and case in cases:
            assert verdict == "fail", (case, told)
            assert text in told, told
        else:
            assert verdict == "pass", (case, implementation, told)


GROUPS = "process groups of the world are gone: "


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ("dist.destroy_process_group()", GROUPS),
        ("dist.destroy_process_group(self.config.mesh.get_group())", GROUPS),
        ("torch.nn.functional.linear = lambda *a: None", "patched: torch.nn.functional.linear"),
        ("torch.Tensor.backward = lambda *a: None", "patched: torch.Tensor.backward"),
        ("torch.Tensor.add_ = lambda *a: None", "patched: torch.Tensor.add_"),
        ("torch.optim.Optimizer.zero_grad = lambda *a: None", "patched: torch.optim.optimizer.Optimizer.zero_grad"),
        ("torch.nn.Linear.forward = lambda *a: None", "patched: torch.nn.modules.linear.Linear.forward"),
        ("dist.all_reduce = lambda *a: None", "patched: torch.distributed.all_reduce"),
    ],
    ids=["all-groups", "a-group", "function", "method", "inherited", "optimizer", "module", "collective"],
)
def test_what_a_teardown_breaks_fails_its_own_case(verdicts, body, text):
    _, found = verdicts(f"def teardown(self):\n    {body}")
    assert_only_the_untidy_fail(found, text)


def test_an_exception_in_a_teardown_is_its_cases_failure_and_the_others_are_torn_down(verdicts, pytester):
    noted = "open(f'teardowns-{dist.get_rank()}', 'a').write('x')"
    method = f"def teardown(self):\n    {noted}\n    raise OSError('the disk is gone')"
    _, found = verdicts(method, "-k", "one", pairs=2)
    assert_only_the_untidy_fail(found, "OSError: the disk is gone")
    assert pytester.path.joinpath("teardowns-0").read_text() == "xx"


def test_a_teardown_that_raises_after_a_failure_is_told_and_ends_the_world(verdicts, pytester):
    wrong = "def backward(self, loss):\n    (loss * 2).backward()"
    method = f"{wrong}\ndef teardown(self):\n    raise OSError('the disk is gone')"
    _, found = verdicts(method)
    assert_only_the_untidy_fail(found, "afterwards a teardown raised OSError")
    assert "gradient" in found["one", "Untidy"][1]
    assert len(set(pytester.path.joinpath("untidy-0.log").read_text().split())) == 2


THREAD = "def start(self):\n    threading.Thread(target=time.sleep, args=(600,), name='left', daemon=True).start()"


def test_a_leak_fails_first_or_second_and_when_it_is_reproduced(verdicts, pytester, monkeypatch):
    result, found = verdicts(THREAD, "-v")
    assert_only_the_untidy_fail(found, "leak: threads: left")
    commands = {line for line in result.outlines if line.startswith("reproduce: ")}
    assert len(commands) == 2
    for command in commands:
        *_, start = command.partition(" -m pytest ")
        arguments = shlex.split(start.removesuffix(")"))
        assert arguments[-1] == "--isolate"
        again = pytester.runpytest_inprocess(*arguments)
        again.assert_outcomes(failed=1)
        again.stdout.fnmatch_lines(["fail: leak: threads: left*"])


def test_state_that_is_set_up_once_is_no_leak_and_costs_one_more_run(verdicts, pytester):
    thread = "threading.Thread(target=time.sleep, args=(600,), name='kept', daemon=True)"
    method = f"def start(self):\n    if not self.kept: self.kept.append({thread}); self.kept[0].start()"
    _, found = verdicts(method)
    assert {verdict for verdict, _ in found.values()} == {"pass"}
    processes = pytester.path.joinpath("untidy-0.log").read_text().split()
    assert len(processes) == 3 and len(set(processes)) == 1, "the first case ran twice, in one process"
    sound = pytester.path.joinpath("sound-0.log").read_text().split()
    assert len(sound) == 2 and not set(sound) & set(processes), "the thread is no neighbour of the others"


@pytest.mark.parametrize(
    ("traits", "method"),
    [
        ("frees_models=False", "def teardown(self):\n    self.kept.append(self.module)"),
        ("process_groups='kept'", "def start(self):\n    self.kept or self.kept.append(dist.new_group())"),
        ("process_groups='abandoned'", "def start(self):\n    dist.new_group()"),
    ],
    ids=["models", "kept-groups", "abandoned-groups"],
)
def test_a_world_in_which_an_adapter_left_what_it_may_is_for_its_own_cases(verdicts, pytester, traits, method):
    declared = f"traits = dataclasses.replace(ReferenceAdapter.traits, {traits})"
    _, found = verdicts(method, traits=declared)
    assert {verdict for verdict, _ in found.values()} == {"pass"}, found
    untidy, sound = (set(pytester.path.joinpath(f"{name}-0.log").read_text().split()) for name in ("untidy", "sound"))
    assert len(untidy) == len(sound) == 1
    assert untidy != sound


def test_tidy_implementations_share_a_world(verdicts, pytester):
    verdicts()
    untidy, sound = (set(pytester.path.joinpath(f"{name}-0.log").read_text().split()) for name in ("untidy", "sound"))
    assert len(untidy) == 1 and untidy == sound


@pytest.mark.parametrize("prefix", ["--", "--shardproof-"])
def test_isolated_cases_share_no_process(verdicts, pytester, prefix):
    result, found = verdicts("", f"{prefix}isolate")
    assert {verdict for verdict, _ in found.values()} == {"pass"}
    lines = [line for path in pytester.path.glob("*-0.log") for line in path.read_text().split()]
    assert len(lines) == len(set(lines)) == 4
    assert not re.search("reproduce", result.stdout.str())
