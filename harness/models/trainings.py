"""A training as plain data: a model, a mesh, policies and a schedule, which hypothesis draws and a case runs.

A training is frozen, can be pickled, and its ``repr`` is Python that makes it again. What it means does not depend on
the file and the name of the case that runs it: it has a seed of its own.
"""

import dataclasses
import json
from collections.abc import Sequence
from typing import Any, Literal

from shardproof.harness.adapters.base import Accumulation
from shardproof.harness.adapters.capability import Capability
from shardproof.harness.adapters.config import EvaluationMode, options_in
from shardproof.harness.models.drawn import Described, Plan

#: The longest line of the source of a case.
_MOST_COLUMNS = 120

Optimizer = Literal["sgd", "momentum", "adam"]


@dataclasses.dataclass(frozen=True, repr=False)
class Step(Described):
    """One training step, and what user code does before it.

    Attributes:
        evaluates: forwards without autograd that precede it, by their contexts.
        unshards: whether all parameters are gathered by a call before it.
        uses: the outputs that its loss uses.
    """

    evaluates: tuple[EvaluationMode, ...] = ()
    unshards: bool = False
    uses: tuple[int, ...] = (0,)
    set_to_none: bool = True


_PLAIN = Plan()


@dataclasses.dataclass(frozen=True, repr=False)
class Training(Described):
    """A training; what is not described here is as in ``Config`` and ``Run.step``.

    Attributes:
        steps: one under Adam.
        rows: the rows of each microbatch.
        replicas: the number of replicas, on a mesh of (replicas, shards); 0 is a mesh of one dimension.
        microbatches: the microbatches of a step.
        ahead: the number of forwards that run before the first backward.
        clip: the type of the norm by which gradients are clipped.
        prefetches: whether each unit gathers the next one ahead, in the order of their names.
        seed: seeds the parameters and the batches.
    """

    plan: Plan = _PLAIN
    steps: tuple[Step, ...] = (Step(),)
    rows: int = 1
    inputs_require_grad: bool = False
    replicas: int = 0
    reshard_after_forward: bool | int | None = None
    microbatches: int = 1
    accumulation: Accumulation | None = None
    ahead: int = 0
    clip: Literal["", "1", "2", "3", "inf"] = ""
    offloads: bool = False
    flat_parameters: bool = False
    prefetches: bool = False
    optimizer: Optimizer = "sgd"
    seed: int = 0

    def as_case(self, *, world_size: int, requirements: Sequence[str], deadline: float | None = None) -> str:
        """Return a case that runs this training, as the source of a file; without a deadline it has that of the run."""
        made = [name for name in ("Block", "Part", "Plan", "Step") if f"{name}(" in repr(self)]
        return case_of(
            self, "train_drawn", module="train", names=(*made, "Training", "train_drawn"),
            needed=needs_of(self, world_size=world_size), world_size=world_size, requirements=requirements,
            deadline=deadline,
        )  # fmt: skip


def case_of(
    example: Described, function: str, *, module: str, names: Sequence[str], needed: frozenset[str],
    world_size: int, requirements: Sequence[str], deadline: float | None,
) -> str:  # fmt: skip
    """Return the source of a file with one case, which calls a function with an example.

    Args:
        function: the function, of a ``module`` of ``shardproof.testing``.
        names: what the case imports from there.
        needed: the capabilities that the example needs.
        deadline: that of the case; None is that of the run.
    """
    body = source_of(example, indent=4, used=len(f"    {function}(rank, )"))
    marks = [
        *(f"contract({json.dumps(one)})" for one in requirements),
        f"world({world_size})",
        *([f"deadline({deadline:g})"] if deadline else []),
        *(
            f"needs({f'Capability.{one.name}' if isinstance(one, Capability) else json.dumps(one)})"
            for one in sorted(needed)
        ),
    ]
    # Classes before functions, as isort has them.
    marked = sorted({mark.partition("(")[0] for mark in marks})
    every = [*(["Capability"] if any("Capability." in mark for mark in marks) else []), "Rank", *marked]
    imports = {
        "shardproof.testing": every,
        "shardproof.testing.make": ["Accumulation"] if "Accumulation(" in body else [],
        f"shardproof.testing.{module}": names,
    }
    return "\n".join(
        [
            *(f"from {one} import {', '.join(several)}" for one, several in sorted(imports.items()) if several),
            "",
            "",
            *(f"@{mark}" for mark in marks),
            "def test_found(rank: Rank) -> None:",
            f"    {function}(rank, {body})",
        ]
    )


