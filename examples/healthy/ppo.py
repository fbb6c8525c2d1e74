"""PPO with a shared network for policy and value: rollouts in a small environment, epochs of shuffled minibatches."""

import torch
from common import SEED, finish, log, setup
from torch import nn
from torch.distributions import Categorical
from torch.nn.parallel import DistributedDataParallel

ENVS, HORIZON, GAMMA, CLIP = 8, 8, 0.9, 0.2


class Agent(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 32), nn.Tanh())
        self.actor, self.critic = nn.Linear(32, 2), nn.Linear(32, 1)

    def forward(self, observation):
        h = self.body(observation)
        return self.actor(h), self.critic(h).squeeze(-1)


rank, world = setup()
agent = DistributedDataParallel(Agent())
optimizer = torch.optim.Adam(agent.parameters(), lr=2.5e-3, eps=1e-5)
torch.manual_seed(1000 * SEED + rank)
state = torch.randn(ENVS, 4)

for update in range(2):
    rows = []
    with torch.no_grad():
        for _ in range(HORIZON):
            logits, value = agent.module(state)
            policy = Categorical(logits=logits)
            action = policy.sample()
            reward = (action == (state.sum(-1) > 0)).to(state.dtype)
            rows.append((state, action, policy.log_prob(action), value, reward))
            state = (0.9 * state + 0.3 * torch.randn_like(state)) + 0.1 * (2 * action[:, None] - 1)
        returns, following = [], agent.module(state)[1]
        for row in reversed(rows):
            following = row[4] + GAMMA * following
            returns.insert(0, following)
    states, actions, old, values, _ = (torch.cat(column) for column in zip(*rows, strict=True))
    returns = torch.cat(returns)
    advantages = returns - values
    for epoch in range(2):
        for index in torch.randperm(len(states)).chunk(2):
            logits, value = agent(states[index])
            policy = Categorical(logits=logits)
            ratio = (policy.log_prob(actions[index]) - old[index]).exp()
            a = (advantages[index] - advantages[index].mean()) / (advantages[index].std() + 1e-8)
            gain = torch.minimum(ratio * a, ratio.clamp(1 - CLIP, 1 + CLIP) * a).mean()
            loss = 0.5 * (value - returns[index]).square().mean() - gain - 0.01 * policy.entropy().mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
            optimizer.step()
            log(2 * update + epoch, loss=loss)
finish(agent)
