"""The command ``shardproof record``: runs a training script and writes what each rank sees of some steps."""

import argparse
from collections.abc import Sequence

from shardproof import commands

_EPILOG = """\
examples:
  torchrun --nproc-per-node 1 -m shardproof record --out ref train.py --lr 1e-3
  torchrun --nproc-per-node 4 -m shardproof record --out run train.py --lr 1e-3
  shardproof compare ref run

The script runs as it is. Each rank writes to a folder of its own and waits for no other rank; docs/record.md describes
the files.

exit codes: the script's own; 2 an option or the script is not valid"""


def record(arguments: Sequence[str]) -> int:
    """Run a script and record it; the exit code is the script's, or 2 for bad input."""
    own, script = commands.split(arguments)
    options = _parser().parse_args(own)
    from shardproof.harness.training.recording import record as recording
    from shardproof.harness.watching import script as run_script
    from shardproof.harness.watching.records import NotWatchable

    try:
        with recording(
            out=options.out, steps=commands.numbers("record", options.steps), detail=options.detail,
            stages=options.stages, tensors=options.tensors, max_bytes=options.max_bytes,
        ):  # fmt: skip
            run_script.run(script)
    except NotWatchable as error:
        return commands.refuse(error)
    return 0


def _names(text: str) -> tuple[str, ...]:
    return tuple(filter(None, text.split(",")))


def _parser() -> argparse.ArgumentParser:
    parser = commands.parser(
        "shardproof record",
        description="Write what each rank sees of some steps of a training script: digests of inputs, losses, "
        "gradients, norms, parameters and optimizer states, for `shardproof compare`.",
        epilog=_EPILOG,
    )
    parser.usage = "shardproof record --out DIR [options] SCRIPT [ARGS ...], or [options] -m MODULE [ARGS ...]"
    add = parser.add_argument
    add("--out", required=True, metavar="DIR", help="the folder to write to, the same on all ranks")
    add("--steps", default="0,1", metavar="0,1", help="the steps to record")
    add("--detail", default="digest", metavar="digest|tensors", help="tensors: write the values too")
    add(
        "--tensors", type=_names, default=(), metavar="PATTERNS", help="parameters and modules whose values are written"
    )
    add(
        "--stages",
        type=_names,
        default=(),
        metavar="modules",
        help="also record the outputs of modules and their gradients",
    )
    add("--max-bytes", type=int, default=1 << 30, metavar="BYTES", help="limit of each rank's files")
    return parser
