"""The doctor changes no bit of a training, nor does a recording: losses of 20 steps of the loops of examples/loops."""

import pathlib
import re

import pytest

from tests.harness.inner import ROOT, torchrun

LOOPS = sorted(path.stem for path in (ROOT / "examples/loops").glob("*.py"))
STEPS = 20
#: Loops that need no mesh of two dimensions run with two ranks, the others with four.
TWO = ("ddp", "fsdp2")
RECORDED = "fsdp2"


def _losses(ranks: int, script: pathlib.Path, *before: str) -> list[str]:
    """What rank 0 prints of its losses, with two microbatches a step."""
    done = torchrun(ranks, *before, script, "--accumulate", "2", code=0)
    # It watched to its end, without an error of its own.
    assert "doctor" not in before or f"steps 0-2 of {ranks} ranks" in done.stderr, done.stderr
    return re.findall(r"loss (\S+)", done.stdout)


@pytest.mark.nightly
@pytest.mark.parametrize("name", LOOPS)
def test_losses_have_the_same_bits_with_the_doctor_a_recording_and_without(name: str, tmp_path: pathlib.Path) -> None:
    text = (ROOT / f"examples/loops/{name}.py").read_text()
    # The same script for more steps, of which the last 17 are not watched, and with all digits of its losses.
    text, steps = re.subn(r"^(STEPS, .* = )3,", rf"\g<1>{STEPS},", text, flags=re.MULTILINE)
    text, prints = re.subn(r"\{total:.4f\}", "{total.hex()}", text)
    assert (steps, prints) == (1, 1)
    script = tmp_path / f"{name}.py"
    script.write_text(text)
    ranks = 2 if name in TWO else 4
    alone = _losses(ranks, script)
    assert len(set(alone)) == STEPS and alone[0].startswith("0x")
    assert _losses(ranks, script, "-m", "shardproof", "doctor") == alone
    if name == RECORDED:
        out = tmp_path / "run"
        assert _losses(ranks, script, "-m", "shardproof", "record", "--stages", "modules", "--out", str(out)) == alone
        assert len([*out.glob("rank*/done")]) == ranks
