"""In the scripts of examples/healthy the doctor finds nothing, and it changes no bit of them.

Ranks are forked from a process with torch, as ``torchrun`` would start them (tests/harness/forked.py).
"""

import importlib.util
import math
import pathlib
import re
import shutil
import statistics
from collections.abc import Callable
from typing import NamedTuple

import pytest

from shardproof import torch_versions
from tests.harness import forked
from tests.harness.inner import ROOT

HEALTHY = ROOT / "examples/healthy"
WATCHED = ("doctor", "--strict")
SEEDS = range(3)

#: The scripts that run by day, with two ranks and one seed: the fastest, of each kind of wrapper one.
BY_DAY = (
    "ddp_plain", "ddp_batchnorm_small", "closure_plain", "skip_large_norm", "lora", "hook_fp16", "zero_redundancy",
    "fsdp2_validate_first", "fsdp1_original_params", "tp_tutorial", "allreduce_by_hand", "gan_wgan_gp", "ema",
)  # fmt: skip

#: How the losses of the ranks give that of one process, by the word of the index.
ALIKE: dict[str, Callable[[list[float]], float]] = {"mean": statistics.fmean, "sum": math.fsum}
#: A callback of PowerSGD waits for a collective in a worker thread of gloo, and needs a second one.
TWO_THREADS = ("hook_powersgd",)
#: Scripts that crash with an older torch, without the doctor too: stages of its pipelines exchange shapes over gloo.
NEWER = {"pipeline_gpipe": (2, 10), "pipeline_interleaved": (2, 10)}
#: A float64's relative distance of two losses that are sums of the same numbers in another order.
ROUNDING = 1e-9


#: By script a mistake in it: what is wrong, the right text and the wrong one, and the check that finds it.
TWINS = {
    "closure_accumulate": (
        "the closure forgets the microbatches before it",
        "\n        loss.backward()", "\n        optimizer.zero_grad()\n        loss.backward()", "D11",
    ),
    "validate_first": (
        "nothing is reduced after a validation",
        "loss = F.cross_entropy(model(inputs)", "loss = F.cross_entropy(model.module(inputs)", "D11",
    ),
    "fsdp2_validate_first": (
        "no gradient is reduced after a validation",
        "    model.train()\n", "    model.train()\n    model.set_requires_gradient_sync(False)\n", "D11",
    ),
    "ddp_batchnorm_small": (
        "the optimizer lacks a parameter behind BatchNorm",
        "SGD(model.parameters()", "SGD(list(model.parameters())[:-2]", "D4",
    ),
    "hook_bf16": (
        "a communication hook loses a rank", ".div_(dist.get_world_size())", ".mul_(float(dist.get_rank() > 0))", "D11",
    ),
    "ddp_plain": (
        "the sampler gives each rank all samples", "shuffle=False)", "num_replicas=1, rank=0, shuffle=False)", "D9",
    ),
    "skip_large_norm": (
        "one rank alone skips a step", "if norm < 5:", "if norm < 5 or torch.distributed.get_rank() == 0:", "D1",
    ),
    "mup": ("one layer of its class has another factor", 'if name == "head"', 'if name == "blocks.1.up"', "D12"),
    "ddp_static_graph": (
        "the embedding is detached", "x = self.embed(tokens) +", "x = self.embed(tokens).detach() +", "D5",
    ),
    "zero1_by_hand": (
        "the weights are not gathered after a sharded step",
        "dist.broadcast(parameter.data, src=i % world)", "pass", "D1",
    ),
    "tp_tutorial": (
        "ranks of a tensor-parallel group read other data",
        "manual_seed(SEED + i)", "manual_seed(SEED + i + 100 * rank)", "D9",
    ),
    "maml_vmap": (
        "the outer gradients are those of one rank",
        "dist.all_reduce(parameter.grad)", "dist.broadcast(parameter.grad, 0)", "D11",
    ),
    "muon_hooks": ("owners do not send what they step", "dist.broadcast(p.detach(), owner)", "pass", "D1"),
    "allreduce_by_hand": (
        "one layer begins with other values on each rank",
        "optimizer = ", "model[0].weight.data.add_(dist.get_rank())\noptimizer = ", "D1",
    ),
    "join_few": ("nothing is reduced", "model(x)", "model.module(x)", "D11"),
    "gan_dcgan": ("the discriminator is never zeroed", "    netD.zero_grad()\n", "", "D11"),
    "fsdp2_gan": (
        "the generator's learning rate differs between ranks",
        "Adam(generator.parameters(), lr=1e-3", "Adam(generator.parameters(), lr=1e-3 * (1 + rank)", "D18",
    ),
    "two_towers": (
        "the second tower is not wrapped", "DistributedDataParallel(encoder())\n", "encoder()\n", "D11",
    ),
}  # fmt: skip


