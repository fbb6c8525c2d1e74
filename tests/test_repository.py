"""What holds for the repository as a whole: its arrows, its pins, its size, its documents."""

import ast
import configparser
import itertools
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from shardproof.harness.adapters.registry import BUILT_IN
from tests.harness.inner import CASE, PYTHONPATH, QUIET

ROOT = Path(__file__).parents[1]
FOLDERS = ("fsdp_impl", "harness", "reports", "suites", "shardproof")
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def python_files(*folders):
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


# Arrows between the packages


def lint_imports(folder):
    """Check the import contracts of pyproject.toml against the packages in `folder`."""
    pytest.importorskip("importlinter", reason="the arrows are checked by import-linter: pip install '.[lint]'")
    script = "from importlinter.cli import lint_imports_command as main; main(['--no-cache'])"
    return subprocess.run([sys.executable, "-c", script], cwd=folder, capture_output=True, text=True)


def rooms():
    """The rooms of the harness, as the contract with their layers has them."""
    (layers,) = (one["layers"] for one in PYPROJECT["tool"]["importlinter"]["contracts"] if one.get("exhaustive"))
    return [room.strip("()") for layer in layers for room in layer.split(" | ")]


def packages_with(folder, imports):
    """Make empty packages in `folder`, under the real contracts, with a module for each (package, import)."""
    (folder / "pyproject.toml").write_bytes((ROOT / "pyproject.toml").read_bytes())
    packages = ["fsdp_impl", "fsdp_impl/common", "shardproof", "shardproof/harness"]
    packages += [f"shardproof/harness/{room}" for room in rooms()]
    packages += [f"shardproof/{name}" for name in ("commands", "reports", "reports/page", "suites")]
    for package in packages:
        (folder / package).mkdir()
        (folder / package / "__init__.py").touch()
    modules = ("__main__", "commands/page", "commands/run", "commands/submit")
    for module in (
        *modules,
        "alike",
        "contract",
        "door",
        "extras",
        "folders",
        "garbage",
        "jsonfiles",
        "planfile",
        "plugin",
        "runfile",
        "testing",
    ):
        (folder / f"shardproof/{module}.py").touch()
    for i, (package, imported) in enumerate(imports):
        (folder / package / f"module_{i}.py").write_text(f"import {imported}\n")


def test_the_arrows_hold():
    done = lint_imports(ROOT)
    assert done.returncode == 0, done.stdout


# Each room with the lowest room that it may not import.
UPWARD = {
    "worlds": "plugin", "parity": "worlds training", "training": "worlds parity", "reproducing": "worlds parity",
    "states": "parity training reproducing", "planning": "states parity training reproducing",
    "simulation": "planning watching", "watching": "planning simulation",
    "collectives": "simulation models", "models": "collectives", "judging": "adapters collectives",
    "adapters": "models collectives judging", "tensors": "adapters judging",
}  # fmt: skip
#: What other packages may not import.
FORBIDDEN = {
    "shardproof/suites": "fsdp_impl.common shardproof.harness.parity shardproof.reports shardproof.plugin",
    "shardproof/harness/parity": "fsdp_impl.common shardproof.suites shardproof.reports shardproof.commands.run "
    "shardproof.__main__",
    "shardproof/harness/adapters": "shardproof.suites shardproof.reports shardproof.testing",
    "shardproof/harness/plugin": "shardproof.suites shardproof.testing",
    "fsdp_impl": "shardproof.harness pytest",
    "fsdp_impl/common": "shardproof.suites shardproof.reports",
    "shardproof/reports": "torch shardproof.harness shardproof.suites shardproof.commands.run fsdp_impl pytest jinja2 "
    "plotly shardproof.reports.page",
    "shardproof": "shardproof.reports.page",
    "shardproof/reports/page": "torch",
}


def test_each_forbidden_arrow_is_caught(tmp_path):
    """All are planted at once; each in a module of its own that nothing imports, so each must be named by itself."""
    forbidden = [(package, name) for package, names in FORBIDDEN.items() for name in names.split()]
    for room, others in UPWARD.items():
        forbidden += [(f"shardproof/harness/{room}", f"shardproof.harness.{other}") for other in others.split()]
    packages_with(tmp_path, forbidden)
    done = lint_imports(tmp_path)
    assert done.returncode == 1
    # Broken across lines at the width of a terminal.
    printed = " ".join(done.stdout.split())
    planted = {f"{package.replace('/', '.')}.module_{i} -> {name}" for i, (package, name) in enumerate(forbidden)}
    assert {arrow for arrow in planted if f"{arrow} (l.1)" not in printed} == set()


