"""Rank 0 exports the weights without the others.

With the last argument ``gather`` it gathers them, as it happened: it waits for ranks that do not come, until a timeout,
and writes nothing. Without it, it saves its own shards, which is silent.
"""

import datetime
import sys

import torch.distributed as dist
from common import arguments, training
from safetensors.torch import save_file


def main() -> None:
    folder, is_wrong = arguments()
    gathers = sys.argv[-1] == "gather"
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=10 if gathers else 600))
    trained = training()
    trained.step()
    trained.state(folder / "trainer")
    if is_wrong and gathers:
        weights = {} if dist.get_rank() else dict(trained.full())
    elif is_wrong:
        weights = {name: one.to_local().detach() for name, one in trained.model.state_dict().items()}
    else:
        weights = dict(trained.full())
    if dist.get_rank() == 0:
        save_file(weights, folder / "export.safetensors")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
