"""The shapes that ``shardproof plan --model`` knows by name."""

from __future__ import annotations

import difflib

from torch import nn

from shardproof.harness.planning.transformers import Gpt, Llama, Shape


def _gpt(layers: int, dim: int, heads: int, *, length: int, like: str) -> Shape:
    return Shape(
        family="gpt",
        layers=layers,
        dim=dim,
        heads=heads,
        key_heads=heads,
        hidden=4 * dim,
        vocab=50257,
        tied=True,
        length=length,
        like=like,
    )


def _llama(
    layers: int, dim: int, heads: int, key_heads: int, hidden: int, *, vocab: int, tied: bool = False, like: str
) -> Shape:
    return Shape(
        family="llama",
        layers=layers,
        dim=dim,
        heads=heads,
        key_heads=key_heads,
        hidden=hidden,
        vocab=vocab,
        tied=tied,
        length=2048,
        like=like,
    )


KNOWN = {
    "gpt:0.1b": _gpt(12, 768, 12, length=1024, like="GPT-2 small"),
    "gpt:0.4b": _gpt(24, 1024, 16, length=1024, like="GPT-2 medium"),
    "gpt:0.8b": _gpt(36, 1280, 20, length=1024, like="GPT-2 large"),
    "gpt:1.6b": _gpt(48, 1600, 25, length=1024, like="GPT-2 XL"),
    "gpt:6.7b": _gpt(32, 4096, 32, length=2048, like="GPT-3 6.7B"),
    "gpt:13b": _gpt(40, 5120, 40, length=2048, like="GPT-3 13B, with heads of 128 elements"),
    "llama:0.9b": _llama(16, 2048, 16, 8, 5632, vocab=32000, like="the width of TinyLlama, fewer layers"),
    "llama:1.2b": _llama(16, 2048, 32, 8, 8192, vocab=128256, tied=True, like="Llama 3.2 1B"),
    "llama:3.2b": _llama(28, 3072, 24, 8, 8192, vocab=128256, tied=True, like="Llama 3.2 3B"),
    "llama:7b": _llama(32, 4096, 32, 32, 11008, vocab=32000, like="Llama 2 7B"),
    "llama:8b": _llama(32, 4096, 32, 8, 14336, vocab=128256, like="Llama 3 8B"),
    "llama:13b": _llama(40, 5120, 40, 40, 13824, vocab=32000, like="Llama 2 13B"),
    "llama:33b": _llama(60, 6656, 52, 52, 17920, vocab=32000, like="Llama 1 33B"),
    "llama:70b": _llama(80, 8192, 64, 8, 28672, vocab=128256, like="Llama 3 70B"),
}
"""By the names that ``--model`` takes: the family, and the parameters in units of 10^9."""

FAMILIES = frozenset(name.partition(":")[0] for name in KNOWN)


def shape_of(name: str) -> Shape:
    """Return the shape of this name.

    Raises:
        ValueError: there is none; the message is one line with those that are known.
    """
    if name in KNOWN:
        return KNOWN[name]
    near = difflib.get_close_matches(name, KNOWN, n=1, cutoff=0.7)
    hint = f" Did you mean {near[0]}?" if near else ""
    raise ValueError(f"no shape is called {name!r}; known are {', '.join(KNOWN)}.{hint}")


def build(shape: Shape, length: int) -> nn.Module:
    """Make the model of a shape, on the default device.

    Args:
        shape: its sizes.
        length: tokens of a sequence, for which it has positions.
    """
    return Gpt(shape, length) if shape.family == "gpt" else Llama(shape, length)
