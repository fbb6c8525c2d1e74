"""The doctor around loops of two ranks, each right as it stands and then with one mistake: no finding, and one."""

import contextlib
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, SequentialSampler, TensorDataset

from shardproof.harness.parity.rank import Rank
from shardproof.harness.training.doctor import Doctor
from shardproof.testing import world

STEPS = 4
SAME_DATA = "read the same data in the step"


class Net(nn.Module):
    """Its root has parameters of its own, which no inner unit has."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.scale = nn.Linear(8, 16), nn.Parameter(torch.ones(16))
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(2))
        self.down = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.up(x) * self.scale
        for block in self.blocks:
            x = x + block(x)
        return self.down(x)

    def generate(self, x: torch.Tensor) -> torch.Tensor:
        return self.forward(x).argmax(-1)


def sharded(**options) -> nn.Module:
    torch.manual_seed(0)
    model = Net()
    for block in model.blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def batch(rank: Rank, step: int, microbatch: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    made = torch.Generator().manual_seed(100 * step + 10 * rank.index + microbatch)
    return torch.randn(4, 8, generator=made), torch.randint(4, (4,), generator=made)


def train(rank: Rank, model, optimizer, *, before=lambda step: None, microbatches: int = 1) -> None:
    """Train for some steps; ``before`` is called before each."""
    for step in range(STEPS):
        before(step)
        for microbatch in range(microbatches):
            inputs, labels = batch(rank, step, microbatch)
            (F.cross_entropy(model(inputs), labels) / microbatches).backward()
        optimizer.step()
        optimizer.zero_grad()


# What a loop does before its first step, and between steps, that gathers parameters or reads them.


def validate(rank: Rank, model) -> None:
    model.eval()
    with torch.no_grad():
        model(batch(rank, 99)[0])
    model.train()


def roll_out(rank: Rank, model) -> None:
    register_fsdp_forward_method(model, "generate")
    with torch.no_grad():
        for step in (7, 8):
            model.generate(batch(rank, step)[0])


def unshard(rank: Rank, model) -> None:
    for module in model.modules():
        if hasattr(module, "unshard"):
            module.unshard()


def save(rank: Rank, model) -> None:
    validate(rank, model)
    get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    for parameter in model.parameters():
        parameter.full_tensor()


READS = {one.__name__: one for one in (validate, roll_out, unshard, save)}


def gathered_before(read: Callable[[Rank, nn.Module], None], **options):
    """Parameters are gathered when watching begins; then no gradient of the last unit is reduced any more."""

    def loop(rank: Rank, is_wrong: bool) -> None:
        model = sharded(**options)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        read(rank, model)
        model.set_requires_gradient_sync(not is_wrong)
        train(rank, model, optimizer, before=lambda step: read(rank, model))

    return loop


def sum_missing_after_a_validation(rank: Rank, is_wrong: bool) -> None:
    """One parameter is no unit's, and its gradients are summed by hand, until the first validation."""
    torch.manual_seed(0)
    model = Net()
    fully_shard(model, ignored_params={model.scale})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    validate(rank, model)
    for step in range(STEPS):
        inputs, labels = batch(rank, step)
        F.cross_entropy(model(inputs), labels).backward()
        if not is_wrong:
            torch.distributed.all_reduce(model.scale.grad)
            model.scale.grad /= 2
        optimizer.step()
        optimizer.zero_grad()
        validate(rank, model)


def never_resharded(reduces: bool, **options):
    """Units stay gathered between microbatches; and over the step, or nothing is reduced, or an eager reshard()."""

    def loop(rank: Rank, is_wrong: bool) -> None:
        model = sharded(reshard_after_forward=False, **options)
        model.set_reshard_after_backward(False)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

        def before(step: int) -> None:
            model.set_requires_gradient_sync(reduces or not is_wrong)
            for module in model.modules() if not (is_wrong and reduces) else ():
                if hasattr(module, "reshard"):
                    module.reshard()

        train(rank, model, optimizer, before=before, microbatches=2)

    return loop