def source_of(value: Any, *, indent: int = 0, used: int = 0) -> str:
    """Return Python that makes a value, in lines of at most 120 characters where there is a place to break them.

    Args:
        value: a description, a tuple, or anything with a ``repr`` that is Python.
        indent: the indentation of the lines that follow the first.
        used: the characters that the first line has besides the value.
    """
    text = repr(value)
    if used + len(text) <= _MOST_COLUMNS or not isinstance(value, (tuple, Described, Accumulation)):
        return text
    inner = indent + 4
    if isinstance(value, tuple):
        name, parts = "", [("", one) for one in value]
    else:
        fields = value.given() if isinstance(value, Described) else vars(value).items()
        name, parts = type(value).__name__, [(f"{field}=", one) for field, one in fields]
    lines = [
        f"{' ' * inner}{prefix}{source_of(one, indent=inner, used=inner + len(prefix) + 1)},\n" for prefix, one in parts
    ]
    return f"{name}(\n{''.join(lines)}{' ' * indent})"


def needs_of(training: Training, *, world_size: int) -> frozenset[str]:
    """Return the capabilities without which an implementation cannot run a training on so many ranks."""
    plan, steps, reshards = training.plan, training.steps, training.reshard_after_forward
    blocks, deferred = [block for _, block in plan.blocks()], training.accumulation or Accumulation()
    returned = {block.returns for block in blocks}
    needed = {
        Capability.GROUPED_UNIT: any(block.unit == "joined" for block in blocks),
        Capability.MULTIPLE_FORWARD: any(block.calls > 1 for block in blocks),
        Capability.UNUSED_MODULE: any(block.runs != "always" for block in blocks),
        Capability.RECOMPUTATION: any(block.recomputed for block in blocks),
        Capability.DATACLASS_OUTPUT: "dataclass" in returned,
        Capability.CONTAINER_OUTPUT: not returned <= {"", "spare", "dataclass"},
        Capability.UNUSED_OUTPUT: "spare" in returned or any(len(step.uses) <= len(plan.heads) for step in steps),
        Capability.TIED_PARAMETERS: any(part.kind == "tied" for part in plan.parts()),
        Capability.HYBRID: training.replicas,
        Capability.SINGLE_RANK: training.replicas == world_size,
        Capability.RESHARD_AFTER_FORWARD: isinstance(reshards, bool),
        Capability.RESHARD_TO_SIZE: reshards is not None and not isinstance(reshards, bool),
        Capability.DEFERRED_REDUCTION: training.accumulation is not None,
        Capability.CLIP_BY_CALL: training.clip,
        Capability.CLIP_EMPTY_SHARDS: training.clip,
        "clip.norm_type": training.clip not in ("", "2"),
        Capability.OFFLOAD: training.offloads,
        Capability.PAGEABLE_OFFLOAD: training.offloads,
        "flat_parameters": training.flat_parameters,
        Capability.EXPLICIT_PREFETCH: training.prefetches,
        Capability.ADAM: training.optimizer == "adam",
        Capability.ASYNC_UNSHARD: any(step.unshards for step in steps),
    }
    options = options_in(deferred, "accumulation.")
    return options.union(capability for capability, is_needed in needed.items() if is_needed)