def test_a_new_room_must_be_given_its_layer(tmp_path):
    packages_with(tmp_path, [])
    (tmp_path / "shardproof/harness/attic").mkdir()
    (tmp_path / "shardproof/harness/attic/__init__.py").touch()
    done = lint_imports(tmp_path)
    assert (done.returncode, "attic" in done.stdout) == (1, True)


def test_the_page_of_the_architecture_has_the_rooms_in_the_order_of_their_layers():
    text = (ROOT / "docs/architecture.md").read_text().partition("\nharness/   ")[2].partition("\nfsdp_impl/")[0]
    on_page = re.findall(r"^(?:   │ +)?(\w+) {2,}[A-Z][^?]*\?", text, flags=re.MULTILINE)
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    [layers] = [one["layers"] for one in contracts if one.get("containers") == ["shardproof.harness"]]
    assert on_page == [room for layer in layers for room in layer.split(" | ")]
    folders = {path.parent.name for path in (ROOT / "harness").glob("*/__init__.py")}
    assert folders == set(on_page) == {*UPWARD, "plugin"}


def imported(*paths):
    """{(module, name)} of what files import from modules, which none of them renames."""
    nodes = [one for path in paths for one in ast.walk(ast.parse(path.read_text())) if isinstance(one, ast.ImportFrom)]
    return {(node.module, alias.name) for node in nodes for alias in node.names}


def test_testing_lists_each_name_of_the_harness_that_cases_use_once():
    by_cases, listed = imported(*python_files("suites", "examples")), []
    for path in python_files("shardproof/testing"):
        module = f"shardproof.testing.{path.stem}".removesuffix(".__init__")
        text = path.read_text()
        own = {name for source, name in imported(path) if source.startswith("shardproof.harness")}
        names = re.findall(r'^    "(\w+)",$', text.partition("__all__ = [")[2].partition("]")[0], flags=re.MULTILINE)
        listed += [(module, name) for name in names if name in own]
        assert re.findall(r"import (\w+) as \1\b", text) == []
    assert len({name for _, name in listed}) == len(listed) > 60
    assert set(listed) - by_cases == set()


def test_no_case_names_an_implementation():
    """Cases ask for capabilities; the harness outside the adapters compares without knowing whom."""
    # "ddp" is also the name of a baseline, which a case does choose.
    named = re.compile("|".join(rf"[\"']{re.escape(name)}[\"']" for name in BUILT_IN if name != "ddp") + "|deepspeed")
    # What --impl means when it is not given; the engine that a user's training may have.
    allowed = {"harness/plugin/options.py", "harness/watching/engines.py"}
    adapters = ROOT / "harness/adapters"
    files = [path for path in python_files("suites", "harness") if not path.is_relative_to(adapters)]
    assert len(files) > 50, "the folders have moved"
    texts = {str(path.relative_to(ROOT)): path.read_text() for path in files}
    found = {name: [line for line in text.splitlines() if named.search(line)] for name, text in texts.items()}
    assert {name: lines for name, lines in found.items() if lines and name not in allowed} == {}


#: Where "cuda" is CUDA itself, and no other accelerator.
CUDA_ITSELF = {
    "harness/adapters/fairscale.py": "the package has CUDA alone",
    "harness/adapters/megatron_fsdp.py": "the package has CUDA alone",
    "harness/plugin/options.py": "examples, in the texts of docs/options.md",
    "harness/tensors/devices.py": "the one place that knows device types",
    "harness/tensors/private.py": "names of torch",
    "shardproof/alike.py": "devices in messages of torch",
    "shardproof/commands/findings.py": "reproducers are written for CUDA",
    "shardproof/findings.py": "on which build of torch a finding was reproduced",
    "suites/test_overlap.py": "kernels of NCCL, in the profiler of CUDA",
}


def test_one_file_knows_device_types():
    files = python_files("harness", "suites", "shardproof", "reports")
    said = {str(path.relative_to(ROOT)) for path in files if re.search(r"\bcuda\b", path.read_text())}
    assert said == CUDA_ITSELF.keys()


# Packaging


def test_nothing_loads_itself_into_other_runs():
    assert "entry-points" not in PYPROJECT["project"]


def test_a_link_leads_to_each_folder():
    links = {path.name: path.readlink() for path in (ROOT / "shardproof").iterdir() if path.is_symlink()}
    assert links == {name: Path("..", name) for name in ("harness", "reports", "suites")}


