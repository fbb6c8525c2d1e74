"""Trainings that are saved and resumed, with a mistake or right, on the ranks of torchrun.

    torchrun --nproc-per-node 2 -m tests.harness.resumed_trainings FOLDER PARTS CASE ...

PARTS is "run", "again" or "both". Each case is a training of :data:`CASES`; rank 0 prints, for each resumed one, a line
of JSON: the case, the stages that were lost, the text, and what the run file has of it.
"""

import dataclasses
import importlib
import json
import pathlib
import random
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from shardproof.harness.judging.finding import Divergence
from shardproof.harness.training.request import Request
from shardproof.harness.training.resumption import resumption

HERE = "tests.harness.resumed_trainings"
AFTER, STEPS, WORDS, DIM = 3, 1, 16, 8

#: The case that trains; the ranks train one after the other.
HOW = [""]


class Net(nn.Module):
    def __init__(self, p):
        super().__init__()
        self.embed, self.hidden, self.head = nn.Embedding(WORDS, DIM), nn.Linear(DIM, DIM), nn.Linear(DIM, WORDS)
        self.drop = nn.Dropout(p)
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("last", torch.zeros(()))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)

    def forward(self, tokens):
        if self.training:
            self.seen += 1
            self.scratch += 1
        if HOW[0] == "a buffer that each forward writes":
            self.last.copy_(tokens.sum())
        return self.head(self.drop(torch.tanh(self.hidden(self.embed(tokens)))))


def model():
    made = Net(0.2)
    made.embed.weight.requires_grad_(HOW[0] != "a frozen parameter is not saved")
    return made


def steady():
    return Net(0.0)


def parallelize(model, mesh):
    made = fully_shard(model, mesh=mesh)
    torch.manual_seed(1000 + dist.get_rank())  # what follows draws others on each rank
    return made


def optimizer(model):
    trained = [one for one in model.parameters() if one.requires_grad]
    matrices, biases = ([one for one in trained if (one.ndim > 1) is wide] for wide in (True, False))
    if "momentum" in HOW[0]:
        return torch.optim.SGD(trained, lr=0.05, momentum=0.9)
    return torch.optim.AdamW([{"params": matrices}, {"params": biases, "weight_decay": 0.0}], lr=1e-2)


class Loader:
    def __init__(self):
        self.read = 0

    def __iter__(self):
        return self

    def __next__(self):
        self.read += 1
        return batch(self.read, dist.get_rank())


def batch(number, rank):
    tokens = torch.randint(WORDS, (4, 6), generator=torch.Generator().manual_seed(100 * rank + number))
    return tokens[:, :-1], tokens[:, 1:]


class Average:
    def __init__(self, model):
        self.values = {name: one.detach().clone() for name, one in model.named_parameters()}
        self.began = time.time()

    def update(self, model):
        for name, one in model.named_parameters():
            self.values[name].lerp_(one.detach(), 0.1)


def objects(model, optimizer):
    return {"scheduler": schedule(optimizer), "loader": Loader(), "average": Average(model)}


def schedule(optimizer, **options):
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / 10, **options)


def few(model, optimizer):
    return {"scheduler": schedule(optimizer)}


def data(step, rank, loader):
    return [next(loader)]


def by_step(step, rank):
    return [
        batch(0 if "constant" in HOW[0] else step, 2 * rank),
        batch(0 if "constant" in HOW[0] else step, 2 * rank + 1),
    ]


def step(model, optimizer, microbatches, mesh, scheduler, average=None):
    train(model, optimizer, microbatches)
    scheduler.step()
    if average is not None:
        average.update(model)
    if HOW[0] == "the shard of one rank is stale" and scheduler.last_epoch == 1:
        model.early = {name: local(one).clone() for name, one in model.named_parameters()}


def seeded(model, optimizer, microbatches, mesh):
    torch.manual_seed(7 + model.seen.int().item())
    train(model, optimizer, microbatches)


def by_hand(model, optimizer, microbatches, mesh):
    for group in optimizer.param_groups:
        group["lr"] = 0.01 / (1 + model.seen.item())
    random.random()  # as of a loop that logs now and then
    train(model, optimizer, microbatches)


def train(model, optimizer, microbatches):
    model.count = getattr(model, "count", 0) + (HOW[0] == "a weight of the loss is in an attribute")
    for tokens, labels in microbatches:
        loss = F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten()) / len(microbatches)
        (loss * (1 + model.count)).backward()
    optimizer.step()
    optimizer.zero_grad()


def local(tensor):
    return tensor.detach().to_local() if isinstance(tensor, DTensor) else tensor.detach()


