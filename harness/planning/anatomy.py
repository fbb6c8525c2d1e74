"""What a model consists of, and how it is built for a simulation: its units, sizes and dtypes."""

import dataclasses
import math
from collections.abc import Iterator, Sequence

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardproof.harness.adapters.config import Config
from shardproof.harness.planning.request import PlanRequest
from shardproof.harness.planning.subject import Built, Subject
from shardproof.harness.tensors import private

# Which modules of a model become units: those that are named, by class or by name, or its repeated blocks.


_LISTS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


def choose_units(model: nn.Module, wanted: Sequence[str] = ()) -> list[str]:
    """Return the names of the modules that become units, the root aside, in the order of the model.

    Wanted are names of modules, and of classes of which every module becomes a unit; one that no module has is a
    ValueError of one line with the classes of the model. Without any, the units are the blocks that repeat: the modules
    in the outermost lists of several modules of one class with parameters.
    """
    if not wanted:
        return [name for name in _repeated(model) if name]
    found = {name: type(module).__name__ for name, module in model.named_modules() if name and _has_parameters(module)}
    for one in wanted:
        if one not in found and one not in found.values():
            known = ", ".join(sorted(set(found.values())))
            raise ValueError(f"--unit {one}: no module with parameters has this class or name; classes are {known}")
    return [name for name, kind in found.items() if kind in wanted or name in wanted]


def _repeated(module: nn.Module, prefix: str = "") -> Iterator[str]:
    children = [(f"{prefix}{name}", child) for name, child in module.named_children() if _has_parameters(child)]
    if isinstance(module, _LISTS) and len(children) > 1 and len({type(child) for _, child in children}) == 1:
        yield from (name for name, _ in children)
        return
    for name, child in children:
        yield from _repeated(child, f"{name}.")


def _has_parameters(module: nn.Module) -> bool:
    return any(True for _ in module.parameters())


checkpoint_wrapper = private.take("torch.distributed.algorithms._checkpoint.checkpoint_wrapper.checkpoint_wrapper")


@dataclasses.dataclass(frozen=True)
class Anatomy:
    """What a model consists of: by the name of a unit's module the shapes of its parameters, and the module's class.

    The root's own unit is "", and has no class here.
    """

    shapes: dict[str, list[torch.Size]]
    classes: dict[str, str]

    @property
    def numel(self) -> int:
        """Elements of all parameters."""
        return sum(self.numels())

    def numels(self) -> list[int]:
        """Elements of each unit that has parameters."""
        return [sum(map(math.prod, shapes)) for shapes in self.shapes.values() if shapes]

    @property
    def root_numel(self) -> int:
        """Elements of the root's own unit."""
        return sum(map(math.prod, self.shapes[""]))


def examine(model: nn.Module, wanted: Sequence[str]) -> Anatomy:
    """Find the units of a model that is not sharded, as :func:`choose_units` does.

    A model without parameters is a ValueError of one line, as is a name that no module has.
    """
    names = choose_units(model, wanted)
    found: dict[str, list[torch.Size]] = {name: [] for name in [*names, ""]}
    for name, parameter in model.named_parameters():
        owner = name
        while owner not in found:  # the innermost unit around it
            owner = owner.rpartition(".")[0]
        found[owner].append(parameter.shape)
    if not any(found.values()):
        raise ValueError("the model has no parameters: there is nothing to shard")
    return Anatomy(found, {name: type(model.get_submodule(name)).__name__ for name in names})


def build(request: PlanRequest, subject: Subject, anatomy: Anatomy | None = None) -> Built:
    """Build the model of a request on the default device, in its dtype.

    With an anatomy its units are recomputed in backward, if the request asks for it. A model that cannot be built is a
    ValueError of one line.
    """
    built = subject.build(request.sequence or subject.length)
    if request.dtype != torch.float32:
        _cast(built.model, request.dtype)
    if anatomy is not None and request.checkpointing:
        for name in anatomy.classes:
            _recompute(built.model, name)
    return built


def config_of(request: PlanRequest, anatomy: Anatomy, mesh: DeviceMesh) -> Config:
    """Return how the model is sharded."""
    return Config(
        mesh=mesh, units=tuple((name,) for name in anatomy.classes), precision=request.precision,
        reshard_after_forward=request.reshard_after_forward,
    )  # fmt: skip


def _cast(model: nn.Module, dtype: torch.dtype) -> None:
    """Do what ``model.to(dtype)`` does, which refuses parameters without memory."""
    made: dict[torch.Tensor, nn.Parameter] = {}  # modules may share parameters
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            if parameter.is_floating_point() and parameter not in made:
                made[parameter] = nn.Parameter(parameter.detach().to(dtype), parameter.requires_grad)
            setattr(module, name, made.get(parameter, parameter))
        for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False):
            if buffer.is_floating_point():
                setattr(module, name, buffer.to(dtype))


def _recompute(model: nn.Module, name: str) -> None:
    parent, _, child = name.rpartition(".")
    # The state of generators is kept for dropout alone; a simulation draws nothing.
    wrapped = checkpoint_wrapper(model.get_submodule(name), preserve_rng_state=False)
    setattr(model.get_submodule(parent), child, wrapped)
