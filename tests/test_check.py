"""`shardproof check` on ranks: right trainings agree under each parallelism; records say what was seen."""

import importlib.util
import pathlib

import pytest

import shardproof
from shardproof.harness.planning import packaged
from shardproof.runfile import Verdict, load_run
from tests.harness.inner import ROOT, python

LOOP = ROOT / "examples/incidents/g01_divided_twice.py"

FSDP2, TENSOR = ("--impl", "torch.fully_shard"), ("--impl", "torch.fully_shard", "--mesh", "dp=2,tp=2")
BF16 = ("--param-dtype", "bfloat16")
RIGHT = {
    "fsdp2": FSDP2,
    "fsdp2-sgd": (*FSDP2, "--optimizer", "sgd"),
    "fsdp2-bf16": (*FSDP2, *BF16, "--reduce-dtype", "bfloat16"),
    "hsdp": (*FSDP2, "--mesh", "2x2"),
    "hsdp-bf16": (*FSDP2, "--mesh", "2x2", *BF16),
    "ddp": ("--impl", "ddp"),
    "ddp-bf16": ("--impl", "ddp", "--dtype", "bfloat16"),
    "tp": TENSOR,
    "tp-bf16": (*TENSOR, *BF16),
    "fsdp1": ("--impl", "torch.fsdp"),
    "reference": ("--impl", "reference"),
    "oracle-none": (*FSDP2, *BF16, "--oracle", "none"),
    "oracle-float32": (*FSDP2, "--oracle", "float32"),
}

#: Each has two layers of width 64; those of transformers are, where its tox environment has the package.
MODELS = ["gpt:0.1b", "llama:0.9b", *(packaged.KNOWN if importlib.util.find_spec("transformers") else ())]
#: Classes of transformers that bring no plan, or one with styles for experts.
WITHOUT_PLAN = {"transformers:gpt2", "transformers:mixtral", "transformers:vit"}


def models_of(name: str) -> list[str]:
    is_cut = RIGHT[name][: len(TENSOR)] == TENSOR
    return [model for model in MODELS if not is_cut or model not in WITHOUT_PLAN]


@pytest.mark.nightly
@pytest.mark.parametrize(("name", "model"), [(name, model) for name in RIGHT for model in models_of(name)])
def test_a_right_training_agrees(name: str, model: str) -> None:
    options = ["--model", model, "--layers", "2", "--dim", "64", "--mesh", "4", "--device", "cpu", *RIGHT[name]]
    done = python("-m", "shardproof", "check", *options, timeout=900, OMP_NUM_THREADS="1")
    assert done.returncode == 0 and done.stdout.startswith("pass  "), done.stdout + done.stderr


@pytest.mark.nightly
def test_a_check_from_python_returns_a_record_whose_run_file_stays(tmp_path: pathlib.Path) -> None:
    functions = {name: f"{LOOP}:{name}" for name in ("model", "parallelize", "data", "step")}
    record = shardproof.check(**functions, mesh="2", device="cpu", steps=1, report=tmp_path / "run.json")
    assert (record.id, record.implementation, record.world) == ("own/test_check.py::test_own[w2]", "own", 2)
    assert record.verdict is Verdict.FAIL and record.own is not None and record.failure is not None
    assert (record.own.mesh, record.own.signature, record.own.factor) == ({"dp": 2}, "S1", 0.5)
    assert record.failure.stage == "gradient" and "1/2 is 1 / the size of dp" in record.failure.text
    assert {one.module for one in record.own.distances} >= {"", "tokens", "layers.0", "head"}
    assert "shardproof check --mesh 2" in record.reproduce and "--report" in record.reproduce
    assert load_run(tmp_path / "run.json").end.complete


@pytest.mark.nightly
def test_what_cannot_be_checked_is_one_line_from_python() -> None:
    with pytest.raises(ValueError, match=r"^check: --mesh 'dp=2,dp=2' has two dimensions of one name$"):
        shardproof.check(model=f"{LOOP}:model", mesh="dp=2,dp=2")
