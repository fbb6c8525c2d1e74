"""Simulated worlds: what they leave behind, what the ledger counts, and what is refused."""

import contextlib
import sys

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.profiler import record_function
from torch.testing._internal.distributed.fake_pg import FakeStore

from shardproof.harness.adapters.base import Config
from shardproof.harness.adapters.reference import ReferenceAdapter, ReferenceFlatAdapter
from shardproof.harness.adapters.replicas import DdpAdapter
from shardproof.harness.models import optim, shapes
from shardproof.harness.models.plain import mean_square
from shardproof.harness.plugin.selection import resolve
from shardproof.harness.simulation import training
from shardproof.harness.simulation.memory import Kind, Ledger
from shardproof.harness.simulation.tensors import Tensors
from shardproof.harness.simulation.training import Simulation
from shardproof.harness.simulation.world import check_shape, simulated_world
from shardproof.suites.places import chunk
from shardproof.testing import simulated
from shardproof.testing.measure import private
from tests.allocated import allocated
from tests.harness.planned_models import objects_of_others_rest  # noqa: F401

DIM, DEPTH = 512, 4
LAYER = 4 * DIM * DIM


def simulate(world, kind=ReferenceAdapter, *, steps=2, **options):
    """Layers of one square weight, sharded over all ranks and trained."""
    units = tuple((f"layers.{index}",) for index in range(DEPTH))
    config = Config(mesh=world.mesh(), units=units)
    options |= {"config": config, "optimizer": optim.sgd(momentum=0.0)}
    one = Simulation(world, kind, lambda: shapes.EqualLayers(DIM, DEPTH), **options)
    for _ in range(steps):
        one.step(lambda: (torch.zeros(1, DIM),), loss=mean_square)
    return one


def belongs_to_no_world():
    return not dist.is_initialized() and not private.need("torch.distributed.distributed_c10d._world").pg_map


def attributes():
    """What a simulation replaces while it runs."""
    return sys.excepthook, torch.UntypedStorage.resize_, torch.UntypedStorage.data_ptr, torch.Tensor.data_ptr


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("rank", [0, 3])
def test_process_is_left_as_it_was(rank, fails):
    before = attributes()
    with (
        pytest.raises(ZeroDivisionError) if fails else contextlib.nullcontext(),
        simulated_world(8, rank=rank) as world,
    ):
        assert (dist.get_world_size(), dist.get_rank()) == (8, rank)
        one = simulate(world, steps=1)
        if fails:
            one.step(lambda: (torch.zeros(1, DIM),), loss=lambda output: 1 / 0)
        one.close()
    assert belongs_to_no_world()
    assert attributes() == before


def test_own_world_is_hidden_and_comes_back():
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
    try:
        own = dist.new_group([0, 1])
        with simulated_world(16, rank=5) as world:
            assert (dist.get_world_size(), dist.get_rank()) == (16, 5)
            simulate(world, steps=1).close()
        assert (dist.get_world_size(), dist.get_rank()) == (4, 1)
        assert dist.get_process_group_ranks(own) == [0, 1]
        # Functional collectives find a group by its name alone.
        assert torch._C._distributed_c10d._resolve_process_group(own.group_name) == own
        assert dist.new_group([1, 2]).size() == 2
    finally:
        dist.destroy_process_group()
    assert belongs_to_no_world()


@pytest.mark.parametrize("rank", [1, 5])
def test_rank_of_an_equal_mesh_is_not_taken_from_a_cache(rank):
    """Three rows are among four of six ranks, by chunks of one."""
    with simulated_world(6, rank=rank) as world:
        one = Simulation(
            world, ReferenceAdapter, lambda: nn.Linear(2, 3, bias=False), config=Config(mesh=world.mesh()),
            optimizer=optim.sgd(),
        )  # fmt: skip
        one.step(lambda: (torch.zeros(1, 2),), loss=mean_square)
        assert one.layout()["weight"].shape == (chunk(3, 6, rank), 2) == (int(rank < 3), 2)
        one.close()


