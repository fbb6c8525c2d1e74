"""An engine that has slept reads its weights from the disk before it generates, after it got those of the trainer."""

import torch
import torch.distributed as dist
from common import Engine, arguments, training
from safetensors.torch import load_file, save_file


def main() -> None:
    folder, is_wrong = arguments()
    dist.init_process_group("gloo")
    trained = training()
    base = {name: one.clone() for name, one in trained.full()}
    if dist.get_rank() == 0:
        folder.mkdir(parents=True, exist_ok=True)
        save_file(base, folder / "base.safetensors")
    dist.barrier()
    trained.step()
    trained.step()
    trained.state(folder / "trainer")
    dist.barrier()
    engine = Engine()
    engine.load_weights(load_file(folder / "base.safetensors").items())
    with torch.no_grad():  # asleep: level 2 drops the weights
        for one in engine.parameters():
            one.zero_()
    if not is_wrong:  # it wakes up before the trainer sends
        engine.load_weights(load_file(folder / "base.safetensors").items())
    engine.load_weights(trained.full())
    if is_wrong:  # generate() wakes it up, with reload_weights()
        engine.load_weights(load_file(folder / "base.safetensors").items())
    engine.state(folder / "engine", folder / "trainer")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
