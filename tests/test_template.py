"""The template repository: its workflow runs from wheels, in another directory, whatever its packages are called."""

import re
import shlex
import shutil

import pytest

from tests.installations import ROOT, build, copy_of_the_sources, install, run

TEMPLATE = ROOT / "examples/your-implementation"

#: Names of its packages that shardproof's folders have too.
RENAMED = {
    "your_implementation": "harness",
    "conformance/": "suites/",
    "conformance ": "suites ",
    '"conformance"]': '"suites"]',
}


def renamed(text):
    for name, other in RENAMED.items():
        text = text.replace(name, other)
    return text


def commands(workflow):
    """The commands of a workflow, without those that install."""
    found = re.findall(r"run: (?:>-\n((?: {10}\S.*\n)+)|(.*\n))", workflow)
    lines = [" ".join((folded or plain).split()) for folded, plain in found]
    return [line for line in lines if not line.startswith("pip ")]


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    """A copy of the template whose packages are called harness and suites, and a folder with it and shardproof."""
    copy = tmp_path_factory.mktemp("repository") / "theirs"
    shutil.copytree(TEMPLATE, copy, ignore=shutil.ignore_patterns("__pycache__", "out", "*.egg-info", "build"))
    (copy / "your_implementation").rename(copy / "harness")
    (copy / "conformance").rename(copy / "suites")
    for path in [path for path in copy.rglob("*") if path.is_file()]:
        path.write_text(renamed(path.read_text()))
    site = tmp_path_factory.mktemp("site")
    install(build(copy_of_the_sources(tmp_path_factory.mktemp("sources")), tmp_path_factory.mktemp("wheel")), site)
    install(build(copy, tmp_path_factory.mktemp("theirs")), site)
    return copy, site


def test_the_workflow_is_green_from_wheels(repository):
    copy, site = repository
    assert (copy / "harness/adapter.py").is_file() and (copy / "suites/test_own.py").is_file()
    printed = {}
    workflow = (copy / ".github/workflows/conformance.yml").read_text()
    for line in commands(workflow):
        words = shlex.split(line.replace("$EFFORT", "quick"))
        words = words[1:] if words[0] == "python" else ["-m", *words]
        done = run(*words, cwd=copy, path=site)
        assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
        printed[words[2] if words[1] == "shardproof" else words[1]] = done.stdout
    assert list(printed) == ["implementations", "run", "pytest", "merge", "report"]
    assert re.search(r"^your.implementation  0.1.0 +7 .* your-implementation 0.1.0$", printed["implementations"], re.M)
    assert "1 expected-fail" in printed["pytest"] and "6 passed" in printed["pytest"], printed["pytest"]
    report = printed["report"]
    assert re.search(r"^OWN-2 +2 +1 expected-fail, 1 pass$", report, re.M), report
    assert re.search(r"^TRAINING-1 +\d+ +\d+ pass$", report, re.M), report
    assert "your.implementation was kept from " in report
    assert str(site) not in report and "shardproof 0.1.0" in report, "that of the wheel"


def test_the_folders_are_the_ones_that_the_documents_name():
    readme = (TEMPLATE / "README.md").read_text()
    for name in re.findall(r"^\| `([^`]+)` \|", readme, re.M):
        assert (TEMPLATE / name).is_file(), name
    assert "your-implementation" in (ROOT / "README.md").read_text()
