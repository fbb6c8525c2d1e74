"""Checks in a rank that an adapter keeps to the protocol: what its methods return, and how its pieces are cut."""

import dataclasses
import traceback
from collections.abc import Collection, Mapping, Sequence
from types import TracebackType
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardproof.harness.adapters.base import Adapter, Config, OptimizerFactory
from shardproof.harness.adapters.registry import line_of_error, one_line
from shardproof.harness.judging.finding import ProtocolError
from shardproof.harness.tensors.pieces import Piece, original_name

# Which parameters of a model are shared by several of its modules, and which of them sharding has untied.


@dataclasses.dataclass(frozen=True)
class Tie:
    """One parameter with several names; ``named_parameters`` of the original model lists it under the first."""

    names: tuple[str, ...]

    def is_kept(self, modules: Mapping[str, nn.Module]) -> bool:
        """Whether all of the original model's modules that still register it, after sharding, hold the same object.

        A module may hold no parameter of the name, as where parameters are views of a flat one.
        """
        found = set()
        for name in self.names:
            owner, _, leaf = name.rpartition(".")
            if owner in modules and (held := modules[owner]._parameters.get(leaf)) is not None:
                found.add(id(held))
        return len(found) <= 1

    def __str__(self) -> str:
        first, *others = map(repr, self.names)
        return f"{first} and {', '.join(others)} are one parameter of the original model and several after sharding"


def ties_of(model: nn.Module) -> list[Tie]:
    """Return the parameters of a model that several modules share."""
    names: dict[int, list[str]] = {}
    for name, value in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(value), []).append(original_name(name))
    return [Tie(tuple(found)) for found in names.values() if len(found) > 1]


_CUTS = "a cut takes a full tensor and returns its elements at the places of the piece"

#: The most frames of the adapter's own code below a message.
_MOST_FRAMES = 5


def make(
    implementation: type[Adapter], model: nn.Module, *, optimizer: OptimizerFactory | None, config: Config
) -> Adapter:
    """Make an adapter.

    Raises:
        ProtocolError: its constructor breaks the protocol or leaves out an attribute, or a parameter of the original
            model has no name in the dicts that cases look into. The message is one line.
    """
    # Before sharding, which may take the parameters out of the modules.
    every_name = {tie.names[0]: frozenset(tie.names) for tie in ties_of(model)}
    for name, _ in model.named_parameters():
        every_name.setdefault(original_name(name), frozenset({original_name(name)}))
    try:
        adapter = implementation(model, optimizer=optimizer, config=config)
    except TypeError as error:
        # Raised by the call itself, and not in the constructor.
        if error.__traceback__ is not None and error.__traceback__.tb_next is None:
            raise ProtocolError(
                f"adapter {_name(implementation)}: __init__(model, optimizer=..., config=...) raised TypeError: {error}"
            ) from None
        raise
    for attribute, kind, wanted in (
        ("config", Config, "super().__init__(model, optimizer=optimizer, config=config) sets it"),
        ("module", nn.Module, "__init__ sets it to the module that a training loop calls"),
        ("optimizer", object, "__init__ sets it, to None where the case trains without one"),
    ):
        if not hasattr(adapter, attribute):
            raise ProtocolError(f"adapter {_name(implementation)}: there is no attribute {attribute!r}; {wanted}")
        if not isinstance(value := getattr(adapter, attribute), kind):
            raise ProtocolError(
                f"adapter {_name(implementation)}: the attribute {attribute!r} is {_kind(value)}; {wanted}"
            )
    if not config.flat_parameters:  # flat parameters have no names of the model
        _check_names(adapter, every_name)
    return adapter


def _check_names(adapter: Adapter, names: Mapping[str, Collection[str]]) -> None:
    """Check that each parameter of the original model is found by one of its names.

    Cases count and read parameters by these dicts: where some are missing, they would fail for reasons of their own.
    """
    for method, what in (("named_parameters", "is registered"), ("held_parameters", "the optimizer updates")):
        found = getattr(adapter, method)()
        who = f"adapter {_name(type(adapter))}: {method}()"
        if not isinstance(found, Mapping):
            raise ProtocolError(f"{who} returned {_kind(found)}; it returns a dict from names to parameters")
        if missing := [name for name, others in names.items() if found.keys().isdisjoint(others)]:
            raise ProtocolError(
                f"{who} lacks {len(missing)} of the original model's {len(names)} parameters: "
                f"{one_line(', '.join(missing))}; it returns for each what {what}, if that is a flat chunk the chunk"
            )


