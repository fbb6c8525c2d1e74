"""What planted/frozen.py writes of records and findings, how it goes on after a kill, and what a difference is."""

import importlib.util
import json
import pathlib
from collections.abc import Iterator

import pytest
import torch

from planted import frozen, table
from shardproof.harness.judging import signatures
from shardproof.harness.training.findings import DoctorFinding
from tests import test_healthy as healthy

FAILURE = {"stage": "gradient", "step": 0, "rank": 1, "name": "0.weight", "element": [3], "host": ""}


@pytest.mark.parametrize(
    ("text", "own", "signature"),
    [
        (
            "a title: gradient of '0.weight'\n  8 elements differ\n  it is 2 times the oracle's everywhere, as when",
            {},
            "S1",
        ),
        ("a title\n  it equals the norm of this rank's shards alone", {}, "S6"),
        ("Unhealthy: step 0: gradients are not reduced [D11, S2]", {}, "S2"),
        ("a title\n  it is zero", {}, ""),
        ("a title\n  it is 2 times the oracle's everywhere", {"signature": ""}, ""),
        ("loss of the model in step 0\n  each microbatch counts alike", {"signature": "S5"}, "S5"),
    ],
)
def test_a_failure_has_its_place_and_signature(text: str, own: dict[str, str], signature: str) -> None:
    record = {"verdict": "fail", "failure": FAILURE | {"text": text}, "own": own}
    place = {"stage": "gradient", "step": 0, "rank": 1, "name": "0.weight"}
    assert frozen.line_of(record) == {"verdict": "fail", "found": [place | {"signature": signature}]}


def test_what_did_not_fail_and_what_was_drawn_has_no_place() -> None:
    assert frozen.line_of({"verdict": "pass", "failure": None}) == {"verdict": "pass"}
    assert frozen.line_of(None) == {"verdict": "not run"}
    drawn = {"verdict": "fail", "failure": FAILURE | {"text": "found by example 3"}, "examples": 3}
    assert frozen.line_of(drawn) == {"verdict": "fail", "examples": 3}


def test_each_sentence_of_the_table_tells_its_signature() -> None:
    torch.manual_seed(0)
    own = {rank: [torch.randn(40, dtype=torch.float64) for _ in range(3)] for rank in range(4)}
    earlier = [torch.randn(40, dtype=torch.float64) for _ in range(2)]
    made = [*signatures._candidates(own, 1, {"dp": (0, 1)}, earlier)]
    wrong = [one for one in made if frozen.signature_of(f"a title\n  it {one.text}") != one.signature]
    assert not wrong and {one.signature for one in made} == {"S2", "S3", "S4", "S12"}
    total = signatures.total(own)
    reduced = signatures.diagnose(total + sum(own[1]), own, rank=1, groups={}, tolerance=1e-6)
    weights = signatures.diagnose(
        sum(weight * part for parts in own.values() for weight, part in zip((1, 2, 5), parts, strict=True)),
        own, rank=1, groups={}, tolerance=1e-6,
    )  # fmt: skip
    for one in (reduced, weights):
        assert one is not None and frozen.signature_of(f"it {one.text}") == one.signature
    guesses = {
        "S1": signatures.guess_from_values(total * 2, total, magnitude=100.0),
        "S13": signatures.guess_from_values(total.float().bfloat16().float(), total, magnitude=100.0),
        "S6": signatures.guess_norm(1.0, 2.0, 1.0, 4, 2.0),
        "S5": signatures.guess_weights(own[0][0] + 2 * own[0][1], {"a": own[0][0], "b": own[0][1]}),
    }
    assert {key: frozen.signature_of(one.seen) for key, one in guesses.items() if one} == {key: key for key in guesses}


def test_a_finding_has_the_parameters_and_ranks_that_it_names() -> None:
    lines = (
        "ranks 0-1 and ranks 2-3 (tp) hold the same elements of 'b' and 'a' of 'other'",
        "2 ranks; rank 1 has more",
    )
    found = frozen.finding_of(DoctorFinding(("D2",), "S9", 1, "copies differ", lines, is_note=True), ["a", "b", "c"])
    assert found == {
        "checks": ["D2"], "signature": "S9", "step": 1, "is_note": True, "names": ["a", "b"],
        "ranks": ["0-1", "1", "2-3"],
    }  # fmt: skip


