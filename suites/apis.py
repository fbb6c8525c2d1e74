"""The APIs of FSDP1 and FSDP2, as cases call them themselves, and collectives that user code gives to FSDP2."""

import dataclasses
import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel

from shardproof.testing import Rank, models
from shardproof.testing.make import Adapter, sharded
from shardproof.testing.refuse import Refusal

#: Without a move to the CPU, as in :meth:`Fsdp1.full_states`.
_OF_THE_FIRST_RANK = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
#: The names of the parameters of the two layers.
NAMES = ["0.bias", "0.weight", "1.bias", "1.weight"]


@dataclasses.dataclass(frozen=True)
class Api:
    """An API under test, and two linear layers to call it with.

    Attributes:
        rank: this rank.
        adapter: of a model that the case does not use; making it lets the harness watch the implementation.
    """

    rank: Rank
    adapter: Adapter

    @property
    def device(self) -> torch.device:
        """The device of this rank."""
        return self.rank.device

    @property
    def mesh(self) -> DeviceMesh:
        """All ranks."""
        return self.adapter.config.mesh

    def layers(self) -> Any:
        """Two linear layers, on the device."""
        return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).to(self.device)

    def forward(self, model: nn.Module) -> torch.Tensor:
        """Run a forward of a model, on a batch of ones."""
        output: torch.Tensor = model(torch.ones(2, 4, device=self.device))
        return output

    def check_refused(self, words: str, attempt: Callable[[], Any]) -> None:
        """Check that every rank refuses an attempt, with an error that has these words (collective)."""
        Refusal(self.rank, attempt, may_send=True).check_names(words)


class Fsdp1(Api):
    """``FullyShardedDataParallel``."""

    @property
    def api(self) -> Any:
        """The module with ``FullyShardedDataParallel`` and the classes of its arguments."""
        return self.adapter.api

    @property
    def kind(self) -> Any:
        """``FullyShardedDataParallel``."""
        return self.api.FullyShardedDataParallel

    def wrap(self, module: nn.Module, **options: Any) -> Any:
        """Wrap a module, by default over all ranks and with its original parameters."""
        chosen: dict[str, Any] = {"device_mesh": self.mesh, "use_orig_params": True, "device_id": self.device}
        return self.kind(module, **(chosen | options))

    def nested(self, inner: dict[str, Any] | None = None, **options: Any) -> Any:
        """Wrap the first layer, with the given options, and then both."""
        layers = self.layers()
        layers[0] = self.wrap(layers[0], **(inner or {}))
        return self.wrap(layers, **options)

    def nested_on_groups(self) -> Any:
        """As :meth:`nested`, over a process group, which local state dicts need."""
        groups: Any = {"device_mesh": None, "process_group": self.mesh.get_group()}
        return self.nested(groups, **groups)

    def low_precision(self, **options: Any) -> Any:
        """A policy that computes in bfloat16."""
        return self.api.MixedPrecision(param_dtype=torch.bfloat16, **options)

    def without_shards(self, module: nn.Module | None = None, **options: Any) -> Any:
        """Wrap a module, by default both layers, in a wrapper that shards nothing."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # NO_SHARD is deprecated
            return self.wrap(module or self.layers(), sharding_strategy=self.api.ShardingStrategy.NO_SHARD, **options)

    def train(
        self, model: nn.Module, *parts: nn.Module, optimizer: torch.optim.Optimizer | None = None
    ) -> torch.optim.Optimizer:
        """Make one step, by default of Adam.

        Args:
            model: whose parameters are trained.
            *parts: modules that each return a loss; without any, the model's output is the loss.
            optimizer: None means Adam over all parameters.

        Returns:
            The optimizer.
        """
        optimizer = optimizer or torch.optim.Adam(model.parameters(), lr=0.1)
        for part in parts or (model,):
            self.forward(part).square().sum().backward()
        optimizer.step()
        return optimizer

    def strategies(self) -> list[str]:
        """The strategies that wrappers report: by default, and chosen with full shards, fewer gathers and no shards."""
        kinds = self.api.ShardingStrategy
        chosen = (None, kinds.FULL_SHARD, kinds.SHARD_GRAD_OP)
        wrappers = [self.wrap(self.layers(), sharding_strategy=one) for one in chosen]
        return [one.sharding_strategy.name for one in (*wrappers, self.without_shards())]

    def sharded_states(self, model: nn.Module) -> Any:
        """The context in which state dicts of a model are sharded."""
        return self.kind.state_dict_type(model, self.api.StateDictType.SHARDED_STATE_DICT)

    def full_states(self, model: nn.Module, *, first_rank: bool = False) -> Any:
        """The context in which state dicts of an optimizer are full: on all ranks, or on the first one alone."""
        # A state that is on the CPU already need not go there, and torch's would free it: findings/F041.py.
        config = self.api.FullOptimStateDictConfig(rank0_only=first_rank, offload_to_cpu=False)
        form = self.api.StateDictType.FULL_STATE_DICT
        return self.kind.state_dict_type(model, form, self.api.FullStateDictConfig(), config)

    def save(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
        """The optimizer's full state where the first rank alone saves, by torch's function for any model.

        That function takes torch's wrappers alone. Of others it is what their own call saves.
        """
        if isinstance(model, FullyShardedDataParallel):
            return get_optimizer_state_dict(model, optimizer, options=_OF_THE_FIRST_RANK)
        with self.full_states(model, first_rank=True):
            return self.kind.optim_state_dict(model, optimizer)

    def load(self, model: nn.Module, optimizer: torch.optim.Optimizer, state: Any) -> None:
        """Load what :meth:`save` returned on each rank."""
        if isinstance(model, FullyShardedDataParallel):
            set_optimizer_state_dict(model, optimizer, state, options=_OF_THE_FIRST_RANK)
            return
        with self.full_states(model, first_rank=True):
            self.kind.optim_state_dict_to_load(model, optimizer, state, load_directly=True)

    def load_model(self, model: nn.Module, state: Any) -> None:
        """Load a full state dict of every rank, by torch's function for any model if that takes the wrapper."""
        if isinstance(model, FullyShardedDataParallel):
            set_model_state_dict(model, state, options=StateDictOptions(full_state_dict=True))
            return
        model.load_state_dict(state)

    def saved_by_the_first_rank(self, model: nn.Module) -> list[str]:
        """The names in the full state dict on this rank, where the first rank alone has the values."""
        config = self.api.FullStateDictConfig(rank0_only=True)
        with self.kind.state_dict_type(model, self.api.StateDictType.FULL_STATE_DICT, config):
            return sorted(model.state_dict())

    def without_parameters(self, **options: Any) -> Any:
        """A wrapper whose own module has buffers, and whose parameters all belong to a wrapper inside it."""
        norm = nn.BatchNorm1d(4, affine=False)
        layers = nn.Sequential(self.wrap(nn.Linear(4, 4).to(self.device), **options), norm).to(self.device)
        return self.wrap(layers, **options)