def steps_in_backward(rank: Rank, is_wrong: bool) -> None:
    """An optimizer for each parameter steps in backward: the root is gathered by then; the twin reduces nothing."""
    model = sharded()
    optimizers = {one: torch.optim.AdamW([one], lr=1e-2) for one in model.parameters()}
    model.set_reshard_after_backward(not is_wrong)

    def step(parameter: nn.Parameter) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for one in model.parameters():
        one.register_post_accumulate_grad_hook(step)
    for number in range(STEPS):
        inputs, labels = batch(rank, number)
        F.cross_entropy(model(inputs), labels).backward()


def optimizer_of_gathered(rank: Rank, is_wrong: bool) -> None:
    model = sharded()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    validate(rank, model)
    if is_wrong:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    train(rank, model, optimizer)


# Meshes whose dimensions have no name, or one that says nothing.


def tensor_parallel(layout, names=None):
    """Both ranks must read the same, or each a part where the plan divides inputs; one seeds by its rank."""

    def loop(rank: Rank, is_wrong: bool) -> None:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=names)
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
        inner = ColwiseParallel(input_layouts=layout)
        parallelize_module(model, mesh, {"0": inner, "2": RowwiseParallel(output_layouts=layout)})
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for step in range(STEPS):
            made = torch.Generator().manual_seed(step + 100 * rank.index * (is_wrong or layout == Shard(0)))
            model(torch.randn(4, 8, generator=made)).square().sum().backward()
            if is_wrong and layout == Shard(0):
                nn.utils.clip_grads_with_norm_(model.parameters(), 0.1, torch.tensor(1.0 + rank.index))
            optimizer.step()
            optimizer.zero_grad()

    return loop


class Rows(nn.Module):
    """A layer whose rows user code shards over a mesh, and gathers in forward: no unit, and no parallel plan."""

    def __init__(self, mesh) -> None:
        super().__init__()
        self.weight = nn.Parameter(distribute_tensor(torch.randn(4, 8), mesh, [Shard(0)]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial("avg")]).T


def line(name: str):
    return init_device_mesh("cpu", (2,), mesh_dim_names=(name,))


