"""Chapter RESUME: training goes on from a checkpoint as if it had never stopped."""

import contextlib
import functools
import pathlib
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.staging import AsyncStager, DefaultStager, StagingOptions
from torch.distributed.device_mesh import DeviceMesh

from shardproof.testing import Capability, Rank, Run, contract, models, needs, states, world
from shardproof.testing.axes import FLAT, RESHARD
from shardproof.testing.compare import StepPicture, check_exact, full_of
from shardproof.testing.make import StateForm, run_by_units
from shardproof.testing.other_worlds import other_worlds
from shardproof.testing.refuse import error_of_all
from shardproof.testing.train import optim, parallel, shapes


class BackgroundSave:
    """A save that has been asked for and is not done yet; another thread issues its collectives, on a group of its own.

    With ``copies_at_once`` the values are copied before the constructor returns, as is torch's default; otherwise by
    :meth:`copy`, before the optimizer steps, as where a thread copies while the next forward runs.
    """

    def __init__(self, run: Run, directory: pathlib.Path, group: dist.ProcessGroup, *, copies_at_once: bool) -> None:
        self._may_write = threading.Event()
        self._late = None if copies_at_once else _LateStager()
        # torch's default writer, which would copy too, without that copy.
        self._stager = self._late or _default_stager()
        found: Any = state_dict_saver.async_save(
            run.adapter.checkpoint(),
            storage_writer=_HeldWriter(directory, self._may_write),
            process_group=group,
            async_stager=self._stager,
        )
        # Where the values are copied later, torch 2.9 and newer return a response with two futures.
        self._done: Future[Any] = getattr(found, "upload_completion", found)

    def copy(self) -> None:
        """Copy the values, unless they are copied already."""
        if self._late is not None:
            self._late.copy()

    def finish(self) -> None:
        """Write the copied values, and wait until they are written; raise the error of the other thread."""
        self._may_write.set()
        self._done.result()
        self._stager.close()

    def abandon(self) -> None:
        """Let the other thread end, after an error."""
        self._may_write.set()
        if self._late is not None:
            self._late.abandon()


@contextlib.contextmanager
def saving(rank: Rank, run: Run, directory: pathlib.Path, *, copies_at_once: bool) -> Iterator[BackgroundSave]:
    """Save a run in the background while the context runs, and wait for the save at its end (collective).

    The world's own groups must have a backend for the CPU.
    """
    group = dist.new_group(backend="gloo")
    assert isinstance(group, dist.ProcessGroup)
    with rank.announcer.passing_over(group):
        save = BackgroundSave(run, directory, group, copies_at_once=copies_at_once)
        try:
            yield save
        except BaseException:
            save.abandon()
            raise
        save.finish()
    dist.destroy_process_group(group)


class _HeldWriter(FileSystemWriter):
    """Writes once it is allowed to."""

    def __init__(self, directory: pathlib.Path, may_write: threading.Event) -> None:
        super().__init__(directory)
        self._may_write = may_write

    def write_data(self, *args: Any, **kwargs: Any) -> Any:
        """Wait until the values may be written, and write them."""
        self._may_write.wait()
        return super().write_data(*args, **kwargs)


class _LateStager(AsyncStager):
    """Copies when the case calls it."""

    def __init__(self) -> None:
        self._copied: Future[Any] = Future()
        self._state: dict[str, Any] | None = None

    def stage(self, state_dict: dict[str, Any]) -> Future[Any]:
        """Return the copies, once they are made."""
        self._state = state_dict
        return self._copied

    def copy(self) -> None:
        """Copy the current values, as torch's own stager does."""
        if self._state is not None:
            stager = _default_stager()
            self._copied.set_result(stager.stage(self._state))
            stager.close()
            self._state = None

    def synchronize_staging(self) -> None:
        """Wait for nothing: the case copies."""
        return None

    def close(self) -> None:
        """Release nothing: it retains nothing."""
        return None

    def abandon(self) -> None:
        """Let the thread that waits for the copies fail."""
        if not self._copied.done():
            self._copied.set_exception(RuntimeError("the case failed before the values were copied"))


def _default_stager() -> DefaultStager:
    """The default stager: it copies at once, into memory that is neither pinned nor shared."""
    return DefaultStager(StagingOptions(False, False, False, False))


pytestmark = [needs(Capability.ADAM), world(4)]

