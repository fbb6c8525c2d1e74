"""Each of our files is imported under one name, in the controller and in ranks."""

import os
import re

import pytest

from tests.harness.inner import PYTHONPATH, ROOT, python

# Run in both: every name in sys.modules whose file is one of ours, by the real file.
NAMES = """
import collections, pathlib, sys

def shared_files():
    names = collections.defaultdict(set)
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if file and name not in ("__main__", "__mp_main__"):
            names[str(pathlib.Path(file).resolve())].add(name)
    folders = tuple(f"{ROOT}/{name}/" for name in ("fsdp_impl", "harness", "reports", "shardproof", "suites"))
    ours = {file: sorted(found) for file, found in names.items() if file.startswith(folders)}
    assert len(ours) > 10, "the files are elsewhere"
    return {file: found for file, found in ours.items() if len(found) > 1}
""".replace("ROOT", repr(str(ROOT)))

PLUGIN = f"""
{NAMES}
def pytest_sessionfinish(session):
    print("controller:", shared_files(), sorted(name for name in sys.modules if name.split(".")[0] in
        ("harness", "suites", "reports")))
"""

CASE = f"""
{NAMES}
from shardproof.testing import world
import shardproof.harness.plugin.marks, shardproof.harness.models.parallel

@world(2)
def test_ranks(rank):
    assert shared_files() == {{}}
"""


@pytest.mark.nightly
@pytest.mark.parametrize("folder", ["suites", "shardproof/suites"])
def test_one_name_for_each_file(tmp_path, folder):
    """In a run of a file of cases and of one case of the suites, with a plugin that looks at the controller."""
    (tmp_path / "look.py").write_text(PLUGIN)
    (tmp_path / "test_names.py").write_text(CASE)
    options = ["--impl", "reference", "--device", "cpu", "--world", "2", "-p", "no:cacheprovider", "-p", "look", "-s"]
    cases = [tmp_path / "test_names.py", ROOT / folder / "test_training.py", "-k", "ranks or 16x15"]
    path = f"{PYTHONPATH}{os.pathsep}{tmp_path}"
    done = python("-m", "pytest", *cases, *options, timeout=120, code=0, PYTHONPATH=path)
    assert "controller: {} []\n" in done.stdout
    assert "reference: 2 pass" in done.stdout


@pytest.mark.parametrize("name", ["harness", "harness.plugin.marks", "reports", "reports.texts"])
def test_a_folder_is_not_importable_beside_its_link(name):
    """From the root of a clone, where the folders would be packages."""
    done = python("-c", f"import {name}")
    package = name.partition(".")[0]
    assert done.returncode == 1
    assert done.stderr.endswith(f"ImportError: {package} is imported as shardproof.{package}\n")


def test_nothing_imports_a_case_module():
    files = [path for folder in ("harness", "suites", "reports", "tests") for path in (ROOT / folder).rglob("*.py")]
    # What cases share is no case module.
    shared = "anytime|apis|crossed|pipelines|places|state_twins"
    imports = re.compile(
        rf"^(from|import) (shardproof\.)?suites\b(?!\.({shared}) import | import ({shared})$)", re.MULTILINE
    )
    assert [str(path.relative_to(ROOT)) for path in files if imports.search(path.read_text())] == []
