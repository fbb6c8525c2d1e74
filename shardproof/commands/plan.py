"""The command ``shardproof plan``: what one rank of a sharded training would hold and send, by simulation."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from shardproof import commands, folders
from shardproof.commands import positive
from shardproof.door import printable
from shardproof.planfile import MARK, VERSION, Plan
from shardproof.reports.plan_text import render_plan

if TYPE_CHECKING:
    from shardproof.harness.planning.request import PlanRequest

_EPILOG = """\
examples:
  shardproof plan --model llama:0.9b --mesh 8
  shardproof plan --model llama:8b --mesh 64x8 --impl torch.fully_shard --param-dtype bfloat16 --reduce-dtype float32
  shardproof plan --model my_models:build --mesh 8 --worlds 8,64,512 --json plan.json
  shardproof page plan.json -o out/plan

The function of module:function takes no arguments and returns a torch.nn.Module that maps tokens (batch, sequence) to
logits, or a tuple of a module, a function inputs(batch, sequence) that makes its arguments on the default device, and a
function loss(output, *inputs) that returns a scalar.

exit codes: 0 printed; 2 an option is not valid, or the model or the implementation cannot be simulated"""


def plan(arguments: Sequence[str]) -> int:
    """Simulate a training step of one rank and print what it holds and sends.

    The exit code is 0; or 2 with one line on stderr, if an option is not valid, the model cannot be built without data,
    the implementation cannot be simulated, torch lacks a private name that simulation needs, or the file cannot be
    written.
    """
    options = _parser().parse_args(arguments)
    # As for `shardproof run`: for models and adapters of the user's own.
    if (here := os.getcwd()) not in sys.path:
        sys.path.append(here)
    try:
        if options.json and not os.path.isdir(folder := os.path.dirname(options.json) or "."):
            raise ValueError(f"--json {options.json}: there is no folder {folder}")
        made = _made(options, ["shardproof", "plan", *arguments])
        if options.json:
            _write(made, options.json)
    except ValueError as error:
        return commands.refuse(printable(str(error)))
    except RuntimeError as error:
        # Late: it imports torch, which has been imported by now.
        from shardproof.harness.tensors import private

        if not (complaint := private.complaint_of(error)):
            raise
        return commands.refuse(complaint)
    print(render_plan(made), end="")
    return 0


def _made(options: argparse.Namespace, command: Sequence[str]) -> Plan:
    # Late: it imports torch.
    from shardproof.harness.planning import planned
    from shardproof.harness.planning.request import parse, parse_worlds, scaled

    request = _request(options)
    mesh = parse(options.mesh)
    wanted = [mesh]
    if options.worlds:
        wanted += [one for ranks in parse_worlds(options.worlds) if (one := scaled(mesh, ranks)) != mesh]
    found = planned.plan(request, wanted, node_size=options.node_size)
    return dataclasses.replace(found, shardproof=_version(), command=tuple(command))


def _request(options: argparse.Namespace) -> PlanRequest:
    from shardproof.harness.planning.request import DTYPES, PlanRequest

    names = {"dtype": options.dtype, "compute": options.param_dtype, "reduce": options.reduce_dtype}
    dtypes = {of: DTYPES[name] for of, name in names.items() if name}
    own = {"implementation": options.impl, "units": tuple(options.unit)}
    return PlanRequest(**commands.values_of(options, PlanRequest) | dtypes | own)


def _version() -> str:
    try:
        return metadata.version("shardproof")
    except metadata.PackageNotFoundError:  # a clone on the path
        return ""


def _write(made: Plan, path: str) -> None:
    """Write a plan file; ValueError, in one line, if it cannot be written."""
    text = json.dumps({MARK: VERSION, **dataclasses.asdict(made)}, indent=1)
    try:
        folders.write_file(Path(path), f"{text}\n")
    except folders.NotWritten as error:
        raise ValueError(f"--json {error}") from error


def _rank(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text} is not a rank: ranks are counted from 0")
    return value


def _reshard(text: str) -> bool | int:
    if text in ("yes", "no"):
        return text == "yes"
    if not text.isdecimal() or int(text) < 2:
        raise argparse.ArgumentTypeError(f"{text!r} is neither yes nor no nor a number of ranks")
    return int(text)


def _parser() -> argparse.ArgumentParser:
    parser = commands.parser(
        "shardproof plan",
        description="Simulate a training step of one rank on fake tensors, without devices and without other ranks, "
        "and print its memory by kind and phase, its traffic by group and to other hosts, and the "
        "number of collectives, each next to the number of a closed formula.",
        epilog=_EPILOG,
    )
    dtypes = ("float32", "bfloat16", "float16", "float64")
    add = parser.add_argument
    add("--model", required=True, metavar="NAME", help="a known shape such as llama:8b, or module:function; "
        "an unknown shape prints the known ones")  # fmt: skip
    add("--layers", type=positive, metavar="N", help="cut a known shape down to so many layers")
    add("--dim", type=positive, metavar="N", help="cut a known shape down to this width; heads, vocabulary and the "
        "layers behind attention follow")  # fmt: skip
    add("--mesh", required=True, metavar="MESH", help="ranks (512), or replicas x shards (64x8)")
    add("--impl", default="torch.fully_shard", metavar="NAME", help="an implementation of `shardproof implementations` "
        "(default: torch.fully_shard)")  # fmt: skip
    add("--worlds", metavar="8,64,512", help="also print a table for these numbers of ranks: with more shards, or, if "
        "the mesh has replicas, with more replicas")  # fmt: skip
    add("--node-size", type=positive, default=8, metavar="N", help="ranks of a host (default: 8)")
    add("--rank", type=_rank, default=0, metavar="N", help="the rank that is simulated (default: 0)")
    add("--batch", type=positive, default=1, metavar="N", help="sequences of a rank's batch (default: 1)")
    add("--sequence", type=positive, metavar="N", help="tokens of a sequence (default: the shape's, or 2048)")
    add("--dtype", choices=dtypes, default="float32", help="dtype of parameters and optimizer state (default: float32)")
    add("--param-dtype", choices=dtypes, help="dtype of gathers and compute (default: --dtype)")
    add("--reduce-dtype", choices=dtypes, help="dtype in which gradients are reduced (default: the implementation's)")
    add("--optimizer", choices=("adamw", "sgd", "momentum"), default="adamw", help="AdamW, SGD, or SGD with momentum "
        "(default: adamw)")  # fmt: skip
    add("--reshard-after-forward", type=_reshard, metavar="yes|no|N", help="whether units are freed after forward, or "
        "the size of the groups in which they are kept (default: the implementation's)")  # fmt: skip
    add("--checkpointing", action="store_true", help="recompute each unit's activations in backward")
    add("--unit", action="append", default=[], metavar="NAME", help="a module of this name, or every module of this "
        "class, is a unit; may be given several times (default: the repeated blocks)")  # fmt: skip
    add("--json", metavar="FILE", help="write a plan file, of which `shardproof page` makes a page")
    return parser