DISTRIBUTED = needs(Capability.DISTRIBUTED_CHECKPOINT)
#: Whether the resumed run is the saved one, with other values in between, or a new one.
REUSES = pytest.mark.parametrize("reuses", [False, True], ids=["new-run", "same-run"])
WHY = "the same kernels on the same bits, which a checkpoint stores unchanged"
WHY_BEHIND = "the same kernels on the same bits, which a save reads and does not change"
TWO_DIMENSIONS = needs(Capability.TENSOR_PARALLEL, Capability.TENSOR_PARALLEL_CHECKPOINT)
HYBRID = needs(Capability.HYBRID)
FULL = needs(Capability.FULL_STATE_DICT)

LR = 1e-2
#: By which a schedule multiplies the learning rates after each step.
DECAY = 0.5

Layout = Literal["shards", "replicas", "tensor"]
Make = Callable[[int], Run]
"""Makes a run: number 0 is that which is saved, another number has other values and other learning rates."""


@contract("RESUME-1")
@DISTRIBUTED
@TWO_DIMENSIONS
@REUSES
@pytest.mark.parametrize("optimizer", ["adam", "adamw"])
@pytest.mark.parametrize("sequence", [False, True], ids=["tensor", "sequence"])
def test_two_dimensions(rank: Rank, sequence: bool, optimizer: Literal["adam", "adamw"], reuses: bool) -> None:
    """Model and optimizer, sharded over data- and tensor-parallel ranks, are restored bit for bit."""
    mesh = rank.mesh((2, 2), ("dp", "tp"))

    prepare = functools.partial(parallel.parallelize_transformer, mesh=mesh["tp"], sequence=sequence)
    make = maker(rank, parallel.SplitTransformer, optimizer, mesh=mesh["dp"], prepare=prepare)
    check_resumes(rank, make, parallel.SplitTransformer(), reuses=reuses, mesh=mesh["dp"])


@contract("RESUME-2")
@DISTRIBUTED
@REUSES
@needs(Capability.TIED_PARAMETERS)
@pytest.mark.parametrize(
    "shape",
    [None, pytest.param((2, 2), marks=HYBRID), pytest.param((4, 1), marks=[HYBRID, needs(Capability.SINGLE_RANK)])],
    ids=["shards", "replicas", "replicas-of-one"],
)
def test_one_dimension_and_replicas(rank: Rank, shape: tuple[int, int] | None, reuses: bool) -> None:
    """Model and optimizer on a one-dimensional mesh, and on replicas, are restored bit for bit, ties too."""
    config = models.TransformerConfig(is_tied=True)
    mesh = rank.mesh(shape, ("replicate", "shard")) if shape else rank.mesh()
    make = maker(rank, functools.partial(models.Transformer, config), mesh=mesh)
    check_resumes(rank, make, models.Transformer(config), reuses=reuses, mesh=mesh)


@contract("RESUME-3")
@DISTRIBUTED
@pytest.mark.parametrize(
    ("before", "after", "form"),
    [
        *(
            pytest.param(*layouts, "sharded", marks=marks, id="-".join(layouts))
            for other, marks in (("replicas", HYBRID), ("tensor", TWO_DIMENSIONS))
            for layouts in (("shards", other), (other, "shards"))
        ),
        # A state dict of every rank torch cannot load into these shards (F-323). Flat parameters have a first rank for
        # each part that tensor parallelism makes.
        pytest.param(
            "shards", "tensor", "first-rank", marks=[TWO_DIMENSIONS, FULL, needs(Capability.DTENSOR_PARAMETERS)]
        ),
    ],
)
def test_onto_another_mesh(rank: Rank, before: Layout, after: Layout, form: StateForm) -> None:
    """A checkpoint of one mesh loads on another: all values, states and learning rates are the saved ones."""
    (make, mesh), (make_other, other_mesh) = (maker_on(rank, layout) for layout in (before, after))
    saved, loaded = make(0), make_other(1)
    train_step(rank, saved, 0, mesh)
    train_step(rank, loaded, 0, other_mesh)
    if form == "sharded":
        states.save(saved, rank.tmp_path / "checkpoint")
        states.load(loaded, rank.tmp_path / "checkpoint")
    else:
        loaded.adapter.restore(saved.adapter.checkpoint(form=form), form=form)
    expected, found = full_state(saved), full_state(loaded)
    assert found.keys() == expected.keys(), f"differ in {sorted(found.keys() ^ expected.keys())}"
    wrong = [name for name in expected if not torch.equal(found[name], expected[name])]
    assert not wrong, f"not as saved: {wrong}"
    check_rates(loaded, rates(saved))


