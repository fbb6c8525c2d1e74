"""`check --save-and-resume`: mistakes of a resumption are named by their stage, and right resumptions get nothing."""

import json
import pathlib
import sys
import time

import pytest

from shardproof.commands.check import check as command
from shardproof.harness.training.request import NotCheckable, Request, by_name
from shardproof.harness.training.user_calls import Calls, file_of, line_of
from tests.harness import forked
from tests.harness import resumed_trainings as trainings
from tests.harness.inner import ROOT, python

SCRIPT = pathlib.Path(trainings.__file__)
EXAMPLE = ROOT / "examples/resuming/checkpoint.py"


def answers(folder, cases, *, ranks=2, parts="both"):
    """What is said of cases: by case the first stage, the text, and what the run file has."""
    ran = forked.run(SCRIPT, ranks, str(folder), parts, *cases)
    assert ran.is_complete, ran.text
    found = [json.loads(line) for line in ran.out[0].splitlines() if line.startswith("[")]
    return {case: rest for case, *rest in found}


@pytest.fixture(scope="module")
def mistakes(tmp_path_factory):
    return answers(tmp_path_factory.mktemp("mistakes"), trainings.MISTAKES)


@pytest.fixture(scope="module")
def healthy(tmp_path_factory):
    return answers(tmp_path_factory.mktemp("healthy"), trainings.HEALTHY)


SAID = {
    "the moments of a group are lost": "these are all parameters of AdamW, group 1",
    "the scheduler begins anew": "begins anew: 0.01 at its step 0, as REF's at step 0; REF's is 0.007 at step 3",
    "the random numbers of another rank": "generator of torch on rank 1 is not that of step 3: it is that of rank 0",
    "the loader begins anew": "data of RUN begin anew: its step 0 reads the data of REF's step 0 instead of step 3",
    "moments in bfloat16": "has values of bfloat16 in float32, which cost at most ",
    "the shard of one rank is stale": "and 2 more: has the shard of rank 1 of the run that went on, after step 1",
    "a parameter is not loaded": "head.bias: is that of the run that went on, after step 0",
    "a step too far": "load() returned step 4, and the run had made 3 steps when it was saved",
    "another seed for dropout": "generator of torch on each rank is not that of step 3: no rank of the run has",
    "the average is forgotten": "and 2 more: is that of the run that went on, after step 0",
}


@pytest.mark.parametrize("case", trainings.MISTAKES)
def test_a_mistake_is_named_by_its_stage(mistakes, case):
    lost, text, own = mistakes[case]
    assert lost == trainings.MISTAKES[case][1], text
    assert f"resumed after 3 steps: {lost}: " in text.splitlines()[0] and SAID[case] in text, text
    assert own["lines"] and own["compared"] > 20 and not own["notes"]


@pytest.mark.parametrize("case", trainings.HEALTHY)
def test_a_right_resumption_gets_nothing(healthy, case):
    lost, text, own = healthy[case]
    assert (lost, own["notes"]) == ("", []), text
    assert own["lines"] == ["the state after load() and all steps are equal bit by bit"]


@pytest.mark.nightly
def test_siblings_of_the_mistakes_are_named(tmp_path):
    found = answers(tmp_path, trainings.SIBLINGS)
    assert {case: lost for case, (lost, _, _) in found.items()} == {
        case: stage for case, (_, stage) in trainings.SIBLINGS.items()
    }
    assert "is that of the run that went on, after step 4" in found["a save that is not staged"][1]


@pytest.mark.nightly
def test_on_another_number_of_ranks(tmp_path):
    cases = trainings.OTHER_MESH
    answers(tmp_path, cases, parts="run")
    found = answers(tmp_path, cases, ranks=1, parts="again")
    assert {case: lost for case, (lost, _, _) in found.items()} == {case: stage for case, (_, stage) in cases.items()}
    for case, (lost, _, own) in found.items():
        assert lost or own["lines"][0].startswith("the state after load() is equal bit by bit, steps are within "), case
    assert "is 0.5 times what it was" in found["moments of another mesh are halved"][1]


# The command.


def checked(*options, names=("objects", "save", "load"), file=EXAMPLE, **variables):
    every = ("model", "parallelize", "optimizer", "data", "step", *names)
    functions = [word for name in every for word in (f"--{name}", f"{file}:{name}")]
    return python("-m", "shardproof", "check", "--save-and-resume", "2", "--steps", "1", "--device", "cpu", *functions,
                  *options, OMP_NUM_THREADS="1", timeout=600, **variables)  # fmt: skip


@pytest.mark.nightly
def test_a_file_that_a_rank_lacks_is_one_line():
    done = checked("--mesh", "1", "--resume-mesh", "2")
    line = f"fail  {EXAMPLE}:model, own, mesh dp=2: load() raised on rank 1 of 2: FileNotFoundError: "
    assert done.returncode == 1 and done.stdout.startswith(line), done.stdout + done.stderr
    first, *rest = done.stdout.splitlines()
    assert "rank1.pt" in first and first.endswith(")") and "(checkpoint.py, line " in first
    assert len(rest) == 1 and rest[0].startswith("reproduce: "), rest


