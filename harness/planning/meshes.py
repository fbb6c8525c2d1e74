"""Meshes as a command line names them, and larger or smaller ones of the same kind."""

from __future__ import annotations

import math
import re

_FORMS = "give ranks, as 512, or replicas x shards, as 64x8"
_NAMES = {1: ("shard",), 2: ("replicate", "shard")}

Mesh = tuple[int, ...]
"""The sizes of (shard), or of (replicate, shard)."""


def names_of(mesh: Mesh) -> tuple[str, ...]:
    """The names of a mesh's dimensions."""
    return _NAMES[len(mesh)]


def parse(text: str) -> Mesh:
    """Read a mesh: ``8``, or ``64x8`` for 64 replicas of 8 shards.

    Raises:
        ValueError: the text is no mesh of one or two dimensions; one line.
    """
    if not re.fullmatch(r"\d{1,9}(x\d{1,9})*", text):
        raise ValueError(f"--mesh {text!r} is no mesh: {_FORMS}")
    mesh = tuple(map(int, text.split("x")))
    if len(mesh) not in _NAMES:
        raise ValueError(f"--mesh {text!r} has {len(mesh)} dimensions: {_FORMS}")
    if 0 in mesh:
        raise ValueError(f"--mesh {text!r} has no ranks: sizes begin at 1")
    return mesh


def parse_worlds(text: str) -> list[int]:
    """Read numbers of ranks, separated by commas.

    Raises:
        ValueError: one is no positive number; one line.
    """
    wrong = [one for one in text.split(",") if not re.fullmatch(r"0*[1-9]\d{0,8}", one.strip())]
    if wrong:
        raise ValueError(f"--worlds {text!r}: {wrong[0]!r} is no number of ranks; give several as 8,64,512")
    return sorted({int(one) for one in text.split(",")})


def scaled(mesh: Mesh, ranks: int) -> Mesh:
    """Return the mesh of the same kind for another number of ranks: more shards, or with replicas more of them.

    Raises:
        ValueError: the ranks do not divide into groups of as many shards; one line.
    """
    if len(mesh) == 1:
        return (ranks,)
    if ranks % mesh[-1]:
        raise ValueError(f"a world of {ranks} ranks does not divide into replicas of {mesh[-1]} shards")
    return (ranks // mesh[-1], mesh[-1])


def hosts_of(mesh: Mesh, node_size: int) -> int:
    """Return how many hosts of ``node_size`` ranks a mesh takes.

    Raises:
        ValueError: the last host would not be full; one line.
    """
    ranks = math.prod(mesh)
    if ranks > node_size and ranks % node_size:
        raise ValueError(f"a world of {ranks} ranks does not divide into hosts of {node_size} (--node-size)")
    return math.ceil(ranks / node_size)
