"""The mistake of each script of examples/incidents is named, and nothing is said of the same script without it.

Those with a loop are watched by the doctor, or recorded and compared; those with functions are checked against one
process.
"""

import pathlib
import re
from collections.abc import Sequence

import pytest

from tests.harness import forked
from tests.harness.inner import ROOT, python

EXAMPLES = ROOT / "examples"

#: What a finding must say, by script: check and signature, and what is wrong.
SAID = {
    "g02_no_sync": ("[D11, S2]", "is this rank's own gradient", "nothing was reduced over dp (ranks 0-3)"),
    "g03_sub_mesh": ("[D11, S3]", "is reduced over shard (ranks 0-1) only: ranks 2-3 are missing (c = 0.5"),
    "g04_zero_grad": ("[D11, S4]", "has the last of 4 microbatches only (c = 0.25"),
    "g06_local_norm": (
        "[D10, S6]",
        "each rank scales its gradients by the norm of its own shards",
        "the scale differs between ranks",
    ),
    "g07_early_optimizer": ("[D4, S7]", "none of the 14 parameters of AdamW is the model's"),
    "g08_untied": ("[D8, S8]", "'embed.weight'", "'head.weight'", "were one parameter and are 2"),
    "g09_sequence_parallel_norm": ("[D2, S9]", "ranks 0-1 and ranks 2-3 (tp)", "the sum over tp is missing"),
    "g10_detached_router": ("[D5, S10]", "'1.gate.weight', '2.gate.weight' get no gradient on any rank"),
}
#: What a comparison with a recording of the healthy script says, and the number of ranks of that recording.
COMPARED = {
    "g03_sub_mesh": (4, "gradient of '0.norm.weight' in step 0", "is reduced over shard (ranks 0-1) only", "[S3]"),
    "g04_zero_grad": (4, "gradient of '0.norm.weight' in step 0", "it has the last of 4 microbatches only", "[S4]"),
    "g06_local_norm": (4, "gradient at the optimizer's step of '0.norm.weight'", "by a factor of its own", "[S6]"),
    "g07_early_optimizer": (4, "gradient at the optimizer's step of ", "no optimizer steps '0.norm.weight'", "[S7]"),
    "g08_untied": (4, "parameter before step of 'embed.weight' in step 0", "'head.weight' are one parameter", "[S8]"),
    "g09_sequence_parallel_norm": (
        4, "gradient at the optimizer's step of '1.norm.weight' in step 0",
        "is reduced over dp (ranks 0, 2) only", "[S3]",
    ),
    "g10_detached_router": (
        4, "gradient before its reduction of ", "'1.gate.weight', '2.gate.weight' have no gradient", "[S10]",
    ),
    "g13_tokens_of_all_ranks": (
        1, "gradient of '0.weight' in step 0",
        "every gradient is exactly 0.5000 x the reference's (15 of 15): 1 / the size of dp or the size of tp [S1]",
    ),
    "g14_mean_of_means": (1, "loss in step 0", "microbatches count with other weights than in the reference: ", "[S5]"),
    "g15_stale_reduction": (
        1, "gradient at the optimizer's step of '0.weight' in step 1", "it is the gradient of the step before", "[S12]",
    ),
}  # fmt: skip

#: What a check must say, by script: the function with the mistake, which "healthy" replaces, and the others.
CHECKED = {
    "bf16_norm": (
        "parallelize", ("step",),
        ("output of 'microbatch 0' in the first step", "8 tensors of this stage diverge, on every rank"),
    ),
    "g01_divided_twice": (
        "step", ("parallelize", "data"),
        ("gradient of 'tokens.weight' in the first step", "every gradient is exactly 0.2500 x the reference's (9 of 9",
         "1/4 is 1 / the size of dp [S1]", "losses and own gradients agree (factor 1)",
         "multiply the loss by the size of dp (4 here, and 1 on one rank)"),
    ),
    "g05_means_of_means": (
        "step", ("parallelize", "data"),
        ("loss of 'microbatch 0' in the first step", "each microbatch counts alike [S5]: the sum of its losses is "
         "divided by its own tokens (24, 18, 12, 6), not by those of the step (60)"),
    ),
    "g12_reversed_shards": (
        "parallelize", (),
        ("parameter before step of '0.weight' in the first step", "rank 0 has the shard of rank 3", "[S12]"),
    ),
}  # fmt: skip
MESHES = {"bf16_norm": ("--mesh", "dp=2,tp=2")}
TWO, CLIP = ["--accumulate", "2"], ["--clip", "torch"]
LOOPS = {"ddp": TWO, "fsdp2": TWO + CLIP, "fsdp2_tp": TWO + CLIP, "hsdp": CLIP}
LOOPS["fsdp2-bf16"] = ["--bf16", "--clip", "hand"]


