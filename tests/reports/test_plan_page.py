"""The page of plan files: its tables, the data of its plots, and that nothing in a plan becomes part of the page."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("plotly", reason="the page needs its extra: pip install '.[page]'")

from shardproof.__main__ import main
from shardproof.planfile import MARK, VERSION, parse_plan
from shardproof.reports.page import assets, render_plans
from tests.reports import samples
from tests.reports.pages import Page, told

ROOT = Path(__file__).parents[2]
HOSTILE = "</script><script>alert(1)</script><b onload='x'>&amp;"


def plan_data(**changes):
    phases = [
        {"name": "between steps", "at_peak": {"shards": 1024}, "most": {"shards": 1024}},
        {"name": "step", "at_peak": {"shards": 1024, "gradients": 512}, "most": {"shards": 1024, "gradients": 768}},
    ]
    traffic = {
        "group": "shard", "ranks": 4, "kind": "all_gather", "dtype": "float32", "count": 3, "nbytes": 4096,
        "sent": 3072.0, "across": 1536.0,
    }  # fmt: skip
    formula = {"quantity": "shards", "unit": "B", "text": "P x 4 B / S", "value": 1024.0, "simulated": 1024}
    worlds = [
        {"mesh": [{"name": "shard", "size": size}], "hosts": size, "phases": phases, "traffic": [traffic],
         "formulas": [formula]}
        for size in (4, 8)
    ]  # fmt: skip
    return {
        MARK: VERSION, "model": "m:build", "about": "", "numel": 1024, "units": {"Block": 2, "root": 1},
        "implementation": "x", "version": "1", "settings": {"batch": "1 x 8 tokens"}, "rank": 0, "node_size": 1,
        "worlds": worlds,
        "kinds": {"shards": "what it is", "gradients": "what they are"}, "assumptions": ["a ring"],
    } | changes  # fmt: skip


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(plan_data()))
    return path


def test_a_page_of_two_plans(tmp_path, file, capsys):
    other = tmp_path / "other.json"
    other.write_text(json.dumps(plan_data(implementation="y")))
    assert main(["page", str(file), str(other), "-o", str(tmp_path / "out"), "--title", "Ours"]) == 0
    assert re.fullmatch(rf"{tmp_path}/out/index.html: 2 plans, \d\.\d MB\n", capsys.readouterr().out)
    made = Page((tmp_path / "out/index.html").read_text())
    assert "m:build under x" in made.text and "m:build under y" in made.text
    drawn = json.loads(made.unpacked("data"))
    assert [one["name"] for one in drawn] == ["m:build under x", "m:build under y"]
    assert drawn[0]["kinds"] == ["shards", "gradients"] and drawn[0]["unit"] == "KiB"
    assert drawn[0]["memory"] == [[1.0, 1.0], [0.0, 0.5]]
    assert drawn[0]["worlds"] == [4, 8] and drawn[0]["sent"] == [3.0, 3.0] and drawn[0]["across"] == [1.5, 1.5]
    assert "P x 4 B / S" in made.text and "a ring" in made.text and "what they are" in made.text


def test_nothing_in_a_plan_becomes_part_of_the_page():
    plan, harmless = plan_data(shardproof="x", torch="x", command=["x"]), re.sub("[<>&/'=()]", "x", HOSTILE)
    plans = [parse_plan(told(plan, text, names=("Block", "batch"), kept=("unit",))) for text in (harmless, HOSTILE)]
    usual, made = (Page(render_plans([one], title=one.model)) for one in plans)
    assert made.elements == usual.elements
    assert made.scripts["script"] == usual.scripts["script"]
    (policy,) = (value for name, value in made.attributes if name == "content" and "script-src" in value)
    assert assets.content_hash(made.scripts["script"]) in policy


def test_runs_and_plans_do_not_mix(tmp_path, file, capsys):
    run = tmp_path / "run.json"
    run.write_text(json.dumps(samples.journal(samples.case())))
    assert main(["page", str(file), str(run), "-o", str(tmp_path / "out")]) == 2
    said = f"shardproof: {file} is a plan and {run} is none: a page has run files or plan files\n"
    assert capsys.readouterr().err == said


@pytest.mark.parametrize(
    "changes, said",
    [
        ({MARK: 2}, "plan_version: 2 is not supported; supported: 1"),
        ({"worlds": []}, "worlds: it is empty"),
        ({"worlds": [{"mesh": [], "hosts": 1}]}, "worlds[0].mesh: it is empty"),
        ({"numel": "many"}, "numel: 'many' is not an integer"),
    ],
)
def test_a_file_that_is_no_plan_is_one_line(changes, said, tmp_path, capsys):
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(plan_data(**changes)))
    assert main(["page", str(path), "-o", str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err == f"shardproof: {path}: {said}\n"


def test_torch_is_not_needed_to_read_a_plan(tmp_path, file):
    script = "import sys; sys.modules['torch'] = None; from shardproof.__main__ import main; sys.exit(main())"
    command = [sys.executable, "-c", script, "page", file, "-o", tmp_path / "out"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
