"""Chapter EXTENSION: parameters with gather hooks of their own."""

import dataclasses
import functools
import math
import types
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef

from shardproof.testing import Capability, Pair, Rank, contract, models, needs, world
from shardproof.testing.axes import REPLICAS, RESHARD
from shardproof.testing.compare import check_bits, exact_difference, map_leaves, map_tensors, tensors_of
from shardproof.testing.make import Adapter, Precision, sharded
from shardproof.testing.measure import bytes_of, private
from shardproof.testing.refuse import Refusal
from shardproof.testing.train import batches, checked_steps, train_and_check


@dataclasses.dataclass
class Calls:
    """The arguments and results of the hooks of all tensors of a model.

    Attributes:
        before: of each call of the first hook: size of the mesh, full size, outputs of the module, compute dtype.
        ranks: of the meshes that the first hook received.
        gathered: the memory of the tensors that the second hook received, of each call.
        storages: of the full tensors that it made, in the order of the first gathers.
        filled: how often it filled a tensor that it had made before.
        pads: how many of its two outputs the first hook pads, on ranks that hold fewer rows: both, as it must.
        cuts: whether the second hook leaves out the rows of padding, as it may, when it makes a tensor.
        releases: what a third hook returns: whether the second frees the gathered tensors. None: there is none.
    """

    before: list[tuple[int, tuple[int, ...], int, torch.dtype | None]] = dataclasses.field(default_factory=list)
    ranks: set[tuple[int, ...]] = dataclasses.field(default_factory=set)
    gathered: list[StorageWeakRef] = dataclasses.field(default_factory=list)
    storages: list[torch.UntypedStorage] = dataclasses.field(default_factory=list)
    filled: int = 0
    pads: int = 2
    cuts: bool = True
    releases: Any = None


class Halves(torch.Tensor):
    """A tensor that is gathered as two tensors: its values in bfloat16, and the remainder in its own dtype.

    It wraps a plain tensor, as quantised tensors do. (A subclass that is itself the tensor would not outlive the
    operations by which a DTensor is made.)

    Attributes:
        held: the plain tensor that it wraps.
        calls: shared by all tensors of a model.
    """

    held: torch.Tensor
    calls: Calls

    @staticmethod
    def __new__(cls, held: torch.Tensor, calls: Calls) -> "Halves":
        made: Halves = private.need("torch.Tensor._make_wrapper_subclass")(
            cls, held.size(), strides=held.stride(), dtype=held.dtype, device=held.device
        )
        made.held, made.calls = held, calls
        return made

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["held"], self.calls

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, torch.Tensor], calls: Any, size: Any, stride: Any) -> "Halves":
        return cls(inner["held"], calls)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        (first, *_) = [one for one in tensors_of((args, kwargs)) if isinstance(one, Halves)]
        unwrap = functools.partial(map_leaves, lambda one: one.held, kind=Halves)
        found = func(*unwrap(args), **unwrap(kwargs or {}))
        if func._schema.is_mutable:
            return args[0]
        return map_tensors(lambda one: cls(one, first.calls), found)

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: torch.Size, outer_stride: Any, module: nn.Module, mp_policy: Any
    ) -> Any:
        """Return the two halves of the padded shard, and the full size."""
        return before(self.held, self.calls, mesh, outer_size, module, mp_policy)

    def fsdp_post_all_gather(
        self, outputs: Any, metadata: Any, param_dtype: torch.dtype, *, out: torch.Tensor | None = None
    ) -> Any:
        """Add up the two halves."""
        return after(self.calls, outputs, metadata, param_dtype, out=out)

    def fsdp_should_release_all_gather_outputs_after_post_all_gather(self) -> bool:
        """Free the two gathered halves if the case wants that."""
        return bool(self.calls.releases)