def save(model, optimizer, folder, step, objects):
    """Write the shards of each rank to its file, and all else."""
    how, rank = HOW[0], dist.get_rank()
    saved = {name: local(one).clone() for name, one in model.named_parameters()}
    states = {name: {key: local(value).clone() for key, value in optimizer.state[one].items()}
              for name, one in model.named_parameters() if one in optimizer.state}  # fmt: skip
    if how == "moments in bfloat16":
        for state in states.values():
            state |= {key: value.bfloat16() if value.ndim else value for key, value in state.items()}
    if how == "the shard of one rank is stale" and rank == 1:
        saved = model.early
    groups = [{key: value for key, value in one.items() if key != "params"} for one in optimizer.param_groups]
    scheduler, loader, average = (objects.get(name) for name in ("scheduler", "loader", "average"))
    own = {
        "model": saved, "seen": model.seen.clone(), "states": states, "groups": groups, "random": torch.get_rng_state(),
        "scheduler": scheduler and scheduler.state_dict(), "read": loader and loader.read, "step": step,
        "average": average and {name: local(one).clone() for name, one in average.values.items()},
    }  # fmt: skip
    if how == "save() leaves the average in the model":
        with torch.no_grad():
            for name, one in model.named_parameters():
                one.copy_(average.values[name])
    if how in ("a save that is not staged", "a save that is staged"):
        if how == "a save that is not staged":
            own["model"] = {name: local(one) for name, one in model.named_parameters()}
        return Later(own, f"{folder}/{rank}.pt")
    torch.save(own, f"{folder}/{rank}.pt")
    return None


LACKING = [("a parameter is not loaded", "head.bias"), ("a frozen parameter is not saved", "embed.weight")]


class Later:
    def __init__(self, own, path):
        self.own, self.path = own, path

    def result(self):
        torch.save(self.own, self.path)


def load(model, optimizer, folder, objects):
    how, rank = HOW[0], dist.get_rank()
    own = torch.load(f"{folder}/{rank}.pt")
    scheduler, loader, average = (objects.get(name) for name in ("scheduler", "loader", "average"))
    with torch.no_grad():
        for name, one in model.named_parameters():
            if (how, name) not in (
                ("a parameter is not loaded", "head.bias"),
                ("a frozen parameter is not saved", "embed.weight"),
            ):
                local(one).copy_(own["model"][name])
    if how != "a buffer is not loaded":
        model.seen.copy_(own["seen"])
    restore(optimizer, own, dict(model.named_parameters()))
    anew = {}
    if how == "a scheduler made for the step":
        anew = {"scheduler": schedule(optimizer, last_epoch=own["step"] - 1), "step": own["step"]}
        for group, its in zip(optimizer.param_groups, own["groups"], strict=True):
            group["lr"] = its["lr"]
    elif scheduler is not None and how != "the scheduler begins anew":
        scheduler.load_state_dict(own["scheduler"])
    loaded(loader, average, own)
    if how == "another seed for dropout":
        torch.manual_seed(99)
    elif how == "the random numbers of another rank" and rank == 1:
        torch.set_rng_state(torch.load(f"{folder}/0.pt")["random"])
    elif how not in ("nothing draws random numbers", "step() seeds"):
        torch.set_rng_state(own["random"])
    return anew or own["step"] + {"a step too far": 1, "a step too early": -1}.get(how, 0)


def loaded(loader, average, own):
    if loader is not None and HOW[0] != "the loader begins anew":
        if HOW[0] == "a loader that reads up to its place":
            for _ in range(own["read"]):
                next(loader)
        loader.read = own["read"]
    if average is not None and HOW[0] != "the average is forgotten":
        for name, value in own["average"].items():
            local(average.values[name]).copy_(value)


def restore(optimizer, own, parameters):
    """Load states and settings, as ``how`` the training does it."""
    how = HOW[0]
    for name, state in own["states"].items():
        one = parameters[name]
        if how == "the moments of a group are lost" and one.ndim == 1:
            continue
        made = {key: DTensor.from_local(value.float(), one.device_mesh, one.placements) if value.ndim else value
                for key, value in state.items()}  # fmt: skip
        if how == "counters begin anew":
            made["step"] = torch.zeros(())
        optimizer.state[one] = made
    if how != "rates that each step sets":
        for group, its in zip(optimizer.param_groups, own["groups"], strict=True):
            group.update(its)
    if how == "the scheduler begins anew":
        for group in optimizer.param_groups:
            group["lr"] = group["initial_lr"]
    if how == "weight decay is lost":
        optimizer.param_groups[0]["weight_decay"] = 0.0


FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)


