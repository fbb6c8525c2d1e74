"""transformers' Trainer with a tiny Llama: accumulation, labels of several lengths, an evaluation at the start."""

import os
import tempfile

import torch
from common import SEED, finish, log
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments


class Logging(Trainer):
    def training_step(self, *args, **kwargs):
        loss = super().training_step(*args, **kwargs)
        log(self.state.global_step, loss=loss)
        return loss


def example(i):
    tokens = torch.randint(128, (16,), generator=torch.Generator().manual_seed(1000 * SEED + i))
    labels = tokens.clone()
    labels[: 2 * (i % 4)] = -100
    return {"input_ids": tokens, "labels": labels}


torch.manual_seed(SEED)
config = LlamaConfig(
    hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    vocab_size=128, tie_word_embeddings=True,
)  # fmt: skip
model = LlamaForCausalLM(config)
arguments = TrainingArguments(
    output_dir=tempfile.mkdtemp(), max_steps=4, per_device_train_batch_size=2, gradient_accumulation_steps=2,
    use_cpu=True, seed=SEED, report_to="none", save_strategy="no", disable_tqdm=True, eval_strategy="steps",
    eval_steps=2, eval_on_start=True, warmup_steps=2, learning_rate=1e-3,
)  # fmt: skip
data = [example(i) for i in range(16 * int(os.environ.get("WORLD_SIZE", "1")))]
trainer = Logging(model=model, args=arguments, train_dataset=data, eval_dataset=data[:8])
trainer.train()
finish(model)
