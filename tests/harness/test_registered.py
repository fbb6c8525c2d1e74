"""Implementations that installed packages register, and the command that lists what --impl can name."""

import os

import pytest

from shardproof.harness.adapters import registry
from shardproof.harness.adapters.reference import ReferenceAdapter
from tests.harness.inner import PYTHONPATH, python

pytestmark = pytest.mark.nightly

ADAPTER = """
from shardproof.harness.adapters.reference import ReferenceAdapter
class Mine(ReferenceAdapter):
    name = "mine"
    @classmethod
    def version(cls): return "7.1"
class Nowhere(Mine):
    @classmethod
    def availability(cls, device_type): return "it is not installed"
"""

CASE = """
from shardproof.testing import models, world
@world(2)
def test_case(rank):
    rank.run(models.MLP(8))
    assert rank.implementation.name == "mine"
"""


@pytest.fixture
def install(tmp_path):
    """Leave a package as pip would: its module and what it registers."""

    def install(package="mine", **names):
        folder = tmp_path / "site"
        folder.mkdir(exist_ok=True)
        (folder / "mine_adapters.py").write_text(ADAPTER)
        info = folder / f"{package}-1.2.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.2\n")
        points = "".join(f"{name.replace('_', '.')} = {target}\n" for name, target in names.items())
        (info / "entry_points.txt").write_text(f"[shardproof.implementations]\n{points}")
        return folder

    return install


@pytest.fixture
def start(tmp_path):
    """Run a module of this Python with these packages installed, and return what came of it."""

    path = f"{tmp_path / 'site'}{os.pathsep}{PYTHONPATH}"
    return lambda *arguments, code=None: python("-m", *arguments, cwd=tmp_path, code=code, PYTHONPATH=path)


def test_a_registered_name_is_that_of_impl_and_of_the_reports(install, start, tmp_path):
    install(mine_sharder="mine_adapters:Mine")
    (tmp_path / "test_own.py").write_text(CASE)
    options = ["-p", "shardproof.plugin", "--impl", "mine.sharder", "--device", "cpu", "--report", "run.json"]
    done = start("pytest", *options, code=0)
    assert "mine.sharder: 1 pass" in done.stdout
    shown = start("shardproof", "report", "run.json", "--cases").stdout
    assert "test_own.py::test_case[w2]               pass\n" in shown and "  mine.sharder\n" in shown


def test_built_in_names_come_first(install, monkeypatch):
    monkeypatch.syspath_prepend(install(reference="mine_adapters:Mine"))
    assert registry.load("reference") is ReferenceAdapter


def test_a_name_that_two_packages_register_is_refused(install, monkeypatch):
    install(mine_sharder="mine_adapters:Mine")
    monkeypatch.syspath_prepend(install("other", mine_sharder="mine_adapters:Nowhere"))
    told = "'mine.sharder' is registered by (mine|other) 1.2 and (mine|other) 1.2: uninstall one, or pass module:Class"
    with pytest.raises(ValueError, match=told):
        registry.load("mine.sharder")
    with pytest.raises(ValueError, match=r"unknown implementation 'mine.shader': did you mean mine.sharder\b"):
        registry.load("mine.shader")


def test_the_command_lists_what_is_known_and_where_it_runs(install, start):
    install(mine_sharder="mine_adapters:Mine [extra]", mine_none="mine_adapters:Nowhere", mine_typo="mine_adapters:Min")
    install("other", reference="mine_adapters:Mine")
    done = start("shardproof", "implementations")
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    rows = {line.split()[0]: line.split() for line in lines}
    assert lines[0].split()[:2] == ["name", "version"] and lines[0].endswith("from")
    assert set(rows) >= {*registry.BUILT_IN, "mine.sharder", "mine.none", "mine.typo"}
    assert rows["mine.sharder"][1:] == ["7.1", rows["reference"][2], *rows["reference"][3:-1], "mine", "1.2"]
    assert rows["mine.none"][1:] == ["-", "-", "nothing", "here", "mine", "1.2"]
    assert "other 1.2 registers 'reference', which is built-in: use another name, or pass mine_adapters:Mine" in lines
    assert "implementation 'mine.none' cannot run here on cpu: it is not installed" in lines
    assert "implementation 'mine.typo': module 'mine_adapters' has no 'Min'; it has " in done.stdout


@pytest.mark.parametrize(
    ("name", "code", "told"),
    [
        ("mine_adapters:Mine", 0, "mine_adapters:Mine  7.1 "),
        ("mine_adapters:Nowhere", 1, "cannot run here on cpu: it is not installed"),
        ("mine.sharder", 1, "unknown implementation 'mine.sharder'"),
    ],
)
def test_the_command_for_one(install, start, name, code, told):
    install()
    done = start("shardproof", "implementations", name)
    assert (done.returncode, done.stderr) == (code, "")
    assert told in done.stdout and "torch.fsdp " not in done.stdout