def before(shard: torch.Tensor, calls: Calls, mesh: Any, size: torch.Size, module: Any, policy: Any) -> Any:
    """Return the two halves of the padded shard, and the full size."""
    calls.before.append((mesh.size(), tuple(size), getattr(module, "out_features", 0), policy.param_dtype))
    calls.ranks.add(tuple(mesh.mesh.flatten().tolist()))
    padded = shard.new_zeros(-(-size[0] // mesh.size()), *size[1:])
    padded[: shard.size(0)].copy_(shard)
    high = padded.to(torch.bfloat16)
    # Exact: the bits that bfloat16 cuts off fit in the dtype.
    halves = (high, padded - high.to(padded.dtype))
    return tuple(half if index < calls.pads else half[: shard.size(0)] for index, half in enumerate(halves)), size


def after(calls: Calls, outputs: Any, size: torch.Size, dtype: torch.dtype, *, out: torch.Tensor | None) -> Any:
    """Add up the two halves, into a new tensor or into the one that was made before."""
    high, rest = outputs
    calls.gathered += [StorageWeakRef(output.untyped_storage()) for output in outputs]
    for output in outputs:
        begin, numel = output.storage_offset(), output.untyped_storage().nbytes() // output.element_size()
        assert begin == 0 and numel >= output.numel(), f"a gathered tensor begins at {begin} of {numel} elements"
    padded = (high.to(rest.dtype) + rest).to(dtype)
    whole = padded[: size[0]]
    if out is not None:
        calls.filled += 1
        # Values that autograd has saved do not change: the same ones are written again.
        with torch.no_grad(), private.need("torch.autograd._unsafe_preserve_version_counter")(out):
            out.copy_(whole)
        return None
    whole = whole.clone() if calls.cuts else padded
    calls.storages.append(whole.untyped_storage())
    return whole, (whole,)


#: The third hook.
RELEASES = "fsdp_should_release_all_gather_outputs_after_post_all_gather"


def extend(model: nn.Module, calls: Calls) -> None:
    """Replace the matrices of a model, which is not sharded yet, by tensors with hooks, in place."""
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter.ndim == 2:
                setattr(module, name, nn.Parameter(Halves(parameter.detach(), calls)))


def extend_shard(parameter: DTensor, calls: Calls, *, both: bool = True, older: bool = False) -> None:
    """Give the shard of one sharded parameter the hooks.

    Args:
        both: whether both hooks are set, or the first alone, which is to be refused.
        older: whether the first hook has the older signature, with the mesh as its only argument.
    """
    shard: Any = parameter._local_tensor  # of which ``to_local`` may make an alias
    made = functools.partial(before, shard, calls)
    shard.fsdp_pre_all_gather = lambda mesh, size, stride, module, policy: made(mesh, size, module, policy)
    if older:
        size = parameter.size()
        module, policy = types.SimpleNamespace(out_features=size[0]), types.SimpleNamespace(param_dtype=None)
        shard.fsdp_pre_all_gather = lambda mesh: made(mesh, size, module, policy)
    if both:
        shard.fsdp_post_all_gather = functools.partial(after, calls, out=None)
    if calls.releases is not None:
        setattr(shard, RELEASES, lambda: calls.releases)


pytestmark = [needs(Capability.ALL_GATHER_EXTENSION), world(2)]

SIZES = {"0": (7, 5), "": (6, 7)}


@contract("EXTENSION-1")
@world(2, 4)
@pytest.mark.parametrize("reshard_after_forward", RESHARD[:3])
@pytest.mark.parametrize("kind", ["class", "object"])
def test_tensors_that_choose_the_all_gather_input(rank: Rank, kind: str, reshard_after_forward: bool | None) -> None:
    """Weights that are sent as two halves, in one collective with biases, train as DDP does."""
    pair, calls = extended(rank, kind, reshard_after_forward)
    expected = {label or "(root)": gathered_bytes(rank.world_size, *size) for label, size in SIZES.items()}
    for _ in checked_steps(pair, batches(rank, 3, (4, 5))):
        found = [item.nbytes for item in pair.last_trace() if (item.phase, item.kind) == ("forward", "all_gather")]
        assert found == [expected["(root)"], expected["0"]], f"forward gathers {found} bytes instead of {expected}"
        again = {None: 1, True: 2, False: 0}[reshard_after_forward]
        pair.check_counts("backward", all_gather=again, reduce_scatter=2)
    given = {(rank.world_size, (7, 5), 7, None), (rank.world_size, (6, 7), 6, None)}
    assert set(calls.before) == given, f"the first hook was given {set(calls.before)} instead of {given}"


@contract("EXTENSION-1")
@pytest.mark.parametrize("kind", ["class", "object"])
def test_several_tensors_of_one_unit(rank: Rank, kind: str) -> None:
    """Two weights with hooks share a collective with the bias between them, and each hook gets its own memory."""
    # The last one has hooks: nothing follows it in the buffer.
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 6, bias=False))
    pair, calls = extended(rank, kind, None, model=model, units=[])
    biased, unbiased = (gathered_bytes(rank.world_size, *size) for size in SIZES.values())
    expected = biased + unbiased - 6 * 4
    for step in checked_steps(pair, batches(rank, 2, (4, 5))):
        found = [item.nbytes for item in pair.last_trace() if item.kind == "all_gather"]
        assert found == [expected], f"step {step} gathers {found} bytes instead of {expected}"
    assert len(calls.gathered) == 8, f"in two steps the second hooks were given {len(calls.gathered)} tensors, not 8"


