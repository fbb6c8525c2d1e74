"""GRPO under FSDP2: rollouts without gradients, a frozen sharded reference, two updates for each batch of rollouts."""

import copy

import torch
import torch.distributed as dist
from common import GPT, LENGTH, SEED, VOCABULARY, finish, log, setup
from torch.distributed.fsdp import fully_shard

GROUP, UPDATES, CLIP, BETA = 4, 2, 0.2, 0.02


def shard(model):
    for block in model.blocks:
        fully_shard(block)
    return fully_shard(model)


@torch.no_grad()
def rollout(model, prompt, generator):
    tokens = prompt
    while tokens.shape[1] < LENGTH:
        probabilities = model(tokens)[:, -1].softmax(-1)
        tokens = torch.cat([tokens, torch.multinomial(probabilities, 1, generator=generator)], 1)
    return tokens


def log_probabilities(model, tokens):
    return model(tokens[:, :-1]).log_softmax(-1).gather(-1, tokens[:, 1:, None]).squeeze(-1)[:, 3:]


rank, world = setup()
network = GPT()
reference = shard(copy.deepcopy(network).requires_grad_(False))
policy = shard(network)
optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3)
generator = torch.Generator().manual_seed(1000 * SEED + rank)

for step in range(3):
    prompts = torch.randint(VOCABULARY, (2, 4), generator=generator).repeat_interleave(GROUP, 0)
    tokens = rollout(policy, prompts, generator)
    reward = (tokens[:, 1:] > tokens[:, :-1]).double().mean(1).view(-1, GROUP)
    advantage = ((reward - reward.mean(1, keepdim=True)) / (reward.std(1, keepdim=True) + 1e-4)).view(-1, 1)
    with torch.no_grad():
        old, base = log_probabilities(policy, tokens), log_probabilities(reference, tokens)
    for _ in range(UPDATES):
        new = log_probabilities(policy, tokens)
        ratio, kl = (new - old).exp(), (base - new).exp() - (base - new) - 1
        gain = torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage)
        loss = (BETA * kl - gain).mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        log(step, loss=loss, reward=reward.mean())
dist.barrier()
finish(policy)