def test_a_file_goes_on_where_it_was_killed(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = []

    def run(name: str, is_broken: bool) -> Iterator[frozen.Line]:
        runs.append(name)
        yield {"id": name, "verdict": "pass"}
        if is_broken:
            raise RuntimeError("pytest ended with 4")

    def make(*broken: str, seconds: float = 60, only: str = "") -> int:
        works = [frozen.Work("rows", one, lambda _, one=one: run(one, one in broken)) for one in ("a", "b", "c")]
        monkeypatch.setattr(frozen, "PARTS", {"rows": lambda: works})
        return frozen.make(path, ["rows"], jobs=1, seconds=seconds, only=only)

    path = tmp_path / "frozen.jsonl"
    assert make(seconds=0) == 1 and frozen.read(path) == runs == []
    assert make("b", only="a|b") == 1 and runs == ["a", "b"]
    assert "rows b: RuntimeError: pytest ended with 4\n0 done before, 1 done, 1 failed" in capsys.readouterr().out
    with path.open("a") as file:
        file.write('{"part": "rows", "id": "cu')
    assert frozen.compare(path, path) == 0 and path.read_text().endswith('"cu')
    assert make() == 0 and runs == ["a", "b", "b", "c"]
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line.get("id") or line["done"] for line in lines] == ["a", "a", "b", "b", "c", "c"]


def test_each_difference_has_a_line(tmp_path: pathlib.Path) -> None:
    def line(name: str, verdict: str, *found: frozen.Line) -> frozen.Line:
        return {"part": "rows", "id": name, "verdict": verdict, "found": [*found]}

    old = [line("a", "pass"), line("b", "fail", FAILURE), line("c", "fail", FAILURE), {"part": "rows", "done": "x"}]
    new = [line("d", "pass"), line("c", "fail", FAILURE | {"rank": 0}, {"step": 2}), line("b", "fail", FAILURE)]
    assert [*frozen.differences(old, new)] == [
        "rows a: missing", "rows c: found 1 -> 2", "rows c: 0.rank 1 -> 0", "rows c: 1.step null -> 2", "rows d: new",
    ]  # fmt: skip
    with pytest.raises(SystemExit, match=r"missing.jsonl: there is no such file"):
        frozen.compare(tmp_path / "missing.jsonl", tmp_path)


def test_an_item_that_was_renamed_is_the_same() -> None:
    old, new = (
        [{"part": "standard", "id": f"suites/test_prefetch.py::{name}[torch.fsdp-w2-{when}]", "verdict": "pass"}]
        for name, when in (("test_units_that_run_twice", "never"), ("test_units_that_run_twice", "none"))
    )
    assert [*frozen.differences(old, new)] == []


def test_all_that_is_judged_has_its_work() -> None:
    works = {part: [work.name for work in make()] for part, make in frozen.PARTS.items()}
    assert all(len(names) == len(set(names)) for names in works.values())
    told = {name.partition("/")[2].removesuffix("-healthy").split("-")[0] for name in works["scripts"]}
    needed = {row.name for row in healthy.INDEX.values() for one in row.needs.split(", ") if not _is_there(one)}
    folders = [frozen.EXAMPLES / name for name in ("healthy", "incidents", "loops")]
    assert {path.stem for folder in folders for path in folder.glob("*.py")} - told - needed == {"common"}
    by_part = {part: {name.split()[0] for name in works[part]} for part in ("rows", "standard")}
    bugs = table.every().values()
    assert by_part["rows"] == {bug.file for bug in bugs if bug.gpus <= torch.cuda.device_count()}
    assert by_part["standard"] == {bug.file for bug in bugs}
    assert len(works["standard"]) == 4 * len(by_part["standard"])


def _is_there(package: str) -> bool:
    return not package or importlib.util.find_spec(package) is not None


#: Of each part some that are quick: each kind of script, and a row that a guess explains.
SAMPLE = (
    "^(twin/ddp_plain|healthy/lora-w2|incident/g06.*|compare/g15.*|check/g12.*parallelize|90546)$|BROKEN/closure loses"
)


@pytest.mark.nightly
def test_a_tree_says_the_same_twice(tmp_path: pathlib.Path) -> None:
    old, new = tmp_path / "old.jsonl", tmp_path / "new.jsonl"
    for path in (old, new):
        assert frozen.make(path, ["history", "scripts"], jobs=2, seconds=600, only=SAMPLE) == 0
        assert frozen.make(path, ["rows"], jobs=1, seconds=600, only="test_evaluation.py.* 0$") == 0
    lines = frozen.read(old)
    assert [*frozen.differences(lines, frozen.read(new))] == []
    found = {one["id"]: [each["signature"] for each in one["found"]] for one in lines if one.get("found")}
    assert found["twin/ddp_plain"] == ["S11"] and found["check/g12_reversed_shards-parallelize"] == ["S12"]
    assert not any("no report" in str(one) for one in lines) and all(one.get("as_row", True) for one in lines)
