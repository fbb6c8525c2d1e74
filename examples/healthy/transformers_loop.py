"""A tiny Llama of transformers in a plain DDP loop, with gradient checkpointing and its own loss by labels."""

import torch
from common import SEED, finish, loader, log, setup, text
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM, get_linear_schedule_with_warmup

rank, world = setup()
config = LlamaConfig(
    hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4,
    vocab_size=64, attention_dropout=0.1,
)  # fmt: skip
network = LlamaForCausalLM(config)
network.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
network.config.use_cache = False
model = DistributedDataParallel(network)
torch.manual_seed(1000 * SEED + rank)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scheduler = get_linear_schedule_with_warmup(optimizer, num_warmup_steps=2, num_training_steps=4)

model.train()
for step, (inputs, _) in enumerate(loader(text())):
    loss = model(input_ids=inputs, labels=inputs).loss
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    scheduler.step()
    log(step, loss=loss)
finish(network)
