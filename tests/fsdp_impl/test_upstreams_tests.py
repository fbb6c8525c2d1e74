"""``tests/fsdp_impl/upstream``, which runs torch's own tests against the reference, shown with a file of our own."""

import json
import pathlib
import subprocess

import pytest

from tests.fsdp_impl.upstream import __main__ as command
from tests.fsdp_impl.upstream import exchange, private, sources, table
from tests.fsdp_impl.upstream.running import Outcome, Ran

ROOT = pathlib.Path(__file__).parents[2]
# As upstream's files import: under other names, from private modules, through helpers of torch.testing.
FILE = """
import functools
import os
import time
import unittest
from unittest import mock

import torch
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, fully_shard, name_of_a_newer_torch
from torch.distributed.fsdp._fully_shard import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup, another_name_of_a_newer_torch
from torch.testing._internal.common_fsdp import FSDPTest, patch_unshard
from vendor import device


class TestNames(unittest.TestCase):
    def test_names(self):
        self.assertEqual({one.__module__.partition(".")[0] for one in (FSDP, FSDPModule, fully_shard)}, {EXPECTED})

    def test_only_torch(self):
        FSDPParamGroup
        self._look(fully_shard)

    def _look(self, function):
        self.assertEqual(function.__module__, "torch.distributed.fsdp")
        getattr(function, "_handle", None)

    def test_only_reference(self):
        self.assertTrue(fully_shard.__module__.startswith("fsdp_impl"))

    def test_crash(self):
        os.abort()

    def test_hang(self):
        time.sleep(600)

    def test_newer(self):
        name_of_a_newer_torch()

    def test_helper(self):
        self.assertTrue(callable(patch_unshard))

    @unittest.skip("Need at least 4 CUDA devices")
    def test_four(self):
        pass


class TestRanks(FSDPTest):
    @property
    def world_size(self):
        return min(2, torch.cuda.device_count())

    def test_ranks(self):
        self.assertEqual(torch.distributed.get_world_size(), 2)
        self.assertTrue(fully_shard.__module__.startswith(("fsdp_impl", "torch")))
"""


@pytest.fixture
def checkout(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """Make a checkout with one file, and a table of sources that has its row alone."""
    rows = tmp_path / "sources.toml"
    rows.write_text(
        sources.TABLE.read_text().partition("[[source]]")[0]
        + '[[source]]\nname = "own"\nrepository = "own/tests"\nrevision = "v{torch}"\nfiles = ["test/test_*.py"]\n'
        + "patch = [['^from vendor import device$', ''], ['EXPECTED', '\"fsdp_impl\"']]\n"
    )
    monkeypatch.setattr(sources, "TABLE", rows)
    path = tmp_path / "own/test/test_own.py"
    path.parent.mkdir(parents=True)
    path.write_text(FILE)
    return tmp_path / "own"


@pytest.mark.nightly
@pytest.mark.parametrize("parts", ["1", "4"])
def test_a_run_of_both_implementations(
    checkout: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str], parts: str
) -> None:
    """Names are exchanged in the file and in its ranks; a crash and a hang cost their own test, in parts too."""
    (checkout / "test/test_broken.py").write_text("import no_such_module")
    results = tmp_path / "results.json"
    given = ["--checkout", f"own={checkout}", "--device", "cpu", "--ranks", "2", "--limit", "20", "--parts", parts]
    assert command.main([*given, "--results", str(results)]) == 0
    ran = json.loads(results.read_text())["files"]["own/test_own.py"]
    outcomes = {test: [ran[half]["outcomes"][test]["outcome"] for half in command.IMPLEMENTATIONS]
                for test in ran["torch"]["outcomes"]}  # fmt: skip
    assert outcomes == {
        "TestNames.test_names": ["pass", "fail"],
        "TestNames.test_only_torch": ["fail", "pass"],
        "TestNames.test_only_reference": ["pass", "fail"],
        "TestNames.test_crash": ["crash", "crash"],
        "TestNames.test_hang": ["hang", "hang"],
        "TestNames.test_newer": ["skip", "skip"],
        "TestNames.test_helper": ["pass", "pass"],
        "TestNames.test_four": ["skip", "skip"],
        "TestRanks.test_ranks": ["pass", "pass"],
    }
    said = capsys.readouterr().out
    assert (
        "| own/test_own.py | 9 | 5 | 2 | 2 | 1 | 1 | torch fails it too 2; needs 4 devices 1; torch lacks a name 1 |"
        in said
    )
    assert "| own/test_broken.py | 0 | 0 | 0 | 0 | 0 | 0 | not usable: ModuleNotFoundError: " in said