@contract("EXTENSION-1")
@needs("shard_dim")
def test_tensors_cut_along_another_dimension(rank: Rank) -> None:
    """Tensors of such a class are cut along the dimension that user code chooses, whatever the size of the other."""
    model = models.two_linear((6, 4), (4, 10)).to(rank.device)
    full = {name: value.detach().clone() for name, value in model.named_parameters() if value.ndim == 2}
    extend(model, Calls())
    adapter = sharded(rank, model, units=[["0"]], shard_dim=lambda one: 1 if one.ndim == 2 else None)
    for name, value in full.items():
        local: Any = sharded_weight(adapter.named_parameters()[name])._local_tensor
        assert isinstance(local, Halves), f"the shard of {name} is a {type(local).__name__}"
        check_bits(f"shard of {name}", local.held, value.chunk(rank.world_size, dim=1)[rank.index])


@contract("EXTENSION-1")
def test_replaced_shards(rank: Rank) -> None:
    """If user code replaces shards before the first forward, the hooks of the new ones are called."""
    run, calls = rank.run(models.two_linear((5, 8), (8, 6)), units=[["0"]]), Calls()
    for name in ("0", "2"):
        module = run.original_module(name)
        assert isinstance(module, nn.Linear)
        module.weight = nn.Parameter(module.weight.detach().clone())
        extend_shard(sharded_weight(module.weight), calls)
    run.evaluate((rank.batch(0, (4, 5)),))
    assert len(calls.before) == 2, f"the first hooks of the new shards were called {len(calls.before)} times, not twice"


@contract("EXTENSION-1")
@pytest.mark.parametrize("kind", ["class", "object"])
def test_tensors_made_by_a_hook_are_freed(rank: Rank, kind: str) -> None:
    """The second hook's inputs and result are freed after forward if the unit is, and made again in backward."""
    pair, calls = extended(rank, kind, True)
    train_and_check(pair, batches(rank, 1, (4, 5)))
    assert [storage.size() for storage in calls.storages] == [0, 0], "after backward the gathered weights hold bytes"
    held = sum(map(bytes_of, calls.gathered))
    assert not held, f"after backward what was gathered for the second hooks holds {held} bytes"
    assert calls.filled == 2, f"backward filled {calls.filled} weights again, not 2"


@contract("EXTENSION-1")
@needs("precision.param_dtype")
def test_tensors_in_a_dtype_of_compute(rank: Rank) -> None:
    """Hooks receive the compute dtype, and outputs and gradients are those of tensors without hooks."""
    model, calls = models.two_linear((5, 7), (7, 6)), Calls()
    policy = Precision(param_dtype=torch.bfloat16)
    runs = [rank.run(models.copy_of(model), units=[["0"]], precision=policy) for _ in range(2)]
    extend_shards(runs[1].adapter, calls)
    batch = rank.batch(0, (4, 5))
    (output, _), (found, _) = [run.forward_backward((batch,), loss=models.mean_square) for run in runs]
    assert exact_difference(found[0], output[0]) is None, "hooks that keep all bits change the output"
    assert {given[-1] for given in calls.before} == {torch.bfloat16}, "the first hook was given another policy"
    expected = runs[0].adapter.gradients()
    for name, piece in runs[1].adapter.gradients().items():
        other = expected[name]
        assert piece is not None and other is not None, f"{name} has no gradient"
        check_bits(f"gradient of {name!r}", piece.tensor, other.tensor, sides="with hooks and without")


