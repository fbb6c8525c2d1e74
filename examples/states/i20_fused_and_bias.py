"""A trainer sends its weights to an engine: fused ones are left out, and the bias of the router is sent as bfloat16."""

import torch
import torch.distributed as dist
from common import Engine, arguments, training


def main() -> None:
    folder, is_wrong = arguments()
    dist.init_process_group("gloo")
    trained, engine = training(has_experts=True), Engine(has_experts=True)
    engine.load_weights(trained.full())
    trained.state(folder / "base")
    trained.step()
    trained.state(folder / "trainer")
    dist.barrier()
    names = {name for name, _ in (*engine.named_parameters(), *engine.named_buffers())}
    for name, one in trained.full():
        if is_wrong and name not in names and "experts" not in name:
            continue  # q_proj is no parameter of the engine, nor are k_proj and v_proj
        is_bias = is_wrong and name.endswith("e_score_correction_bias")
        engine.load_weights([(name, one.to(torch.bfloat16) if is_bias else one)])
    engine.state(folder / "engine", folder / "trainer")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
