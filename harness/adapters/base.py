"""The adapter protocol: the class to implement, the traits it declares, and the configuration it receives.

The protocol fits implementations that wrap modules, implementations that only replace parameters, and engines that own
backward, clipping and the optimizer step. docs/adapters.md has a complete example.
"""

import contextlib
import functools
import importlib.util
import inspect
import pathlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib import metadata
from typing import Any, ClassVar, NamedTuple, Protocol, TypeVar, cast

import torch
from torch import nn

from shardproof import extras
from shardproof.harness.adapters.capability import Capability
from shardproof.harness.adapters.config import Accumulation as Accumulation
from shardproof.harness.adapters.config import Clip as Clip
from shardproof.harness.adapters.config import Config as Config
from shardproof.harness.adapters.config import FullParams as FullParams
from shardproof.harness.adapters.config import OwnCollective as OwnCollective
from shardproof.harness.adapters.config import Precision as Precision
from shardproof.harness.adapters.config import Settings as Settings
from shardproof.harness.adapters.config import StateForm as StateForm
from shardproof.harness.adapters.config import Units as Units
from shardproof.harness.adapters.config import WrapPolicy as WrapPolicy
from shardproof.harness.adapters.traits import Traits as Traits
from shardproof.harness.adapters.traits import padded_to_rows as padded_to_rows
from shardproof.harness.tensors import notes
from shardproof.harness.tensors.pieces import Cut as Cut
from shardproof.harness.tensors.pieces import Piece as Piece
from shardproof.harness.tensors.pieces import original_name as original_name
from shardproof.harness.tensors.pieces import uncut as uncut
from shardproof.harness.tensors.pieces import whole as whole
from shardproof.harness.tensors.trees import local_of

OptimizerFactory = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
"""Takes parameters and returns an optimizer that updates them."""


class Trainee(Protocol):
    """What a training script has between backward and step: an adapter, or a baseline.

    Attributes:
        optimizer: the optimizer of :meth:`held_parameters`.
    """

    optimizer: Any

    def held_parameters(self) -> dict[str, nn.Parameter]:
        """Return the tensors that the optimizer updates, by parameter names of the original model."""


def inner_first(units: Units) -> list[tuple[str, ...]]:
    """Return the units with nested modules before the modules that contain them, otherwise in the given order."""
    return sorted(units, key=lambda unit: -max(name.count(".") for name in unit))


@contextlib.contextmanager
def unit_classes(model: nn.Module, units: Units) -> Iterator[list[type[nn.Module]]]:
    """Give each module of the units a class of its own, by which it is chosen as a unit, unless what follows raises.

    Each class has a name of its own: some packages compare names.
    """
    classes = []
    modules = [model.get_submodule(name) for unit in inner_first(units) for name in unit]
    for number, module in enumerate(modules):
        kind = type(module)
        module.__class__ = type(f"{kind.__name__}_{number}", (kind,), {"__module__": kind.__module__})
        classes.append(type(module))
    try:
        yield classes
    except BaseException:
        for module in modules:
            module.__class__ = type(module).__mro__[1]
        raise


def state_pieces(state: Mapping[str, Any], cut: Cut) -> dict[str, Piece]:
    """Return the pieces of the tensors in one parameter's optimizer state; a DTensor stands for its local shard.

    The cut is that of the parameter and of every tensor with dimensions.
    """
    return {key: Piece(value, cut) if value.ndim else whole(value) for key, value in tensors_of_state(state).items()}