def pins(name):
    lines = (line.partition("#")[0].strip() for line in (ROOT / name).read_text().splitlines())
    return [Requirement(line) for line in lines if line]


CONSTRAINTS = sorted(f"constraints/{path.name}" for path in ROOT.glob("constraints/*.txt"))


@pytest.mark.parametrize("name", CONSTRAINTS)
def test_constraints_pin_exactly(name):
    loose = [str(pin) for pin in pins(name) if not re.fullmatch(r"==[0-9][0-9a-z.]*", str(pin.specifier))]
    assert loose == []


def test_constraints_pin_a_torch_that_the_package_accepts():
    pinned = {pin.name: str(pin.specifier).removeprefix("==") for pin in pins("constraints/torch.txt")}
    accepted = {Requirement(text).name: Requirement(text).specifier for text in PYPROJECT["project"]["dependencies"]}
    assert pinned["torch"] == "2.13.0"
    assert pinned["torch"] in accepted["torch"]


def test_every_direct_dependency_is_pinned():
    project = PYPROJECT["project"]
    pinned = {pin.name.lower() for name in CONSTRAINTS for pin in pins(name)}
    wanted = ["tox", *project["dependencies"], *itertools.chain(*project["optional-dependencies"].values())]
    assert {Requirement(text).name for text in wanted} - pinned == set()


# Files


def test_files_are_short():
    files = [*python_files(*FOLDERS, "tests", "benchmarks"), ROOT / "conftest.py"]
    lengths = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in files}
    assert {name: length for name, length in lengths.items() if length > 900} == {}


def test_ci_runs_the_line_that_the_readme_gives_for_the_tests():
    pasted = [line.strip() for line in (ROOT / "README.md").read_text().splitlines() if line.startswith("    python3 ")]
    assert [line.rpartition(" ")[2] for line in pasted] == ["conform", "py"]
    assert pasted[1] in (ROOT / ".ci/run").read_text().splitlines()


def test_the_peers_run_at_night():
    tox = configparser.ConfigParser(interpolation=None)
    tox.read(ROOT / "tox.ini")
    at_night = [tox[name] for name in tox.sections() if tox[name].get("labels") == "nightly"]
    installed = set(", ".join(section.get("extras", "") for section in at_night).split(", "))
    tools = {"lint", "types", "tests", "fuzz", "progress", "page", "docs", "browser", "own"}
    peers = PYPROJECT["project"]["optional-dependencies"].keys() - tools
    assert peers - installed == {"megatron"}  # it needs GPUs
    script = (ROOT / ".ci/nightly").read_text()
    reports = [name for section in at_night for name in re.findall(r"--report (\S+)", section["commands"])]
    others = [reports.pop(reports.index("out/{env_name}.json"))]
    reports += [name.replace("{env_name}", f"torch{torch}") for name in others for torch in ("211", "214", "215")]
    assert len(reports) == 10 and [name for name in reports if name not in script.partition("report out")[0]] == []
    assert "tox -m nightly" in script


def test_the_canary_runs_all_that_torch_has():
    (names,) = re.findall(r"IMPL:=(\S+)}", (ROOT / ".ci/canary").read_text())
    assert names.split(",") == sorted(name for name in BUILT_IN if name == "ddp" or name.startswith("torch."))
    assert "run: .ci/canary suites" in (ROOT / ".github/workflows/canary.yml").read_text()


@pytest.mark.nightly
def test_the_canary_reports_what_is_new_once(tmp_path):
    (tmp_path / ".ci").mkdir()
    shutil.copy(ROOT / ".ci/canary", tmp_path / ".ci")
    variables = {"PYTHON": sys.executable, "IMPL": "ddp", "FINDINGS": "F-0", "PYTHONPATH": PYTHONPATH}
    for body, code, drafts in (("pass", 0, []), ("assert 0", 1, ["ddp.toml"]), ("assert 0", 0, ["ddp.toml"])):
        (tmp_path / "test_inner.py").write_text(CASE.format(body=body))
        command = [".ci/canary", "test_inner.py", *QUIET]
        done = subprocess.run(command, cwd=tmp_path, env={**os.environ, **variables}, capture_output=True, text=True)
        drafted = [path.name for path in (tmp_path / "out/canary").glob("*.toml")]
        assert (done.returncode, drafted) == (code, drafts), done.stdout + done.stderr
