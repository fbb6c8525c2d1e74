"""A tied head has no entry of its own, and the index of the base model, which the writer was given, still names it."""

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from common import arguments, training
from torch.distributed.checkpoint import HuggingFaceStorageWriter


def main() -> None:
    folder, is_wrong = arguments()
    dist.init_process_group("gloo")
    trained = training(is_tied=True)
    trained.step()
    trained.state(folder / "trainer")
    saved = {name: one for name, one in trained.model.state_dict().items() if name != "lm_head.weight"}
    index = dict.fromkeys(saved, 1)
    if is_wrong:
        index["lm_head.weight"] = 2
    writer = HuggingFaceStorageWriter(
        str(folder / "hf"), fqn_to_index_mapping=index, save_distributed=True, enable_consolidation=True
    )
    dcp.save(saved, storage_writer=writer)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.manual_seed(0)
    main()