@contract("EXTENSION-3")
@world(4)
@needs(Capability.RESHARD_TO_SIZE)
def test_groups_of_two(rank: Rank) -> None:
    """Resharded to a subgroup, such shards are refused by name before anything is sent, or train as DDP does."""
    model, calls = models.two_linear((5, 7), (7, 6)), Calls()

    def hooked(plain: nn.Module) -> nn.Module:
        extend(plain, calls)
        return plain

    tried = hooked(models.copy_of(model).to(rank.device))
    adapter = sharded(rank, tried, units=[["0"]], reshard_after_forward=2)
    refusal = Refusal(rank, lambda: adapter.forward(rank.batch(0, (4, 5))))
    if refusal.text is not None:
        refusal.check_names("reshard")
        return
    pair = rank.pair(model, units=[["0"]], prepare=hooked, reshard_after_forward=2)
    train_and_check(pair, batches(rank, 1, (4, 5)))


@contract("EXTENSION-4")
@needs(Capability.ALL_GATHER_RELEASE)
@pytest.mark.parametrize("releases", [True, False])
@pytest.mark.parametrize("kind", ["class", "object"])
def test_gathered_tensors_are_released(rank: Rank, kind: str, releases: bool) -> None:
    """What was gathered is freed once the second hook has run, in forward and in backward, only if a third says so."""
    pair, calls = extended(rank, kind, True, releases=releases)
    held: list[int] = []

    def note(*_: Any) -> None:
        held.append(sum(map(bytes_of, calls.gathered)))

    for name in ("0", "2"):
        pair.sharded.original_module(name).register_forward_pre_hook(note)
    # When the gradient of the first layer's output is there, backward has used the root's own weight.
    pair.sharded.original_module("0").register_forward_hook(lambda module, args, out: out.register_hook(note) and None)
    train_and_check(pair, batches(rank, 2, (4, 5)))
    assert len(held) == 6 and all(bool(nbytes) != releases for nbytes in held), (
        f"twice in a forward and once in its backward, what was gathered for the second hooks holds {held} bytes"
    )


@contract("EXTENSION-4")
@world(4)
@needs(Capability.ALL_GATHER_RELEASE, Capability.RESHARD_TO_SIZE)
def test_release_in_groups_of_two(rank: Rank) -> None:
    """Resharded to a subgroup, shards that release what was gathered are refused by name before anything is sent."""
    model = models.two_linear((5, 7), (7, 6)).to(rank.device)
    extend(model, Calls(releases=True))

    def attempt() -> None:
        sharded(rank, model, units=[["0"]], reshard_after_forward=2).forward(rank.batch(0, (4, 5)))

    Refusal(rank, attempt).check_names("reshard_after_forward")


@contract("EXTENSION-4")
@needs(Capability.ALL_GATHER_RELEASE)
@pytest.mark.parametrize("wrong", ["alone", "no-bool"])
def test_wrong_third_hook(rank: Rank, wrong: str) -> None:
    """A third hook without the other two, or one that returns no bool, is refused by name, and nothing is sent."""
    adapter = sharded(rank, models.two_linear((5, 7), (7, 6)).to(rank.device))
    weight = sharded_weight(adapter.named_parameters()["0.weight"])
    if wrong == "alone":
        setattr(weight._local_tensor, RELEASES, lambda: True)
    else:
        extend_shard(weight, Calls(releases="yes"))
    Refusal(rank, lambda: adapter.forward(rank.batch(0, (4, 5)))).check_names(RELEASES)


@contract("EXTENSION-2")
def test_a_single_hook(rank: Rank) -> None:
    """A shard with only one of the two hooks is refused, with the names of both, and nothing is sent."""
    adapter = sharded(rank, models.two_linear((5, 7), (7, 6)).to(rank.device))
    extend_shard(sharded_weight(adapter.named_parameters()["0.weight"]), Calls(), both=False)
    Refusal(rank, lambda: adapter.forward(rank.batch(0, (4, 5)))).check_names("fsdp_post_all_gather")


@contract("EXTENSION-1")
@pytest.mark.parametrize("kind", ["class", "object"])
def test_first_forward_is_in_inference_mode(rank: Rank, kind: str) -> None:
    """A parameter that the second hook makes in an evaluation, before any training forward, trains as DDP does."""
    pair, _ = extended(rank, kind, None)
    pair.evaluate(rank.batch(0, (2, 5), microbatch=1), mode="inference_mode")
    train_and_check(pair, batches(rank, 2, (4, 5)))


