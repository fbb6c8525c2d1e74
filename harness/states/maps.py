"""Rules by which a state has other names than another: tables of libraries, and what fused tensors are made of.

A table has a line "OLD -> NEW" for each kind of entry; ``*`` is one word between dots, and the same word in NEW. A
fused tensor has several names, "ONE + TWO", along its rows; ``#`` in them is the index of its first dimension, as of
experts. ``(rotary)`` says that the rows of each head have the other order of rotary embeddings, ``(transposed)`` that
the two dimensions are exchanged. The sizes of slices, and where a rank of tensor parallelism has its part of a full
tensor, follow from the shapes of the other state, which has no fused tensors.
"""

import functools
import importlib.util
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from shardproof import door
from shardproof.door import BadFile
from shardproof.harness.tensors.fingerprints import Box

ROTARY, TRANSPOSED = "rotary", "transposed"

#: Names of Hugging Face's llama and of torchtitan's.
_LLAMA = """
model.embed_tokens.weight -> tok_embeddings.weight
model.layers.*.self_attn.q_proj.weight -> layers.*.attention.wq.weight (rotary)
model.layers.*.self_attn.k_proj.weight -> layers.*.attention.wk.weight (rotary)
model.layers.*.self_attn.v_proj.weight -> layers.*.attention.wv.weight
model.layers.*.self_attn.o_proj.weight -> layers.*.attention.wo.weight
model.layers.*.mlp.gate_proj.weight -> layers.*.feed_forward.w1.weight
model.layers.*.mlp.down_proj.weight -> layers.*.feed_forward.w2.weight
model.layers.*.mlp.up_proj.weight -> layers.*.feed_forward.w3.weight
model.layers.*.input_layernorm.weight -> layers.*.attention_norm.weight
model.layers.*.post_attention_layernorm.weight -> layers.*.ffn_norm.weight
model.norm.weight -> norm.weight
lm_head.weight -> output.weight
"""
_ENGINE = """
**.qkv_proj.weight -> **.q_proj.weight + **.k_proj.weight + **.v_proj.weight
**.qkv_proj.bias -> **.q_proj.bias + **.k_proj.bias + **.v_proj.bias
**.gate_up_proj.weight -> **.gate_proj.weight + **.up_proj.weight
**.gate_up_proj.bias -> **.gate_proj.bias + **.up_proj.bias
**.experts.w13_weight -> **.experts.#.gate_proj.weight + **.experts.#.up_proj.weight
**.experts.w2_weight -> **.experts.#.down_proj.weight
**.experts.gate_up_proj -> **.experts.#.gate_proj.weight + **.experts.#.up_proj.weight
**.experts.down_proj -> **.experts.#.down_proj.weight
"""
TABLES: Mapping[str, str] = {
    "hf-llama": _LLAMA,
    "hf-names": _LLAMA.replace(" (rotary)", ""),
    "engine": _ENGINE,
    "vllm": _ENGINE,
    "sglang": _ENGINE,
    "peft": "**.lora_A.weight -> **.lora_A.default.weight\n**.lora_B.weight -> **.lora_B.default.weight",
}

_WORDS = re.compile(r"\*\*|\*|#")
_NOTE = re.compile(r"\s*\((\w+)\)$")

#: The most words that may precede a name.
MOST_WORDS = 5


class Rule(NamedTuple):
    """A line of a table.

    Attributes:
        old: matches a name.
        new: the names that it stands for, with words to fill in.
        note: ``ROTARY``, ``TRANSPOSED``, or empty.
        line: as it was written.
    """

    old: re.Pattern[str]
    new: tuple[str, ...]
    note: str
    line: str

    def names(self, name: str, index: int = 0) -> tuple[str, ...] | None:
        """Return the names that a name stands for; of a tensor of experts those of one. None where it is another."""
        match = self.old.fullmatch(name)
        return None if match is None else tuple(_filled(one, match.groups(), index) for one in self.new)

    @property
    def has_index(self) -> bool:
        """Whether the first dimension is one of experts."""
        return "#" in self.new[0]


def _filled(template: str, words: Sequence[str], index: int) -> str:
    left = iter(words)
    return _WORDS.sub(lambda found: str(index) if found[0] == "#" else next(left), template)


Rules = Sequence[Rule]
"""The lines of a table, of which the first that matches counts."""

Function = Callable[[str], str | None]
"""Returns the other name of an entry, or None where it has one name in both."""


def read(named: str) -> tuple[list[Rules], Function | None]:
    """Read a table by its name or its file, or a function "FILE.py:FUNCTION", which is executed.

    Returns:
        The rules, in both directions where no line is fused; and the function, if it is one.

    Raises:
        BadFile: it is none of these, in one line.
    """
    path, colon, function = named.rpartition(":")
    if colon and path.endswith(".py"):
        return [], _function(Path(path), function)
    text = TABLES.get(named)
    if text is None:
        if not Path(named).is_file():
            raise BadFile(
                f"--map {named}: no file, and no table of this name; known: {', '.join(TABLES)}; or FILE.py:FUNCTION"
            )
        text = bytes(door.piece(Path(named), 0, min(door.size_of(Path(named)), door.MOST_BYTES))).decode(
            errors="replace"
        )
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.lstrip().startswith("##")]
    forth = [_rule(line, named) for line in lines]
    back = (
        [_rule(line, named, is_back=True) for line in lines]
        if not any(" + " in one or "#" in one for one in lines)
        else []
    )
    return [one for one in (forth, back) if one], None


