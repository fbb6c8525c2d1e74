"""A device of PrivateUse1, torch's OpenReg: its ranks run cases of the core profile, on data that move."""

import json
import os
import shutil

import pytest

from tests.installations import ROOT, run

#: Names the folder torch_openreg of a checkout of torch, in which the package is built for the torch that is installed.
VARIABLE = "OPENREG"
EXAMPLE = ROOT / "examples/openreg"
CHAPTERS = "test_single_unit or test_clipping or test_collectives"


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """A folder with the example's package, built for the torch that is installed, before that with OpenReg."""
    given = os.environ.get(VARIABLE)
    if not given:
        pytest.skip(f"{VARIABLE} names no folder with a built torch_openreg")
    folder = tmp_path_factory.mktemp("openreg")
    sources = shutil.copytree(EXAMPLE, folder / "sources", ignore=shutil.ignore_patterns("build", "*.egg-info"))
    made = folder / "site"
    words = ("install", "--quiet", "--no-deps", "--no-build-isolation", "--target", made)
    run("-m", "pip", *words, sources, cwd=folder, path="", timeout=900, code=0)
    return f"{made}{os.pathsep}{given}{os.pathsep}{ROOT}"


@pytest.mark.nightly
def test_collectives_through_the_host_move_data(site, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import torch, torch.distributed as dist\n"
        "dist.init_process_group('host')\n"
        "rank = dist.get_rank()\n"
        "device = torch.device('openreg', rank)\n"
        "total = torch.tensor([rank + 1.0], device=device, requires_grad=True).detach()\n"
        "version = total._version\n"
        "dist.all_reduce(total)\n"
        "parts = [torch.zeros(1, device=device) for _ in range(2)]\n"
        "dist.all_gather(parts, torch.tensor([float(rank)], device=device))\n"
        "if rank == 0:\n"
        "    dist.send(total, 1)\n"
        "    print(total.item(), torch.cat(parts).tolist(), total._version == version)\n"
        "else:\n"
        "    got = torch.zeros(1, device=device)\n"
        "    dist.recv(got, 0)\n"
        "    assert got.item() == 3.0\n"
    )
    words = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", script)
    done = run(*words, cwd=tmp_path, path=site, code=0)
    assert "3.0 [0.0, 1.0] True" in done.stdout


@pytest.mark.nightly
def test_cases_of_the_core_profile_pass(site, tmp_path):
    asked = ("--impl", "torch.fully_shard", "--device", "openreg", "--profile", "core", "-k", CHAPTERS)
    words = ("-m", "shardproof", "run", *asked, "-p", "no:cacheprovider", "--report", "run.json")
    done = run(*words, cwd=tmp_path, path=site, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    written = json.loads((tmp_path / "run.json").read_text())
    verdicts = [case["verdict"] for case in written["cases"]]
    assert "pass" in verdicts and set(verdicts) <= {"pass", "expected-fail", "unsupported"}, done.stdout
    assert written["environment"]["backend"] == "host"