def over_data(make):
    """Each rank must read data of its own; both read the same."""

    def loop(rank: Rank, is_wrong: bool) -> None:
        torch.manual_seed(0)
        model = make()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for step in range(STEPS):
            made = torch.Generator().manual_seed(step + 100 * rank.index * (not is_wrong))
            model(torch.randn(4, 8, generator=made)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    return loop


# What keeps gradients from their reduction, or ranks from data of their own: the words name what was seen.


def switched(rank: Rank, is_wrong: bool) -> None:
    """The first backward of a step is synchronized, and not the last."""
    model = sharded()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(STEPS):
        for microbatch in range(2):
            model.set_requires_gradient_sync(microbatch == (0 if is_wrong else 1))
            inputs, labels = batch(rank, step, microbatch)
            F.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
        optimizer.zero_grad()


class Stream(IterableDataset):
    """Samples one after another, each n-th of them."""

    def __init__(self, first: int, every: int) -> None:
        self.samples = torch.randn(32, 8, generator=torch.Generator().manual_seed(3))[first::every]

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(self.samples)


def streamed(rank: Rank, is_wrong: bool) -> None:
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(8, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = DataLoader(Stream(0, 1) if is_wrong else Stream(rank.index, 2), batch_size=4)
    for inputs in loader:
        model(inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def replicated(*, compiled: bool = False, loader: bool = False, zero: bool = False, dropout: float = 0.0):
    """DistributedDataParallel with one mistake, or none."""

    def loop(rank: Rank, is_wrong: bool) -> None:
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(8, 16), nn.Dropout(dropout), nn.Tanh(), nn.Linear(16, 4), nn.Linear(4, 4))
        module[4].requires_grad_(False)
        model = DistributedDataParallel(module)
        optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=1e-2)
        called = torch.compile(model, backend="eager") if compiled else model
        data = TensorDataset(torch.randn(32, 8, generator=torch.Generator().manual_seed(3)))
        sampler = SequentialSampler(data) if is_wrong and loader else DistributedSampler(data, 2, rank.index)
        data_loader = DataLoader(data, batch_size=2, sampler=sampler)
        batches = list(data_loader)
        for step in range(STEPS):
            for (inputs,) in batches[2 * step : 2 * step + 2]:
                if is_wrong and zero:
                    optimizer.zero_grad()
                with model.no_sync() if is_wrong and not (loader or zero) else contextlib.nullcontext():
                    called(inputs).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    return loop


def group_of_one(rank: Rank, is_wrong: bool) -> None:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    model = sharded(mesh=mesh["shard"] if is_wrong else mesh)
    train(rank, model, torch.optim.AdamW(model.parameters(), lr=1e-2))


def not_wrapped(rank: Rank, is_wrong: bool) -> None:
    torch.manual_seed(0)
    wrapped = DistributedDataParallel(Net())
    train(rank, wrapped.module if is_wrong else wrapped, torch.optim.AdamW(wrapped.parameters(), lr=1e-2))


APART = "ranks 0-1 ({0}) are parts of one model and read different microbatches"

OUTDATED = "forwards compute with outdated parameters [D14]"

#: By name the loop, and what is said of it with its mistake.
LOOPS: dict[str, tuple[Callable[[Rank, bool], None], str]] = {
    **{
        f"{name}-before-the-first-step": (gathered_before(read), "gradients are not reduced [D11, S2]")
        for name, read in READS.items()
    },
    "validate-without-resharding": (
        gathered_before(validate, reshard_after_forward=False), "gradients are not reduced [D11, S2]",
    ),
    "sum-missing-after-a-validation": (
        sum_missing_after_a_validation, "each gradient of every rank is this rank's own gradient (c = 1.0000",
    ),
    "never-resharded": (never_resharded(False), "gradients are not reduced [D11, S2]"),
    "resharded-before-the-step": (never_resharded(True), OUTDATED),
    "resharded-before-the-step-in-bfloat16": (
        never_resharded(True, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16)), OUTDATED,
    ),
    "steps-in-backward": (steps_in_backward, OUTDATED),
    "tensor-parallel-without-names": (tensor_parallel(None), APART.format("mesh")),
    "tensor-parallel-of-any-name": (tensor_parallel(None, ("x",)), APART.format("x")),
    "sequence-parallel-without-names": (
        tensor_parallel(Shard(0)), "they are 0.5, 1 x those of rank 0: each rank scales them by itself",
    ),
    # Units of FSDP2 are of data-parallel ranks whatever their mesh is called; other DTensors are, if it is called so.
    **{f"fsdp2-on-{one}": (over_data(lambda one=one: sharded(mesh=line(one))), SAME_DATA) for one in ("world", "data")},
    "rows-by-hand-on-data": (over_data(lambda: Rows(line("data"))), SAME_DATA),
    "first-synchronized": (
        switched, "seen: the last backward of the step ran under set_requires_gradient_sync(False), and one before it "
        "did not: the last one must reduce, and only that",
    ),
    "never-synchronized": (replicated(), "seen: each backward of the step ran under no_sync(); the last one must not"),
    "frozen": (replicated(), "(4 of 4 parameters): nothing was reduced over dp (ranks 0-1)"),
    "zeroed-between": (replicated(zero=True), "seen: zero_grad() was called once between the backward passes"),
    "sampler-without-ranks": (
        replicated(loader=True), "seen: SequentialSampler on each rank, which knows no rank: use DistributedSampler",
    ),
    "stream-without-ranks": (
        streamed, "seen: the IterableDataset Stream on each rank, without a sampler: divide the data by rank in "
        "__iter__(), and the part of a rank by worker (get_worker_info())",
    ),
    "group-of-one-rank": (
        group_of_one, "seen: the group 'shard' over which gradients are reduced has one rank: give the wrapper the "
        "mesh of all data-parallel ranks",
    ),
    "not-wrapped": (
        not_wrapped, "seen: DistributedDataParallel around Net, which the loop does not call: call it, and not its",
    ),
    "optimizer-of-gathered-parameters": (
        optimizer_of_gathered, "5 of the 9 parameters of AdamW are not the model's but gathered ones, which a unit of "
        "FSDP2 has for a time: make the optimizer right after fully_shard(), before any forward or unshard()",
    ),
}  # fmt: skip