def _rule(line: str, named: str, *, is_back: bool = False) -> Rule:
    note = _NOTE.search(line)
    old, arrow, new = (line[: note.start()] if note else line).partition("->")
    if not arrow or not old.strip() or not new.strip() or (note and note[1] not in (ROTARY, TRANSPOSED)):
        raise BadFile(
            f"--map {named}: {line[:200]!r}: expected OLD -> NEW, such as 'model.layers.*.mlp.w1 -> layers.*.w1'"
        )
    if is_back:
        old, new = new, old
    pattern = "".join(
        {"**": "(.*)", "*": "([^.]+)"}.get(part, re.escape(part)) for part in re.split(r"(\*\*|\*)", old.strip())
    )
    targets = tuple(one.strip() for one in new.split(" + "))
    if any(len(re.findall(r"\*\*|\*", one)) > re.compile(pattern).groups for one in targets):
        raise BadFile(f"--map {named}: {line[:200]!r}: the new name has more words to fill in than the old one")
    return Rule(re.compile(pattern), targets, note[1] if note else "", line)


def _function(path: Path, name: str) -> Function:
    spec = importlib.util.spec_from_file_location("shardproof_map", path) if path.is_file() else None
    if spec is None or spec.loader is None:
        raise BadFile(f"--map {path}:{name}: no such file")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise BadFile(f"--map {path}:{name}: {type(error).__name__}: {error}") from error
    found = getattr(module, name, None)
    if not callable(found):
        raise BadFile(f"--map {path}:{name}: the file has no function of this name")
    return found  # type: ignore[no-any-return]


def rule_of(name: str, rules: Rules) -> Rule | None:
    """Return the rule of a name, if one matches."""
    return next((one for one in rules if one.old.fullmatch(name)), None)


def beginning(names: Collection[str], is_wanted: Callable[[str], bool]) -> str:
    """Return what most names begin with, words and dots, before one that is wanted; the shortest of several."""
    counts = Counter({"": 0})
    for name in names:
        words = name.split(".")
        for count in range(min(len(words), MOST_WORDS + 1)):
            if is_wanted(".".join(words[count:])):
                counts["".join(f"{word}." for word in words[:count])] += 1
    return max(counts, key=lambda one: (counts[one], -len(one)))


def chosen(every: Sequence[Rules], names: Collection[str], wanted: Collection[str]) -> tuple[Rules, str]:
    """Return the rules, of several directions, by which most names are wanted ones, and what the names begin with."""
    best: tuple[int, Rules, str] = (-1, every[0], "")
    for rules in every:

        def is_wanted(name: str, rules: Rules = rules) -> bool:
            rule = rule_of(name, rules)
            found = None if rule is None else rule.names(name)
            return found is not None and any(one in wanted for one in found)

        before = beginning(names, is_wanted)
        count = sum(name.startswith(before) and is_wanted(name.removeprefix(before)) for name in names)
        best = max(best, (count, rules, before), key=lambda one: one[0])
    return best[1], best[2]


# Slices ----------------------------------------------------------------------------------------------------------


class Slice(NamedTuple):
    """A part of a fused tensor: an entry of the other state, or a rank's part of one.

    Attributes:
        name: of the entry.
        tensor: a view.
        box: which elements of the full entry it has.
    """

    name: str
    tensor: torch.Tensor
    box: Box


class Parallel(NamedTuple):
    """The place of a rank in a dimension of parallelism."""

    rank: int = 0
    size: int = 1

    def __str__(self) -> str:
        """Return the words of a message."""
        return f"rank {self.rank} of {self.size}"


ONE = Parallel()
"""Of a rank that has all of each entry."""


class NoFit(ValueError):
    """A fused tensor is not made of entries of these shapes. The text is the end of a line."""


def slices(
    rule: Rule, name: str, tensor: torch.Tensor, shapes: Mapping[str, tuple[int, ...]],
    tensor_parallel: Parallel = ONE, expert_parallel: Parallel = ONE,
) -> list[Slice]:  # fmt: skip
    """Return the parts of a tensor, or of a rank's part of it, that are entries of another state.

    Args:
        rule: that of the name.
        shapes: those of the other state's entries.
        tensor_parallel: where the rank is among those that share rows or columns of each entry.
        expert_parallel: where it is among those that share experts.

    Raises:
        NoFit: the shapes do not allow it.
    """
    if not rule.has_index:
        return _fused(rule.names(name) or (), _turned(rule, tensor), shapes, tensor_parallel)
    found = []
    for local in range(tensor.shape[0] if tensor.ndim else 0):
        number = expert_parallel.rank * tensor.shape[0] + local
        names = rule.names(name, number) or ()
        if names and names[0] not in shapes and number:
            raise NoFit(
                f"it has {tensor.shape[0]} experts on each of {expert_parallel.size} ranks, and {names[0]} is none"
            )
        found += _fused(names, _turned(rule, tensor[local]), shapes, tensor_parallel)
    return found