@contract("EXTENSION-1")
def test_older_form_of_a_hook(rank: Rank) -> None:
    """A first hook with the older signature, with the mesh as its only argument, trains as DDP does too."""
    pair, calls = extended(rank, "older", None)
    train_and_check(pair, batches(rank, 2, (4, 5)))
    assert calls.before, "no hook was called"


@contract("EXTENSION-1")
def test_padding_that_a_hook_leaves(rank: Rank) -> None:
    """If the second hook leaves rows of padding in its result, the weights that modules see have none."""
    pair, calls = extended(rank, "object", True)
    calls.cuts = False
    train_and_check(pair, batches(rank, 2, (4, 5)))
    found = [storage.size() for storage in calls.storages]
    assert found == [0, 0], f"after backward the gathered weights hold {found} bytes"


@contract("EXTENSION-2")
@pytest.mark.parametrize("pads", [0, 1], ids=["none", "one-of-two"])
def test_inputs_without_padding(rank: Rank, pads: int) -> None:
    """A first hook that does not pad is refused on a rank with fewer rows, before that rank enters a gather."""
    adapter, calls = sharded(rank, models.two_linear((5, 7), (7, 6)).to(rank.device)), Calls(pads=pads)
    extend_shard(sharded_weight(adapter.named_parameters()["0.weight"]), calls)
    text = None
    if rank.index == 1:  # the other has four rows of seven, and needs no padding
        with pytest.raises(AssertionError) as caught:
            adapter.forward(rank.batch(0, (4, 5)))
        text = str(caught.value)
    found = rank.exchange(text)[1]
    assert "4, 5" in found and "3, 5" in found, f"the error names neither the right size nor the wrong one: {found}"


@contract("EXTENSION-1")
@world(4)
@needs(Capability.HYBRID)
@REPLICAS
def test_hooks_with_replicas(rank: Rank, shape: tuple[int, int]) -> None:
    """On replicas, hooks get the mesh of the ranks among which a shard is gathered."""
    mesh = rank.mesh(shape, ("replicate", "shard"))
    pair, calls = extended(rank, "class", None, mesh=mesh)
    train_and_check(pair, batches(rank, 2, (4, 5)))
    expected = tuple(mesh["shard"].mesh.tolist())
    assert calls.ranks == {expected}, f"the first hook was given meshes of ranks {calls.ranks} instead of {expected}"


def extended(
    rank: Rank,
    kind: str,
    reshard_after_forward: bool | None,
    *,
    model: nn.Module | None = None,
    units: Sequence[Sequence[str]] = (("0",),),
    releases: bool | None = None,
    **options: Any,
) -> tuple[Pair, Calls]:
    """A model, or else two linear layers, whose weights have hooks: by their class, or set on their shards."""
    calls = Calls(releases=releases)

    def prepare(model: nn.Module) -> nn.Module:
        if kind == "class":
            extend(model, calls)
        return model

    # A tensor of that class has no memory of its own to copy.
    options |= {"pictures": kind != "class", "units": units, "reshard_after_forward": reshard_after_forward}
    pair = rank.pair(model or models.two_linear((5, 7), (7, 6)), prepare=prepare, **options)
    if kind != "class":
        extend_shards(pair.adapter, calls, older=kind == "older")
    return pair, calls


def extend_shards(adapter: Adapter, calls: Calls, *, older: bool = False) -> None:
    """Give the shards of all matrices the hooks."""
    for parameter in adapter.named_parameters().values():
        if parameter.ndim == 2:
            extend_shard(sharded_weight(parameter), calls, older=older)


def gathered_bytes(ranks: int, rows: int, columns: int) -> int:
    """The bytes of a gather: two and four of each element of a weight, four of each of a bias; rows are padded."""
    padded = math.ceil(rows / ranks) * ranks
    return padded * columns * (2 + 4) + padded * 4


def sharded_weight(parameter: nn.Parameter) -> DTensor:
    """The same parameter, which is a DTensor."""
    assert isinstance(parameter, DTensor)
    return parameter