@contextlib.contextmanager
def watched() -> Iterator[Doctor]:
    """A doctor that attaches by itself, as under the command."""
    with Doctor(on_finding="collect") as watching:
        yield watching


@pytest.mark.sampled
@world(2)
@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_has_no_finding_and_its_twin_has(rank: Rank, name: str) -> None:
    loop, said = LOOPS[name]
    with watched() as watching:
        loop(rank, False)
    assert [one.render() for one in watching.findings if not one.is_note] == []
    assert "no finding" in watching.summary()
    with watched() as watching:
        loop(rank, True)
    found = "\n".join(one.render() for one in watching.findings if not one.is_note)
    assert said in found, found


@pytest.mark.sampled
@world(2)
@pytest.mark.parametrize("is_anew", [False, True])
def test_a_loader_that_begins_anew_in_each_step_is_noted(rank: Rank, is_anew: bool) -> None:
    model = DistributedDataParallel(nn.Linear(8, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data = TensorDataset(torch.randn(32, 8, generator=torch.Generator().manual_seed(3)))
    loader = DataLoader(data, batch_size=2, sampler=DistributedSampler(data, 2, rank.index))
    batches = iter(loader)
    with watched() as watching:
        for _ in range(STEPS):
            (inputs,) = next(iter(loader) if is_anew else batches)
            model(inputs).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    found = [(one.title, one.lines[0]) for one in watching.findings]
    said = ("each step reads the same data", "ranks 0-1 read the same microbatches in the steps 0-2")
    assert found == [said] * is_anew


#: Summaries of healthy loops: what a line says of what was seen, and of what was not judged.
SUMMED = {
    "compiled": (
        replicated(compiled=True),
        "at the optimizer's step; not seen before it",
        "inside of a compiled module",
    ),
    "frozen": (replicated(), "every gradient is the mean over 2 ranks", ""),
}


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleDict({"embed": nn.Embedding(8, 8), "layer": nn.Linear(8, 8)})
        self.head = nn.Linear(8, 8, bias=False)
        self.inner["embed"].weight = self.head.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.inner["layer"](self.inner["embed"](tokens)))


def tied(rank: Rank, is_wrong: bool) -> None:
    torch.manual_seed(0)
    model = DistributedDataParallel(Tied())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(STEPS):
        tokens = torch.randint(8, (2, 4), generator=torch.Generator().manual_seed(10 * step + rank.index))
        model(tokens).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


SUMMED["tied"] = (tied, "every gradient is the mean over 2 ranks", "3 parameters")


def all_zero(rank: Rank, is_wrong: bool) -> None:
    model = DistributedDataParallel(nn.Linear(8, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(STEPS):
        (0 * model(batch(rank, step)[0]).sum()).backward()
        optimizer.step()


SUMMED["zero"] = (all_zero, "0 0 0, recomputed from all gradients at the optimizer's step: all gradients are zero", "")


@pytest.mark.sampled
@world(2)
@pytest.mark.parametrize("name", SUMMED)
def test_a_summary_names_what_was_not_judged(rank: Rank, name: str) -> None:
    loop, *said = SUMMED[name]
    with watched() as watching:
        loop(rank, False)
    text = watching.summary()
    assert "user code" not in text and all(one in text for one in said), text