def _turned(rule: Rule, tensor: torch.Tensor) -> torch.Tensor:
    return tensor.t() if rule.note == TRANSPOSED and tensor.ndim == 2 else tensor


def _fused(
    names: Sequence[str], tensor: torch.Tensor, shapes: Mapping[str, tuple[int, ...]], parallel: Parallel
) -> list[Slice]:
    if missing := [one for one in names if one not in shapes]:
        raise NoFit(f"{missing[0]} is no entry of the other state")
    full = [shapes[one] for one in names]
    if len(names) == 1:
        part, box = fitted(tensor, full[0], parallel)
        return [Slice(names[0], part, box)]
    rows, at = _rows(tensor, full, parallel), 0
    found = []
    for name, shape, height in zip(names, full, rows, strict=True):
        # Heads of keys and values that are fewer than ranks are on several of them.
        share = parallel.size // max(1, shape[0] // max(1, height))
        start = parallel.rank // max(1, share) * height
        box = Box(shape) if height == shape[0] else _rows_box(shape, 0, start, start + height)
        found.append(Slice(name, tensor[at : at + height], box))
        at += height
    return found


def _rows(tensor: torch.Tensor, full: Sequence[tuple[int, ...]], parallel: Parallel) -> list[int]:
    """Return how many rows a rank has of each entry in a fused tensor."""
    said = f"its shape {list(tensor.shape)} is not made of {', '.join(str(list(one)) for one in full)}"
    said += f" on {parallel}"
    if any(not one or one[1:] != tuple(tensor.shape[1:]) for one in full):
        raise NoFit(said)
    rows = [one[0] // parallel.size for one in full]
    if sum(rows) != tensor.shape[0] or any(one[0] % parallel.size for one in full):
        each = _shared(tensor.shape[0] - rows[0], [one[0] for one in full[1:]], parallel)
        if not each:
            raise NoFit(said)
        rows = [rows[0], *(each for _ in full[1:])]
    return rows


def _shared(rest: int, others: Sequence[int], parallel: Parallel) -> int:
    """Return how many rows of each a rank has of keys and values that several ranks have; 0 if they do not fit."""
    each = rest // max(1, len(others))
    if rest <= 0 or rest % len(others) or any(one % each or parallel.size % (one // each) for one in others):
        return 0
    return each


def fitted(tensor: torch.Tensor, shape: tuple[int, ...], parallel: Parallel) -> tuple[torch.Tensor, Box]:
    """Return a rank's part of an entry without padding, and where it is in the full entry.

    Raises:
        NoFit: it is of another size.
    """
    local = tuple(tensor.shape)
    if local == shape:
        return tensor, Box(shape)
    differing = [dim for dim, (one, other) in enumerate(zip(local, shape, strict=False)) if one != other]
    if len(local) != len(shape) or len(differing) != 1 or local[differing[0]] * parallel.size < shape[differing[0]]:
        raise NoFit(f"its shape {list(local)} is no part of {list(shape)} on {parallel}")
    dim = differing[0]
    start = min(parallel.rank * local[dim], shape[dim])
    stop = min(start + local[dim], shape[dim])  # what follows pads a vocabulary
    return tensor.narrow(dim, 0, stop - start), _rows_box(shape, dim, start, stop)


def _rows_box(shape: tuple[int, ...], dim: int, start: int, stop: int) -> Box:
    if (start, stop) == (0, shape[dim]):
        return Box(shape)
    spans = [((0, size),) if size else () for size in shape]
    spans[dim] = ((start, stop),) if start < stop else ()
    return Box(shape, tuple(spans))


# The order of rows for rotary embeddings -----------------------------------------------------------------------


def rotated(tensor: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield a tensor with the rows of each head in the other orders of rotary embeddings, and the size of a head.

    Some implementations turn rows 2i and 2i + 1 of a head together, and others rows i and i + half of a head.
    """
    rows = tensor.shape[0] if tensor.ndim else 0
    for size in _sizes_of_heads(rows):
        split = tensor.reshape(rows // size, 2, size // 2, -1)
        yield size, split.transpose(1, 2).reshape(tensor.shape)
        paired = tensor.reshape(rows // size, size // 2, 2, -1)
        yield size, paired.transpose(1, 2).reshape(tensor.shape)


@functools.cache
def _sizes_of_heads(rows: int) -> tuple[int, ...]:
    common = [size for size in (128, 64, 256, 96, 80, 112, 160, 192, 32, 16, 8, 4) if rows and rows % size == 0]
    return tuple(common)
