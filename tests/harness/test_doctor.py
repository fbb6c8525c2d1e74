"""The doctor around real loops: what it refuses, each in one line, and that it leaves nothing behind."""

import contextlib
import copy
import io
import pathlib
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d
from torch.optim import optimizer as optimizers
from torch.utils.checkpoint import checkpoint

from shardproof.__main__ import main
from shardproof.harness.parity.rank import Rank
from shardproof.harness.simulation.world import simulated_world
from shardproof.harness.training.doctor import doctor
from shardproof.harness.worlds import leftovers
from shardproof.runfile import load_run
from shardproof.testing import world
from tests.errors import error_of
from tests.harness import hosts
from tests.harness.inner import python


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def train(model, optimizer, steps=4, seed=0, microbatches=1):
    """Train, and return the losses."""
    made, losses = torch.Generator().manual_seed(seed), []
    for _ in range(steps):
        for _ in range(microbatches):
            loss = model(torch.randn(3, 4, generator=made)).square().mean()
            loss.backward()
            losses.append(loss.item())
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
    return losses


class Traces:
    """What the doctor could leave behind in a process: hooks, other functions of torch, process groups."""

    def __init__(self, model):
        self.owners = [torch.nn.modules.module, optimizers, *model.modules(), *model.parameters()]
        self.patches, self.update, self.before = leftovers.Patches(), torch.amp.GradScaler.update, self.now()

    def now(self):
        names = [{*getattr(owner, "__dict__", ()), "_backward_hooks"} for owner in self.owners]
        hooks = [{name for name in own if name.endswith("_hooks")} for own in names]
        counts = [[len(getattr(one, n, None) or ()) for n in own] for one, own in zip(self.owners, hooks, strict=True)]
        return len(distributed_c10d._world.pg_map), counts

    def assert_some(self):
        assert self.now() != self.before and self.patches.found() and torch.amp.GradScaler.update is not self.update

    def assert_none(self):
        assert (self.now(), self.patches.found()) == (self.before, [])
        assert torch.amp.GradScaler.update is self.update


# One process, which needs no torch.distributed


@pytest.fixture
def model():
    return net()


@pytest.fixture
def traces(model):
    assert not dist.is_initialized()
    made = Traces(model)
    yield made
    made.assert_none()


@pytest.mark.parametrize("steps", [5, 1], ids=["after the last watched step", "after close"])
def test_nothing_is_left(model, traces, steps, capsys):
    optimizer, other = sgd(model), net()
    with doctor(model, optimizer) as watching:
        traces.assert_some()
        losses = train(model, optimizer, steps)
        hooks, patches = traces.now()[1], traces.patches.found()
        if steps == 1:
            watching.close()
            traces.assert_none()
        else:  # between looks steps are counted, and calls of schedulers and state dicts noted
            assert hooks[2:] == traces.before[1][2:] and sum(hooks[1]) == sum(traces.before[1][1]) + 2 and patches
    traces.assert_none()
    assert watching.findings == [] and losses == train(other, sgd(other), steps)
    said = capsys.readouterr().err.splitlines()[0]
    assert said.endswith(" of 1 rank, Sequential, 4 parameters (30 elements), SGD; no finding")


def test_a_copy_of_a_watched_model_is_not_watched(model, traces):
    """As an EMA makes one, and ``torch.save(model)``: the doctor has process groups, which cannot be copied."""
    optimizer = sgd(model)
    with doctor(model, optimizer, steps=range(4)) as watching:
        train(model, optimizer, steps=1)
        average = copy.deepcopy(model)
        assert torch.equal(average(torch.ones(1, 4)), model(torch.ones(1, 4)))
        torch.save(model, io.BytesIO())
        train(model, optimizer, steps=3)
    assert not watching.findings


def test_an_exception_of_user_code_passes_with_a_note(model, traces):
    mine = KeyError("mine")
    with pytest.raises(KeyError) as caught, doctor(model):
        model(torch.ones(1, 4)).sum().backward()
        raise mine
    assert caught.value is mine and mine.args == ("mine",)
    assert mine.__notes__ == ["shardproof doctor: the step had reached: backward of '0.weight'"]


