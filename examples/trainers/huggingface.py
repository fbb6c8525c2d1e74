"""transformers' Trainer on CPUs: a tiny Llama on random tokens, DDP by accelerate.

``--incident same-data``: a loader of one's own that is not prepared, so that each rank reads all of it (G11).
"""

import argparse
import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import shardproof
from shardproof.trainers.transformers import Watching


class Printing(Trainer):
    def training_step(self, *args, **kwargs):
        loss = super().training_step(*args, **kwargs)
        if self.is_world_process_zero():
            print("loss", float(loss).hex(), flush=True)
        return loss


class SameData(Printing):
    def get_train_dataloader(self):
        sampler = torch.utils.data.RandomSampler(self.train_dataset, generator=torch.Generator().manual_seed(0))
        return torch.utils.data.DataLoader(
            self.train_dataset, self.args.per_device_train_batch_size, sampler=sampler, collate_fn=self.data_collator
        )


def sequences(seed):
    generator = torch.Generator().manual_seed(seed)
    for number in range(64):
        tokens = torch.randint(128, (16,), generator=generator)
        labels = tokens.clone()
        labels[: number % 5] = -100  # sequences have other numbers of tokens
        yield {"input_ids": tokens, "labels": labels}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--incident", choices=("same-data",))
    parser.add_argument("--watch", choices=("doctor", "record"), help="by a callback")
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    config = LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=128,
    )  # fmt: skip
    arguments = TrainingArguments(
        output_dir=tempfile.mkdtemp(), max_steps=4, per_device_train_batch_size=2, gradient_accumulation_steps=2,
        use_cpu=True, bf16=options.dtype == "bfloat16", seed=options.seed, report_to="none", save_strategy="no",
        disable_tqdm=True,
    )  # fmt: skip
    kind = SameData if options.incident else Printing
    trainer = kind(model=LlamaForCausalLM(config), args=arguments, train_dataset=list(sequences(options.seed)))
    if options.watch:
        watcher = shardproof.doctor() if options.watch == "doctor" else shardproof.record(out="run")
        trainer.add_callback(Watching(watcher))
    trainer.train()
