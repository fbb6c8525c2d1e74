"""The command ``shardproof state``: prints the state of a training, or says what two of them have otherwise."""

import argparse
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from shardproof import commands
from shardproof.commands import judgement
from shardproof.door import printable

if TYPE_CHECKING:
    from shardproof.harness.states.differences import Difference
    from shardproof.harness.states.sides import State

DIFFERS = 1

_EPILOG = """\
examples:
  shardproof state before checkpoint/       what was saved is what was trained
  shardproof state before after             what was resumed is what was saved
  shardproof state checkpoint/              what a file has
  shardproof state now file.pt --earlier step0 --earlier step5
  shardproof state titan hf/ --map hf-llama
  shardproof state now adapter/ --rename 'lora_(.)=lora_\\1.default'

A state is a folder that shardproof.state(model, optimizer, out=...) wrote, or a checkpoint: a file of torch.save or
safetensors, a folder of torch.distributed.checkpoint or of Hugging Face. A checkpoint is read tensor by tensor: no more
than one is in memory, and nothing in it is executed. docs/state.md has more.

exit codes: 0 nothing differs; 1 something does; 2 a state cannot be read"""


@commands.reader
def state(arguments: Sequence[str]) -> int:
    """Print a state, or compare two; the exit code is 0 if nothing differs, 1 if something does, 2 for bad input."""
    options = _parser().parse_args(arguments)
    from shardproof.harness.states import comparing, flat, sides

    a = sides.read(options.a)
    if options.b is None:
        found = [*comparing.check(a)]
        lines = [*_summary(a), "", *comparing.lines(found)] if found else _summary(a)
        return _print(lines, found, options.json)

    b = sides.read(options.b)

    def translated(state: "State", to: "State") -> "State":
        state = flat.unflattened(sides.renamed(state, options.rename), to)
        return sides.mapped(state, options.map, to) if options.map else state

    if b.is_live and not a.is_live:
        live = translated(b, a)
        a, _ = sides.aligned(flat.unflattened(a, live), live)

    def read(path: str) -> tuple["State", str]:
        return sides.aligned(translated(b if path == options.b else sides.read(path), a), a)

    b, prefix = read(options.b)
    earlier = [read(one)[0] for one in options.earlier]
    found = [
        *(one._replace(text=f"in {a.path}: {one.text}") for one in comparing.check(a)),
        *(one._replace(text=f"in {b.path}: {one.text}") for one in comparing.check(b, a)),
        *comparing.compare(a, b, earlier=earlier),
    ]
    begins = f", whose names begin with {prefix!r}" if prefix else ""
    frozen = comparing.without_frozen(a, b)
    without = f", without {len(frozen)} entries that do not train" if frozen else ""
    head = [f"{a.path}: {a.what}", f"{b.path}: {b.what}{begins}{without}"]
    left_out = comparing.scope(a, b, earlier=earlier).left_out
    head += [left_out] if left_out else []
    told = comparing.lines(found, a.entries) if found else ["nothing differs"]
    return _print([*head, "", *told], found, options.json)


def _summary(state: "State") -> list[str]:
    lines = [f"{state.path}: {state.what}"]
    for section in dict.fromkeys(key.section for key in state.entries):
        mine = [one for key, one in state.entries.items() if key.section == section]
        tensors = [one for one in mine if one.is_tensor]
        numel = sum(one.numel for one in tensors)
        dtypes = ", ".join(dict.fromkeys(one.dtype for one in tensors))
        count, others = len(tensors), len(mine) - len(tensors)
        told = [f"{count} tensor{'s' * (count != 1)} of {numel:,} elements ({dtypes})"] if tensors else []
        told += [f"{others} value{'s' * (others != 1)}"] if others else []
        lines.append(f"  {section}: {', '.join(told)}")
    return lines


def _print(lines: Iterable[str], found: Sequence["Difference"], file: str | None) -> int:
    text = "\n".join(map(printable, lines))
    print(text)
    items = [
        judgement.Item(
            kind="difference", title=f"{one.key}: {one.text}", where={"section": one.key.section, "kind": one.kind}
        )
        for one in found
    ]
    return judgement.write(file, judgement.of("state", items, text)) or (DIFFERS if found else 0)


def _parser() -> argparse.ArgumentParser:
    parser = commands.parser(
        "shardproof state",
        description="Print what a state of a training has, or say what B has otherwise than A: entries that are "
        "missing, empty, stale, zero, another rank's, exchanged or narrower. Needs no process group and no GPU.",
        epilog=_EPILOG,
    )
    parser.add_argument("a", metavar="A", help="a state; with B, the state as it should be")
    parser.add_argument("b", metavar="B", nargs="?", help="the state to judge, of any number of ranks")
    parser.add_argument("--earlier", action="append", default=[], metavar="OLD", help="an earlier state of the "
                        "training, whose entries B may have instead; may be repeated")  # fmt: skip
    parser.add_argument("--rename", action="append", default=[], metavar="REGEX=NEW", help="replace this part of the "
                        "names of B, as re.sub() does; may be repeated")  # fmt: skip
    judgement.add_option(parser)
    parser.add_argument("--map", metavar="TABLE", help="names of B by a table: hf-llama, engine, or another of "
                        "docs/state.md; a file with lines 'OLD -> NEW'; or FILE.py:FUNCTION")  # fmt: skip
    return parser