class LayersOfStage(nn.Module):
    """Some of the layers of a model, under the names that they have in the model, as the stage of a pipeline has."""

    def __init__(self, layers: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleDict(layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Call the layers in order."""
        for layer in self.layers.values():
            x = layer(x)
        return x

    def units(self) -> list[list[str]]:
        """Each layer is a unit."""
        return [[f"layers.{name}"] for name in self.layers]


#: Which layers each stage has.
SPLITS = {"even": ("01", "23"), "uneven": ("0", "123"), "one": ("0123",)}


@contract("RESUME-6")
@DISTRIBUTED
@needs(Capability.FULL_STATE_DICT, Capability.DTENSOR_PARAMETERS)  # flat ones' optimizer groups go by number
@pytest.mark.parametrize(("before", "after"), [("one", "even"), ("even", "one"), ("even", "uneven")])
def test_onto_other_stages(rank: Rank, before: str, after: str) -> None:
    """A checkpoint of pipeline stages loads where layers have moved between them: each gets its own values and moments.

    A state dict of other layers is refused by their names.
    """

    def trained(number: int, split: str) -> Run:
        stages = SPLITS[split]
        mesh = rank.mesh((len(stages), 4 // len(stages)), ("pp", "dp"))
        torch.manual_seed(rank.seeds.init + number)
        layers = {name: models.MLP(5, 2) for name in "0123"}
        model = LayersOfStage({name: layers[name] for name in stages[mesh["pp"].get_local_rank()]})
        run = run_by_units(rank, model, mesh=mesh["dp"], optimizer=optim.adamw(lr=LR * (1 + number)))
        run.step([(rank.batch(number, (2, 5)),)], loss=models.mean_square)
        return run

    saved, loaded = trained(0, before), trained(1, after)
    mine = states.read(rank, saved)
    states.check_held(rank, saved, mine)
    refusal = error_of_all(rank, lambda: loaded.adapter.restore({"model": saved.adapter.checkpoint()["model"]}))
    assert "layers." in refusal, f"a state dict of other layers is not refused by their names: {refusal or 'loaded'}"
    state_dict_saver.save(saved.adapter.checkpoint(form="flattened"), checkpoint_id=rank.tmp_path / "checkpoint")
    state = loaded.adapter.checkpoint(form="flattened")
    state_dict_loader.load(state, checkpoint_id=rank.tmp_path / "checkpoint")
    loaded.adapter.restore(state, form="flattened")
    every = rank.exchange(mine)
    values = {name: value for one in every for name, value in one["model"].items()}
    moments = {name: value for one in every for name, value in one["optimizer"]["state"].items()}
    names = loaded.adapter.parameters().keys()
    states.check_held(rank, loaded, {"model": {name: values[name] for name in names}, "optimizer": {"state": moments}})
    check_rates(loaded, rates(saved))


@contract("RESUME-4")
@world(2)
@DISTRIBUTED
@FLAT
@pytest.mark.parametrize("copied", ["at-once", "in-forward", "after-backward"])
@pytest.mark.parametrize("reshard_after_forward", RESHARD)
def test_asynchronous_save(rank: Rank, reshard_after_forward: bool | int | None, copied: str, flat: bool) -> None:
    """A background save that runs during two steps has the values of the time of its call, and changes neither step.

    Values are copied at once, or at the latest before the optimizer steps; they are written after the second step.
    """
    with other_worlds(rank) as worlds, worlds.of(rank.world_size) as member:
        saves: list[BackgroundSave] = []

        def copy(when: str) -> None:
            if saves and when == copied:
                saves[0].copy()

        def make(number: int, **options: Any) -> Run:
            torch.manual_seed(rank.seeds.init + number)
            lr = LR * (1 + 2 * number)
            options |= {"flat_parameters": flat, "reshard_after_forward": reshard_after_forward}
            options["optimizer"] = optim.adamw(lr=lr) if flat else optim.in_two_groups("adamw", lr=lr)
            return member.run(models.Tower(dim=5), units=models.Tower(dim=5).units(), **options)

        def step(run: Run, number: int) -> StepPicture:
            return run.step([(member.batch(number, (3, 5)),)], loss=models.mean_square)

        run, twin = make(0, after_backward=lambda _: copy("after-backward")), make(0)
        run.original_module("layers.1.out_proj").register_forward_hook(lambda *_: copy("in-forward"))
        for one in (run, twin):
            step(one, 0)
        expected, checkpoint = states.read(member, run), rank.tmp_path / "checkpoint"
        pictures = []
        with saving(member, run, checkpoint, copies_at_once=copied == "at-once") as save:
            saves.append(save)
            for number in (1, 2):
                pictures.append(step(twin, number))
                check_exact(member, step(run, number), pictures[-1], step=number, why=WHY_BEHIND)
        loaded = make(1)
        step(loaded, 3)
        states.load(loaded, checkpoint)
        states.check_same(member, states.read(member, loaded), expected)
        states.check_held(member, loaded, expected)
        for number in (1, 2):
            check_exact(member, step(loaded, number), pictures[number - 1], step=number, why=WHY)


@contract("RESUME-5")
@world(2)
@needs(Capability.OWN_CHECKPOINT, Capability.TIED_PARAMETERS)
@REUSES
@pytest.mark.parametrize("optimizer", ["momentum", "adamw"])
def test_own_checkpoint(rank: Rank, optimizer: Literal["momentum", "adamw"], reuses: bool) -> None:
    """An implementation's own checkpoint restores model, optimizer and rates, and converts to the model's full weights.

    Full weights have the unsharded model's names, those of shared and frozen parameters and of buffers included.
    """

    def plain(number: int) -> shapes.Stateful:
        torch.manual_seed(rank.seeds.init + number)
        return shapes.Stateful(5)

    def make(number: int) -> Run:
        model = plain(number)
        return rank.run(model, units=model.units(), optimizer=optim.of_kind(optimizer, "for-loop"))

    def step(run: Run, number: int) -> StepPicture:
        picture = run.step([(rank.batch(number, (3, 5)),)], loss=models.mean_square)
        set_rates(run, [rate * DECAY for rate in rates(run)])
        return picture

    through, saved = make(0), make(0)
    expected = [step(through, number) for number in range(3)]
    first = step(saved, 0)
    check_exact(rank, first, expected[0], step=0, why="the same seed, the same data")
    directory = rank.tmp_path / "own"
    saved.adapter.save_own(directory)
    check_weights(saved.adapter.consolidated(directory), plain(0), first)
    saved_rates, resumed = rates(saved), saved if reuses else make(1)
    step(resumed, 3)
    set_rates(resumed, [3 * rate for rate in saved_rates])
    resumed.adapter.load_own(directory)
    check_rates(resumed, saved_rates)
    for number in (1, 2):
        check_exact(rank, step(resumed, number), expected[number], step=number, why=WHY)


def check_weights(found: Mapping[str, torch.Tensor], unsharded: nn.Module, picture: StepPicture) -> None:
    """Full weights have the names and shapes of the unsharded model, and the values that the last step left."""
    shapes = {name: value.shape for name, value in unsharded.state_dict().items()}
    named = {name: value.shape for name, value in found.items()}
    assert named == shapes, f"the full weights have the names and shapes {named} instead of {shapes}"
    for name, piece in picture.parameters.items():
        assert piece is not None
        cut = piece.cut(found[name]).to(piece.tensor.device)
        assert torch.equal(cut, piece.tensor), f"{name} of the full weights is not the parameter after the step"


def maker(rank: Rank, build: Callable[[], Any], optimizer: Literal["adam", "adamw"] = "adamw", **options: Any) -> Make:
    """A function that makes a run of a model."""

    def make(number: int) -> Run:
        torch.manual_seed(rank.seeds.init + number)
        return run_by_units(
            rank, build(), optimizer=optim.in_two_groups(optimizer, lr=LR * (1 + 2 * number)), **options
        )

    return make


def maker_on(rank: Rank, layout: Layout) -> tuple[Make, DeviceMesh]:
    """A function that makes a run on one of the meshes, and that run's data-parallel mesh."""
    names = {"shards": ("dp",), "replicas": ("replicate", "shard"), "tensor": ("dp", "tp")}[layout]
    mesh = rank.mesh((2, 2) if len(names) > 1 else None, names)
    over = mesh["dp"] if layout == "tensor" else mesh
    prepare = functools.partial(parallel.parallelize_transformer, mesh=mesh["tp"]) if layout == "tensor" else None
    return maker(rank, parallel.SplitTransformer, mesh=over, prepare=prepare), over


def train_step(rank: Rank, run: Run, number: int, mesh: DeviceMesh) -> StepPicture:
    """One step, after which a schedule lowers the learning rates."""
    tokens = rank.tokens(number, (3, 8), vocabulary=11, mesh=mesh)
    picture = run.step([(tokens,)], loss=models.mean_square)
    set_rates(run, [rate * DECAY for rate in rates(run)])
    return picture


def check_resumes(rank: Rank, make: Make, plain: nn.Module, *, reuses: bool, mesh: DeviceMesh) -> None:
    """Train three steps without interruption, and three with a save and a load after the first."""
    through = make(0)
    expected = [train_step(rank, through, number, mesh) for number in range(3)]
    saved = make(0)
    first = train_step(rank, saved, 0, mesh)
    check_exact(rank, first, expected[0], step=0, why="the same seed, the same data")
    check_state(saved, plain, first)
    checkpoint = rank.tmp_path / "checkpoint"
    states.save(saved, checkpoint)
    saved_rates = rates(saved)
    resumed = saved if reuses else make(1)
    if reuses:
        spoil(resumed)
        set_rates(resumed, [3 * rate for rate in saved_rates])
    wrong = train_step(rank, resumed, 1, mesh)
    assert not torch.equal(wrong.losses[0], expected[1].losses[0]), "before loading the loss must be another"
    assert rates(resumed) != saved_rates, "before loading the learning rates must be others"
    states.load(resumed, checkpoint)
    check_rates(resumed, saved_rates)
    for number in (1, 2):
        check_exact(rank, train_step(rank, resumed, number, mesh), expected[number], step=number, why=WHY)


def check_state(run: Run, plain: nn.Module, picture: StepPicture) -> None:
    """A checkpoint has the names and shapes of the unsharded model, and the values that the last step left."""
    state, shapes = run.adapter.checkpoint(), {name: value.shape for name, value in plain.state_dict().items()}
    found = {name: value.shape for name, value in state["model"].items()}
    assert found == shapes, f"the model's names and shapes are {found} instead of {shapes}"
    for name, piece in picture.parameters.items():
        assert piece is not None
        cut = piece.cut(full_of(state["model"][name]).to(piece.tensor.device))
        assert torch.equal(cut, piece.tensor), f"{name} of the checkpoint is not the parameter after the step"
    states = state["optimizer"]["state"]
    shapes = {name: value.shape for name, value in plain.named_parameters()}
    assert states.keys() == shapes.keys(), f"states of {sorted(states.keys() ^ shapes.keys())} are missing or unknown"
    moments = {name: (one["exp_avg"].shape, one["exp_avg_sq"].shape) for name, one in states.items()}
    wrong = {name: found for name, found in moments.items() if found != (shapes[name], shapes[name])}
    assert not wrong, f"moments of other shapes than their parameters: {wrong}"
    grouped = [name for group in state["optimizer"]["param_groups"] for name in group["params"]]
    assert sorted(grouped) == sorted(shapes), f"the groups have {grouped}"


def full_state(run: Run) -> dict[str, torch.Tensor]:
    """All tensors of a run's checkpoint in full, on the CPU, by name (collective)."""
    state = run.adapter.checkpoint()
    named = dict(state["model"])
    for name, values in state["optimizer"]["state"].items():
        named |= {f"{key} of {name}": value for key, value in values.items() if isinstance(value, torch.Tensor)}
    # Sorted: to gather a DTensor is a collective.
    return {name: full_of(named[name]).detach().cpu() for name in sorted(named)}


def rates(run: Run) -> list[float]:
    """The learning rate of each group of the run's optimizer."""
    assert run.adapter.optimizer is not None
    return [float(group["lr"]) for group in run.adapter.optimizer.param_groups]


def set_rates(run: Run, wanted: list[float]) -> None:
    """Set the learning rate of each group."""
    assert run.adapter.optimizer is not None
    for group, rate in zip(run.adapter.optimizer.param_groups, wanted, strict=True):
        group["lr"] = rate


def check_rates(run: Run, expected: list[float]) -> None:
    """The learning rates must be the saved ones."""
    assert rates(run) == expected, f"learning rates {rates(run)} after loading instead of {expected}"


@torch.no_grad()
def spoil(run: Run) -> None:
    """Overwrite all parameters and tensors of optimizer state in place, so that a load must restore every one."""
    for parameter in run.adapter.module.parameters():
        parameter.fill_(0.125)
    assert run.adapter.optimizer is not None
    for state in run.adapter.optimizer.state.values():
        for value in state.values():
            if isinstance(value, torch.Tensor):
                value.fill_(7.0)
