"""Weights are sent in chunks, and the end of each reload restores the layers that are not in the chunk."""

from collections.abc import Iterator

import torch
import torch.distributed as dist
from common import Engine, arguments, training


def chunks(weights: list[tuple[str, torch.Tensor]]) -> Iterator[list[tuple[str, torch.Tensor]]]:
    """Weights in chunks of 16."""
    for start in range(0, len(weights), 16):
        yield weights[start : start + 16]


def main() -> None:
    folder, is_wrong = arguments()
    dist.init_process_group("gloo")
    trained, engine = training(has_experts=True), Engine(has_experts=True)
    trained.state(folder / "base")
    weights = list(trained.full())
    engine.load_weights(weights)
    kept = {name: one.clone() for name, one in engine.state_dict().items()}  # by which a reload begins
    trained.step()
    trained.state(folder / "trainer")
    dist.barrier()
    for chunk in chunks(list(trained.full())):
        engine.load_weights(chunk)
        if is_wrong:  # finalize: what was not in the chunk is as it was when the reload began
            of_chunk = {engine.place_of(dict(engine.state_dict()), name)[1] for name, _ in chunk}
            engine.load_state_dict({name: one for name, one in kept.items() if name not in of_chunk}, strict=False)
    engine.state(folder / "engine", folder / "trainer")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
