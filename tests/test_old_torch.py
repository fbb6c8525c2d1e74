"""The doctor, recordings, comparisons, states and checks with the oldest torch; the suites refuse it in one line."""

import os
import pkgutil
import re
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from packaging.requirements import Requirement
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate

from shardproof import torch_versions
from shardproof.harness.judging.finding import Stage
from shardproof.harness.tensors import private
from shardproof.harness.tensors.fingerprints import Box
from shardproof.harness.tensors.layouts import Layout, layout_of
from shardproof.harness.training.sides import Sides
from shardproof.harness.watching.names import number_of
from tests.harness.inner import PYTHONPATH, ROOT, python
from tests.names_of_torch import HIDING, files_of, nodes_of, paths_of_torch

#: The public names of torch that the harness uses and that its oldest torch was seen to have, one a line. With that
#: torch `python -m tests.test_old_torch` writes the file again.
SEEN = Path(__file__).with_name("names-of-torch-2.9.txt")

#: What a newer torch has, by the file that asks whether it is there before it takes it.
ASKED_FOR = {
    "harness/adapters/torch_fully_shard.py": {
        "torch.distributed.fsdp.DataParallelMeshDims", "torch.distributed.fsdp.share_comm_ctx",
        "torch.distributed.fsdp.MixedPrecisionPolicy.param_dtype_override_fn",
    },
    "harness/adapters/torch_replicate_with_fsdp.py": {"torch.distributed.fsdp.DataParallelMeshDims"},
}  # fmt: skip

#: What each command that runs with the oldest torch imports when it begins, besides its own module.
DOORS = {
    "doctor": "training.doctor training.report watching.script watching.ties",
    "record": "training.recording watching.script",
    "compare": "training.comparing training.recording training.report",
    "state": "states.comparing states.flat states.sides",
    "check": "training.request training.trials training.checking training.resumption plugin.hooks",
}


def used(files):
    """The names of torch that files use, by file, without those that are looked up in the table."""
    listed = {name.path for name in private.NAMES}
    for file, nodes in files.items():
        if file != "harness/tensors/private.py":
            yield file, {path for _, path in paths_of_torch(nodes) if not listed & set(_prefixes(path))}


def _prefixes(path):
    parts = path.split(".")
    return (".".join(parts[:end]) for end in range(1, len(parts) + 1))


def unseen(files, seen):
    """The names of torch that files use and nobody has seen in the oldest one."""
    return {(file, path) for file, paths in used(files) for path in paths - seen - ASKED_FOR.get(file, set())}


def test_no_name_is_newer_than_the_oldest_torch():
    """A name that is new in the source: run this file with the oldest torch, or put the name into the table."""
    seen = {*SEEN.read_text().split()}
    files = files_of("harness", "shardproof")
    assert unseen(files, seen) == set()
    own = dict(used(files))
    assert seen <= set().union(*own.values()), "the source uses them no more"
    assert [(file, path) for file, paths in ASKED_FOR.items() for path in paths if path not in own[file]] == []


def test_a_name_that_is_newer_is_found():
    nodes = nodes_of("import torch.distributed as dist\ndist.get_backend_impl()")
    assert ("a.py", "torch.distributed.get_backend_impl") in unseen({"a.py": nodes}, {*SEEN.read_text().split()})


def test_the_installed_torch_has_each_name():
    """By night, with the oldest."""
    assert [path for path in SEEN.read_text().split() if not _is_there(path)] == []


def test_commands_that_need_no_suite_import_none():
    """Neither the suites nor the reference implementation."""
    modules = [f"shardproof.commands.{one}" for one in DOORS]
    modules += [f"shardproof.harness.{one}" for needed in DOORS.values() for one in needed.split()]
    script = f"import sys, {', '.join(modules)}\n"
    script += "print([one for one in sys.modules if one.startswith(('fsdp_impl', 'shardproof.suites'))])"
    assert python("-c", script, code=0).stdout == "[]\n"


# Total norms, which torch 2.9 returns before it reduces them


@pytest.fixture
def alone():
    """A world of one rank."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


def test_a_part_of_a_norm_is_no_number(alone):
    part = DTensor.from_local(torch.tensor(3.0), alone, [Partial()], run_check=False)
    whole = DTensor.from_local(torch.tensor(3.0), alone, [Replicate()], run_check=False)
    assert [number_of(one) for one in (part, whole, torch.tensor(3.0), 3.0, None)] == [None, 3.0, 3.0, 3.0, None]
    assert layout_of(part).pending == (), "of one rank it is made"


def test_a_check_combines_the_parts_of_a_norm():
    """And what clipping adds to each of them may show in the gradients."""
    key = (Stage.TOTAL_NORM, "", "", 0, 0, 0, "")
    ranks = [SimpleNamespace(norm_types=[2.0], events={
        key: SimpleNamespace(value=torch.tensor(value), layout=Layout(Box(()), pending, (0, 1)))
    }) for value, pending in ((3.0, (0, 1)), (4.0, (0, 1)))]  # fmt: skip
    sides = Sides.__new__(Sides)
    object.__setattr__(sides, "ranks", ranks)
    assert float(sides.norm(key, ranks[1])) == 5.0
    assert sides.added_to_norms == pytest.approx(1e-6 * 2**0.5 / 5)
    ranks[0].events[key].layout = Layout(Box(()))
    sides.__dict__.pop("added_to_norms")
    assert (float(sides.norm(key, ranks[0])), sides.added_to_norms) == (3.0, 0.0)


# Refusals


def _of_version(folder, version):
    """Make a torch that has nothing but a version."""
    (folder / "torch").mkdir()
    (folder / "torch/__init__.py").write_text("raise AssertionError('torch was imported')\n")
    (folder / "torch/version.py").write_text(f"__all__ = ['x']\n__version__ = '{version}'\ndebug = False\n")
    return os.pathsep.join([str(folder), PYTHONPATH])


def _line(who, version):
    return (
        f"{who} needs torch 2.11 or later, and torch {version} is installed; doctor, record, compare, state and check "
        "run with torch 2.9 or later"
    )


@pytest.mark.parametrize("command", ["run", "plan", "reproduce"])
def test_a_command_of_the_suites_refuses_an_older_torch(tmp_path, command):
    path = _of_version(tmp_path, "2.10.0+cu128")
    done = python("-m", "shardproof", command, cwd=tmp_path, PYTHONPATH=path, code=2)
    assert (done.stdout, done.stderr) == ("", f"{_line(f'shardproof {command}', '2.10.0+cu128')}\n")
    helped = python("-m", "shardproof", "plan", "--help", cwd=tmp_path, PYTHONPATH=path, code=0)
    assert helped.stdout.startswith("usage: ") and not helped.stderr


def test_a_run_of_pytest_refuses_an_older_torch(tmp_path):
    path = _of_version(tmp_path, "2.9.1")
    words = ("suites/test_clipping.py", "--impl", "torch.fully_shard", "-p", "no:cacheprovider")
    done = python("-m", "pytest", *words, PYTHONPATH=path, code=4)
    assert f"ERROR: {_line('a case', '2.9.1')}\n" in done.stderr and "Traceback" not in done.stdout + done.stderr


CASES = """
from shardproof.testing import world

