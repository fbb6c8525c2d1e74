"""``shardproof doctor --state`` writes the state after the last watched step, of every root, and changes nothing."""

import re
import textwrap

import pytest

from shardproof import commands
from shardproof.__main__ import main
from shardproof.commands import doctor
from tests.harness.inner import torchrun

SCRIPT = textwrap.dedent("""
    import sys
    from pathlib import Path

    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    class Generator(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(4, 12), nn.Linear(12, 8)

        def forward(self, x):
            return self.down(self.up(x).relu())

    class Critic(nn.Module):
        def __init__(self):
            super().__init__()
            self.up = nn.Linear(8, 1)

        def forward(self, x):
            return self.up(x)

    def wrapped(model):
        if kind == "ddp":
            return DistributedDataParallel(model)
        for child in model.children():
            fully_shard(child)
        return fully_shard(model)

    folder, kind, roots = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    models = {"Generator": wrapped(Generator()), "Critic": wrapped(Critic())}
    models = dict([*models.items()][:roots])
    optimizers = {name: torch.optim.AdamW(one.parameters(), lr=0.01) for name, one in models.items()}
    schedulers = [torch.optim.lr_scheduler.StepLR(one, 2) for one in optimizers.values()]
    torch.manual_seed(dist.get_rank())
    for step in range(5):
        output = torch.randn(6, 4)
        for name, model in models.items():
            output = model(output)
        loss = output.square().mean()
        loss.backward()
        for one in optimizers.values():
            one.step()
            one.zero_grad()
        for one in schedulers:
            one.step()
        if not dist.get_rank():
            print(f"loss {loss.item().hex()}")
        if step == 2:
            options = StateDictOptions(full_state_dict=True, cpu_offload=True)
            for (name, model), scheduler in zip(models.items(), schedulers):
                state = {
                    "model": get_model_state_dict(model, options=options),
                    "optimizer": get_optimizer_state_dict(model, optimizers[name], options=options),
                    "scheduler": scheduler.state_dict(),
                }
                if not dist.get_rank():
                    torch.save(state, folder / f"{name}.pt")
        dist.barrier()
    dist.destroy_process_group()
""")


def losses(done):
    return re.findall(r"loss (\S+)", done.stdout)


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
@pytest.mark.parametrize("roots", [1, 2])
def test_a_checkpoint_of_the_last_watched_step_is_the_state_of_the_doctor(kind, roots, tmp_path, capsys):
    script, out = tmp_path / "train.py", tmp_path / "out"
    script.write_text(SCRIPT)
    alone = losses(torchrun(2, script, tmp_path, kind, roots, code=0))
    done = torchrun(2, "-m", "shardproof", "doctor", "--state", out, script, tmp_path, kind, roots, code=0)
    assert losses(done) == alone and len({*alone}) == 5
    folders = {"Generator": out} if roots == 1 else {name: out / name for name in ("Generator", "Critic")}
    assert done.stderr.count("the state after 3 steps is in ") == 1 and "finding" in done.stderr, done.stderr
    for name, folder in folders.items():
        code = main(["state", str(folder), str(tmp_path / f"{name}.pt")])
        text = capsys.readouterr().out
        assert code == 0 and text.endswith("nothing differs\n"), text
        assert "on 2 ranks after step 3" in text
        assert "scheduler" in (folder / "rank00000.jsonl").read_text()
    # A checkpoint of a later step is another state.
    done = torchrun(
        2, "-m", "shardproof", "doctor", "--state", out, "--steps", "1", script, tmp_path, kind, roots, code=0
    )
    folder = folders["Generator"]
    assert main(["state", str(folder), str(tmp_path / "Generator.pt")]) == 1
    assert " differs, by " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "own", "folder"),
    [
        (["--state", "x.py", "--a"], ["--state"], "shardproof-state"),
        (["--state", "out", "x.py"], ["--state", "out"], "out"),
        (["--state", "--report", "a/run.json", "-m", "x"], ["--state", "--report", "a/run.json"], "a/run.state"),
        (["--state=out", "train"], ["--state=out"], "out"),
        (["--strict", "x.py", "--state"], ["--strict"], None),
    ],
)
def test_the_folder_may_be_left_out(arguments, own, folder):
    found, script = commands.split(arguments, flags=("--strict",), optional=("--state",))
    assert (found, [*found, *script]) == (own, arguments)
    options = doctor._parser().parse_args(found)
    assert doctor._folder(options.state, options.report) == folder