def save_full(model, optimizer, scheduler, folder):
    parameters, states = get_state_dict(model, optimizer, options=FULL)
    if dist.get_rank() == 0:
        torch.save([parameters, states, scheduler.state_dict()], f"{folder}/full.pt")


def load_full(model, optimizer, scheduler, folder):
    parameters, states, schedule = torch.load(f"{folder}/full.pt")
    if HOW[0] == "moments of another mesh are halved":
        for state in states["state"].values():
            state["exp_avg"] *= 0.5
    set_state_dict(model, optimizer, model_state_dict=parameters, optim_state_dict=states, options=FULL)
    scheduler.load_state_dict(schedule)


EVERYTHING = {name: name for name in ("model", "parallelize", "optimizer", "objects", "data", "step", "save", "load")}
BY_STEP = EVERYTHING | {"data": "by_step", "objects": "few"}
PLAIN = BY_STEP | {"objects": "", "model": "steady"}
FULLY = BY_STEP | {"model": "steady", "save": "save_full", "load": "load_full"}
DEFAULT = {"save": "", "load": ""}
#: By case the functions, and the stage that is named first; none of a right one.
MISTAKES = {
    "the moments of a group are lost": (EVERYTHING, "moments"),
    "the scheduler begins anew": (EVERYTHING, "learning rates"),
    "the random numbers of another rank": (EVERYTHING, "random numbers"),
    "the loader begins anew": (EVERYTHING, "data position"),
    "moments in bfloat16": (EVERYTHING, "moments"),
    "the shard of one rank is stale": (EVERYTHING, "parameters"),
    "a parameter is not loaded": (EVERYTHING, "parameters"),
    "a step too far": (BY_STEP, "data position"),
    "another seed for dropout": (EVERYTHING, "random numbers"),
    "the average is forgotten": (EVERYTHING, "average"),
}
SIBLINGS = {
    "a step too early": (BY_STEP, "data position"),
    "counters begin anew": (EVERYTHING, "step counters"),
    "a buffer is not loaded": (EVERYTHING, "buffers"),
    "weight decay is lost": (EVERYTHING, "settings"),
    "save() leaves the average in the model": (EVERYTHING, "save()"),
    "a save that is not staged": (EVERYTHING, "parameters"),
    "a weight of the loss is in an attribute": (EVERYTHING, "steps, gradient"),
}
HEALTHY = {
    "everything is restored": EVERYTHING,
    "nothing draws random numbers": EVERYTHING | {"model": "steady"},
    "step() seeds": PLAIN | {"model": "model", "step": "seeded"},
    "rates that each step sets": PLAIN | {"step": "by_hand"},
    "a scheduler made for the step": EVERYTHING,
    "a frozen parameter is not saved": EVERYTHING,
    "a loader that reads up to its place": EVERYTHING,
    "by torch.distributed.checkpoint": BY_STEP | DEFAULT,
    "momentum": EVERYTHING,
    "a save that is staged": EVERYTHING,
    "constant data": BY_STEP,
    "a buffer that each forward writes": EVERYTHING,
}
OTHER_MESH = {
    "full state dicts": (FULLY, ""),
    "torch.distributed.checkpoint": (BY_STEP | DEFAULT | {"model": "steady"}, ""),
    "moments of another mesh are halved": (FULLY, "moments"),
}
CASES = {
    **{name: functions for name, (functions, _) in (MISTAKES | SIBLINGS | OTHER_MESH).items()}, **HEALTHY,
}  # fmt: skip


def main(folder, parts, *cases):
    """Train both parts of each case, or one of them."""
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))

    def exchange(value):
        every = [None] * world
        dist.all_gather_object(every, value)
        return every

    for number, case in enumerate(cases):
        HOW[0] = case
        shared = pathlib.Path(folder) / str(number)
        shared.mkdir(parents=True, exist_ok=True)
        names = {option: f"{HERE}:{name}" if name else "" for option, name in CASES[case].items()}
        request = Request(mesh=(("dp", 2),), data_dims=("dp",), steps=STEPS, save_and_resume=AFTER, shared=str(shared),
                          **names)  # fmt: skip
        again = dataclasses.replace(request, resume_mesh=f"dp={world}").resumed()
        noted = []
        for part in {"run": [request], "again": [again], "both": [request, again]}[parts]:
            try:
                resumption(part, rank=rank, mesh=mesh, device=torch.device("cpu"), exchange=exchange, note=noted.append)
                lost, text = "", ""
            except Divergence as error:
                lost, text = error.location.name or "refused", str(error)
        if rank == 0:
            print(json.dumps([case, lost, text, noted[-1] if noted else None]), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    # A request names the functions of the module, and not those of the script.
    importlib.import_module(HERE).main(*sys.argv[1:])
