"""Ten minutes for a vendor: what a run of two profiles needs, and the workflows of examples/vendor-ci, line by line."""

import ast
import json
import os
import re
import shlex
import shutil
import subprocess
import sys

import pytest

from shardproof import contract
from shardproof.harness.plugin import changed
from shardproof.harness.plugin.options import OPTIONS, flag
from tests.installations import ROOT, build, copy_of_the_sources, run
from tests.workflows import run_job, steps, variables

EXAMPLE = ROOT / "examples/vendor-ci"
WORKFLOWS = {path.stem: path for path in sorted(EXAMPLE.glob(".github/workflows/*.yml"))}
IMPLEMENTATIONS = ("torch.fully_shard", "torch.fsdp")
PROFILES = ("core", "zero3")
ASKED = ("--impl", ",".join(IMPLEMENTATIONS), "--device", "cpu", "--profile", ",".join(PROFILES))

#: The files of a run on another vendor's device that name CUDA: texts, and the one place that knows types.
ALLOWED = {"harness/plugin/options.py", "harness/tensors/devices.py", "harness/tensors/private.py"}


def items(hardware):
    """The items of both profiles."""
    return frozenset().union(*(contract.items_of_profile(name, hardware) for name in PROFILES))


# What it needs


def sources():
    """The files of which a run of the profiles on an accelerator without NCCL consists."""
    chapters = {id_.partition("::")[0] for id_ in items("accelerator-2")}
    adapters = ROOT / "harness/adapters"
    others = {path for path in adapters.glob("*.py") if path.stem in {"fairscale", "megatron_fsdp"}}
    rooms = [path for name in ("harness", "shardproof/testing") for path in (ROOT / name).rglob("*.py")]
    helpers = [path for path in (ROOT / "suites").glob("*.py") if not path.name.startswith("test_")]
    return [*(ROOT / name for name in sorted(chapters)), *helpers, *(one for one in rooms if one not in others)]