@pytest.mark.nightly
def test_the_resumed_part_has_processes_of_its_own(tmp_path):
    report, found = (str(tmp_path / name) for name in ("run.json", "found.json"))
    done = checked("--mesh", "2", "--keep", str(tmp_path / "kept"), "--report", report, "--json", found)
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(pathlib.Path(found).read_text())["verdict"] == "nothing found"
    first, _, agree = done.stdout.splitlines()
    assert first.endswith("1 steps agree with the run that was saved after 2 steps and went on")
    assert agree == "  agree     the state after load() and all steps are equal bit by bit"
    ids = [json.loads(file.read_text())["process"] for file in (tmp_path / "kept").glob("*-rank?.json")]
    assert len(set(ids)) == 4


@pytest.mark.nightly
@pytest.mark.parametrize(
    "mistake, stage",
    [("moments", "moments"), ("scheduler", "learning rates"), ("loader", "data position"), ("average", "average")],
)  # fmt: skip
def test_the_mistakes_of_the_example(mistake, stage, tmp_path):
    done = checked("--mesh", "2", "--json", str(tmp_path / "found.json"), MISTAKE=mistake)
    assert done.returncode == 1 and f"resumed after 2 steps: {stage}: " in done.stdout, done.stdout + done.stderr
    (item,) = json.loads((tmp_path / "found.json").read_text())["items"]
    assert f"fail  {item['title']}" == done.stdout.splitlines()[0]


@pytest.mark.nightly
def test_a_function_that_hangs_is_named(tmp_path):
    (tmp_path / "hanging.py").write_text(
        f"import sys, time\nsys.path.insert(0, {str(EXAMPLE.parent)!r})\nfrom checkpoint import *\n"
        "_save = save\n\ndef save(model, optimizer, scheduler, loader, average, folder, step):\n"
        "    time.sleep(10**6 * dist.get_rank())\n"
        "    _save(model, optimizer, scheduler, loader, average, folder, step)\n"
    )
    done = checked("--mesh", "2", "--deadline", "30", file=tmp_path / "hanging.py")
    assert done.returncode == 1 and "save() has not returned on rank" in done.stdout, done.stdout + done.stderr


HERE = "tests.harness.resumed_trainings"
OWN = ("--model", f"{HERE}:model", "--parallelize", f"{HERE}:parallelize", "--mesh", "2", "--device", "cpu")
LINES = [
    (("--save", f"{HERE}:save"), "--save is of --save-and-resume N, which is not given"),
    (("--resume-mesh", "4"), "--resume-mesh is of --save-and-resume N, which is not given"),
    (("--save-and-resume", "2", "--save", f"{HERE}:save"), "--save and --load belong together: give both, or none for"),
    (("--save-and-resume", "2", "--bisect"), "--bisect and --explain are of a check without --save-and-resume"),
    (
        ("--save-and-resume", "2", "--resume-mesh", "tp=2"),
        "--data-dims: name the dimensions of tp over",
    ),
    (("--save-and-resume", "2", "--objects", f"{HERE}:nothing"), "has no function 'nothing'"),
]


@pytest.mark.parametrize("options, text", LINES)
def test_an_option_that_is_not_valid_is_one_line(options, text, monkeypatch, capsys):
    monkeypatch.setattr(sys, "path", [*sys.path])
    assert command([*OWN, *options]) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.count("\n") == 1 and said.err.startswith("shardproof check: ")
    assert text in said.err, said.err


def test_arguments_are_given_by_their_names():
    def save(model, folder, *, ema=None, other=1):
        raise NotImplementedError

    given = {"model": 1, "folder": 2, "scheduler": 3, "ema": 4}
    assert by_name(save, given) == {"model": 1, "folder": 2, "ema": 4}
    assert by_name(save, given, 1) == {"folder": 2, "ema": 4} and by_name(None, given) == {}
    with pytest.raises(NotCheckable, match=r"^check: save\(\) needs 'folder'; there are model: objects\(\) returns"):
        by_name(save, {"model": 1})


def called(folder, request, rank, name, error=None):
    with Calls(file_of(folder, request, rank)).of(name):
        if error is not None:
            raise error


def test_the_rank_that_raised_first_is_named(tmp_path):
    request = Request(model="m", mesh=(("dp", 3),))
    assert line_of(tmp_path, request) == ""
    for rank in (1, 0):  # rank 0 fails because rank 1 has
        called(tmp_path, request, rank, "model()")
        with pytest.raises(OSError):
            called(tmp_path, request, rank, "save()", OSError(f"rank {rank}\nis full"))
        time.sleep(0.01)
    line = line_of(tmp_path, request)
    assert line.startswith("save() raised on rank 1 of 3: OSError: rank 1") and "test_save_and_resume.py, line" in line
    assert "\n" not in line
    again = Request(model="m", mesh=(("dp", 2),), readers=3)
    for rank in range(2):
        with pytest.raises(ValueError):
            called(tmp_path, again, rank, "load()", ValueError("no such key"))
    assert line_of(tmp_path, again).startswith("load() raised on all 2 ranks: ValueError: no such key")


def test_a_function_that_does_not_return_is_named(tmp_path):
    request = Request(model="m", mesh=(("dp", 3),))
    called(tmp_path, request, 0, "save()")
    calls = [Calls(file_of(tmp_path, request, rank)).of("save()") for rank in (1, 2)]
    for one in calls:
        one.__enter__()
    assert line_of(tmp_path, request) == "save() has not returned on ranks 1-2 of 3"
