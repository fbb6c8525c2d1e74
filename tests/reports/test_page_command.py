"""`shardproof page`, as a user starts it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.reports import samples

pytest.importorskip("plotly", reason="the page needs its extra: pip install '.[page]'")

ROOT = Path(__file__).parents[2]


def page(*arguments, without=""):
    """Run the command line in a process of its own, perhaps as if a package were not installed."""
    script = "import sys; from shardproof.__main__ import main\n"
    script += f"sys.modules[{without!r}] = None\n" if without else ""
    script += "code = main(); print('torch' in sys.modules, file=sys.stderr) if code == 0 else None; sys.exit(code)"
    command = [sys.executable, "-c", script, "page", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


@pytest.fixture
def run(tmp_path):
    path = tmp_path / "run.json"
    path.write_text(json.dumps(samples.journal(samples.case(verdict="fail", failure=samples.whole_case()["failure"]))))
    return path


def test_it_writes_one_file_and_says_where(tmp_path, run):
    folder = tmp_path / "a" / "b"
    done = page(run, "-o", folder, "--title", "Ours & theirs")
    assert done.returncode == 0, done.stderr
    assert [path.name for path in folder.iterdir()] == ["index.html"]
    size = (folder / "index.html").stat().st_size
    assert done.stdout == f"{folder}/index.html: 1 run, 1 record, {size / 1e6:.1f} MB\n"
    assert done.stderr == "False\n", "torch is not loaded"
    text = (folder / "index.html").read_text()
    assert text.startswith("<!DOCTYPE html>") and "<title>Ours &amp; theirs</title>" in text


def test_several_runs_and_a_journal(tmp_path, run):
    other = tmp_path / "other.json.partial"
    other.write_text(json.dumps(samples.journal(samples.case(), reason="SIGTERM") | {"run_id": "f" * 32}))
    done = page(run, other, "-o", tmp_path / "out")
    assert (done.returncode, done.stdout.split(": ")[1].split(", ")[:2]) == (0, ["2 runs", "2 records"])


@pytest.mark.parametrize("package", ["jinja2", "plotly"])
def test_without_its_extra_it_says_what_to_install(tmp_path, run, package):
    done = page(run, "-o", tmp_path / "out", without=package)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "shardproof: the page needs packages that are not installed; install them with: pip install 'shardproof[page]' "
        f"({package} is missing)\n"
    )
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("content", [None, "{", '{"schema_version": 3}'], ids=["missing", "no JSON", "version"])
def test_bad_input_is_one_line_and_writes_nothing(tmp_path, run, content):
    path = tmp_path / "bad.json"
    if content is not None:
        path.write_text(content)
    done = page(run, path, "-o", tmp_path / "out")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"shardproof: {path}: ") and done.stderr.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_a_run_given_twice_is_refused(tmp_path, run):
    copy = tmp_path / "copy.json"
    copy.write_bytes(run.read_bytes())
    done = page(run, copy, "-o", tmp_path / "out")
    assert (done.returncode, done.stderr) == (2, f"shardproof: {run} and {copy} are of the same run: give it once\n")


def test_a_page_that_cannot_be_written_is_one_line(tmp_path, run):
    (tmp_path / "file").touch()
    done = page(run, "-o", tmp_path / "file")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"shardproof: {tmp_path}/file: File exists\n"


def test_texts_that_are_no_unicode_do_not_stop_it(tmp_path):
    path = tmp_path / "run.json"
    data = samples.journal(samples.case(id="\ud800"))
    data["environment"]["torch"] = "\ud800"
    path.write_text(json.dumps(data))
    done = page(path, "-o", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    assert r"\ud800" in (tmp_path / "out/index.html").read_bytes().decode()