def _watched(
    script: pathlib.Path, *arguments: str, command: Sequence[str] = ("doctor", "--strict"), ranks: int = 4
) -> tuple[int, str]:
    """The exit code of ranks whose script is watched by a command, and what they print."""
    ran = forked.run(script, ranks, *arguments, command=command)
    return int(not ran.is_complete), ran.text


def _assert_says(text: str, words: Sequence[str]) -> None:
    missing = [one for one in words if one not in text]
    assert not missing, f"{missing} is not in:\n{text}"


def _findings(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("shardproof doctor: step ")]


@pytest.mark.nightly
@pytest.mark.parametrize("name", SAID)
def test_the_mistake_is_named_and_its_healthy_twin_has_no_finding(name: str) -> None:
    script = EXAMPLES / "incidents" / f"{name}.py"
    code, text = _watched(script)
    assert code == 1, text
    _assert_says(text, SAID[name])
    # What follows from the mistake is no finding of its own.
    assert len([line for line in _findings(text) if line.endswith("]")]) == 1, text
    code, text = _watched(script, "healthy")
    assert code == 0, text
    assert "no finding" in text and not [line for line in _findings(text) if line.endswith("]")], text


@pytest.mark.nightly
def test_a_mean_of_means_is_a_note_because_it_may_be_meant() -> None:
    script = EXAMPLES / "incidents" / "g14_mean_of_means.py"
    code, text = _watched(script)
    assert code == 0 and "note: step 0: each microbatch counts alike, whatever its tokens [D17, S5]" in text, text
    assert "D17" not in _watched(script, "healthy")[1]


def _checked(script: str, functions: dict[str, str], *options: str) -> tuple[int, str]:
    """The exit code of a check of four ranks, and what it prints."""
    path = EXAMPLES / "incidents" / f"{script}.py"
    options += tuple(word for option, name in functions.items() for word in (f"--{option}", f"{path}:{name}"))
    return _shardproof("check", "--mesh", "dp=4", "--device", "cpu", *options)


def _shardproof(*arguments: str | pathlib.Path) -> tuple[int, str]:
    """The exit code of a command, and what it prints."""
    done = python("-m", "shardproof", *arguments, timeout=900, OMP_NUM_THREADS="1")
    return done.returncode, done.stdout + done.stderr


@pytest.mark.nightly
@pytest.mark.parametrize("name", CHECKED)
def test_a_check_names_the_mistake_and_agrees_without_it(name: str) -> None:
    wrong, others, said = CHECKED[name]
    functions = {one: one for one in ("model", wrong, *others)}
    mesh = MESHES.get(name, ())
    code, text = _checked(name, functions, *mesh)
    assert code == 1, text
    _assert_says(text, said)
    code, text = _checked(name, functions | {wrong: "healthy"}, *mesh)
    assert code == 0 and text.startswith("pass  "), text


@pytest.mark.nightly
def test_a_problem_of_bfloat16_under_tensor_parallelism_is_bisected() -> None:
    """Of eleven axes two matter."""
    functions = {one: one for one in ("model", "parallelize", "step")}
    code, text = _checked("bf16_norm", functions, *MESHES["bf16_norm"], "--bisect")
    assert code == 1 and "  cured by each alone: tp -> 1; mixed-precision -> float32\n" in text, text
    (count,) = re.findall(r"configuration: tp and mixed-precision on   \((\d+) trials, ", text)
    assert int(count) <= 20, text


def test_each_script_has_what_is_said_of_it() -> None:
    scripts = {path.stem for path in (EXAMPLES / "incidents").glob("*.py")}
    assert scripts == {"common", *SAID, *COMPARED, *CHECKED}


@pytest.mark.nightly
@pytest.mark.parametrize("name", COMPARED)
def test_a_comparison_with_a_healthy_recording_names_the_mistake(name: str, tmp_path: pathlib.Path) -> None:
    script, (ranks, first, *said) = EXAMPLES / "incidents" / f"{name}.py", COMPARED[name]
    for out, count, arguments in (("ref", ranks, ["healthy"]), ("healthy", 4, ["healthy"]), ("mistake", 4, [])):
        code, text = _watched(script, *arguments, command=["record", "--out", str(tmp_path / out)], ranks=count)
        assert code == 0, text
    code, text = _shardproof("compare", tmp_path / "ref", tmp_path / "healthy")
    assert code == 0 and "no divergence" in text, text
    code, text = _shardproof("compare", tmp_path / "ref", tmp_path / "mistake")
    assert code == 1, text
    _assert_says(text, [f"first divergence on rank 0: {first}", *said])


@pytest.mark.nightly
@pytest.mark.parametrize("name", LOOPS)
def test_loops_without_a_mistake_have_no_finding(name: str) -> None:
    code, text = _watched(EXAMPLES / "loops" / f"{name.partition('-')[0]}.py", *LOOPS[name])
    assert code == 0 and "no finding" in text and "c = " in text, text