class Row(NamedTuple):
    """A row of the index."""

    name: str
    like: str
    source: str
    needs: str
    ranks: str
    alike: str

    def run(self, ranks: int, *command: str, seed: int = 0, double: bool = False) -> forked.Ran:
        """Run the script; skip the test if a package is missing."""
        for package in filter(None, self.needs.split(", ")):
            if importlib.util.find_spec(package) is None:
                pytest.skip(f"{self.name} needs {package}: `tox -e trainers` has it")
        if torch_versions.release_of(torch_versions.installed()) < (oldest := NEWER.get(self.name, (0,))):
            pytest.skip(f"{self.name} needs torch {torch_versions.text(oldest)}")
        script, mended = HEALTHY / f"{self.name}.py", self.name not in TWO_THREADS
        ran = forked.run(script, ranks, command=command, double=double, mended=mended, SEED=str(seed))
        assert ran.is_complete or command, ran.text
        return ran


def _index() -> dict[str, Row]:
    rows = re.findall(r"^\| \[(\w+)\]\(\1\.py\) \|(.*)\|$", (HEALTHY / "README.md").read_text(), re.MULTILINE)
    return {name: Row(name, *(cell.strip(" -") for cell in cells.split(" | "))) for name, cells in rows}


INDEX = _index()
WORLDS = [(row, int(ranks)) for row in INDEX.values() for ranks in row.ranks.split(", ")]


def _named(value: object) -> str | None:
    return value.name if isinstance(value, Row) else None


#: Scripts whose optimizer has copies of the parameters, of which nothing can be watched; the doctor says so.
COPIES = ("master_weights", "zero1_flat")


def _watched(row: Row, ranks: int, seed: int = 0) -> forked.Ran:
    """Run a script under the doctor, which finds nothing and watches to its end without an error of its own."""
    ran = row.run(ranks, *WATCHED, seed=seed)
    assert ran.is_complete and not forked.findings(ran.text), ran.text
    last = rf"^shardproof doctor: steps 0-\d+ of {ranks} rank.*; no finding(, \d+ notes?)?$"
    if row.name in COPIES:
        last = r"^shardproof doctor: nothing was watched .* stepped, and has none of the parameters of Sequential; "
    assert re.search(last, ran.text, re.MULTILINE), ran.text
    return ran


@pytest.mark.parametrize("name", BY_DAY)
def test_by_day_nothing_is_found_in_a_script(name: str) -> None:
    _watched(INDEX[name], 2)


@pytest.mark.nightly
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("row", "ranks"), WORLDS, ids=_named)
def test_nothing_is_found_and_no_bit_changes(row: Row, ranks: int, seed: int) -> None:
    if row.needs and seed:
        pytest.skip("its packages take longer to import than its steps: one seed")
    watched = _watched(row, ranks, seed)
    assert watched.bits and watched.bits == row.run(ranks, seed=seed).bits


@pytest.mark.nightly
@pytest.mark.parametrize("row", [row for row in INDEX.values() if row.alike in ALIKE], ids=_named)
def test_ranks_compute_the_losses_of_one_process(row: Row) -> None:
    """A script of the corpus must be right itself: in float64 its losses are those of the same batches on one rank."""
    ran = [row.run(int(ranks), double=True) for ranks in row.ranks.split(", ")]
    alone, *several = [[ALIKE[row.alike](step) for step in forked.losses(one)] for one in ran]
    assert len(alone) >= 3
    for losses in several:
        assert losses == pytest.approx(alone, rel=ROUNDING, abs=0)


@pytest.mark.nightly
@pytest.mark.parametrize("name", TWINS)
def test_the_mistake_of_a_broken_twin_is_found(name: str, tmp_path: pathlib.Path) -> None:
    mistake, right, wrong, check = TWINS[name]
    text = (HEALTHY / f"{name}.py").read_text()
    assert right in text
    (tmp_path / f"{name}.py").write_text(text.replace(right, wrong))
    shutil.copy(HEALTHY / "common.py", tmp_path)
    said = forked.run(tmp_path / f"{name}.py", 2, command=WATCHED).text
    found = re.findall(r"^shardproof doctor: (?:note: )?step \d+: .* \[(.*)\]$", said, re.MULTILINE)
    assert any(check in one.split(", ") for one in found), f"{mistake}\n{said}"


def test_each_script_has_a_row_with_its_first_line() -> None:
    scripts = {path.stem: path.read_text() for path in HEALTHY.glob("*.py") if path.stem != "common"}
    assert list(INDEX) == sorted(scripts) and len(scripts) >= 60
    for name, text in scripts.items():
        assert text.startswith(f'"""{INDEX[name].like}"""\n'), name
        assert INDEX[name].source.startswith("["), name
    assert set(BY_DAY) <= set(INDEX) and len(BY_DAY) >= len(INDEX) // 10
