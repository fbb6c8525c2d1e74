"""Cases that draw their parameter: the search, what it shrinks to, and the case to paste."""

import itertools
import pickle
import time
import types
from typing import Any, NamedTuple

import pytest

from shardproof.harness.adapters import registry
from shardproof.harness.adapters.base import Accumulation
from shardproof.harness.models.drawn import Block, Part, Plan
from shardproof.harness.models.trainings import Step, Training, source_of
from shardproof.harness.plugin import drawing
from shardproof.harness.plugin.records import MadeRecord
from shardproof.runfile import Verdict
from tests.harness.inner import PYTHONPATH, QUIET, run_cases

pytest.importorskip("hypothesis", reason="cases that draw need hypothesis: pip install '.[fuzz]'")
st: Any = pytest.importorskip("hypothesis.strategies")

NAMES = {one.__name__: one for one in (Accumulation, Block, Part, Plan, Step, Training)}
IMPLEMENTATIONS = ["reference", "reference.flat", "torch.fully_shard", "torch.fsdp"]


def record(verdict: Verdict = Verdict.PASS, text: str = "", seconds: float = 0.1) -> MadeRecord:
    return MadeRecord(
        id="f.py::test", implementation="reference", requirement="", world=2, device="cpu", parameters={},
        verdict=verdict, seconds=seconds, text=text,
    )  # fmt: skip


def search(judge: Any, *, strategy: Any = None, shrink_seconds: float = 60.0, **options: Any) -> Any:
    """What a search finds, and what ran, with which deadline, where ranks answer as a function says."""
    ran: list[tuple[Any, float | None]] = []
    answer = drawing.Search(lambda *call: ran.append(call) or judge(call[0]), shrink_seconds=shrink_seconds)
    strategy = st.integers(0, 1000) if strategy is None else strategy
    return answer.find(strategy, **({"seed": 1, "examples": 50} | options)), types.SimpleNamespace(ran=ran)


def test_what_passes_is_not_found():
    found, ranks = search(lambda example: record())
    assert found is None
    # Each example runs once, however often it is drawn.
    assert 30 < len(ranks.ran) == len(set(ranks.ran)) <= 50


def test_the_same_seed_draws_the_same_examples():
    assert search(lambda _: record())[1].ran == search(lambda _: record())[1].ran
    assert search(lambda _: record())[1].ran != search(lambda _: record(), seed=2)[1].ran


def test_a_failure_shrinks_and_runs_once_more():
    found, ranks = search(lambda n: record(Verdict.FAIL, f"ValueError: {n}") if n > 17 else record())
    assert (found.example, found.record.text, found.repeats) == (18, "ValueError: 18", True)
    assert ranks.ran[-1] == (18, None)


def test_shrinking_does_not_slip_to_another_error():
    def judge(n: int) -> MadeRecord:
        if n > 500:
            return record(Verdict.FAIL, "ValueError: large")
        return record(Verdict.CRASH, "the rank's process ended") if n > 17 else record()

    found, _ = search(judge, strategy=st.integers(501, 1000).map(lambda n: n) | st.integers(0, 500))
    assert found.record.text in ("ValueError: large", "the rank's process ended")
    assert found.example == {"ValueError: large": 501, "the rank's process ended": 18}[found.record.text]


def test_shrinking_ends_when_its_time_is_over():
    found, ranks = search(lambda n: record(Verdict.FAIL, "ValueError: 1") if n > 17 else record(), shrink_seconds=0)
    assert found.is_out_of_time and found.example > 18
    assert ranks.ran[-1] == ranks.ran[-2], "the first failure ran once more, and nothing else after it"


def test_deadlines_are_short_while_a_hang_shrinks():
    found, ranks = search(lambda n: record(Verdict.HANG, "stuck") if n > 17 else record(seconds=0.6))
    assert found.example == 18
    deadlines = [deadline for _, deadline in ranks.ran]
    first = deadlines.index(3.0)
    assert set(deadlines[:first]) == {None} and set(deadlines[first:-1]) == {3.0} and deadlines[-1] is None


def test_what_the_harness_could_not_run_ends_the_search():
    found, ranks = search(lambda n: record(Verdict.HARNESS_ERROR, "no space is left"))
    assert len(ranks.ran) == 1
    assert drawing.report(found, examples=1, case="(a case)") == "no space is left"


@pytest.mark.parametrize("error", [KeyboardInterrupt(), pytest.fail.Exception("Timeout >5s"), ValueError("a bug")])
def test_errors_of_the_pytest_process_are_raised_as_they_are(error: BaseException):
    def judge(n: int) -> MadeRecord:
        raise error

    with pytest.raises(type(error)) as raised:
        search(judge)
    assert raised.value is error


def test_a_failure_that_depends_on_time_says_so():
    ran: set[int] = set()

    def judge(n: int) -> MadeRecord:
        fails = n > 17 and n not in ran
        ran.add(n)
        return record(Verdict.FAIL, "ValueError: late") if fails else record()

    found, _ = search(judge)
    assert (found.example, found.repeats, found.record.text) == (18, False, "ValueError: late")
    assert "it passed when it was run again" in drawing.report(found, examples=3, case="(a case)")


def test_a_search_by_time_goes_on_until_it_is_over(monkeypatch):
    now = itertools.count()  # each look at the clock is a second later
    monkeypatch.setattr(drawing, "_EXAMPLES_AT_ONCE", 5)
    monkeypatch.setattr(drawing, "time", types.SimpleNamespace(monotonic=lambda: next(now)))
    found, ranks = search(lambda n: record(), seconds=20)
    assert found is None and 5 < len(ranks.ran) <= 20
    found, _ = search(lambda n: record(Verdict.FAIL, "ValueError: 1") if n > 17 else record(), seconds=600)
    assert found.example == 18


