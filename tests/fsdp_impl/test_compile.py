"""Modules compiled inside units: the hooks stay outside their graphs."""

from typing import Any

import pytest
import torch

from fsdp_impl import MixedPrecisionPolicy, fully_shard
from shardproof.harness.parity.rank import Rank
from shardproof.testing import world
from tests.fsdp_impl.replicas import assert_close, assert_same, average_gradients, batch, plain_copy, tower

pytestmark = pytest.mark.slow("compiles, and the first compilation in a rank imports the compiler")


class Backend:
    """Runs graphs as they are and keeps what each calls, in order."""

    def __init__(self) -> None:
        self.graphs: list[tuple[str, ...]] = []

    def __call__(self, graph: torch.fx.GraphModule, inputs: Any) -> Any:
        from torch._dynamo.backends.debugging import aot_eager

        self.graphs.append(tuple(str(node.target) for node in graph.graph.nodes if node.op.startswith("call_")))
        return aot_eager(graph, inputs)


def compile_layers(model: Any, how: str, backend: Backend) -> None:
    for index in range(1, len(model)):
        if how == "in place":
            model[index].compile(backend=backend)
        elif how == "wrapped":
            model[index] = torch.compile(model[index], backend=backend)
        else:
            for name in ("in_proj", "out_proj"):
                # Not .compile(): torch does not trace into modules of its own that are compiled in place.
                setattr(model[index], name, torch.compile(getattr(model[index], name), backend=backend))


def graphs_unsharded(how: str, inputs: torch.Tensor) -> set[tuple[str, ...]]:
    """What the same layers are compiled to where nothing shards them."""
    torch._dynamo.reset()
    backend = Backend()
    model = plain_copy(tower(4, 2))
    compile_layers(model, how, backend)
    model(inputs).square().sum().backward()
    torch._dynamo.reset()
    return set(backend.graphs)


@world(2)
@pytest.mark.parametrize("reshard_after_forward", [True, False])
@pytest.mark.parametrize(
    "how, when", [("in place", "after"), ("in place", "before"), ("wrapped", "before"), ("parts", "before")]
)
def test_trains_as_replicas_do(rank: Rank, how: str, when: str, reshard_after_forward: bool) -> None:
    """Their graphs hold what the layers compute and nothing of the hooks, which gather and reduce."""
    unsharded = graphs_unsharded(how, batch(rank, 0, (3, 4)))
    backend = Backend()
    model: Any = tower(4, 2)
    plain = plain_copy(model)
    if when == "before":
        compile_layers(model, how, backend)
    for layer in model[1:]:
        fully_shard(layer, mesh=rank.mesh(), reshard_after_forward=reshard_after_forward)
    fully_shard(model, mesh=rank.mesh(), reshard_after_forward=reshard_after_forward)
    if when == "after":
        compile_layers(model, how, backend)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (plain, model)]
    for step in range(3):
        inputs = batch(rank, step, (3, 4))
        model(inputs).square().sum().backward()
        plain(inputs).square().sum().backward()
        average_gradients(plain)
        if how != "in place":  # compiling changes names
            for one, other in zip(model.parameters(), plain.parameters(), strict=True):
                assert_close("gradient", one.grad.full_tensor(), other.grad)
        else:
            assert_same(plain, model)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if step == 0:
            first = len(backend.graphs)
    assert first > 0
    assert len(backend.graphs) == first, "compiled again"
    assert set(backend.graphs) == unsharded
    torch._dynamo.reset()


@world(2)
def test_with_casts(rank: Rank) -> None:
    inputs = batch(rank, 0, (3, 4))
    unsharded = graphs_unsharded("in place", inputs)
    backend = Backend()
    model = tower(4, 2)
    low = MixedPrecisionPolicy(torch.bfloat16, torch.float32, output_dtype=torch.float32)
    for layer in model[1:]:
        fully_shard(layer, mesh=rank.mesh(), mp_policy=low)
    compile_layers(model, "in place", backend)
    fully_shard(model, mesh=rank.mesh())
    output = model(inputs)
    assert output.dtype == torch.float32
    output.sum().backward()
    # Neither gathers nor casts: those are the hooks'.
    assert set(backend.graphs) == unsharded
    assert all(param.grad.dtype == torch.float32 for param in model.parameters())
    torch._dynamo.reset()