@world(2)
def test_case(rank):
    pass

def test_other():
    pass
"""


def test_cases_of_other_projects_are_refused_and_other_tests_are_not(tmp_path):
    tmp_path.joinpath("conftest.py").write_text(
        "import shardproof.torch_versions as versions\nversions.installed = lambda: '2.9.1'\n"
        "pytest_plugins = ['shardproof.plugin']\n"
    )
    tmp_path.joinpath("test_cases.py").write_text(CASES)
    tmp_path.joinpath("test_others.py").write_text("def test_other(): pass\n")
    run = ("-m", "pytest", "-p", "no:cacheprovider")
    done = python(*run, "--impl", "ddp", "test_cases.py", cwd=tmp_path, code=4)
    assert f"ERROR: {_line('a case', '2.9.1')}\n" in done.stderr
    done = python(*run, "test_cases.py", cwd=tmp_path, code=2)
    assert f"\n{_line('a case', '2.9.1')}\n" in done.stdout and "Traceback" not in done.stdout
    assert "1 passed" in python(*run, "test_others.py", cwd=tmp_path, code=0).stdout


@pytest.mark.nightly
def test_the_reference_refuses_an_older_torch(tmp_path):
    done = python("-c", "import fsdp_impl", code=1, PYTHONPATH=HIDING, TORCH_CALLS_ITSELF="2.10.1+cpu")
    last = done.stderr.splitlines()[-1]
    assert last == "ImportError: fsdp_impl needs torch 2.11 or later, and torch 2.10.1+cpu is installed"
    script = "from shardproof.harness.adapters import registry; registry.load('reference')"
    done = python("-c", script, code=1, PYTHONPATH=HIDING, TORCH_CALLS_ITSELF="2.10.1+cpu")
    told = done.stderr.splitlines()[-1]
    assert told.endswith("NotImported: reference does not import: " + last)


@pytest.mark.parametrize(
    ("version", "is_refused"),
    [("2.10.0", True), ("2.9.1+cpu", True), ("1.13", True), ("2.11.0a0+git1234567", False),
     ("2.11.0.dev20260101", False), ("2.13.0+cpu", False), ("3.0", False), ("unknown", False), ("", False)],
)  # fmt: skip
def test_which_versions_are_refused(monkeypatch, version, is_refused):
    monkeypatch.setattr(torch_versions, "installed", lambda: version)
    assert bool(torch_versions.refusal("a case")) is is_refused


def test_the_version_is_that_of_the_torch_that_is_imported():
    assert torch_versions.installed() == str(torch.__version__)


def test_the_versions_are_those_of_the_package_and_of_the_night():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    required = {Requirement(one).name: str(Requirement(one).specifier) for one in project["dependencies"]}
    assert required["torch"] == f">={torch_versions.text(torch_versions.OLDEST)}"
    deps = re.findall(r"^    torch(\d+): torch==(\d+\.\d+)\.\d+$", (ROOT / "tox.ini").read_text(), re.MULTILINE)
    releases = sorted(torch_versions.release_of(version) for _, version in deps)
    assert releases[0] == torch_versions.OLDEST and releases[-1] == torch_versions.NEWEST
    assert torch_versions.OLDEST_OF_SUITES in releases
    assert all(name == version.replace(".", "") for name, version in deps)
    private_of_the_reference = (ROOT / "fsdp_impl/common/private.py").read_text()
    assert f'OLDEST = "{torch_versions.text(torch_versions.OLDEST_OF_SUITES)}"' in private_of_the_reference
    readme = (ROOT / "README.md").read_text()
    assert f"torch {torch_versions.text(torch_versions.OLDEST)} or later" in readme
    assert f"torch {torch_versions.text(torch_versions.OLDEST_OF_SUITES)} or later" in readme


def _is_there(path):
    try:
        pkgutil.resolve_name(path)
    except (ImportError, AttributeError):
        return False
    return True


def _write():
    """Write which of the names that are used the installed torch has; print the others."""
    paths = sorted(set().union(*(paths for _, paths in used(files_of("harness", "shardproof")))))
    SEEN.write_text("".join(f"{path}\n" for path in paths if _is_there(path)))
    print(f"torch {torch.__version__} lacks", *[path for path in paths if not _is_there(path)], sep="\n  ")


if __name__ == "__main__":
    _write()