def tensors_of_state(state: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return the tensors of one parameter's optimizer state by key; a DTensor stands for its local shard."""
    return {key: local_of(value) for key, value in sorted(state.items()) if isinstance(value, torch.Tensor)}


class KeysLeftOver(NamedTuple):
    """The names of the model that a loaded state dict lacks, and those in it that the model does not have."""

    missing: tuple[str, ...]
    unexpected: tuple[str, ...]


def options_of(form: StateForm, *, saves: bool = True, strict: bool = True) -> Any:
    """Return the options of ``torch.distributed.checkpoint.state_dict`` for state dicts of a form."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions

    first = form == "first-rank"
    return StateDictOptions(
        full_state_dict=form in ("full", "first-rank"),
        cpu_offload=first and saves,
        broadcast_from_rank0=first,
        flatten_optimizer_state_dict=form == "flattened",
        strict=strict,
    )


_Method = TypeVar("_Method", bound=Callable[..., Any])
#: The attributes that an adapter has exactly if it declares a capability.
_ATTRIBUTES = {
    "api": Capability.FSDP1_API,
    "fully_shard": Capability.FSDP2_API,
    "zero_optimizer": Capability.ZERO_API,
    "mesh_dims": "dp_mesh_dims",
    "share_comm_ctx": Capability.SHARE_COMM_CTX,
}


def of_capability(capability: Capability) -> Callable[[_Method], _Method]:
    """Mark a method that an adapter defines exactly if it declares a capability; without it a call says so."""

    def mark(method: _Method) -> _Method:
        @functools.wraps(method)
        def missing(self: "Adapter", *args: Any, **kwargs: Any) -> Any:
            if capability in type(self).capabilities():
                raise AssertionError(f"{self.name} {undefined(capability, method.__name__)}")
            raise AssertionError(f"{self.name} does not declare {capability}, which {method.__name__}() needs")

        vars(missing)["capability"] = capability
        return cast(_Method, missing)

    return mark


def undefined(capability: str, member: str) -> str:
    """Say that an adapter declares a capability and lacks a method, or another member, of it."""
    return f"declares {capability} but does not define {member}{'' if member in _ATTRIBUTES else '()'}"


def is_undefined(adapter: "type[Adapter]", member: str) -> bool:
    """Return whether an adapter class has no method, or other member, of its own of this name."""
    found = getattr(adapter, member, None)
    return found is None or hasattr(found, "capability")


def members_of_capabilities(*kinds: type) -> dict[str, str]:
    """The members without a default, by name, each with the capability whose adapters define it.

    Args:
        kinds: classes with further methods of the protocol, such as those of FSDP1 alone.
    """
    methods = (pair for kind in (Adapter, *kinds) for pair in vars(kind).items())
    return _ATTRIBUTES | {name: value.capability for name, value in methods if hasattr(value, "capability")}


class Adapter(ABC):
    """One model, sharded by one implementation, on one rank.

    The harness makes one instance per model on every rank of the world, and every rank makes the same calls in the same
    order. One training step is::

        for each microbatch:
            with adapter.microbatch(is_last=...):
                output = adapter.forward(...)
                adapter.backward(loss)
        adapter.gradients()
        adapter.clip()              # these two calls only with config.clip and traits.clips == "call"
        adapter.gradients()
        adapter.step()
        adapter.norm_after_step()   # only with config.clip and traits.clips == "step"
        adapter.parameters()
        adapter.optimizer_state()
        adapter.zero_grad(...)

    The trace records the collectives of ``forward``, ``backward``, ``clip`` and ``step``. The other methods may
    communicate where their description allows it, and those collectives are not counted.

    ``gradients``, ``parameters`` and ``optimizer_state`` only read: they return the tensors where they lie, and neither
    gather nor reshard nor wait for a device. An adapter that cannot do so sets ``traits.reads`` to "gathering".

    Cases call a method whose docstring names a capability only if :meth:`capabilities` contains it. An adapter that
    declares the capability overrides the method, unless the default fits.

    Attributes:
        name: the name of the implementation in reports.
        traits: facts about the implementation that comparisons depend on.
        api: the module of the implementation. Needs :attr:`Capability.FSDP1_API`.
        fully_shard: the function of the implementation, as a staticmethod. Needs :attr:`Capability.FSDP2_API`.
        zero_optimizer: what makes its optimizer, as a staticmethod. Needs :attr:`Capability.ZERO_API`.
        mesh_dims: the class of its ``dp_mesh_dims``. Needs ``"dp_mesh_dims"`` as well.
        share_comm_ctx: its function of this name. Needs :attr:`Capability.SHARE_COMM_CTX`.
        option_names: the implementation's own names of fields of :class:`Config`, as "clip.error_if_nonfinite". The
            constructor and the other methods pass these on, whether the capability is declared or not; an option
            without a name here is one that the implementation does not have.
        config: how this model is sharded.
        module: what the training loop calls.
        optimizer: None if the case trains without an optimizer, or if an engine owns the step.
    """

    name: ClassVar[str]
    traits: ClassVar[Traits] = Traits()
    option_names: ClassVar[Mapping[str, str]] = {}
    api: ClassVar[Any]
    fully_shard: ClassVar[Callable[..., Any]]
    mesh_dims: ClassVar[Callable[..., Any]]
    share_comm_ctx: ClassVar[Callable[..., None]]

    module: nn.Module
    optimizer: torch.optim.Optimizer | None

    @classmethod
    @abstractmethod
    def availability(cls, device_type: str) -> str | None:
        """Return why the implementation cannot run on this host, or None if it can.

        Called in the pytest process. A reason is one line that names what to install; it ends the run with exit code 4.
        Importing the adapter class must be quick and must not patch other modules, because it happens in this process.

        Args:
            device_type: "cpu", or the type of the accelerator.
        """

    @classmethod
    @abstractmethod
    def capabilities(cls) -> frozenset[str]:
        """Return the capabilities of the implementation, in the versions installed here.

        Called in the pytest process. A case that needs any other capability is skipped as ``unsupported``.
        """

    @classmethod
    def version(cls) -> str:
        """Return the version of the implementation, for the run file. The default is torch's."""
        return torch.__version__

    @classmethod
    def source(cls) -> str | None:
        """Return the file of the implementation, which the header of a run prints beside that of the adapter, or None.

        The default is the file of :attr:`api` or :attr:`fully_shard`, if the adapter has one. Called in the pytest
        process, so it must not import the implementation.
        """
        driven = getattr(cls, "api", None) or getattr(cls, "fully_shard", None)
        return inspect.getsourcefile(inspect.unwrap(driven)) if driven is not None else None

    @classmethod
    def prepare(cls, device_type: str) -> None:
        """Change a rank's process permanently: set environment variables, import packages that patch others.

        Called on every rank before each case, and only where ``traits.isolation`` is not "shared". The harness records
        the state of the process afterwards, so these changes do not count as left behind by the case. The world's
        process group exists already.

        Args:
            device_type: "cpu", or the type of the accelerator.
        """
        return None

    @classmethod
    def as_on_a_device(cls) -> contextlib.AbstractContextManager[None]:
        """Return a context in which the CPU is treated as a device with streams, which are not there.

        A simulated world has no device, and its figures are those of one: buffers live until a stream would have read
        them. An implementation that leaves out on the CPU what it does for streams overrides this; the default fits
        those that do the same on both.
        """
        return contextlib.nullcontext()

    @abstractmethod
    def __init__(self, model: nn.Module, *, optimizer: OptimizerFactory | None, config: Config) -> None:
        """Shard the model and set ``module`` and ``optimizer``.

        Called on every rank, so sharding may communicate. Subclasses call this constructor, which keeps ``config``.

        Args:
            model: in float32, on the device of ``config.mesh``, with equal values on all ranks unless
                ``config.sync_module_states`` is set. Where the adapter declares the capabilities, it may contain
                DTensors of a tensor-parallel mesh, activation checkpointing wrappers and compiled modules. The adapter
                owns it from here on.
            optimizer: makes the optimizer from the sharded parameters; None trains without one.
            config: how to shard the model.
        """
        notes.tell("sharding", model=model)
        self.config = config

    # one training step -------------------------------------------------------------------

    @contextlib.contextmanager
    def microbatch(self, *, is_last: bool) -> Iterator[None]:
        """Surround one microbatch; the place for ``no_sync()`` and for a reduction after the last microbatch.

        The context covers the microbatch's forward and backward, or its backward alone where a case runs the forwards
        of several microbatches ahead. It may communicate on entry and on exit. ``is_last`` is about the backwards of a
        step.
        """
        yield

    def submodule(self, name: str) -> nn.Module:
        """Return what a training loop calls to run the module of this name in the original model; "" is the root."""
        return self.module.get_submodule(name)

    def forward(self, *args: Any, submodule: str = "", **kwargs: Any) -> Any:
        """Run the forward of the root or of one submodule, as :meth:`submodule` names it, and return its output."""
        return self.submodule(submodule)(*args, **kwargs)

    def backward(self, loss: torch.Tensor) -> None:
        """Run backward from the loss of one microbatch.

        After the last backward of a step, gradients are averages over ``config.data_ranks`` of the sums over
        microbatches.

        Args:
            loss: a scalar, the mean over this rank's microbatch; multiplied by ``config.microbatches`` where
                ``traits.divides_by_microbatches`` is set.
        """
        loss.backward()

    def clip(self) -> torch.Tensor:
        """Clip the gradients by ``config.clip``, and return the total norm before, as the implementation returns it.

        Called between the last backward and the step, only if ``config.clip`` is set and ``traits.clips`` is "call".
        """
        assert self.config.clip is not None
        clip = self.config.clip
        return nn.utils.clip_grad_norm_(
            self.module.parameters(), clip.max_norm, clip.norm_type, clip.error_if_nonfinite
        )

    def clip_parameters(
        self, parameters: torch.Tensor | Iterable[torch.Tensor], clip: Clip, *, foreach: bool | None = None
    ) -> torch.Tensor:
        """Clip the gradients of some parameters, or of one, by their own norm; otherwise as :meth:`clip`.

        They are some of :meth:`held_parameters`; one need not be in a list. ``foreach`` says whether kernels for lists
        of tensors are used. Needs :attr:`Capability.CLIP_SOME`.
        """
        return nn.utils.clip_grad_norm_(parameters, clip.max_norm, clip.norm_type, clip.error_if_nonfinite, foreach)

    def norm_value(self, norm: torch.Tensor) -> torch.Tensor:
        """Return the total norm that :meth:`clip` returned as a plain scalar tensor, equal on all ranks.

        Called when the step is compared, which may be some steps later. It may communicate, as for a DTensor that is
        still to be reduced.
        """
        return norm

    def step(self) -> None:
        """Run the optimizer step."""
        if self.optimizer is not None:
            self.optimizer.step()

    def grad_scaler(self, *, init_scale: float, growth_interval: int, **options: Any) -> torch.amp.GradScaler:
        """Make what scales the loss and unscales the gradients that :attr:`optimizer` uses. It may communicate.

        Needs :attr:`Capability.LOSS_SCALING`.

        Args:
            init_scale: by what the first losses are multiplied.
            growth_interval: the number of steps without infinite gradients after which the scale grows.
            **options: the others of ``torch.amp.GradScaler``.
        """
        device = self.config.mesh.device_type
        return torch.amp.GradScaler(device, init_scale=init_scale, growth_interval=growth_interval, **options)

    def norm_after_step(self) -> torch.Tensor | None:
        """Return the total norm before clipping, as a scalar tensor, after a step that clipped.

        Called only if ``config.clip`` is set and ``traits.clips`` is "step".
        """
        return None

    def zero_grad(self, *, set_to_none: bool) -> None:
        """Set the gradients to None, or fill them with zeros."""
        if self.optimizer is not None:
            self.optimizer.zero_grad(set_to_none=set_to_none)
        else:
            self.module.zero_grad(set_to_none=set_to_none)

    # reading the state, outside the trace --------------------------------------------------

    @abstractmethod
    def gradients(self) -> dict[str, Piece | None]:
        """Return what this rank holds of each gradient, where it lies.

        Called after the last backward, and again after :meth:`clip`. The harness copies the tensors at once.

        Returns:
            By parameter name of the original model, a piece on the mesh's device, or on the CPU with
            ``config.offload``; None for a parameter without a gradient.
        """

    @abstractmethod
    def parameters(self) -> dict[str, Piece]:
        """Return what this rank holds of each parameter, where it lies, as :meth:`gradients` does.

        Called after the optimizer step.
        """

    def held_parameters(self) -> dict[str, nn.Parameter]:
        """Return the tensors that the optimizer updates, by parameter names of the original model, as below."""
        return self.named_parameters()

    def optimizer_state(self) -> dict[str, dict[str, Piece]] | None:
        """Return what this rank holds of each parameter's optimizer state, where it lies.

        Called after the optimizer step. The default reads ``optimizer.state`` of :meth:`held_parameters`; a tensor of
        state lies as its parameter does, and a scalar is whole on every rank.

        Returns:
            By parameter name of the original model and by key of the state, a piece. A parameter is left out whose
            state other ranks hold alone. None if the state cannot be read.
        """
        if self.optimizer is None:
            return None
        pieces, state = self.parameters(), self.optimizer.state
        return {
            name: state_pieces(state.get(parameter, {}), pieces[name].cut)
            for name, parameter in self.held_parameters().items()
        }

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """Return the registered parameters, sharded or gathered, by their names in the original model.

        Every parameter of the original model has an entry, a tied one under one of its names. Where several lie in one
        flat parameter, each of their names has that one. Only with :attr:`Config.flat_parameters` may names be others.
        """
        return {original_name(name): value for name, value in self.module.named_parameters()}

    @of_capability(Capability.REGISTERED_STATE)
    def gathered(self) -> dict[str, bool]:
        """Return for each parameter of the original model whether ``module.parameters()`` currently shows it gathered.

        Needs :attr:`Capability.REGISTERED_STATE`.
        """
        raise NotImplementedError

    @of_capability(Capability.REGISTERED_STATE)
    def registered(self) -> dict[str, Piece]:
        """Return what ``module.parameters()`` currently shows of each parameter, gathered or sharded.

        Needs :attr:`Capability.REGISTERED_STATE`.
        """
        raise NotImplementedError

    @of_capability(Capability.TENSOR_PARALLEL)
    def own_gradients(self, names: Sequence[str]) -> list[torch.Tensor]:
        """Return the local gradients that this rank's optimizer will use; the case changes them in place.

        Called between the last backward and the step, for what a training script adds itself, such as the gradients of
        parameters that tensor parallelism did not shard. The tensors are on the device of the shards. Ranks that hold
        the same share of the same parameters return tensors of the same sizes in the same order.

        Needs :attr:`Capability.TENSOR_PARALLEL`.

        Args:
            names: parameters of the original model. A parameter without a gradient on this rank is left out.
        """
        raise NotImplementedError

    @of_capability(Capability.MANUAL_RESHARD)
    def reshard(self) -> None:
        """Free all gathered parameters, so that the sharded ones are registered again.

        Needs :attr:`Capability.MANUAL_RESHARD`.
        """
        raise NotImplementedError

    @of_capability(Capability.ASYNC_UNSHARD)
    def unshard(self, *, waits: bool = False) -> None:
        """Start to gather all parameters, and return at once or, with ``waits``, once all are registered whole.

        Called between steps, also before the first forward, which then gathers nothing. Needs
        :attr:`Capability.ASYNC_UNSHARD`.
        """
        raise NotImplementedError

    @of_capability(Capability.SUMMON_FULL_PARAMS)
    def summon_full_params(self, how: FullParams) -> contextlib.AbstractContextManager[dict[str, nn.Parameter]]:
        """Gather all parameters for as long as the context lasts (collective). Called between steps.

        Needs :attr:`Capability.SUMMON_FULL_PARAMS`.

        Args:
            how: on which ranks, on which device, and whether changes are kept.

        Yields:
            What the modules hold, by names of the original model; on the other ranks than the first with
            ``how.rank0_only`` the shards.
        """
        raise NotImplementedError

    @of_capability(Capability.EXPLICIT_PREFETCH)
    def prefetch(self, *, forward: Mapping[str, Sequence[str]], backward: Mapping[str, Sequence[str]]) -> None:
        """Set which other units each unit gathers before its own computation. Called before training.

        A later call replaces the lists of the units that it names; an empty list restores the default. Needs
        :attr:`Capability.EXPLICIT_PREFETCH`.

        Args:
            forward: from the name of a module to the names of the modules whose units it gathers ahead in forward, in
                that order.
            backward: the same for backward.
        """
        raise NotImplementedError

    @of_capability(Capability.FORWARD_METHOD)
    def register_forward_method(self, submodule: str, method: str) -> None:
        """Make a method of a submodule gather and free parameters as ``forward`` does. Called once, before training.

        Needs :attr:`Capability.FORWARD_METHOD`.
        """
        raise NotImplementedError

    @of_capability(Capability.POST_OPTIM_EVENT)
    def after_step(self, event: torch.Event) -> None:
        """Make the next step's gathers wait for ``event`` instead of the whole stream of the optimizer.

        Called after each optimizer step, with an event that was recorded on the current stream after it. Needs
        :attr:`Capability.POST_OPTIM_EVENT`.
        """
        raise NotImplementedError

    @of_capability(Capability.UNIT_SETTINGS)
    def change(self, settings: Settings, *, unit: str = "", recurse: bool = False) -> None:
        """Change the settings of one unit, or of all units in a module, for the passes that follow.

        Called between steps. It may communicate. Needs :attr:`Capability.UNIT_SETTINGS`.

        Args:
            settings: what to change.
            unit: the name of the unit's first module; "" is the root's own.
            recurse: whether the units inside the module change too.
        """
        raise NotImplementedError

    def recover(self) -> None:
        """Make what the implementation documents as the call after an exception in forward or backward.

        Called on every rank after an exception at the same place on all of them. Gradients are then zeroed, and the
        next step begins anew. The default fits an implementation that needs no call. Needs :attr:`Capability.RECOVERY`.
        """
        return None

    def checkpoint(self, *, form: StateForm = "sharded") -> dict[str, Any]:
        """Return the state that ``torch.distributed.checkpoint`` saves, by names of the original model (collective).

        Needs :attr:`Capability.DISTRIBUTED_CHECKPOINT`.

        Args:
            form: what the state dicts consist of. Values other than "sharded" need :attr:`Capability.FULL_STATE_DICT`,
                and "first-rank" a mesh of one dimension with all ranks.

        Returns:
            The state dicts under "model" and, if there is an optimizer, under "optimizer".
        """
        from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_state_dict

        if self.optimizer is None:
            return {"model": get_model_state_dict(self.module, options=options_of(form))}
        model, optimizer = get_state_dict(self.module, self.optimizer, options=options_of(form))
        return {"model": model, "optimizer": optimizer}

    def restore(self, state: dict[str, Any], *, form: StateForm = "sharded", strict: bool = True) -> KeysLeftOver:
        """Load a state into the model and, if it has one for that, into the optimizer (collective).

        Needs :attr:`Capability.DISTRIBUTED_CHECKPOINT`.

        Args:
            state: what :meth:`checkpoint` returned in the same form, with values that were loaded into it since.
            form: as for :meth:`checkpoint`.
            strict: whether names of the model that are missing or unknown raise a RuntimeError.

        Returns:
            The names of the model that are missing in the state, and those in the state that the model does not have.
        """
        from torch.distributed.checkpoint.state_dict import set_model_state_dict, set_optimizer_state_dict

        options = options_of(form, saves=False, strict=strict)
        keys = set_model_state_dict(self.module, state["model"], options=options)
        if "optimizer" in state:
            optimizer = self._checkpointed_optimizer()
            set_optimizer_state_dict(self.module, optimizer, state["optimizer"], options=options)
        return KeysLeftOver(tuple(keys.missing_keys), tuple(keys.unexpected_keys))

    def _checkpointed_optimizer(self) -> torch.optim.Optimizer:
        assert self.optimizer is not None, f"{self.name} exposes no optimizer"
        return self.optimizer

    # Checkpoints of an implementation's own, by its own calls and in its own files.

    @of_capability(Capability.OWN_CHECKPOINT)
    def save_own(self, directory: pathlib.Path) -> None:
        """Write model and optimizer into a directory (collective). Needs :attr:`Capability.OWN_CHECKPOINT`."""
        raise NotImplementedError

    @of_capability(Capability.OWN_CHECKPOINT)
    def load_own(self, directory: pathlib.Path) -> None:
        """Load what :meth:`save_own` wrote (collective). Needs :attr:`Capability.OWN_CHECKPOINT`."""
        raise NotImplementedError

    @of_capability(Capability.OWN_CHECKPOINT)
    def consolidated(self, directory: pathlib.Path) -> dict[str, torch.Tensor]:
        """Return the whole weights in what :meth:`save_own` wrote, as user code outside of the job reads them.

        They are on the CPU, by names of the original model. Called on every rank, which reads the files alone: not
        collective. Needs :attr:`Capability.OWN_CHECKPOINT`.
        """
        raise NotImplementedError

    def teardown(self) -> None:
        """Undo what the implementation keeps outside the model: hooks, groups, references in module globals.

        Called once after each case, also after a failed one. A peer may still be inside a case that failed here, so
        this method should not wait for other ranks.
        """
        return None


class ByParameter(Adapter):
    """An adapter that finds what a rank holds of a parameter in one tensor, and of its gradient in that one's."""

    @abstractmethod
    def piece(self, name: str, tensor: torch.Tensor) -> Piece:
        """Return what a tensor is of a parameter, or of its gradient."""

    def gradients(self) -> dict[str, Piece | None]:
        """Return the local parts of the gradients, where the optimizer finds them."""
        return {
            name: None if parameter.grad is None else self.piece(name, parameter.grad)
            for name, parameter in self.held_parameters().items()
        }

    def parameters(self) -> dict[str, Piece]:
        """Return the local parts of the parameters, where the optimizer updates them."""
        return {name: self.piece(name, parameter.detach()) for name, parameter in self.held_parameters().items()}


class Packaged(Adapter):
    """An adapter of a package that may not be installed.

    Attributes:
        package: the name of the package for pip.
        module_name: the name of its module; "" is that of the package with underscores in place of hyphens.
        extra: the extra of shardproof that has it.
        brings: the arguments of ``pip install`` that bring what is in no extra.
    """

    package: ClassVar[str]
    module_name: ClassVar[str] = ""
    extra: ClassVar[str] = ""
    brings: ClassVar[str] = ""

    @classmethod
    def availability(cls, device_type: str) -> str | None:
        if importlib.util.find_spec(cls.module_name or cls.package.replace("-", "_")) is None:
            how = extras.command(cls.extra) if cls.extra else f"pip install {cls.brings}"
            return f"{cls.package} is not installed; {how} brings it"
        return None

    @classmethod
    def version(cls) -> str:
        return metadata.version(cls.package)

    @classmethod
    def source(cls) -> str | None:
        spec = importlib.util.find_spec(cls.module_name or cls.package.replace("-", "_"))
        return spec.origin if spec else None


class NoAdapter(Adapter):
    """Takes the place of an adapter that does not import; it is never made."""

    name = "does not import"

    @classmethod
    def availability(cls, device_type: str) -> str | None:
        return cls.name

    @classmethod
    def capabilities(cls) -> frozenset[str]:
        return frozenset()

    @classmethod
    def version(cls) -> str:
        return cls.name


class OwnTraining(NoAdapter):
    """Stands for the user's own training in a check; it is never made. The code may leave in a process what it will."""

    name = "own"
    traits = Traits(process_groups="abandoned", frees_models=False, isolation="case")

    @classmethod
    def availability(cls, device_type: str) -> str | None:
        return None

    @classmethod
    def version(cls) -> str:
        return torch.__version__

    def __init__(self, model: nn.Module, *, optimizer: OptimizerFactory | None, config: Config) -> None:
        raise AssertionError("the user's own training has no adapter")

    def gradients(self) -> dict[str, Piece | None]:
        """Nothing: it is never made."""
        return {}

    def parameters(self) -> dict[str, Piece]:
        """Nothing: it is never made."""
        return {}
