"""The runner of public programs (examples/programs), on a program made here; `tox -e programs` runs the public ones."""

import importlib.util
import pathlib
import subprocess
import sys
import types

import pytest

from tests.harness.inner import ROOT

PROGRAMS = ROOT / "examples/programs"

SCRIPT = '''"""A loop."""

from __future__ import annotations

import torch

torch.distributed.init_process_group("nccl")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 2).cuda(), device_ids=[0])
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(100):
    optimizer.zero_grad()
    loss = model(torch.randn(3, 4).to("cuda:0")).square().mean()
    loss.backward()
    optimizer.step()
'''


@pytest.fixture(scope="module")
def run() -> types.ModuleType:
    spec = importlib.util.spec_from_file_location("programs_run", PROGRAMS / "run.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look for it
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def clone(tmp_path: pathlib.Path) -> pathlib.Path:
    folder = tmp_path / "clones/made"
    folder.mkdir(parents=True)
    (folder / "loop.py").write_text(SCRIPT)
    who = ("-c", "user.name=x", "-c", "user.email=x@example.com")
    for command in (("init", "-q"), ("add", "."), (*who, "commit", "-q", "-m", "x")):
        subprocess.run(["git", *command], cwd=folder, check=True)
    return folder


def row(run: types.ModuleType, clone: pathlib.Path, **changes: object) -> object:
    fields = {
        "name": "made", "repository": "nobody/made", "revision": run.revision_of(clone), "script": "loop.py",
        "edits": {"loop.py": [(14, "", "on_cpu.loss(loss)")]},
        "mistake": "the module is called", "planted": {"loop.py": [(12, "model(", "model.module(")]}, "found": "D11",
    }  # fmt: skip
    return run.Program(**fields | changes)


def test_each_row_is_complete(run: types.ModuleType) -> None:
    rows = run.read()
    assert len(rows) >= 15 and len({row.name for row in rows}) == len(rows)
    assert len({row.repository for row in rows}) >= 15
    page = (ROOT / "docs/programs.md").read_text()
    for one in rows:
        assert len(one.revision) == 40 and one.edits and one.planted and one.mistake, one.name
        assert one.judged or not (one.findings or one.notes), one.name
        assert f"| {one.name} | `{one.revision[:12]}` |" in page and f"| {one.mistake} |" in page, one.name


def test_a_clone_is_copied_and_edited(run: types.ModuleType, clone: pathlib.Path, tmp_path: pathlib.Path) -> None:
    text = (run.prepared(row(run, clone), clone, tmp_path / "copy", planted=True) / "loop.py").read_text()
    assert "__future__ import annotations\n\nimport on_cpu\nimport torch\n" in text
    assert "    on_cpu.loss(loss)\n    optimizer.step()\n" in text and "model.module(torch" in text
    assert (clone / "loop.py").read_text() == SCRIPT


def test_an_unusable_clone_gets_one_line(
    run: types.ModuleType, clone: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    def said(code: int, **changes: object) -> str:
        monkeypatch.setattr(run, "read", lambda: [row(run, clone, **changes)])
        monkeypatch.setattr(run, "make_data", lambda folder: None)
        assert run.main(["--checkouts", str(clone.parent)]) == code
        return capsys.readouterr().out.splitlines()[0]

    assert (
        said(2, revision="0" * 40) == f"made: {clone} is at {run.revision_of(clone)[:12]}, and the row at 000000000000"
    )
    line = "made: the patch does not apply: loop.py:12 has no 'absent'"
    assert said(2, edits={"loop.py": [(12, "absent", "")]}) == line
    assert said(2, edits={"other.py": [(1, "", "x")]}) == "made: the patch does not apply: no other.py"
    assert said(0, repository="nobody/other").startswith(f"skipped: made: no {clone.parent / 'other'}")
    (clone / ".git").rename(clone / "git")
    assert said(2, revision="0" * 40) == f"made: {clone} is no checkout of git"
    monkeypatch.delenv(run.VARIABLE, raising=False)
    assert run.main([]) == 0 and capsys.readouterr().out.startswith("skipped: no folder of checkouts is named")


@pytest.mark.nightly
def test_a_program_is_run_and_its_mistake_is_found(
    run: types.ModuleType, clone: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    outcome = run.examine(row(run, clone), clone, tmp_path, None)
    assert list(outcome.problems) == [], outcome.watched.text + outcome.broken.text
    assert outcome.row().endswith("| equal | none | none |  | the module is called | D11 |")
    other = run.Outcome(
        row(run, clone, notes=("D9",), found="D1"), *(getattr(outcome, k) for k in ("plain", "watched", "broken"))
    )
    assert list(other.problems) == ["notes: none instead of D9", "the mistake is not found by D1: D11"]
