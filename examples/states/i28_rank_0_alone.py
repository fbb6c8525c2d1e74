"""Rank 0 exports the weights. Where it gathers each alone the job hangs, as the others have gone on; so it does not.

Its own shards are what it saves then.
"""

import torch.distributed as dist
from common import arguments, training
from safetensors.torch import save_file


def main() -> None:
    folder, is_wrong = arguments()
    dist.init_process_group("gloo")
    trained = training()
    trained.step()
    trained.state(folder / "trainer")
    if is_wrong:
        weights = {name: one.to_local().detach() for name, one in trained.model.state_dict().items()}
    else:
        weights = dict(trained.full())
    if dist.get_rank() == 0:
        save_file(weights, folder / "export.safetensors")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
