"""torchtitan's trainer on CPUs: its Llama 3 debug model on random tokens, FSDP2 or FSDP2 with tensor parallelism.

torchtitan 0.3.0 is for GPUs and for torch 2.14; no file of it is changed, but what it does not find on a CPU or in
torch 2.13 is given to it below. ``--incident local-norm``: gradients are clipped by the norm of what each rank holds.
"""

# ruff: noqa: E402
import argparse
import dataclasses
import os
import types

import torch
from torch.distributed.fsdp import FSDPModule

# Else torchtitan takes "cuda", and asks the device's module for what torch.cpu does not have.
torch._utils._get_available_device_type = lambda: "cpu"
for name, value in {
    "get_device_name": "CPU", "current_device": 0, "device_count": 1, "memory_stats": {}, "empty_cache": None,
    "reset_peak_memory_stats": None, "get_device_properties": types.SimpleNamespace(total_memory=1 << 30),
}.items():  # fmt: skip
    setattr(torch.cpu, name, lambda *_, value=value: value)
if not hasattr(torch.distributed, "set_timeout"):  # of torch 2.14
    torch.distributed.set_timeout = lambda *_: None

from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
from torchtitan.components.optimizer import default_adamw
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.components.validate import Validator
from torchtitan.config import DebugConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed import utils as titan_utils
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.common.config_utils import decoder_vocab_size
from torchtitan.models.llama3 import model_registry
from torchtitan.tools.logging import init_logger
from torchtitan.trainer import Trainer

import shardproof
from shardproof.trainers.torchtitan import watching


class Tokens(BaseDataLoader):
    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        seed: int = 0

    def __init__(self, config, *, dp_rank, seq_len, local_batch_size, tokenizer, **_):
        self.generator = torch.Generator().manual_seed(1000 * config.seed + dp_rank)
        self.shape, self.vocabulary = (local_batch_size, seq_len + 1), tokenizer.get_vocab_size()

    def __iter__(self):
        while True:
            tokens = torch.randint(self.vocabulary, self.shape, generator=self.generator)
            yield {"input": tokens[:, :-1]}, tokens[:, 1:]

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


class Tokenizer(BaseTokenizer):
    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config, **_):
        super().__init__()

    def encode(self, *args, **kwargs):
        return []

    def decode(self, *args, **kwargs):
        return ""

    def get_vocab_size(self):
        return 2048


def clip_by_local_norm(parameters, max_norm, *args, **kwargs):
    gradients = [parameter.grad.to_local() for parameter in parameters if parameter.grad is not None]
    norm = torch.nn.utils.get_total_norm(gradients)
    for gradient in gradients:
        gradient.mul_((max_norm / norm).clamp(max=1.0))
    return norm


def main(options):
    spec = model_registry("debugmodel")
    for layer in spec.model.layers:  # FlexAttention has no backward on a CPU
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    if options.watch:
        watching(spec, shardproof.doctor() if options.watch == "doctor" else shardproof.record(out="run"))
    loss = CrossEntropyLoss.Config(global_vocab_size=decoder_vocab_size(spec))
    ranks = int(os.environ["WORLD_SIZE"]) // options.tp
    config = Trainer.Config(
        model_spec=spec, loss=ChunkedLossWrapper.Config(loss_fn=loss), tokenizer=Tokenizer.Config(),
        dataloader=Tokens.Config(seed=options.seed), optimizer=default_adamw(lr=8e-4),
        training=TrainingConfig(
            local_batch_size=2, global_batch_size=4 * ranks, seq_len=64, steps=4, disable_cuda_graphs=True,
            mixed_precision_param=options.dtype, max_norm=0.5,
        ),
        # torch 2.13 does not shard the plain parameters of the default, "spmd_types".
        parallelism=ParallelismConfig(tensor_parallel_degree=options.tp, spmd_backend="partial_dtensor"),
        checkpoint=CheckpointManager.Config(enable=False), validator=Validator.Config(enable=False),
        debug=DebugConfig(seed=options.seed),
    )  # fmt: skip
    trainer = config.build()
    for module in trainer.model_parts[0].modules():
        if isinstance(module, FSDPModule):  # the sums with a factor that it asks for are NCCL's
            module.set_force_sum_reduction_for_comms(True)
    step = trainer.forward_backward_step

    def printing(**kwargs):
        loss = step(**kwargs)
        if torch.distributed.get_rank() == 0:
            print("loss", float(loss).hex(), flush=True)
        return loss

    trainer.forward_backward_step = printing
    if options.incident:
        titan_utils.clip_grad_norm_ = clip_by_local_norm
    trainer.train()
    trainer.close()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tp", type=int, default=1, help="tensor parallel degree")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--incident", choices=("local-norm",))
    parser.add_argument("--watch", choices=("doctor", "record"), help="by torchtitan's hook")
    init_logger()
    main(parser.parse_args())