@pytest.mark.parametrize(
    ("module", "error", "is_named"),
    [
        ("distributed_c10d", "RuntimeError('Timed out waiting 25000ms for send operation')", True),
        ("_functional_collectives", "RuntimeError('Connection closed by peer')", True),
        ("distributed_c10d", "ValueError('timeout')", False),
        ("distributed_c10d", "RuntimeError('Invalid scalar type')", False),
        ("rpc/api", "RuntimeError('Timed out')", False),
    ],
)
def test_a_collective_that_others_did_not_begin_is_named_by_its_line(module, error, is_named):
    found = {}
    file = f"{pathlib.Path(torch.__file__).parent}/distributed/{module}.py"
    exec(compile(f"def gather():\n    raise {error}", file, "exec"), found)

    def export():
        found["gather"]()

    with pytest.raises((RuntimeError, ValueError)) as caught, doctor(nn.Linear(2, 2)):
        export()
    notes = getattr(caught.value, "__notes__", [])
    assert (
        notes
        == [
            f"shardproof doctor: this rank waited in a collective that it began at "
            f"test_doctor.py:{export.__code__.co_firstlineno + 1} in export(): each rank of its group must begin "
            "it, and another one may be elsewhere"
        ]
        * is_named
    )


def test_a_loop_without_steps(model, traces, capsys):
    with doctor(model):
        model(model(torch.ones(1, 4)).repeat(1, 2))
    counts = "2 forwards with gradients, 0 optimizer steps"
    line = f"the loop ended before a step was complete ({counts}): was the wrapped module called?"
    assert capsys.readouterr().err == f"shardproof doctor: {line}\n"


def test_a_loop_that_updates_parameters_itself(model, traces, capsys):
    with doctor(model):
        for _ in range(2):
            model(torch.ones(1, 4)).sum().backward()
            with torch.no_grad():
                for one in model.parameters():
                    one.sub_(one.grad)
    counts = "2 forwards with gradients, 0 optimizer steps"
    line = (
        f"nothing was watched ({counts}): no optimizer of torch stepped; derive the class that updates the parameters"
    )
    assert capsys.readouterr().err.startswith(f"shardproof doctor: {line} from torch.optim.Optimizer")


class Container(torch.optim.Optimizer):
    """An optimizer of optimizers, as torchtitan has one."""

    def __init__(self, parts):
        self.parts = parts
        super().__init__([one for part in parts for group in part.param_groups for one in group["params"]], {})

    def step(self, closure=None):
        for part in self.parts:
            part.step()


def test_a_step_of_optimizers_in_an_optimizer_is_one_step(model, traces, capsys):
    other = net()
    with doctor(model) as watching:
        losses = train(model, Container([sgd(model[0]), sgd(model[2])]))
    assert watching.findings == [] and losses == train(other, sgd(other))
    said = capsys.readouterr().err
    assert "steps 0-2 of 1 rank, Sequential, 4 parameters (30 elements), SGD; no finding" in said
    assert "  norm      0.5696 0.2873 0.3157, " in said


def test_gradients_of_a_closure_are_those_at_its_end(model, traces):
    """As Lightning calls the optimizer: backward and clipping are in the closure."""
    optimizer = sgd(model)

    def closure():
        optimizer.zero_grad()
        loss = model(torch.ones(3, 4)).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        return loss

    with doctor(model, optimizer) as watching:
        for _ in range(3):
            assert optimizer.step(closure) > 0
    assert watching.findings == [] and "before the step, that is to a norm of 0.1" in watching.summary()


def test_what_follows_from_a_wrong_gradient_is_no_finding_of_its_own(model, traces):
    """The noise stands for what one step leaves in the gradients of the next, as where a loop reduces too early."""
    optimizer = sgd(model)
    with doctor(model, on_finding="collect") as watching:
        for step in range(3):
            for _ in range(2):
                optimizer.zero_grad()
                model(torch.randn(3, 4)).square().mean().backward()
            model[0].weight.grad += step * torch.randn(4, 4)
            optimizer.step()
    assert [one.title for one in watching.findings] == ["gradients lack microbatches"]


REFUSED = [
    ({"on_finding": "stop"}, "on_finding='stop': expected 'raise', 'warn' or 'collect'"),
    ({"model": [net(), net()]}, "'0.bias' names two parameters: give the models one by one"),
    ({"data": ["dpp"]}, "data=('dpp',): no mesh dimension of this name; known: dp"),
    ({}, "torch.distributed is not initialized; call it after init_process_group (in one process: WORLD_SIZE=1 works)"),
]


@pytest.mark.parametrize(("given", "line"), REFUSED, ids=["on_finding", "names", "data", "world"])
def test_what_is_refused_before_anything_is_trained(model, traces, given, line, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "1" if given else "2")
    with simulated_world(1) if "data" in given else contextlib.nullcontext() as fake:
        mesh = fake.mesh() if fake else None
        assert error_of(lambda: doctor(**{"model": model, "mesh": mesh, **given}).__enter__()) == f"doctor: {line}"


