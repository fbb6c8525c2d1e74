"""What an implementation refuses to shard: with which words, on which ranks, and what it has done by then."""

import ast
import contextlib
import copy
import functools
import inspect
import textwrap
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

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
        asked: what ``attempt`` calls, as the case writes it.
        result: what ``attempt`` returned, None if it was refused.
        text: the type and the message of its error; None if it was not refused.
    """

    def __init__(self, rank: Rank, attempt: Callable[[], Any], *, may_send: bool = False) -> None:
        self.result: Any = None
        self.text: str | None = None
        self.asked = _said(attempt)
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
        """Check that it was refused, with an error that has one of some words, in whatever case or with underscores."""
        wanted = f"expected is an error that names {' or '.join(words)}"
        assert self.text is not None, f"no rank refuses {self.asked}: the call raises no error; {wanted}"
        text = _plain(self.text)
        assert any(_plain(word) in text for word in words), f"{self.asked} is refused by {self.text!r}; {wanted}"


def _plain(text: str) -> str:
    return text.lower().replace("_", " ")


def _said(attempt: Callable[[], Any]) -> str:
    """Return a call as the case writes it: the source of a lambda, or a function with its options."""
    if isinstance(attempt, functools.partial):
        options = ", ".join(f"{name}={value!r}" for name, value in attempt.keywords.items() if not callable(value))
        return f"{attempt.func.__name__}({options})"
    if attempt.__name__ == "<lambda>":
        with contextlib.suppress(OSError, SyntaxError):  # there is no source, or a part of a statement
            nodes = ast.walk(ast.parse(textwrap.dedent(inspect.getsource(attempt))))
            return next(ast.unparse(node.body) for node in nodes if isinstance(node, ast.Lambda))
    return f"{attempt.__name__}()"


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
