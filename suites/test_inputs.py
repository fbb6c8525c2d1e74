"""Chapter INPUTS: arguments of units, which wrappers and hooks must pass on unchanged."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from shardproof.testing import Capability, Rank, contract, models, needs, world
from shardproof.testing.axes import subjects
from shardproof.testing.compare import backward_of_copies, check_gradients
from shardproof.testing.make import run_and_plain, tower
from shardproof.testing.refuse import error_of_all

pytestmark = world(2)


class Notes:
    """An object of a user class, with a list in it, as a cache of keys and values has."""

    def __init__(self) -> None:
        self.entries: list[Any] = []


#: By name: a function that makes an argument for units to fill, and one that returns its entries.
FILLED: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "list": (list, lambda notes: notes),
    "dict": (dict, lambda notes: notes),
    "list-in-a-dict": (lambda: {"entries": []}, lambda notes: notes["entries"]),
    "object": (Notes, lambda notes: notes.entries),
}


class _Layer(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.linear = nn.Linear(dim, dim)


class _Entered(models.Stacked):
    """A linear of the root's own, so that the inputs of its layers require gradients, and the layers."""

    def __init__(self, dim: int, layers: Iterable[nn.Module]) -> None:
        super().__init__()
        self.entry = nn.Linear(dim, dim)
        self.layers = nn.ModuleList(layers)


class Filling(_Entered):
    """Two layers that each add an entry to an argument: the first gets it by position, the second by keyword.

    Input and output: (batch, dim). A forward asserts that all entries have arrived in ``what``, a key of ``FILLED``.
    """

    def __init__(self, dim: int, *, what: str) -> None:
        super().__init__(dim, (_Filler(dim, what) for _ in range(2)))
        self.what = what

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        make, entries = FILLED[self.what]
        notes = make()
        hidden: torch.Tensor = self.layers[0](self.entry(x), notes)
        hidden = self.layers[1](hidden, notes=notes)
        added = len(entries(notes))
        assert added == 2, f"units have added {added} of 2 entries to the {self.what} of their caller"
        return hidden


class _Filler(_Layer):
    def __init__(self, dim: int, what: str) -> None:
        super().__init__(dim)
        self.what = what

    def forward(self, x: torch.Tensor, notes: Any) -> torch.Tensor:
        entries = FILLED[self.what][1](notes)
        if isinstance(entries, dict):
            entries[len(entries)] = x.shape[0]
        else:
            entries.append(x.shape[0])
        return torch.tanh(self.linear(x))


class Handing(_Entered):
    """A layer that must receive the very objects that are not tensors, and returns them next to its output.

    Its arguments have the names that wrappers and hooks use for their own. Input and output: (batch, dim).
    """

    def __init__(self, dim: int) -> None:
        super().__init__(dim, [_Hander(dim)])
        self.things = (Notes(), "text", 10**9, None, range(3), torch.float16, torch.Generator(), print)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        note, text, number, nothing, numbers, dtype, generator, function = self.things
        output, *returned = self.layers[0](
            self.entry(x), note, text, output=number, args=nothing, kwargs=numbers, hook=dtype,
            state=generator, fn=function,
        )  # fmt: skip
        wrong = [type(one).__name__ for one, other in zip(returned, self.things, strict=True) if one is not other]
        assert not wrong, f"between caller and unit these were replaced by copies or others: {wrong}"
        hidden: torch.Tensor = output
        return hidden


class _Hander(_Layer):
    def forward(
        self, input: torch.Tensor, module: Any, *more: Any, output: Any, args: Any, kwargs: Any, hook: Any,
        unit: Any = 3, **others: Any,
    ) -> tuple[Any, ...]:  # fmt: skip
        assert unit == 3, f"an argument that was not given is {unit!r} and not its default"
        assert [*others] == ["state", "fn"], f"keywords arrive as {[*others]}"
        return self.linear(input), module, *more, output, args, kwargs, hook, *others.values()