BAD = [
    ([], "nothing: name a script, or -m and a module"),
    (["nosuch.py"], "nosuch.py: there is no such script"),
    (["-m", "nosuch.train"], "nosuch.train: there is no such module"),
    (["--checks", "D99", "train.py"], "doctor: checks='D99': no such check; known: D1 to D32"),
    (["--steps", "a,b", "train.py"], "doctor: steps='a,b': expected steps counted from 0, such as 0,1,2"),
]


@pytest.mark.parametrize(("arguments", "line"), BAD, ids=[" ".join(row[0]) for row in BAD])
def test_bad_input_of_the_command_is_one_line(traces, arguments, line, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", sys.argv)
    assert main(["doctor", *arguments]) == 2
    assert capsys.readouterr() == ("", f"shardproof: {line}\n")


# The run file of a loop that does not come to its end


TRAINS = """
import sys, torch
from torch import nn
model = nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range({steps}):
    model(torch.full((1, 2), step + 1.0)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
{end}
"""

UNSEEN = (
    "the loop ended before a step was complete (0 forwards with gradients, 0 optimizer steps): was the wrapped module"
)


@pytest.mark.parametrize(
    ("steps", "end", "code", "reason", "records"),
    [
        (0, "", 0, UNSEEN, 0),
        (0, "sys.exit(0)", 0, UNSEEN, 0),
        (0, "sys.exit(3)", 3, "the training ended with SystemExit", 0),
        (0, "raise OSError('mine')", OSError, "the training ended with OSError", 0),
        (2, "raise KeyboardInterrupt", KeyboardInterrupt, "the training ended with KeyboardInterrupt", 32),
        (2, "sys.exit()", 0, "", 32),
        (4, "sys.exit(3)", 3, "", 32),
    ],
)
def test_a_report_is_written_however_the_script_ends(
    tmp_path, traces, capsys, monkeypatch, steps, end, code, reason, records
):
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(sys, "path", [*sys.path])
    # Of a model that is not trained: the doctor waits for its first forward after the steps of the script's.
    module = torch.nn.Linear(2, 2)
    other = torch.optim.SGD(module.parameters(), lr=0.1)
    script, report = tmp_path / "train.py", tmp_path / "run.json"
    script.write_text(TRAINS.format(steps=steps, end=end))
    arguments = ["doctor", "--report", str(report), str(script)]
    if isinstance(code, int):
        try:
            assert main(arguments) == code
        except SystemExit as ended:
            assert ended.code == code
    else:
        with pytest.raises(code):
            main(arguments)
    run = load_run(f"{report}.partial" if reason else report)
    assert len(run.cases) == records and run.incomplete.startswith(reason) and bool(run.incomplete) == bool(reason)
    error = capsys.readouterr().err
    assert not reason or f"shardproof doctor: the report is incomplete ({run.incomplete}): {report}.partial\n" in error
    assert report.exists() != bool(reason) and not other.state


def test_a_report_that_cannot_be_written_is_one_line(tmp_path, model, traces, capsys):
    (tmp_path / "file").touch()
    with doctor(model, report=tmp_path / "file/run.json", steps=[0]):
        train(model, sgd(model))
    lines = capsys.readouterr().err.splitlines()
    assert lines[-3] == f"shardproof doctor: the report is not written: {tmp_path}/file/run.json: Not a directory"


# Ranks


REMADE = """
import itertools, os, torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

numbers = itertools.count()

def begin():
    # A new file each time: keys in the store of torchrun outlive the group.
    where = f"file://{os.getcwd()}/store{next(numbers)}"
    dist.init_process_group("gloo", init_method=where, rank=int(os.environ["RANK"]), world_size=2)

def build():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    return DistributedDataParallel(model) if %(ddp)s else fully_shard(model)

begin()
group = dist.new_group()
model = build()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(4):
    model(torch.full((2, 4), 1.0 + step + dist.get_rank())).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    if step in (%(steps)s,):
        %(what)s
dist.destroy_process_group()
print("the training has ended")
"""

BEGINS_ANEW = "begin(); model = build(); optimizer = torch.optim.SGD(model.parameters(), lr=0.1)"
ENDED = "the loop destroyed its process groups before the end of step {}: this step and later ones are not watched"


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("what", "steps", "ddp", "seen", "line"),
    [
        (f"dist.destroy_process_group(); {BEGINS_ANEW}", "1", False, "steps 0-1", ENDED.format(2)),
        (f"dist.destroy_process_group(); {BEGINS_ANEW}", "1", True, "steps 0-1", ENDED.format(2)),
        (f"dist.destroy_process_group(dist.group.WORLD); {BEGINS_ANEW}", "0", False, "step 0", ENDED.format(1)),
        (f"dist.destroy_process_group(); {BEGINS_ANEW}", "0, 1, 2", False, "step 0", ENDED.format(1)),
        # The model keeps its dead groups, which work.
        ("dist.destroy_process_group(); begin()", "1", False, "steps 0-1", ENDED.format(2)),
        (BEGINS_ANEW.partition("; ")[2], "1", False, "steps 0-1", ""),  # the second model is another root
        ("dist.destroy_process_group(group); group = dist.new_group()", "0, 1", False, "steps 0-2", ""),
    ],
    ids=["groups", "groups of DDP", "the world by name", "every step", "groups of one model", "model", "subgroup"],
)
def test_a_loop_that_makes_its_process_groups_anew(tmp_path, what, steps, ddp, seen, line):
    (tmp_path / "train.py").write_text(REMADE % {"what": what, "steps": steps, "ddp": ddp})
    words = ["--standalone", "--nproc-per-node=2", "-m", "shardproof", "doctor", "--report", "run.json", "train.py"]
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *words], cwd=tmp_path, env=hosts.environment(), timeout=300,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
    )  # fmt: skip
    assert "internal error" not in done.stdout, done.stdout
    assert done.stdout.count(f"shardproof doctor: {line}\n") == bool(line), done.stdout
    assert f"shardproof doctor: {seen} of 2 ranks" in done.stdout, done.stdout
    assert len(load_run(tmp_path / "run.json").cases) == 32
    assert done.returncode == 0 and done.stdout.count("the training has ended") == 2, done.stdout


