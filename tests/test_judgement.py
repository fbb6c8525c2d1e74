"""The file of `--json`: one form for all commands that judge, with the texts that they print."""

import json

import pytest
import torch

from shardproof.__main__ import COMMANDS, main
from shardproof.commands import judgement
from shardproof.jsonfiles import decode
from tests.harness.inner import python
from tests.reports import samples

#: A training of which one layer is in no optimizer, unless the second argument says so; the first is its steps.
SCRIPT = """
import sys, torch
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
trained = model if "healthy" in sys.argv else model[0]
optimizer = torch.optim.AdamW(trained.parameters(), lr=0.01)
for step in range(int(sys.argv[1])):
    model(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
if "raises" in sys.argv:
    raise KeyError("the end")
"""


def judged(path):
    """Read a file of `--json`, of which no field is unknown."""
    data = json.loads(path.read_text())
    assert set(data) == {"judgement_version", "command", "verdict", "items", "text"}
    assert all(set(one) == {"kind", "title", "codes", "lines", "where"} for one in data["items"])
    return decode(judgement.Judgement, data)


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


@pytest.mark.parametrize(
    ("arguments", "code", "verdict"),
    [
        (("3",), 0, "found"),
        pytest.param(("3", "healthy"), 0, "nothing found", marks=pytest.mark.nightly),
        pytest.param(("0",), 0, "not judged", marks=pytest.mark.nightly),
        (("3", "raises"), 1, "not judged"),
    ],
)
def test_of_the_doctor(script, tmp_path, arguments, code, verdict):
    file = tmp_path / "new/found.json"
    done = python("-m", "shardproof", "doctor", "--json", file, script, *arguments, cwd=tmp_path, code=code)
    found = judged(file)
    assert (found.command, found.verdict) == ("doctor", verdict)
    if verdict == "found":
        (one,) = [one for one in found.items if one.kind == "finding"][:1]
        ends = f"{one.title} [{', '.join(one.codes)}]"
        assert f"shardproof doctor: step {one.where['step']}: {ends}\n" in done.stderr
        assert all(f"  {line}\n" in done.stderr for line in one.lines)
        assert main(["explain", *one.codes]) == 0
    if verdict != "not judged":
        assert f"shardproof doctor: {found.text[0]}\n" in done.stderr
    assert (list(found.text) == ["no step was seen"]) == ("0" in arguments)


def test_of_a_second_rank_there_is_none(script, tmp_path, monkeypatch):
    """The ranks of a job have one file."""
    from shardproof.commands import doctor

    monkeypatch.setenv("RANK", "1")
    assert not doctor._is_first()
    monkeypatch.setenv("RANK", "0")
    assert doctor._is_first()


def test_of_compare(script, tmp_path, capsys):
    for name in ("ref", "run"):
        more = ("healthy",) if name == "ref" else ()
        python("-m", "shardproof", "record", "--out", name, script, "3", *more, cwd=tmp_path, code=0)
    file = tmp_path / "found.json"
    ended = main(["compare", str(tmp_path / "ref"), str(tmp_path / "run"), "--json", str(file)])
    printed, found = capsys.readouterr().out, judged(file)
    assert ended == 1 and found.verdict == "found" and list(found.text) == printed.splitlines()
    one = found.items[0]
    assert one.kind == "divergence" and f"first divergence on rank {one.where['rank']}: {one.title}" in printed
    assert {"rank", "step", "stage", "name", "distance", "allowed"} == set(one.where) and one.where["step"] == 0
    ended = main(["compare", str(tmp_path / "ref"), str(tmp_path / "ref"), "--json", str(file)])
    assert ended == 0 and judged(file).verdict == "nothing found"


def test_of_state(tmp_path, capsys):
    before, after, file = tmp_path / "before.pt", tmp_path / "after.pt", tmp_path / "found.json"
    state = {"0.weight": torch.arange(6.0).view(2, 3), "0.bias": torch.ones(2)}
    torch.save(state, before)
    torch.save({"0.weight": state["0.weight"] * 0}, after)
    assert main(["state", str(before), str(after), "--json", str(file)]) == 1
    found = judged(file)
    assert found.verdict == "found" and list(found.text) == capsys.readouterr().out.splitlines()
    assert {(one.kind, one.where["kind"]) for one in found.items} >= {("difference", "missing")}
    assert any(one.title.startswith("0.bias: ") for one in found.items)
    assert main(["state", str(before), str(before), "--json", str(file)]) == 0
    assert judged(file).verdict == "nothing found" and not judged(file).items


def test_of_the_gate(tmp_path, capsys):
    names = {"ours": {"version": "", "capabilities": []}}
    for name, verdict in (("base", "pass"), ("head", "fail")):
        more = {"failure": samples.failure("ValueError: no")} if verdict == "fail" else {}
        case = samples.case(id="a", implementation="ours", nodeid="x.py::test_a[ours-w2]", verdict=verdict, **more)
        data = samples.journal(case) | {"run_id": {"base": "b", "head": "d"}[name] * 32}
        data["environment"] |= {"implementations": names}
        (tmp_path / f"{name}.json").write_text(json.dumps(data))
    file = tmp_path / "found.json"
    paths = [str(tmp_path / f"{name}.json") for name in ("base", "head")]
    assert main(["gate", *paths, "--json", str(file), "--format", "markdown"]) == 1
    found = judged(file)
    assert found.verdict == "found" and [one.where["case"] for one in found.items] == ["a"]
    assert "ValueError: no" in found.items[0].title
    assert main(["gate", paths[0], paths[0], "--json", str(file)]) in (0, 2)


def test_of_check(tmp_path, capsys):
    record = samples.case(id="a", implementation="own", verdict="fail", failure=samples.failure("it diverges\n  so"))
    from shardproof.commands import check
    from shardproof.runfile import CaseRecord

    found = check._judged(decode(CaseRecord, record), 1)
    assert found.verdict == "found" and found.items[0].title == "it diverges" and list(found.items[0].lines) == ["  so"]
    unmet = samples.case(id="a", implementation="own", verdict="unmet", missing=["no GPU"])
    found = check._judged(decode(CaseRecord, unmet), 2)
    assert (found.verdict, list(found.text)) == ("not judged", ["no GPU"])


@pytest.mark.parametrize("command", ["doctor", "compare", "state", "check", "gate"])
def test_a_command_that_judges_has_the_option(command, capsys):
    assert command in COMMANDS
    with pytest.raises(SystemExit):
        main([command, "--help"])
    assert "--json FILE" in capsys.readouterr().out


def test_a_file_that_cannot_be_written_is_one_line(tmp_path, capsys):
    torch.save({"a": torch.ones(2)}, tmp_path / "a.pt")
    (tmp_path / "folder").mkdir()
    assert main(["state", str(tmp_path / "a.pt"), "--json", str(tmp_path / "folder")]) == 2
    assert capsys.readouterr().err == f"shardproof: state: --json {tmp_path}/folder: it is not a regular file\n"


def test_codes_are_read_from_the_ends_of_lines():
    lines = ["every gradient is 0.5 x the reference's: 1 / the size of dp [S1]", "ends [D11, S4]", "[D1] begins", "[x]"]
    assert judgement.codes_in(lines) == ["S1", "D11", "S4"]
