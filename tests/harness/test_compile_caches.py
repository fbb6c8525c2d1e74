"""Compilers' caches: a world has its own, which ends with it, so that no world can break what another compiles."""

import os
import pathlib

import pytest

from shardproof.harness.parity.rank import Rank
from shardproof.runfile import load_run
from shardproof.testing import world
from tests.harness.inner import QUIET, python

pytestmark = pytest.mark.sampled

VARIABLES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "TORCH_EXTENSIONS_DIR")

WHERE = """
import os, pathlib
import pytest
from shardproof.testing import world

@world(2, debug_level="INFO")
def test_one(rank):
    write("one", rank.index)

@world(2)
def test_other(rank):
    write("other", rank.index)

def write(name, index):
    found = [os.environ[variable] for variable in {names}]
    pathlib.Path("found", f"{{name}}-{{index}}").write_text("\\n".join(found))
"""

#: The first case's ranks die, each behind a compilation whose files it has cut in half, as a killed writer leaves them.
BROKEN = """
import os, pathlib
import torch
from shardproof.testing import world

def compiled(x):
    return torch.compile(lambda x: (x.sin() + 1).relu(), backend="inductor")(x)

@world(1)
def test_dies(rank):
    compiled(torch.ones(7))
    files = [path for path in pathlib.Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]).rglob("*") if path.is_file()]
    assert files
    for path in files:
        os.truncate(path, path.stat().st_size // 2)
    os._exit(3)

@world(1)
def test_lives(rank):
    x = torch.ones(7)
    assert torch.allclose(compiled(x), (x.sin() + 1).relu())
"""


def run(folder, text):
    """Run cases in a process of its own, whose environment chooses one cache for everything."""
    folder.joinpath("test_inner.py").write_text(text)
    shared = {name: str(folder / "shared") for name in VARIABLES}
    options = ["--impl", "ddp", "--device", "cpu", "--report", "run.json"]
    done = python("-m", "pytest", *QUIET, *options, cwd=folder, **shared)
    cases = {case.id.partition("::")[2].partition("[")[0]: case for case in load_run(folder / "run.json").cases}
    return cases, done.stdout + done.stderr


@world(2)
def test_ranks_of_a_world_share_the_caches(rank: Rank):
    found = [os.environ[name] for name in VARIABLES]
    assert rank.exchange(found) == [found] * 2
    assert len(set(found)) == len(VARIABLES)


def test_each_world_has_caches_of_its_own_which_end_with_it(tmp_path):
    tmp_path.joinpath("found").mkdir()
    cases, output = run(tmp_path, WHERE.format(names=VARIABLES))
    assert [str(case.verdict) for case in cases.values()] == ["pass", "pass"], output
    found = {path.read_text() for path in tmp_path.joinpath("found").iterdir()}
    assert len(found) == 2, "two worlds, and the ranks of each name the same directories"
    paths = [pathlib.Path(line) for text in found for line in text.splitlines()]
    assert len(set(paths)) == 2 * len(VARIABLES)
    assert not any(path.exists() or path.parents[1].exists() for path in paths)
    assert not tmp_path.joinpath("shared").exists()


@pytest.mark.nightly
def test_half_written_caches_of_a_dead_world_break_no_other(tmp_path):
    cases, output = run(tmp_path, BROKEN)
    verdicts = {name: str(case.verdict) for name, case in cases.items()}
    assert verdicts == {"test_dies": "crash", "test_lives": "pass"}, output