class UntouchedInputs(_Entered):
    """A layer whose inputs that need no gradient must not be copied, cast or laid out anew."""

    def __init__(self, dim: int) -> None:
        super().__init__(dim, [_Watcher(dim)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ramp = torch.arange(6, device=x.device)
        given = {
            "mask": ramp > 2, "index": ramp, "complex": ramp * 1j, "transposed": ramp.view(2, 3).t().double(),
            "small": ramp.to(torch.uint8), "scalar": ramp[1].float(), "empty": ramp[:0].half(),
        }  # fmt: skip
        marks = {name: _mark(tensor) for name, tensor in given.items()}
        seen: dict[str, Any] = {}
        hidden: torch.Tensor = self.layers[0](self.entry(x), given, [*given.values()], note=seen.update)
        wrong = {name: (marks[name], seen[name]) for name in marks if seen[name] != marks[name]}
        assert not wrong, f"inputs that need no gradient, as given and as a unit got them: {wrong}"
        return hidden


class _Watcher(_Layer):
    def forward(self, x: torch.Tensor, named: Any, listed: Any, *, note: Callable[..., None]) -> torch.Tensor:
        marks = {name: _mark(tensor) for name, tensor in named.items()}
        same = [_mark(tensor)[1:] for tensor in listed] == [mark[1:] for mark in marks.values()]
        assert same, "the tensors of a list, and of a dict with the same ones, are not alike"
        note(marks)
        return torch.tanh(self.linear(x))


def _mark(tensor: torch.Tensor) -> tuple[Any, ...]:
    """The address of a tensor, and its layout."""
    return tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.requires_grad


class Overwriting(_Entered):
    """Two layers that begin by changing their input in place, as ``nn.ReLU(inplace=True)`` does.

    With ``uses_again``, the input of a layer, as the layer has left it, is added to its output.
    """

    def __init__(self, dim: int, *, uses_again: bool) -> None:
        super().__init__(dim, (_Overwriter(dim) for _ in range(2)))
        self.uses_again = uses_again

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.entry(x)
        for layer in self.layers:
            output = layer(hidden)
            hidden = output + hidden if self.uses_again else output
        return hidden


class _Overwriter(_Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.linear(F.leaky_relu(x.mul_(2), 0.25, inplace=True))
        return hidden


@contract("INPUTS-1")
@subjects("what", FILLED)
def test_things_that_units_fill(rank: Rank, what: str) -> None:
    """A mutable argument that units fill is filled for the caller, in training and in evaluation."""
    evaluate_and_train(rank, Filling(9, what=what))


@contract("INPUTS-2")
@needs(Capability.CONTAINER_OUTPUT)
def test_things_that_are_no_tensors(rank: Rank) -> None:
    """An argument that is not a tensor reaches a unit, and is returned, as the same object, under any keyword."""
    evaluate_and_train(rank, Handing(9))


@contract("INPUTS-3")
def test_tensors_that_need_no_gradient(rank: Rank) -> None:
    """A unit gets tensors that need no gradient without a copy, in their dtype and layout."""
    evaluate_and_train(rank, UntouchedInputs(9))


def evaluate_and_train(rank: Rank, model: models.Stacked) -> None:
    """Run two evaluations and two steps of a model whose forward asserts the arguments of its units."""
    pair = rank.pair(model, units=model.units())
    for step in range(2):
        pair.evaluate(rank.batch(step, (2, 9), microbatch=1))
        pair.checked_step(rank.batch(step, (2, 9)))


@contract("INPUTS-4")
@pytest.mark.parametrize("uses_again", [False, True])
def test_input_changed_in_place(rank: Rank, uses_again: bool) -> None:
    """Units that change their input in place have the plain gradients, or every rank raises."""
    run, plain = run_and_plain(rank, Overwriting(9, uses_again=uses_again))
    x = rank.batch(0, (4, 9))
    backward_of_copies(rank, plain, loss=models.mean_square(plain(x)))

    def attempt() -> None:
        with run.recorder.during("forward"):
            output = run.adapter.forward(x)
        with run.recorder.during("backward"):
            run.adapter.backward(models.mean_square(output))

    if not error_of_all(rank, attempt):
        check_gradients(run, plain, step=0)


@contract("INPUTS-5")
@world(2, 4)
def test_batch_without_rows(rank: Rank) -> None:
    """A rank whose batch has no row takes part in each collective, and its gradients count as zeros."""
    pair = tower(rank)
    for step in range(3):
        rows = 0 if rank.index == step % rank.world_size else 3
        pair.checked_step(rank.batch(step, (rows, 9)), loss=torch.sum)