def test_a_search_by_time_begins_with_its_first_example(monkeypatch):
    """What is imported before may take longer than the search: on a busy host it ran nothing, and passed."""
    before = drawing.importlib.import_module

    def slowly(name):
        time.sleep(0.05)
        return before(name)

    monkeypatch.setattr(drawing, "importlib", types.SimpleNamespace(import_module=slowly))
    _, ranks = search(lambda n: record(), seconds=0.02)
    assert ranks.ran


@pytest.mark.parametrize("size", [3, 4])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_drawn_is_what_is_claimed(implementation: str, size: int):
    capabilities = registry.load(implementation).capabilities()
    strategy = drawing.strategy_of(Training, capabilities=capabilities, wrong_calls=frozenset(), world_size=size)

    def judge(training: Training) -> MadeRecord:
        assert pickle.loads(pickle.dumps(training)) == training
        namespace: dict[str, Any] = {}
        exec(source := training.as_case(world_size=size, requirements=["DRAWN-1"]), namespace)
        assert all(len(line) <= 120 for line in source.splitlines())
        assert eval(source_of(training), NAMES) == training
        return record()

    found, ranks = search(judge, strategy=strategy, examples=20)
    assert found is None and len(ranks.ran) > 10


def test_a_description_prints_what_is_not_the_default():
    training = Training(plan=Plan(heads=(Block((Part("wide", 3),), calls=2),)), steps=(Step(), Step(uses=(1,))))
    plan = "Plan(heads=(Block(parts=(Part(kind='wide', width=3),), calls=2),))"
    assert repr(training) == f"Training(plan={plan}, steps=(Step(), Step(uses=(1,))))"
    assert source_of((Part(), Part("wide", 7)), used=100) == "(\n    Part(),\n    Part(kind='wide', width=7),\n)"


CASE = """
from shardproof.testing import drawn, world
from shardproof.testing.train import Training

@world(2)
@drawn(training=Training)
def test_case(rank, training):
    {body}
"""


@pytest.mark.nightly
def test_without_hypothesis_the_cases_are_unmet(pytester, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", PYTHONPATH)
    pytester.makeconftest("import sys; sys.modules['hypothesis'] = None")
    pytester.makepyfile(test_inner=CASE.format(body="pass"))
    options = ("-p", "no:hypothesispytest", "--impl", "reference", "--device", "cpu", "-rs")
    result = pytester.runpytest_subprocess(*QUIET, *options, timeout=120)
    result.stdout.fnmatch_lines(["*unmet: hypothesis (the extra 'fuzz')*"])


# Planted bugs, hangs and crashes too: found and shrunk; the case that is printed fails alike

GRADIENT = "gradient of 'root.parts.0.values' in the {} step"
TO_PASTE = "a case to paste into a file of its own:\n"


class Shrunk(NamedTuple):
    """The verdict on a bug, words of its message, and a part of the training to which it shrinks."""

    verdict: str
    words: str
    training: str


SHRUNK = {
    "forgotten-division": Shrunk("fail", GRADIENT.format("first"), "Training()"),
    "gradient-not-taken": Shrunk("fail", "gradient of 'root.", "Training("),
    "buffer-replaced": Shrunk("fail", GRADIENT.format("first"), "Training(microbatches=2)"),
    "replaced-gradient": Shrunk("fail", GRADIENT.format("first"), "microbatches=2"),
    "unreduced-dropped": Shrunk("fail", GRADIENT.format("first"), "accumulation=Accumulation("),
    "norm-crashes": Shrunk("crash", "SIGABRT", "clip='1'"),
    "norm-hangs": Shrunk("hang", "rank 0 is missing from it", "Training("),
}


def adapter_of(bug):
    return f"planted.adapters:{bug.replace('-', '_')}"


@pytest.fixture(scope="module")
def searched(tmp_path_factory):
    """The records of the drawn case on two ranks, by implementation."""
    names = ["reference", *map(adapter_of, SHRUNK)]
    chosen = ("suites/test_drawn.py::test_any_training", "-k", "w2")
    found, _ = run_cases(tmp_path_factory.mktemp("drawn"), names, *chosen, code=1)
    return {case["implementation"]: case for case in found}


@pytest.mark.nightly
@pytest.mark.parametrize("bug", SHRUNK)
def test_bug_is_found_and_shrunk(searched, bug):
    case, expected = searched[adapter_of(bug)], SHRUNK[bug]
    assert case["verdict"] == expected.verdict
    assert expected.words in case["failure"]["text"]
    assert expected.training in case["failure"]["text"].partition(TO_PASTE)[2]


@pytest.mark.nightly
@pytest.mark.parametrize("bug", SHRUNK)
def test_the_printed_case_fails_alike(searched, bug, tmp_path):
    expected = SHRUNK[bug]
    name = adapter_of(bug)
    path = tmp_path / "test_pasted.py"
    path.write_text(searched[name]["failure"]["text"].partition(TO_PASTE)[2])
    ((case,), _) = run_cases(tmp_path, [name], "-p", "shardproof.plugin", path, "--rootdir", tmp_path, code=1)
    assert (case["verdict"], case["requirement"]) == (expected.verdict, "DRAWN-1")
    assert expected.words in case["failure"]["text"]
