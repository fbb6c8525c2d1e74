"""The examples: the template, whose workflow runs from wheels whatever its packages are called, a job, a loop."""

import os
import pathlib
import re
import shlex
import shutil
import subprocess

import pytest
from torch.distributed.run import get_args_parser

from tests.harness.inner import torchrun
from tests.installations import ROOT, build, copy_of_the_sources, install, run
from tests.workflows import steps

pytestmark = pytest.mark.sampled

TEMPLATE = ROOT / "examples/your-implementation"

#: Names of its packages that shardproof's folders have too.
RENAMED = {"your_implementation": "harness"}
RENAMED |= {"conformance/": "suites/", "conformance ": "suites ", '"conformance"]': '"suites"]'}


def renamed(text):
    for name, other in RENAMED.items():
        text = text.replace(name, other)
    return text


def commands(workflow):
    """The commands of a workflow, without those that install."""
    return [step.run for step in steps(workflow) if not step.run.startswith("pip ")]


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


@pytest.mark.nightly
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
    assert re.search(r"^your.implementation  0.1.0 +13 .* your-implementation 0.1.0$", printed["implementations"], re.M)
    assert "1 expected-fail" in printed["pytest"] and "6 passed" in printed["pytest"], printed["pytest"]
    report = printed["report"]
    assert re.search(r"^OWN-2 +2 +1 expected-fail, 1 pass$", report, re.M), report
    assert re.search(r"^TRAINING-1 +\d+ +\d+ pass$", report, re.M), report
    assert "cases skipped; what they lack:" in report
    assert str(site) not in report and "shardproof 0.1.0" in report, "that of the wheel"


@pytest.mark.nightly
def test_the_bug_that_the_tutorial_plants_is_found(tmp_path):
    shutil.copytree(TEMPLATE / "your_implementation", tmp_path / "your_implementation")
    path = tmp_path / "your_implementation/zero3.py"
    line = "old if new is None else new if old is None else {} for old, new in pairs"
    edited = path.read_text().replace(line.format("old + new"), line.format("new"))
    assert edited != path.read_text() and line.format("new") in (ROOT / "docs/adapters.md").read_text()
    words = ["-m", "shardproof", "run", "suites/test_accumulation.py", "-k", "test_microbatches_add_up"]
    words += ["--impl", "your_implementation.adapter:YourAdapter", "--device", "cpu", "--effort", "quick"]
    assert ": 1 pass" in run(*words, cwd=tmp_path, path=ROOT, code=0).stdout
    path.write_text(edited)
    found = run(*words, cwd=tmp_path, path=ROOT, code=1).stdout
    assert "fail: the sharded run diverges from the baseline: gradient of" in found, found


def test_the_folders_are_the_ones_that_the_documents_name():
    readme = (TEMPLATE / "README.md").read_text()
    for name in re.findall(r"^\| `([^`]+)` \|", readme, re.M):
        assert (TEMPLATE / name).is_file(), name
    assert "your-implementation" in (ROOT / "README.md").read_text()


# Slurm itself is not here: stand-ins of its commands print what they are given

SCRIPT = ROOT / "examples/torchrun/slurm.sh"

JOB = {"JOB_NODELIST": "node[3-4]", "JOB_NUM_NODES": "2", "GPUS_ON_NODE": "8", "JOB_ID": "77"}
JOB |= {"SUBMIT_DIR": "/home/me/my runs"}


def submit(folder: pathlib.Path, *arguments: str, listing: str = "printf 'node3\\nnode4\\n'"):
    for name, body in {"scontrol": listing, "srun": 'printf "%s\\n" "$TMPDIR" "$@"'}.items():
        (folder / name).write_text(f"#!/bin/sh\n{body}\n")
        (folder / name).chmod(0o700)
    variables = os.environ | {f"SLURM_{name}": value for name, value in JOB.items()}
    variables |= {"PATH": f"{folder}:{os.environ['PATH']}", "SHARED_TMPDIR": "/shared"}
    return subprocess.run(["bash", SCRIPT, *arguments], env=variables, capture_output=True, text=True, check=False)


def test_torchrun_starts_one_rank_for_each_gpu_of_each_node(tmp_path):
    done = submit(tmp_path, "suites/test_hybrid.py", "--impl", "reference", "-k", "counts or order")
    shared, *words = done.stdout.splitlines()
    assert shared == "/shared"
    command = words[words.index("torchrun") + 1 :]
    parsed = get_args_parser().parse_args(command)
    assert (parsed.nnodes, parsed.nproc_per_node, parsed.max_restarts) == ("2", "8", 1)
    assert (parsed.rdzv_backend, parsed.rdzv_id, parsed.rdzv_endpoint) == ("c10d", "77", "node3:29400")
    assert parsed.module and parsed.training_script == "shardproof"
    assert parsed.training_script_args == [
        "run", "suites/test_hybrid.py", "--impl", "reference", "-k", "counts or order",
        "--report", "/home/me/my runs/run-77.json",
    ]  # fmt: skip


def test_without_arguments_all_suites_run_for_one_implementation(tmp_path):
    words = submit(tmp_path).stdout.splitlines()
    assert words[words.index("run") + 1 :][:2] == ["--impl", "torch.fully_shard"]


def test_nothing_starts_without_the_names_of_the_nodes(tmp_path):
    done = submit(tmp_path, listing="exit 1")
    assert done.returncode == 1 and done.stdout == ""


# The loop that takes its implementation from a module


@pytest.mark.parametrize(
    "bf16", [pytest.param((), id="fp32"), pytest.param(("--bf16",), id="bf16", marks=pytest.mark.nightly)]
)
def test_the_same_losses_with_both(tmp_path: pathlib.Path, bf16: tuple[str, ...]) -> None:
    script = tmp_path / "loop.py"
    script.write_text((ROOT / "examples/loops/fsdp2.py").read_text().replace("{total:.4f}", "{total.hex()}"))
    words = (2, script, "--accumulate", "2", *bf16, "--impl")
    theirs, ours = (torchrun(*words, name, code=0).stdout for name in ("torch.distributed.fsdp", "fsdp_impl"))
    assert theirs == ours and len(set(re.findall(r"loss (0x\S+)", ours))) == 3