class Fsdp2(Api):
    """``fully_shard``."""

    def shard(self, modules: Any, **options: Any) -> None:
        """Call ``fully_shard``, by default over all ranks."""
        type(self.adapter).fully_shard(modules, **({"mesh": self.mesh} | options))

    def sharded(self, **options: Any) -> Any:
        """Make each layer a unit, and both the root."""
        layers = self.layers()
        for module in (*layers, layers):
            self.shard(module, **options)
        return layers

    def without_names(self, *shape: int) -> DeviceMesh:
        """All ranks on a mesh of a shape whose dimensions have no names."""
        return DeviceMesh(self.mesh.device_type, self.mesh.mesh.view(*shape))


class Own:
    """An all-gather or a reduce-scatter of the script's own, in memory of its own, which autograd does not record.

    What lies in the output of a gather is this rank's part of it: a backend would write to it what other ranks send.

    Args:
        margin: elements around each tensor in its block of memory.
    """

    def __init__(self, margin: int = 0) -> None:
        self._margin = margin
        self.groups: list[dist.ProcessGroup] = []
        self.ops: list[Any] = []
        self._memory: set[int] = set()

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        block = torch.empty(math.prod(size) + 2 * self._margin, dtype=dtype, device=device)
        self._memory.add(block.untyped_storage().data_ptr())
        return block[self._margin : block.numel() - self._margin].view(*size)

    def __call__(self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, **options: Any) -> Any:
        assert not torch.is_grad_enabled(), "autograd records the script's collective"
        for name, tensor in (("input", input_tensor), ("output", output_tensor)):
            assert tensor.untyped_storage().data_ptr() in self._memory, f"the {name} was not allocated by the script"
        if (
            "op" not in options
            and input_tensor.untyped_storage().data_ptr() == output_tensor.untyped_storage().data_ptr()
        ):
            begin = (input_tensor.data_ptr() - output_tensor.data_ptr()) // input_tensor.element_size()
            mine = group.rank() * input_tensor.numel()
            assert begin == mine, f"the input begins at element {begin} of the output, where {mine} is this rank's part"
        self.groups.append(group)
        collective: Any = dist.reduce_scatter_tensor if "op" in options else dist.all_gather_into_tensor
        if "op" in options:
            self.ops.append(options["op"])
        return collective(output_tensor, input_tensor, group=group, **options)


def fsdp1(rank: Rank, **options: Any) -> Fsdp1:
    """Make the API available (collective).

    Args:
        rank: this rank.
        **options: as for :meth:`Rank.config`.
    """
    return Fsdp1(rank, _adapter(rank, **options))


def trained(rank: Rank) -> tuple[Fsdp1, Any, torch.optim.Optimizer]:
    """Make the API available, with a nested wrapper and its Adam, after one step (collective)."""
    fsdp = fsdp1(rank)
    model = fsdp.nested()
    return fsdp, model, fsdp.train(model)


def hybrid(rank: Rank) -> Fsdp1:
    """Make the API available on a (replicate, shard) mesh of four ranks (collective)."""
    return fsdp1(rank, mesh=rank.mesh((2, 2), ("replicate", "shard")))


def fsdp2(rank: Rank) -> Fsdp2:
    """Make the API available (collective)."""
    return Fsdp2(rank, _adapter(rank))


def _adapter(rank: Rank, **options: Any) -> Adapter:
    return sharded(rank, models.MLP(5).to(rank.device), **options)
