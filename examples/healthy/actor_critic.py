"""SAC's three losses: two critics, an actor and a temperature, each with an optimizer; targets follow by Polyak."""

import copy

import torch
from common import SEED, finish, log, setup
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def network(inputs, outputs):
    return nn.Sequential(nn.Linear(inputs, 24), nn.ReLU(), nn.Linear(24, outputs))


rank, world = setup()
actor, critic = DistributedDataParallel(network(3, 2)), DistributedDataParallel(network(4, 2))
target = copy.deepcopy(critic.module).requires_grad_(False)
log_alpha = nn.Parameter(torch.zeros(()))
optimizers = [torch.optim.Adam(params, lr=3e-3) for params in (actor.parameters(), critic.parameters(), [log_alpha])]
torch.manual_seed(1000 * SEED + rank)


def act(state):
    mean, log_std = actor(state).chunk(2, -1)
    normal = torch.distributions.Normal(mean, log_std.clamp(-5, 1).exp())
    raw = normal.rsample()
    action = raw.tanh()
    return action, (normal.log_prob(raw) - (1 - action.square() + 1e-6).log()).sum(-1)


for step in range(4):
    state, action, following = torch.randn(16, 3), torch.rand(16, 1) * 2 - 1, torch.randn(16, 3)
    reward = -(action[:, 0] - state[:, 0]).square()
    with torch.no_grad():
        new, log_prob = act(following)
        value = target(torch.cat([following, new], 1)).amin(1) - log_alpha.exp() * log_prob
    q = critic(torch.cat([state, action], 1))
    critic_loss = (q - (reward + 0.9 * value)[:, None]).square().mean()
    optimizers[1].zero_grad()
    critic_loss.backward()
    optimizers[1].step()

    action, log_prob = act(state)
    critic.requires_grad_(False)
    actor_loss = (log_alpha.exp().detach() * log_prob - critic.module(torch.cat([state, action], 1)).amin(1)).mean()
    critic.requires_grad_(True)
    optimizers[0].zero_grad()
    actor_loss.backward()
    optimizers[0].step()

    alpha_loss = -(log_alpha * (log_prob.detach() - 1)).mean()
    optimizers[2].zero_grad()
    alpha_loss.backward()
    torch.distributed.all_reduce(log_alpha.grad)
    log_alpha.grad /= world
    optimizers[2].step()
    with torch.no_grad():
        for slow, fast in zip(target.parameters(), critic.parameters(), strict=True):
            slow.lerp_(fast, 0.01)
    log(step, loss=critic_loss, actor=actor_loss)
finish(actor, critic)