def names(path):
    """The dotted names, modules and strings of a file, but for its docstrings."""
    tree = ast.parse(path.read_text())
    texts = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute | ast.Name):
            yield ast.unparse(node)
        elif isinstance(node, ast.Import):
            yield from (one.name for one in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{one.name}" for one in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in texts:
            yield node.value


def test_no_file_of_the_run_names_cuda_or_what_is_private_to_torchs_tests():
    found = {}
    for path in sources():
        name = path.relative_to(ROOT).as_posix()
        said = {one for one in names(path) if re.search(r"\bcuda\b|\btesting\._internal\b", one)}
        if said and name not in ALLOWED:
            found[name] = said
    # Simulated worlds, which no profile has, are on torch's fake process group.
    assert found == {"harness/simulation/world.py": {"torch.testing._internal.distributed.fake_pg"}}


@pytest.mark.nightly
@pytest.mark.parametrize("variable", [{"TORCH_FORBIDS": "torch.testing._internal"}, {"TORCH_LACKS": "torch.cuda"}])
def test_a_run_without_them_has_the_same_verdicts(tmp_path, variable):
    """They are taken from all processes of the run; a few cases run."""
    path = f"{ROOT / 'tests/hiding'}{os.pathsep}{ROOT}"
    few = ("-k", "test_clipping or test_single_unit or test_frozen_before_sharding")
    words = ("-m", "shardproof", "run", *ASKED, *few, "-p", "no:cacheprovider")
    done = run(*words, "--seconds", "400", "--report", "run.json", cwd=tmp_path, path=path, timeout=600, **variable)
    assert done.returncode == 0, done.stdout + done.stderr
    verdicts = {case["verdict"] for case in json.loads((tmp_path / "run.json").read_text())["cases"]}
    assert "pass" in verdicts and verdicts <= {"pass", "expected-fail", "unsupported"}, verdicts


def test_the_hook_refuses_an_import(tmp_path):
    """The proof above would prove nothing if the hook did not."""
    words = ("-c", "import torch.testing._internal.common_utils")
    path = ROOT / "tests/hiding"
    done = run(*words, cwd=tmp_path, path=path, TORCH_FORBIDS="torch.testing._internal")
    assert done.returncode == 1 and "torch.testing._internal.common_utils is forbidden to __main__" in done.stderr
    done = run("-c", "import torch; torch.cuda.is_available()", cwd=tmp_path, path=path, TORCH_LACKS="torch.cuda")
    assert done.returncode == 1 and "has no attribute 'cuda'" in done.stderr


# Breadth before depth


@pytest.mark.nightly
def test_a_run_begins_with_every_requirement(tmp_path):
    """Of both implementations each requirement that has an item comes before a second item of one that had its turn."""
    done = run("-m", "shardproof", "run", *ASKED, "--collect-only", "-q", cwd=tmp_path, path=ROOT, code=0)
    ids = [line for line in done.stdout.splitlines() if "::" in line]
    assert sorted({changed.ITEM.match(id_)["implementation"] for id_ in ids}) == sorted(IMPLEMENTATIONS)
    wanted = frozenset().union(*(contract.profiles()[name].requirements for name in PROFILES))
    listed = contract.items()
    asked = wanted & {name for id_ in items("cpu-4") for name in listed[id_].requirements}
    assert len(ids) == 2 * len(items("cpu-4"))
    for implementation in IMPLEMENTATIONS:
        mine = [found for id_ in ids if (found := changed.ITEM.match(id_))["implementation"] == implementation]
        cases = [f"{one['case']}[{one['rest']}]" for one in mine]
        seen, functions, covered, first = set(), set(), 0, 0
        for number, case in enumerate(cases, 1):
            if new := (asked & set(listed[case].requirements)) - seen:
                seen |= new
                covered = number
            if (function := case.partition("[")[0]) not in functions:
                functions.add(function)
                first = number
        assert seen == asked and covered <= len(asked), f"{implementation}: {covered} items until all {len(asked)}"
        # A function that checks several subjects has an item of each before the last function has its first.
        assert first <= len(cases) // 2, f"{implementation}: the last function is item {first} of {len(cases)}"


# The workflows


@pytest.mark.parametrize("name", WORKFLOWS)
def test_the_lines_are_of_commands_that_there_are(name):
    text = WORKFLOWS[name].read_text()
    kept, given = steps(text, "profiles"), variables(text)
    assert [step.name for step in kept] == ["install", "profiles", "dashboard"]
    assert not any("${{" in step.run for step in kept), "foreign text in a shell line: use env"
    for variable in {one for step in kept for one in re.findall(r"\$([A-Z_]+)", step.run)}:
        assert variable in given or variable.startswith("GITHUB_"), variable
    words = shlex.split(kept[1].run)
    options = [word for word in words if word.startswith("--")]
    assert set(options) <= {flag(one) for one in OPTIONS}
    for word in [*words, *shlex.split(kept[2].run)]:
        if word.endswith((".toml", ".py")):
            assert (EXAMPLE / word).is_file(), word
    assert set(given["PROFILE"].split(",")) <= contract.profiles().keys()


def test_the_fields_of_the_relay_have_their_names():
    """Of docs/vendor-ci.md, which has them from PyTorch's page about the integration."""
    text, page = WORKFLOWS["pytorch-pull-request"].read_text(), (ROOT / "docs/vendor-ci.md").read_text()
    read = set(re.findall(r"client_payload[\w.]+", text))
    assert read and all(f"`{name}`" in page for name in read), read
    inputs = re.findall(r"^          (status|conclusion|[a-z]+-[a-z-]+): ", text, re.M)
    assert all(f"`{name}`" in page for name in inputs), inputs


@pytest.fixture(scope="module")
def vendor(tmp_path_factory):
    """A repository of a vendor: the example in an empty folder, with a wheel of shardproof; nothing else of ours."""
    folder = tmp_path_factory.mktemp("vendor") / "checkout"
    shutil.copytree(EXAMPLE, folder)
    build(copy_of_the_sources(tmp_path_factory.mktemp("sources")), folder / "wheels")
    return folder


def here(folder):
    """What differs on this host: no device of the vendor, the torch of CI, one of the profiles."""
    pins = " ".join(f"-c {ROOT / 'constraints' / name}.txt" for name in ("core", "torch"))
    return {"DEVICE": "cpu", "TORCH": f"torch==2.13.0 {pins}", "BACKEND": "", "PROFILE": "core"}


def expect(folder, implementation, case, verdict):
    """Write an entry of a known failure into the repository of the vendor."""
    entry = (
        f'\n[[expect]]\ncases = ["{case}"]\nverdict = "{verdict}"\nreason = "planted"\nlink = "https://example.org"\n'
    )
    file = folder / f"expectations/{implementation}.toml"
    before = file.read_text()
    file.write_text(before + entry)
    return lambda: file.write_text(before)


@pytest.mark.nightly
@pytest.mark.parametrize("name", WORKFLOWS)
def test_a_workflow_runs_line_by_line(vendor, name):
    text = WORKFLOWS[name].read_text()
    shutil.rmtree(vendor / "out", ignore_errors=True)
    shutil.rmtree(vendor / ".venv", ignore_errors=True)
    done = run_job(text, "profiles", vendor, **here(vendor))
    assert not done.failed, done.printed
    for one in IMPLEMENTATIONS:
        assert re.search(
            rf"^profile core on cpu-4: {one} passed \d+ of \d+ items, 0 failed, ", done.printed["profiles"], re.M
        )
    assert "GREEN" in done.summary
    found = json.loads((vendor / "out/dashboard.json").read_text())
    assert (found["verdict"], found["device"], found["backend"]) == ("passed", "cpu", "gloo")
    if name == "pytorch-pull-request":
        outputs = dict(line.split("=", 1) for line in done.outputs.splitlines())
        assert json.loads(outputs["test_results"]) == found["test_results"]
        assert json.loads(outputs["failed_tests_detail"]) == []

    # An entry that does not fail any more, and a failure of which no entry tells: red, with a line of each.
    passing = "suites/test_training.py::test_single_unit[w2-16x15-15x8]"
    known = next(
        case["id"]
        for case in json.loads((vendor / "out/run.json").read_text())["cases"]
        if case["verdict"] == "expected-fail" and case["implementation"] == "torch.fsdp"
    )
    function = known.partition("::")[2].partition("[")[0]
    undo = [expect(vendor, "torch.fully_shard", passing, "fail"), expect(vendor, "torch.fsdp", known, "pass")]
    few = {"PYTEST_ADDOPTS": f"-k 'test_single_unit or {function}'"}
    try:
        red = run_job(text, "profiles", vendor, only="profiles", **here(vendor), **few)
    finally:
        for one in undo:
            one()
    lines = [line for line in red.summary.splitlines() if line.startswith("RED: ")]
    assert red.failed == "profiles" and len(lines) == 2, red.printed
    assert any(f"fails no more: {passing} on torch.fully_shard: " in line for line in lines), lines
    assert any(f"new failure: {known} on torch.fsdp: " in line for line in lines), lines


def test_the_callback_has_one_line_for_each_output(tmp_path):
    file = tmp_path / "dashboard.json"
    file.write_text(
        json.dumps({"test_results": {"passed": 1}, "failed_tests_detail": [{"name": "a", "message": "b\nc"}]})
    )
    done = subprocess.run([sys.executable, EXAMPLE / "callback.py", file], capture_output=True, text=True, check=True)
    assert [line.partition("=")[0] for line in done.stdout.splitlines()] == ["test_results", "failed_tests_detail"]
