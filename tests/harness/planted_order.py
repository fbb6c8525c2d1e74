"""Adapters of a reference whose check of the order has one bug; each lives in ranks of its own."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

from fsdp_impl.common.order import OrderCheck
from shardproof.harness.adapters.reference import ReferenceAdapter

_begin, _end, _warn = OrderCheck.begin, OrderCheck.end, OrderCheck._warn


class _Planted(ReferenceAdapter):
    """Replaces methods of the check before the first model of the process is sharded, for good."""

    traits = dataclasses.replace(ReferenceAdapter.traits, isolation="adapter")
    wrong: ClassVar[dict[str, Any]]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        for name, method in self.wrong.items():
            setattr(OrderCheck, name, method)
        super().__init__(*args, **kwargs)


class AlwaysAgrees(_Planted):
    """Ranks that gather different units are not told apart."""

    name = "always-agrees"
    wrong: ClassVar = {"_agree": lambda self, names, group: True}


def _end_of_no_first(self: OrderCheck, groups: Any) -> None:
    _end(self, groups)
    self._compares_ranks = True


class ComparesForever(_Planted):
    """Every iteration is compared across ranks, at its cost."""

    name = "compares-forever"
    wrong: ClassVar = {"end": _end_of_no_first}


class ChecksEvaluation(_Planted):
    """Forwards in eval mode are checked too."""

    name = "checks-evaluation"
    wrong: ClassVar = {"begin": lambda self, training: _begin(self, training=True)}


def _warn_again(self: OrderCheck, expected: Any, names: Any) -> None:
    self._has_warned = False
    _warn(self, expected, names)


class WarnsAgain(_Planted):
    """Every iteration that departs is warned of."""

    name = "warns-again"
    wrong: ClassVar = {"_warn": _warn_again}
