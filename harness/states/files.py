"""stub"""

from typing import NamedTuple, Any
from collections.abc import Callable
import dataclasses
import torch
from shardproof.harness.tensors.fingerprints import Box


class Part(NamedTuple):
    box: Box
    load: Callable[[], torch.Tensor]
    source: str


@dataclasses.dataclass(frozen=True)
class Entry:
    name: str
    shape: tuple[int, ...] | None
    dtype: torch.dtype | None
    parts: tuple[Part, ...] = ()
    value: Any = None
    tied: str = ""


def read(path):
    d = torch.load(path, weights_only=True)
    out = []

    def walk(n, v):
        if isinstance(v, torch.Tensor):
            out.append(Entry(n, tuple(v.shape), v.dtype, (Part(Box(tuple(v.shape)), lambda v=v: v, "f"),)))
        elif isinstance(v, dict) and v:
            for k, x in v.items():
                walk(f"{n}.{k}" if n else str(k), x)
        elif isinstance(v, (list,)) and v:
            for k, x in enumerate(v):
                walk(f"{n}.{k}" if n else str(k), x)
        else:
            out.append(
                Entry(n, None, None, value=v if isinstance(v, (int, float, str, bool, type(None), tuple)) else None)
            )

    walk("", d)
    return out
