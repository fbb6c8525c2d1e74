"""An exception that a case raises names its step, its microbatch and its phase, and lists what was called before it."""

import gc
import json

from shardproof.alike import kind_of_text
from shardproof.harness.parity.course import AdapterCall, Course
from shardproof.runfile import Failure

SOURCE = """
import torch
from shardproof.harness.models import optim, plain
from shardproof.testing import world

def breaking(run, module, when):
    calls = []
    def hook(module, args):
        calls.append(None)
        if len(calls) == when:
            torch.zeros(2, 3) @ torch.zeros(2, 3)
    run.original_module(module).register_forward_pre_hook(hook)
    return run

def trained(rank, **options):
    return rank.run(plain.Tower(dim=4), units=[["layers.0"], ["layers.1"]], optimizer=optim.sgd(), **options)

@world(2)
def test_case(rank):
    {body}
"""
STEP = "forward, backward, step, zero_grad"
SHAPES = "RuntimeError: mat1 and mat2 shapes cannot be multiplied (2x3 and 2x3)"


def failure_of(run, pytester, body, *options):
    run(SOURCE.format(body="\n    ".join(body)), "--report", "run.json", *options)
    (case,) = json.loads(pytester.path.joinpath("run.json").read_text())["cases"]
    assert case["verdict"] == "fail"
    return case["failure"], case["failure"]["text"].splitlines()


def test_of_a_microbatch(run, pytester):
    """The fourth of the forwards of two microbatches: an error of torch, whose frames are those of each of them."""
    body = [
        "run = breaking(trained(rank, microbatches=2), 'layers.1', 4)",
        "for step in range(3):",
        "    run.step([(rank.batch(step, (2, 4), microbatch=one),) for one in range(2)], loss=plain.mean_square)",
    ]
    failure, lines = failure_of(run, pytester, body)
    place = {name: failure[name] for name in ("stage", "step", "rank", "name", "element")}
    assert place == {"stage": "exception in forward", "step": 1, "rank": 0, "name": "microbatch 1", "element": None}
    before = f"step 0: forward, backward, {STEP}; step 1: forward, backward"
    told = "exception in forward of 'microbatch 1' in the second step (step 1)"
    assert lines[-3:] == [SHAPES, told, f"calls before it of ddp: {before}"]
    line = Failure(text=failure["text"], **place).line
    assert line == f"{SHAPES} (exception in forward of microbatch 1 in step 1 on rank 0)"


def test_behind_a_stale_gather(run, pytester):
    """The fourth forward gathers nothing, because the case had gathered all before it: the calls of the case say so."""
    body = [
        "run = breaking(trained(rank), 'layers.1', 4)",
        "for step in range(3):",
        "    run.step([(rank.batch(step, (2, 4)),)], loss=plain.mean_square)",
        "run.adapter.unshard(waits=True)",
        "run.step([(rank.batch(3, (2, 4)),)], loss=plain.mean_square)",
    ]
    _, lines = failure_of(run, pytester, body, "--impl", "reference")
    assert lines[-4:-1] == [
        SHAPES,
        "exception in forward of 'microbatch 0' in the fourth step (step 3)",
        "gathered in this forward so far: nothing; in that of the first step: (root), layers.0, layers.1",
    ]
    assert lines[-1] == f"calls before it of reference: steps 0-1, each: {STEP}; step 2: {STEP}, unshard(waits=True)"


def test_of_an_error_of_the_case_itself(run, pytester):
    """It is raised between calls; an exception that the case caught before has nothing to do with it."""
    body = [
        "run = breaking(trained(rank), 'layers.0', 2)",
        "run.step([(rank.batch(0, (2, 4)),)], loss=plain.mean_square)",
        "try:",
        "    run.adapter.forward(rank.batch(1, (2, 4)))",
        "except RuntimeError:",
        "    pass",
        "assert 1 == 2",
    ]
    failure, lines = failure_of(run, pytester, body)
    assert failure["stage"] is None and lines[-1] == f"calls before it of ddp: step 0: {STEP}"


def test_of_an_error_that_the_case_raises_from_another(run, pytester):
    body = [
        "run = breaking(trained(rank), 'layers.0', 1)",
        "try:",
        "    run.adapter.forward(rank.batch(0, (2, 4)))",
        "except RuntimeError as error:",
        "    raise ValueError('no forward') from error",
    ]
    failure, lines = failure_of(run, pytester, body)
    assert failure["stage"] == "exception in forward"
    assert lines[-2:] == ["ValueError: no forward", "exception in forward of 'microbatch 0' in the first step (step 0)"]


def test_of_another_world(run, pytester):
    """The other world has ended, and its process groups are gone, when the exception reaches the harness."""
    body = [
        "from shardproof.testing.other_worlds import other_worlds",
        "with other_worlds(rank) as worlds:",
        "    for size in (2, 1):",
        "        with worlds.of(size) as member:",
        "            run = breaking(trained(member), 'layers.0', 1 if size == 1 else 9)",
        "            run.step([(member.batch(0, (2, 4)),)], loss=plain.mean_square)",
    ]
    failure, lines = failure_of(run, pytester, body)
    assert failure["stage"] == "exception in forward" and SHAPES in lines
    told = "exception in forward of 'microbatch 0' in the first step (step 0)"
    assert any(line.startswith(told) for line in lines), lines


def test_a_case_that_trains_nothing_has_no_calls(run, pytester):
    _, lines = failure_of(run, pytester, ["assert 1 == 2"])
    assert not any("calls before it" in line for line in lines)


def test_cases_that_fail_alike_may_have_made_other_calls():
    text = 'Traceback (most recent call last):\n  File "x.py", line 1, in f\n    f()\nValueError: no'
    calls = "\nexception in {} in the first step (step 0)\ncalls before it of ddp: step 0: {}"
    one, other = (text + calls.format(*names) for names in (("forward", "unshard"), ("backward", "forward")))
    assert kind_of_text(one, "test_a.py") == kind_of_text(other, "test_a.py")


def test_a_long_training_is_kept_by_its_last_calls():
    course = Course("reference")
    for step in range(200):
        for name in (*["evaluation"] * (1 + step % 7), "forward", "backward", "step"):
            with course.during(name):
                pass
    first, *_, last = course.listed().removeprefix("...; ").split("; ")
    assert first == "step 196: evaluation, forward, backward, step"
    assert last == "step 199: evaluation, evaluation, evaluation, evaluation, forward, backward, step"
    assert sum(type(one) is AdapterCall for one in gc.get_objects()) < 20  # isinstance asks proxies of what is gone