def test_private_names_are_read_from_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    found = private.names_by_test(FILE)
    assert {test: sorted(names) for test, names in found.items() if names} == {
        "TestNames.test_only_torch": [
            "._handle",
            "torch.distributed.fsdp._fully_shard._fsdp_param_group.FSDPParamGroup",
        ],
        "TestNames.test_helper": [
            "torch.distributed.fsdp._fully_shard._fsdp_param_group.FSDPParamGroup",
            "torch.distributed.fsdp._fully_shard._fsdp_param_group.FSDPParamGroup.unshard",
        ],
    }


def test_a_test_with_parameters_is_found_under_its_written_name() -> None:
    written = {"TestA.test_x": 0, "TestA.test_x_long": 0, "TestB.test_x": 0}
    assert private.written_name("TestACUDA.test_x_long_3_cuda", written) == "TestA.test_x_long"
    assert private.written_name("TestC.test_x", written) is None


def test_every_public_name_of_both_is_exchanged() -> None:
    import torch.distributed.fsdp as theirs

    import fsdp_impl
    import fsdp_impl.wrap

    pairs = exchange.pairs()
    assert {name for name in fsdp_impl.__all__ if hasattr(theirs, name)} <= pairs.keys()
    assert {name: pairs.get(name) for name in fsdp_impl.wrap.__all__} == {
        name: (getattr(theirs.wrap, name), getattr(fsdp_impl.wrap, name)) for name in fsdp_impl.wrap.__all__
    }


@pytest.mark.parametrize(
    ("ours", "theirs", "judged"),
    [
        (Outcome("pass"), Outcome("pass"), ("agree", "")),
        (Outcome("pass"), Outcome("fail", "a\nRuntimeError: b\n"), ("better", "RuntimeError: b")),
        (Outcome("pass"), Outcome("fail", table._REFUSES), ("undecided", "torch refuses a CPU")),
        (Outcome("hang"), Outcome("pass"), ("worse", "hang")),
        (Outcome("crash"), Outcome("fail", "x"), ("undecided", "torch fails it too")),
        (Outcome("pass"), Outcome("skip", "Need at least 4 CUDA devices"), ("undecided", "needs 4 devices")),
        (Outcome("skip", "torch 2.11.0 lacks torch.a.b"), Outcome("skip"), ("undecided", "torch lacks a name")),
        (Outcome("skip", "slow"), Outcome("pass"), ("undecided", "skips itself")),
        (Outcome("not run", "not run: out of time"), Outcome("pass"), ("undecided", "not run: out of time")),
    ],
)
def test_comparison(ours: Outcome, theirs: Outcome, judged: tuple[str, str]) -> None:
    (compared,) = table.compare(Ran({"T.t": ours}), Ran({"T.t": theirs}), {})
    assert (compared.kind, compared.reason) == judged


def test_without_a_checkout_each_row_is_skipped_with_a_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(command.VARIABLE, raising=False)
    assert command.main([]) == 0
    assert [line.split(":")[0] for line in capsys.readouterr().out.splitlines()] == ["skipped"] * len(sources.read())


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ("own", "--checkout own: say NAME=FOLDER, with one of the names own"),
        ("other=/", "--checkout other=/: say NAME=FOLDER, with one of the names own"),
        ("own=/no/such", "--checkout own=/no/such: /no/such is no folder"),
        ("own={empty}", "own: {empty} has no file of own/tests such as test/test_*.py"),
        ("own={clone}", "own: {clone} lacks revision v"),
    ],
)
def test_mistakes_of_the_user(
    written: str, said: str, checkout: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = {"empty": tmp_path / "empty", "clone": tmp_path / "clone"}
    folders["empty"].mkdir()
    subprocess.run(["git", "init", "-q", folders["clone"]], check=True)
    assert command.main(["--checkout", written.format(**folders)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(said.format(**folders))


def test_a_patch_keeps_the_lines() -> None:
    assert sources.patched("import a\nb = 1\n", [("^import a$", "")]) == "\nb = 1\n"
    with pytest.raises(ValueError, match="changes the number of lines"):
        sources.patched("import a\nb = 1\n", [("import a\n", "")])


def test_files_of_a_clone_are_those_of_the_revision(checkout: pathlib.Path, tmp_path: pathlib.Path) -> None:
    git = ["git", "-C", str(checkout), "-c", "user.name=a", "-c", "user.email=a@b"]
    (row,) = sources.read()
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run([*git, "add", "."], check=True)
    subprocess.run([*git, "commit", "-qm", "first"], check=True)
    subprocess.run([*git, "tag", row.revision], check=True)
    (checkout / "test/test_own.py").write_text("changed")
    (found,) = sources.files_of(row, checkout, tmp_path / "scratch")
    assert found.read_text() == FILE


def test_the_rows_of_the_table_name_a_full_revision() -> None:
    for row in sources.read():
        assert row.repository.count("/") == 1
        assert row.revision.startswith("v2.") or len(row.revision) == 40