def without_gradients(layer, inputs):
    with torch.no_grad():
        return layer(inputs)


#: How a layer is called that gets no gradient, and what is seen of it.
CUT = {
    "no_grad": (without_gradients, "runs with gradients disabled: under no_grad(), or in a reentrant checkpoint"),
    "checkpoint": (lambda layer, inputs: checkpoint(layer, inputs, use_reentrant=True), "runs with gradients disabled"),
    "detached": (lambda layer, inputs: layer(inputs).detach(), "runs with gradients enabled: its output is "),
}


@pytest.mark.parametrize("name", CUT)
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_of_a_layer_without_a_gradient_it_is_said_whether_it_computes_with_gradients(name, traces):
    call, said = CUT[name]

    class Cut(nn.Sequential):
        def forward(self, inputs):
            return self[2](call(self[0], inputs).tanh())

    model = Cut(*net())
    with doctor(model, optimizer := sgd(model), on_finding="collect", steps=[0]) as watching:
        train(model, optimizer, steps=1)
    (found,) = [one for one in watching.findings if one.title == "parameters get no gradient"]
    assert found.lines[0].startswith("'0.weight', '0.bias' get no gradient")
    assert found.lines[1].startswith(f"seen: the forward of their modules {said}")


@pytest.mark.sampled
@world(2)
def test_ranks_with_other_models(rank: Rank):
    model = nn.Sequential(*net(), nn.Linear(2, 2, bias=rank.index == 1))
    traces = Traces(model)
    line = "doctor: rank 1 has '3.bias' (2,), rank 0 does not: the ranks built different models"
    assert error_of(doctor(model).__enter__) == line
    traces.assert_none()


@pytest.mark.sampled
@world(2)
def test_a_rank_that_does_not_come(rank: Rank):
    model, stream = net(), io.StringIO()
    optimizer, traces = sgd(model), Traces(model)
    rank.monkeypatch.setattr(sys, "stderr", stream)
    watching = doctor(model, steps=[1], patience=3).__enter__()
    train(model, optimizer, steps=1)
    if rank.index == 0:
        train(model, optimizer, steps=2)
        line = "rank 1 did not come within 3 s (last event here: step of SGD); detached on this rank"
        assert stream.getvalue() == f"shardproof doctor: {line}\n"
    rank.exchange(None)
    watching.close()
    traces.assert_none()


@pytest.mark.sampled
def test_importing_it_brings_nothing_but_torch_and_this_package():
    """torch._dynamo is what the first optimizer of a process imports."""
    code = """
import sys, time, torch, torch._dynamo, torch.distributed.fsdp, torch.distributed.tensor
before, start = set(sys.modules), time.process_time()
import shardproof.harness.training.doctor
print(f"import of the doctor beyond torch: {1000 * (time.process_time() - start):.0f} ms")
found = {name.partition(".")[0] for name in set(sys.modules) - before} - sys.stdlib_module_names
assert found == {"shardproof"}, found
assert not {"pytest", "jinja2", "rich", "plotly"} & set(sys.modules)
"""
    python("-c", code, code=0)
