"""What an implementation refuses to shard: with which words, on which ranks, and what it has done by then."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from shardproof.harness.adapters.base import Adapter, OptimizerFactory
from shardproof.harness.collectives.recorder import Recorder
from shardproof.harness.judging.elements import exact_difference
from shardproof.harness.parity.rank import Rank


def error_of_all(rank: Rank, attempt: Callable[[], Any]) -> str:
    """The text of the RuntimeError that an attempt raises on every rank; empty if it raises on none (collective)."""
    # Its text alone: the exception holds the frames of the attempt, and through them the model.
    error = ""
    try:
        attempt()
    except RuntimeError as raised:
        error = str(raised) or type(raised).__name__
    raised_by = [index for index, one in enumerate(rank.exchange(bool(error))) if one]
    assert len(raised_by) in (0, rank.world_size), f"ranks {raised_by} raise, and the others do not: {error}"
    return error


class Refusal:
    """One attempt to do something with a model that may be refused (collective).

    Args:
        may_send: whether it may be refused after collectives, as in the midst of a forward.

    Attributes:
        result: what ``attempt`` returned, None if it was refused.
        text: the type and the message of its error; None if it was not refused.
    """

    def __init__(self, rank: Rank, attempt: Callable[[], Any], *, may_send: bool = False) -> None:
        self.result: Any = None
        self.text: str | None = None
        recorder = Recorder(lambda *_: "", announcer=rank.announcer)
        try:
            with recorder.during("sharding"):
                self.result = attempt()
        except Exception as error:
            self.text = f"{type(error).__name__}: {error}"
        texts = rank.exchange(self.text)
        accepting = [index for index, text in enumerate(texts) if text is None]
        assert len(accepting) in (0, rank.world_size), f"ranks {accepting} accept what the others refuse: {texts}"
        sent = [str(item) for item in recorder.trace]
        assert self.text is None or may_send or not sent, f"refused after these collectives: {sent}"

    def check_names(self, *words: str) -> None:
        """Check that it was refused, with an error that has one of some words."""
        assert self.text is not None, "no rank refuses it: the call raises no error"
        assert any(word in self.text for word in words), f"the error names none of {words}: {self.text}"


class Untouched:
    """Remembers a model before an attempt, to see that a refusal has left it as it was."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._modules = {name: (module, type(module)) for name, module in model.named_modules()}
        self._tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        self._copy = copy.deepcopy(model)

    def check(self, batch: torch.Tensor) -> None:
        """Check that the model has the same modules, classes and tensors, and trains as a copy of it does."""
        model = self._model
        modules = {name: (module, type(module)) for name, module in model.named_modules()}
        changed = [name or "the root" for name, kept in self._modules.items() if modules.get(name) != kept]
        assert not changed and len(modules) == len(self._modules), f"modules that a refusal replaced: {changed}"
        tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        replaced = [name for name, tensor in self._tensors.items() if tensors.get(name) is not tensor]
        assert not replaced and len(tensors) == len(self._tensors), f"tensors that a refusal replaced: {replaced}"
        for one in (model, self._copy):
            output: torch.Tensor = one(batch)
            output.square().mean().backward()
        for name, other in self._copy.named_parameters():
            mine = model.get_parameter(name)
            assert exact_difference(mine, other) is None, f"a refusal changed the values of {name}"
            if other.grad is not None:
                assert mine.grad is not None, f"{name} has no gradient after a refusal"
                assert exact_difference(mine.grad, other.grad) is None, f"after a refusal {name} has another gradient"


def sharded(rank: Rank, model: nn.Module, *, optimizer: OptimizerFactory | None = None, **options: Any) -> Adapter:
    """Shard a model by the implementation under test, and nothing else (collective).

    The options are those of :meth:`Rank.config`. The model stays on the device on which it is, where :meth:`Rank.run`
    moves it to the rank's.
    """
    return rank.implementation(model, optimizer=optimizer, config=rank.config(**options))
