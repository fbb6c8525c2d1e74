"""A run file knows the commit of shardproof and the files of its cases, and git costs a run next to nothing."""

import json
import os
import pathlib
import subprocess

import pytest
import torch

import shardproof
from shardproof.harness.plugin import origin
from tests.harness.inner import CASE

PACKAGE = pathlib.Path(shardproof.__file__).parent


def git(folder, *arguments):
    author = {f"GIT_{who}_{what}": "x@y" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    done = subprocess.run(["git", *arguments], cwd=folder, env=os.environ | author, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture
def clone(tmp_path):
    """A folder `shardproof` with one file, committed, in a repository inside another one."""
    package = tmp_path / "around/clone/shardproof"
    package.mkdir(parents=True)
    (package / "a.py").write_text("1\n")
    for root in (tmp_path / "around", package.parent):
        git(root, "init", "-q")
        git(root, "add", "." if root == package.parent else "clone/shardproof/a.py")
        git(root, "commit", "-q", "-m", root.name)
    return package


def executable(path, script):
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path.parent


def test_the_commit_of_a_clone(clone):
    head = git(clone, "rev-parse", "HEAD")
    assert origin.commit(clone) == head
    (clone / "new.py").touch()
    assert origin.commit(clone) == head, "a file that git does not track is none of the commit"
    (clone / "a.py").write_text("2\n")
    assert origin.commit(clone) == f"{head}-dirty"


def test_the_repository_of_a_hook_is_not_that_of_the_clone(clone, monkeypatch):
    head = git(clone, "rev-parse", "HEAD")
    monkeypatch.setenv("GIT_DIR", str(clone.parents[1] / ".git"))
    assert origin.commit(clone) == head


@pytest.mark.parametrize("left", ["nothing", "an empty .git", "a repository without a commit"])
def test_the_repository_around_the_clone_is_not_its_own(clone, left):
    (clone.parent / ".git").rename(clone.parent / "gone")
    if left != "nothing":
        (clone.parent / ".git").mkdir()
    if left == "a repository without a commit":
        git(clone, "init", "-q")
    assert origin.commit(clone) == "unknown"


def test_a_repository_of_another_user(clone, monkeypatch):
    monkeypatch.setenv("GIT_TEST_ASSUME_DIFFERENT_OWNER", "1")
    assert origin.commit(clone) == "unknown"


@pytest.mark.parametrize("script", [None, "exit 1", "echo tag-1-gabc", "exec sleep 100"])
def test_git_that_is_missing_fails_or_hangs(clone, tmp_path, monkeypatch, script):
    folder = tmp_path / "bin"
    if script is not None:
        executable(folder / "git", script)
        folder = f"{folder}:{os.environ['PATH']}"
    monkeypatch.setenv("PATH", str(folder))
    if script == "exec sleep 100":
        monkeypatch.setattr(origin, "_MOST_SECONDS", 0.2)
    assert origin.commit(clone) == "unknown"


@pytest.mark.parametrize(("written", "commit"), [("abc\n", "abc"), ("unknown\n", "unknown"), ("", "unknown")])
def test_what_the_build_has_written_counts(clone, written, commit):
    (clone / "commit.txt").write_text(written)
    assert origin.commit(clone) == commit


def test_the_version_is_that_of_the_code_and_not_of_what_is_installed(clone):
    project = clone.parent / "pyproject.toml"
    project.write_text('[project]\nname = "shardproof"\nversion = "7.8"\n')
    assert origin.version(clone) == "7.8"
    project.write_text('[project]\nname = "theirs"\nversion = "7.8"\n')
    assert origin.version(clone) != "7.8"


def test_a_hash_is_of_names_and_bytes(tmp_path):
    (tmp_path / "a").write_bytes(b"1")
    (tmp_path / "b").write_bytes(b"2")
    one, other = tmp_path / "a", tmp_path / "b"
    files = [{"x": one, "y": other}, {"x": other, "y": one}, {"x": one}, {"z": one}, {"x": tmp_path / "gone"}]
    hashes = [*map(origin.hash_of, files)]
    assert len(set(hashes)) == 5
    assert hashes[0] == origin.hash_of({"y": other, "x": one}), "their order does not matter"


@pytest.mark.nightly
@pytest.mark.skipif(not (PACKAGE.resolve().parent / ".git").exists(), reason="these sources are no clone")
@pytest.mark.parametrize("workers", ["0", "2"])
def test_a_run_asks_git_once_and_its_ranks_do_not(run, pytester, monkeypatch, workers):
    log = pytester.path / "git.log"
    folder = executable(pytester.path / "bin/git", f"echo $$ >> {log}\nexec /usr/bin/env echo {'ab' * 20}")
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    found = []
    for body in ("pass", "pass", "assert rank"):
        run(CASE.format(body=body), "-n", workers, "--report", "run.json", own_process=True).assert_outcomes(passed=1)
        found.append(json.loads((pytester.path / "run.json").read_text()))
    assert len(log.read_text().splitlines()) == 3
    assert {one["environment"]["shardproof_commit"] for one in found} == {"ab" * 20}
    assert {one["environment"]["torch_git_version"] for one in found} == {torch.version.git_version}
    assert found[0]["suites"] == found[1]["suites"] != found[2]["suites"], "the file of the cases has changed"


def test_chapters_of_our_own_suites_have_the_hash_of_all(monkeypatch, tmp_path):
    from shardproof.harness.plugin import packaged
    from shardproof.harness.plugin.state import _hash_of_suites

    chapters = [{f"suites/{name}": PACKAGE / "suites" / name} for name in ("test_tied.py", "test_state.py")]
    assert _hash_of_suites(chapters[0]) == _hash_of_suites(chapters[1])
    names = packaged.files()
    assert {"suites/test_tied.py", "suites/standard.toml", "suites/expectations/torch.fsdp.toml"} <= names.keys()
    own = tmp_path / "test_own.py"
    own.write_text("1")
    both = _hash_of_suites(chapters[0] | {"test_own.py": own})
    assert both not in (_hash_of_suites(chapters[0]), _hash_of_suites({"test_own.py": own}))