def test_ledger_counts_to_the_byte():
    ledger, tensors = Ledger(), Tensors()
    with tensors.without_memory(ledger.during("one")):
        first = torch.zeros(100)
        view = first[10:]
        second = torch.empty(0)
        second.untyped_storage().resize_(48)
        del first
        assert ledger.held().total == 400 + 48  # the view keeps the storage
        del view
        assert ledger.held().total == 48
    with tensors.without_memory(ledger.during("two")):
        ledger.mark([second], Kind.GATHERED)
        third = second + torch.zeros(())
        second.untyped_storage().resize_(0)
    assert ledger.held().by_kind == {}  # `third` is as empty as `second` was made
    assert third.shape == (0,)
    assert ledger.peak(phase="one").total == 448
    assert ledger.peak(phase="two").by_kind == {Kind.GATHERED: 48, Kind.ACTIVATIONS: 4}
    assert ledger.peak(kinds=[Kind.GATHERED]).total == 48


def cut(whole, tensors):
    """What implementations do to a parameter: as many parts as there are ranks, of which the last are empty."""
    with tensors, torch.no_grad():
        parts = list(torch.chunk(whole(), 64))
        return [*parts, parts[0].new_empty(0), parts[0].new_empty(0)]


def facts(tensor):
    """All that tensors without memory differ in, but for the mode that made them."""
    return {
        "type": type(tensor),
        "attributes": {name: value for name, value in vars(tensor).items() if name != "fake_mode"},
        "layout": (tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype, tensor.device),
        "storage": (tensor.untyped_storage().nbytes(), tensor.untyped_storage().device),
        "autograd": (tensor.requires_grad, tensor.is_leaf, tensor._is_view(), tensor._version, tensor.is_inference()),
        "keys": repr(torch._C._dispatch_keys(tensor)),
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_parameter", [False, True])
def test_parts_made_quickly_are_those_that_torch_makes(dtype, is_parameter):
    def whole():
        made = torch.zeros(128, 3, dtype=dtype)
        return nn.Parameter(made) if is_parameter else made

    quickly = cut(whole, Tensors().without_memory())
    slowly = cut(whole, FakeTensorMode())
    assert [facts(one) for one in quickly] == [facts(one) for one in slowly]
    assert len({one.untyped_storage()._cdata for one in quickly}) == 3  # the parts share one; the empty ones do not
    with pytest.raises(RuntimeError, match="data pointer"):
        quickly[0].data_ptr()


@contextlib.contextmanager
def real_world(kind):
    """Rank 0 of two, with real tensors, and streams that are not there."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        with kind.as_on_a_device():
            yield dist.device_mesh.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("kind", [ReferenceAdapter, ReferenceFlatAdapter])
def test_peaks_are_those_that_the_allocator_counts(kind):
    """Of real tensors, in the same order of calls, by torch's profiler; beyond what is held before the step."""
    units = tuple((f"layers.{index}",) for index in range(DEPTH))
    with real_world(kind) as mesh:
        config = Config(mesh=mesh, units=units)
        adapter = kind(shapes.EqualLayers(DIM, DEPTH), optimizer=optim.sgd(momentum=0.0), config=config)

        def step():
            loss = mean_square(adapter.forward(torch.zeros(1, DIM)))
            with record_function("backward"):
                adapter.backward(loss)
            del loss
            with record_function("step"):
                adapter.step()
            adapter.zero_grad(set_to_none=True)

        step()
        real, _ = allocated(step)
        adapter.teardown()
    with simulated_world(2) as world:
        one = simulate(world, kind)
        before = one.held().total
        found = {phase: one.ledger.peak(step=1, phase=phase).total - before for phase in ("forward", "backward")}
        one.close()
    assert found == {phase: real[phase] for phase in found}


def test_ddp_cannot_be_simulated_and_why():
    assert "data is not allocated yet" in str(training.why_not(DdpAdapter))
    assert training.why_not(ReferenceAdapter) is None
    assert belongs_to_no_world()


def ask(simulate):
    return resolve(impl="ddp", simulate=simulate)


def test_sizes_that_are_asked_for():
    assert ask("64,1024,64").simulate == (64, 1024)
    assert ask("64").device == "cpu"
    assert ask(None).simulate == ()


def test_worlds_that_make_no_sense():
    line = r"^rank 8 of a simulated world of 8 ranks: expected 0 to 7$"
    with pytest.raises(ValueError, match=line), simulated_world(8, rank=8):
        pass
    with pytest.raises(ValueError, match=r"^simulated\(multiple_of=0\): a world's size is a positive integer$"):
        simulated(multiple_of=0)
    with pytest.raises(ValueError, match=r"^a mesh of 16x8 has 128 ranks: a world of 100 does not divide into it$"):
        check_shape(100, (16, 8), ("replicate", "shard"))
    with pytest.raises(ValueError, match=r"expected one name for each dimension$"):
        check_shape(100, (10, 10), ("dp",))