def pieces_of(
    adapter: Adapter, method: Literal["gradients", "parameters"], names: Collection[str], *, untied: Sequence[Tie] = ()
) -> dict[str, Piece | None]:
    """Call ``gradients()`` or ``parameters()`` of an adapter; ProtocolError if it returns anything else.

    Further names of the parameters that sharding has untied are unknown.
    """
    found = getattr(adapter, method)()
    who = f"adapter {_name(type(adapter))}: {method}()"
    if not isinstance(found, Mapping):
        raise ProtocolError(f"{who} returned {_kind(found)}; it returns a dict from parameter names to pieces")
    if found.keys() != set(names):
        unknown, missing = sorted(map(str, found.keys() - set(names))), sorted(set(names) - found.keys())
        kinds = {"unknown": unknown, "missing": missing}
        others = [f"{kind}: {one_line(', '.join(some))}" for kind, some in kinds.items() if some]
        raise ProtocolError(
            f"{who} returned other names than the original model's parameters have; {'; '.join(others)}"
            + "".join(f"; untied: {tie}" for tie in untied if set(unknown) & set(tie.names))
        )
    device = adapter.config.mesh.device_type
    for name, piece in found.items():
        if piece is None and method == "gradients":
            continue
        if wrong := _wrong(piece, (device, "cpu") if adapter.config.offload else (device,)):
            raise ProtocolError(f"{who}[{name!r}] {wrong}")
    return dict(found)


def state_of(adapter: Adapter, names: Collection[str]) -> dict[str, dict[str, Piece]] | None:
    """Call ``optimizer_state()`` of an adapter; a ProtocolError says what it returns against the protocol."""
    found = adapter.optimizer_state()
    if found is None:
        return None
    who = f"adapter {_name(type(adapter))}: optimizer_state()"
    if not isinstance(found, Mapping) or not all(isinstance(state, Mapping) for state in found.values()):
        raise ProtocolError(
            f"{who} returned {_kind(found)}; it returns a dict from parameter names to dicts from keys to pieces, or "
            "None"
        )
    if unknown := sorted(map(str, found.keys() - set(names))):
        raise ProtocolError(
            f"{who} returned names of no parameter of the original model: {one_line(', '.join(unknown))}"
        )
    for name, state in found.items():
        for key, piece in state.items():
            # Where the state is kept is the optimizer's choice: its scalars are on the CPU everywhere.
            if wrong := _wrong(piece, ("cpu", adapter.config.mesh.device_type)):
                raise ProtocolError(f"{who}[{name!r}][{key!r}] {wrong}")
    return {name: dict(state) for name, state in found.items()}


def _wrong(piece: Any, device_types: tuple[str, ...]) -> str | None:
    if not isinstance(piece, Piece):
        kind = "a Piece" if piece is None else "a Piece, such as whole(tensor)"
        return f"is {_kind(piece)}; expected {kind}"
    tensor = piece.tensor
    if not isinstance(tensor, torch.Tensor):
        return f"has {_kind(tensor)} for a tensor"
    if isinstance(tensor, DTensor):
        return "has a DTensor; a piece holds this rank's plain tensor, such as that of piece_of(tensor)"
    if tensor.device.type not in device_types:
        return f"has a tensor on {tensor.device}; the mesh, on whose device pieces are, is on {device_types[0]}"
    return None if callable(piece.cut) else f"has {_kind(piece.cut)} for a cut; {_CUTS}"


def cut(piece: Piece, full: torch.Tensor, name: str) -> torch.Tensor:
    """Cut a full tensor to a piece; a ProtocolError says that the cut raised an error or returned no tensor."""
    try:
        found = piece.cut(full)
    except Exception as error:
        what = f"the cut of the piece of {name!r} raised {line_of_error(error)}; {_CUTS}"
        raise ProtocolError(what + _frames(error.__traceback__)) from None
    if not isinstance(found, torch.Tensor):
        raise ProtocolError(f"the cut of the piece of {name!r} returned {_kind(found)}; {_CUTS}")
    return found


def _frames(frames: TracebackType | None) -> str:
    """Render the last frames of an error without the first, which is this module's."""
    own = traceback.extract_tb(frames)[1:][-_MOST_FRAMES:]
    return "".join("\n" + line.rstrip("\n") for line in traceback.format_list(own))


def _kind(value: object) -> str:
    """Name a value by its type: values differ between ranks, and their texts are long."""
    return "None" if value is None else f"a {type(value).__name__}"


def _name(implementation: type[Adapter]) -> str:
    return repr(implementation.name)
