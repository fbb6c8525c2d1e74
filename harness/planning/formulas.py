"""Closed formulas of sharded data parallelism, to stand beside what a simulation counts.

For parameters that are cut into equal parts: S. Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training
Trillion Parameter Models" (2020), sections 5 and 7, with the units and the resharding of the contract.
"""

from __future__ import annotations

import dataclasses

from shardproof.harness.adapters.base import Adapter
from shardproof.harness.adapters.capability import Capability
from shardproof.harness.planning.anatomy import Anatomy
from shardproof.harness.planning.request import STATES, Request

ASSUMPTION = (
    "closed formulas: P parameters, P0 of them in the root's own unit, U units, S shards, R replicas; every parameter "
    "is cut into S equal parts without padding, every unit takes part once in a forward and a backward, and the root's "
    "own stays gathered from forward to backward"
)


@dataclasses.dataclass(frozen=True)
class Formula:
    """What a formula gives.

    Attributes:
        quantity: what it is.
        unit: "B" or "collectives".
        text: the formula with the sizes of the dtypes.
        value: its value.
    """

    quantity: str
    unit: str
    text: str
    value: float


def memory(request: Request, anatomy: Anatomy, adapter: type[Adapter], shards: int) -> dict[str, Formula]:
    """The formulas of what a rank holds for as long as the model lives or the optimizer needs it, by kind.

    Args:
        request: what is trained.
        anatomy: the model.
        adapter: the implementation; its traits say what it divides.
        shards: the number of shards.
    """
    item = request.dtype.itemsize
    states = STATES[request.optimizer]

    def formula(quantity: str, kind: str, factor: str, size: int) -> Formula:
        divided = kind in adapter.traits.shards
        text = f"{factor}P x {item} B{' / S' if divided else ''}"
        return Formula(quantity, "B", text, anatomy.numel * size * item / (shards if divided else 1))

    found = {
        "shards": formula("shards", "parameters", "", 1),
        "gradients": formula("gradients", "gradients", "", 1),
    }
    if states:
        found["optimizer"] = formula("optimizer state", "optimizer", f"{states} x " if states > 1 else "", states)
    return found


def traffic(
    request: Request, anatomy: Anatomy, adapter: type[Adapter], *, shards: int, replicas: int
) -> dict[tuple[str, str], tuple[Formula, Formula]]:
    """The formulas of a step's collectives, by dimension of the mesh and kind: their number, and their bytes.

    Args:
        request: what is trained.
        anatomy: the model.
        adapter: the implementation. One that does not shard parameters, or has other units, has no formula.
        shards: the number of shards.
        replicas: the number of replicas.

    Returns:
        Nothing where a group of one rank may issue collectives or not.
    """
    if Capability.COUNTED_UNITS not in adapter.capabilities() or Capability.SHARDED not in adapter.capabilities():
        return {}
    if shards == 1 or type(request.reshard_after_forward) is int:
        return {}
    units, root = anatomy.numels(), anatomy.root_numel
    compute = (request.compute or request.dtype).itemsize
    reduce = request.precision.reduce_dtype(request.dtype, adapter.traits).itemsize
    again = units if request.reshard_after_forward is not False else []
    # An explicit choice holds for the root's own unit too, where the implementation lets the root choose.
    keeps_root = request.reshard_after_forward is None or Capability.ROOT_RESHARD not in adapter.capabilities()
    kept = 1 if again and root and keeps_root else 0
    gathers = len(units) + len(again) - kept
    gathered = sum(units) + sum(again) - (root if kept else 0)
    texts: dict[bool, tuple[str, str]] = {True: ("2 U - 1", "(2 P - P0)"), False: ("2 U", "2 P")}
    count, numel = texts[bool(kept)] if again else ("U", "P")

    def pair(what: str, number: tuple[str, int], nbytes: tuple[str, float]) -> tuple[Formula, Formula]:
        return Formula(what, "collectives", *number), Formula(f"bytes of {what}", "B", *nbytes)

    found = {
        ("shard", "all_gather"): pair("gathers", (count, gathers), (f"{numel} x {compute} B", gathered * compute)),
        ("shard", "reduce_scatter"): pair(
            "reductions", ("U", len(units)), (f"P x {reduce} B", anatomy.numel * reduce)
        ),
    }  # fmt: skip
    if replicas > 1:
        found["replicate", "all_reduce"] = pair(
            "all-reduces over replicas", ("U", len(units)), (f"P x {reduce} B / S", anatomy.numel * reduce / shards)
        )  # fmt: skip
    return found
