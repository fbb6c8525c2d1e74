"""Which entries of a trainer the tensors of a receiver are, as of an inference engine that fuses and shards them."""

import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from shardproof import door
from shardproof.harness.states import files, maps
from shardproof.harness.states.maps import MOST_WORDS, NoFit, Parallel, Rules
from shardproof.harness.states.sides import line_of, rank_files
from shardproof.harness.states.snapshot import MODEL, ViewsOf
from shardproof.harness.tensors.fingerprints import Box


def views(
    table: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] = "engine",
    *,
    like: str | os.PathLike[str],
    tensor_parallel: tuple[int, int] | None = None,
    expert_parallel: tuple[int, int] = (0, 1),
) -> ViewsOf:
    """Return the ``views`` of ``shardproof.state()`` for a receiver: slices of its tensors that a trainer has.

    The sizes of slices follow from the shapes that the trainer has, also where each rank of tensor parallelism has its
    own heads of queries, keys and values, or its own part of another tensor; a padded vocabulary loses its padding.

    Args:
        table: tables of rules, as of ``--map``: one that says which tensors are fused, and one that translates names.
        like: the state of the trainer: a folder of ``shardproof.state()``, or a checkpoint.
        tensor_parallel: rank and size; by default those of torch.distributed, or one rank.
        expert_parallel: rank and size, where ranks have different experts.

    Raises:
        ValueError: a table or the state cannot be read; in one line.
    """
    if tensor_parallel is None:
        tensor_parallel = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    shapes, fused = _shapes(os.fspath(like)), list[maps.Rule]()
    for one in [table] if isinstance(table, (str, os.PathLike)) else table:
        every, _ = maps.read(os.fspath(one))
        if len(every) == 1:
            fused += every[0]
        elif every:
            shapes = _translated(shapes, every)
    return _Views(fused, shapes, Parallel(*tensor_parallel), Parallel(*expert_parallel))


class _Views:
    """Returns the slices of a receiver's parameters."""

    def __init__(
        self, rules: Rules, shapes: Mapping[str, tuple[int, ...]], tensor_parallel: Parallel, expert_parallel: Parallel
    ) -> None:
        self._rules, self._shapes = rules, shapes
        self._tensor_parallel, self._expert_parallel = tensor_parallel, expert_parallel

    def __call__(self, name: str, tensor: torch.Tensor) -> Mapping[str, tuple[torch.Tensor, Box]] | None:
        words = name.split(".")
        for count in range(min(len(words), MOST_WORDS + 1)):
            own = ".".join(words[count:])
            try:
                if own in self._shapes:
                    return {own: maps.fitted(tensor, self._shapes[own], self._tensor_parallel)}
                rule = maps.rule_of(own, self._rules)
                if rule is not None and (rule.names(own) or ("",))[0] in self._shapes:
                    parallel = self._tensor_parallel, self._expert_parallel
                    return {
                        one.name: (one.tensor, one.box)
                        for one in maps.slices(rule, own, tensor, self._shapes, *parallel)
                    }
            except NoFit as error:
                raise ValueError(f"state: {name}: {error}") from None
        return None


def _shapes(path: str) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the model's entries in a state."""
    if ranks := rank_files(path):
        found = {}
        for file in ranks:
            for line in door.lines(file, line_of, may_be_cut=False):
                fields: Any = getattr(line, "fields", None)
                if fields is not None and fields.section == MODEL and fields.dtype:
                    found[fields.name] = tuple(fields.shape)
        return found
    return {one.name: tuple(one.shape) for one in files.read(path) if one.shape is not None}


def _translated(shapes: Mapping[str, tuple[int, ...]], every: Sequence[Rules]) -> dict[str, tuple[int, ...]]:
    """Return shapes by the names of a table, in the direction in which it has most of them."""
    rules, before = max(
        ((rules, _before(shapes, rules)) for rules in every),
        key=lambda one: sum(maps.rule_of(name.removeprefix(one[1]), one[0]) is not None for name in shapes),
    )
    found = {}
    for name, shape in shapes.items():
        own = name.removeprefix(before)
        rule = maps.rule_of(own, rules)
        new = None if rule is None else rule.names(own)
        found[new[0] if new else own] = shape
    return found


def _before(names: Mapping[str, object], rules: Rules) -> str:
    return maps.beginning(names.keys(), lambda one: maps.rule_of(one, rules) is not None)
