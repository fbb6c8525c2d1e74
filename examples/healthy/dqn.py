"""DQN with a replay buffer on each rank and a target network: several updates may read some transitions again."""

import copy

import torch
from common import SEED, finish, log, setup
from torch import nn
from torch.nn.parallel import DistributedDataParallel

rank, world = setup()
network = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 2))
target = copy.deepcopy(network).requires_grad_(False)
model = DistributedDataParallel(network)
optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3)
torch.manual_seed(1000 * SEED + rank)
states, actions = torch.randn(33, 4), torch.randint(2, (32,))
rewards = (actions == (states[:-1, 0] > 0)).to(states.dtype)

for step in range(6):
    batch = torch.randint(32, (16,))
    with torch.no_grad():
        best = model.module(states[batch + 1]).argmax(1, keepdim=True)  # double DQN
        goal = rewards[batch] + 0.9 * target(states[batch + 1]).gather(1, best).squeeze(1)
    q = model(states[batch]).gather(1, actions[batch, None]).squeeze(1)
    loss = nn.functional.smooth_l1_loss(q, goal)
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_value_(model.parameters(), 1.0)
    optimizer.step()
    if step % 2 == 1:
        target.load_state_dict(network.state_dict())
    log(step, loss=loss)
finish(model)
