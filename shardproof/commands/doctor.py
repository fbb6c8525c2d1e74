"""The command ``shardproof doctor``: runs a training script and reports mistakes in its first steps and later ones."""

import argparse
import contextlib
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from shardproof import commands
from shardproof.commands import judgement
from shardproof.harness.judging import codes

if TYPE_CHECKING:
    from shardproof.harness.training.doctor import Doctor

_EPILOG = """\
examples:
  torchrun --nproc-per-node 4 -m shardproof doctor train.py --lr 1e-3
  torchrun --nproc-per-node 8 -m shardproof doctor --steps 0,1 --strict --report doctor.json -m my_project.train

The script runs unchanged. The doctor watches forward, backward and the optimizer in its first steps, on every rank,
and then removes their hooks; it looks at parameters and states again after later steps, at doubling distances, and at
the end. docs/doctor.md describes each check.

exit codes: the script's own; with --strict 1 if there are findings; 2 an option or the script is not valid"""


def doctor(arguments: Sequence[str]) -> int:
    """Run a script under the doctor; the exit code is the script's, or 1 with ``--strict`` and a finding, or 2."""
    own, script = commands.split(arguments, flags=("--strict",), optional=("--state",))
    options = _parser().parse_args(own)
    from shardproof.harness.training.doctor import CHECKS, Doctor
    from shardproof.harness.watching import script as run_script
    from shardproof.harness.watching.groups import DATA
    from shardproof.harness.watching.records import NotWatchable
    from shardproof.harness.watching.ties import Ties

    watching, has_ended = None, True
    try:
        steps = commands.numbers("doctor", options.steps)
        with contextlib.closing(Ties()) as ties, Doctor(
            data=options.data or DATA, steps=steps, checks=options.checks or CHECKS, report=options.report,
            patience=options.patience, registered=ties, state=_folder(options.state, options.report),
        ) as watching:  # fmt: skip
            run_script.run(script)
    except NotWatchable as error:
        return commands.refuse(error)
    except Exception:
        has_ended = False
        raise
    finally:  # also if the script ends with an exception, or by sys.exit()
        refused = 0
        if watching is not None and _is_first():
            refused = judgement.write(options.json, _judged(watching, has_ended))
    return refused or int(options.strict and any(not one.is_note for one in watching.findings))


def _is_first() -> bool:
    return os.environ.get("RANK", "0") == "0"


def _judged(watching: "Doctor", has_ended: bool) -> judgement.Judgement:
    from shardproof.harness.training.report import UNSEEN

    items = [
        judgement.Item(
            kind="note" if one.is_note else "finding",
            title=one.title,
            codes=[*filter(None, [*one.checks, one.signature])],
            lines=one.lines,
            where={"step": one.step, **({"root": one.root} if one.root else {})},
        )
        for one in watching.findings
    ]
    summary = watching.summary()
    return judgement.of("doctor", items, summary, is_judged=has_ended and summary != UNSEEN)


def _folder(named: str | None, report: str | None) -> str | None:
    """Return the folder of the state: that which is named, or one next to the report."""
    if named != "":
        return named
    return "shardproof-state" if report is None else f"{report.removesuffix('.json')}.state"


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


def _parser() -> argparse.ArgumentParser:
    what = "Watch the first steps of a training script and report mistakes that no correct training has."
    parser = commands.parser("shardproof doctor", description=what, epilog=_EPILOG)
    parser.usage = "shardproof doctor [options] SCRIPT [ARGS ...], or [options] -m MODULE [ARGS ...]"
    add = parser.add_argument
    add("--steps", default="0,1,2", metavar="0,1,2", help="the steps to watch")
    add("--data", type=_names, metavar="DIMS", help="mesh dimensions whose ranks read different data")
    add("--checks", type=_names, metavar=",".join([*codes.CHECKS][:2]), help="the checks to make; all by default")
    add("--report", metavar="FILE", help="write a run file for the page and the gate")
    add("--state", nargs="?", const="", metavar="FOLDER", help="write the state after the last watched step, for "
        "shardproof state; by default next to the report, or to shardproof-state")  # fmt: skip
    add("--strict", action="store_true", help="exit with 1 if there are findings")
    add("--patience", type=float, default=120.0, metavar="SECONDS", help="how long to wait for the slowest rank")
    judgement.add_option(parser)
    return parser
