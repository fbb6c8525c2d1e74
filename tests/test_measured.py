"""The branches and calls that ranks write down while items run, and the pages that are made of them."""

import collections
import gzip
import json
import pathlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed._composable import checkpoint
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from planted import coverage, surface
from shardproof import contract
from shardproof.harness.worlds import instruments
from tests.harness.inner import python

ITEMS = """
import os, signal
from torch import nn, optim
from shardproof.testing import world

@world(2)
def test_a_step(rank):
    run = rank.run(nn.Linear(4, 4), optimizer=lambda parameters: optim.SGD(parameters, lr=0.1))
    run.step([rank.batch(0, shape=(2, 4))], loss=lambda output: output.sum())
    run.adapter.module.set_requires_gradient_sync(False, recurse=False)

@world(2)
def test_killed(rank):
    if rank.index == 1:
        os.kill(os.getpid(), signal.SIGKILL)

@world(2)
def test_after_it(rank):
    pass
"""
SYNC = "torch.distributed.fsdp.FSDPModule.set_requires_gradient_sync"
GROUP = "torch.distributed.fsdp._fully_shard._fsdp_param_group"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """What a run with both instruments leaves, in which the second of three items kills a rank."""
    home = tmp_path_factory.mktemp("watched")
    (home / "test_items.py").write_text(ITEMS)
    chosen = instruments.environment(home, "planted.coverage:branches", "planted.surface:calls")
    options = ["-q", "-n", "0", "-p", "no:cacheprovider", "-p", "shardproof.plugin", "--device", "cpu"]
    done = python(
        "-m", "pytest", home / "test_items.py", *options, "--impl", "torch.fully_shard", cwd=home, **chosen,
        COVERAGE_CORE="ctrace",
    )  # fmt: skip
    assert "1 failed, 2 passed" in done.stdout, done.stdout + done.stderr
    return home


def test_branches_of_an_item(folder: pathlib.Path) -> None:
    saw = coverage.taken(folder)
    step = next(names for item, names in saw.items.items() if "test_a_step" in item)
    assert {
        f"{GROUP}:FSDPParamGroup.post_backward",
        "torch.distributed.fsdp._fully_shard._fully_shard:fully_shard",
    } <= step
    found = coverage.branches_of(saw.arcs)
    ways = {one.target: one.taken for one in found if one.function == "FSDPParamGroup.unshard"}
    # Both ways of one condition: a world of two gathers, and nobody has asked for the gather of one rank.
    assert ways["world_size = self._all_gather_process_group.size()"] is True
    assert ways["world_size = 1"] is False
    assert all(one.function for one in found), "branches of a module run at its import, before a rank is forked"


def test_a_killed_rank_loses_its_item_alone(folder: pathlib.Path) -> None:
    lines = [json.loads(text) for path in folder.glob("*.branches") for text in path.read_text().splitlines()]
    counts = collections.Counter(line["item"].partition("::")[2].partition("[")[0] for line in lines)
    assert counts == {"test_a_step": 2, "test_after_it": 2} | ({"test_killed": 1} if counts["test_killed"] else {})


def test_calls_of_an_item(folder: pathlib.Path) -> None:
    found = {cell[1:] for cell in surface.used(folder) if cell[0] == SYNC}
    assert found == {
        ("", ""), ("requires_gradient_sync", "False"), ("recurse", "False"), ("state", "after a step"),
    }  # fmt: skip
    assert ("torch.distributed.fsdp.MixedPrecisionPolicy", "param_dtype", "None") in surface.used(folder)


def test_the_end_of_a_line_is_dropped(tmp_path: pathlib.Path) -> None:
    line = json.dumps({"item": "a", "entered": {}, "arcs": {GROUP: [[1, 2]]}})
    (tmp_path / "1.branches").write_text(f"{line}\n{line[:20]}")
    assert coverage.taken(tmp_path).arcs == {GROUP: {(1, 2)}}


def test_pages(folder: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert coverage.main(["page", str(folder)]) == 0
    assert surface.main([str(folder)]) == 0
    out = capsys.readouterr().out
    assert "branches are taken" in out and "cells are used" in out
    text = (folder / "branches.md").read_text()
    assert "`world_size = 1`. open" in text
    assert "covers nothing" not in text + (folder / "surface.md").read_text()
    content = json.loads(gzip.decompress((folder / "functions.json.gz").read_bytes()))
    (numbers,) = [found for item, found in content["items"].items() if "test_a_step" in item]
    assert f"{GROUP}:FSDPParamGroup.post_backward" in [content["functions"][one] for one in numbers]


@pytest.mark.parametrize("module", [coverage, surface])
def test_nothing_measured(module: Any, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        module.main([*(["page"] if module is coverage else []), str(tmp_path)])
    assert "has no file of a watched run: python -m planted.coverage run" in capsys.readouterr().err


def _branch(**options: Any) -> coverage.Branch:
    one = coverage.Branch(GROUP, "FSDPParamGroup.unshard", 1, 2, False, "if is_cuda:", "raise ValueError(")
    return coverage.dataclasses.replace(one, **options)


@pytest.mark.parametrize("place", [GROUP, f"{GROUP}:FSDPParamGroup", f"{GROUP}:FSDPParamGroup.unshard"])
def test_a_reason_covers_its_place(place: str) -> None:
    row = coverage.Reason("gpu", "of a GPU", (place,), lines=("if is_cuda",))
    assert row.covers(_branch())
    assert not row.covers(_branch(text="if device:"))
    assert not row.covers(_branch(function="FSDPParamGroupOther.unshard")) or place == GROUP
    text = coverage.page([_branch(), _branch(start=3, taken=True)], [row])
    assert (
        "1 of 2 branches are taken; 1 have a reason (50.0% of all); of the others 100.0% are taken, and 0 are open."
        in text
    )
    assert "gpu: of a GPU" in text


def test_a_reason_that_covers_nothing() -> None:
    row = coverage.Reason("dead", "w", (f"{GROUP}:FSDPParamGroup.unshard",))
    assert "covers nothing" in coverage.page([_branch(taken=True)], [row])


@pytest.mark.parametrize("module", [coverage, surface])
def test_unknown_kind(module: Any, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "reasons.toml"
    path.write_text('[[branch]]\nkind = "lazy"\nwhy = ""\nin = "m:f"\n[[cell]]\nkind = "lazy"\nwhy = ""\ncall = "f"\n')
    monkeypatch.setattr(module, "REASONS", path)
    with pytest.raises(ValueError, match=r"kind 'lazy' of (m:)?f is none of gpu, "):
        module.reasons()


def _tied() -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight = model[0].weight
    return model


STATES = {
    "in evaluation": lambda: nn.Linear(2, 2).eval(),
    "on the meta device": lambda: nn.Linear(2, 2, device="meta"),
    "compiled": lambda: torch.compile(nn.Linear(2, 2)),
    "frozen": lambda: nn.Linear(2, 2).requires_grad_(False),
    "tied": _tied,
}


@pytest.mark.parametrize(("state", "model"), STATES.items(), ids=STATES)
def test_states_of_a_model(state: str, model: Callable[[], nn.Module]) -> None:
    assert surface.states(model(), "after a step") == {"after a step", state}


@pytest.mark.parametrize("apply", [checkpoint, checkpoint_wrapper])
def test_a_checkpointed_model(apply: Callable[[nn.Module], nn.Module]) -> None:
    assert surface.states(apply(nn.Linear(2, 2)), "after a step") == {"after a step", "checkpointed"}


def test_surface_of_this_torch() -> None:
    calls = surface.surface()
    assert calls[SYNC].arguments == {"requires_gradient_sync": ("True", "False"), "recurse": ("True", "False")}
    strategies = calls["torch.distributed.fsdp.FullyShardedDataParallel"].arguments["sharding_strategy"]
    assert {"FULL_SHARD", "NO_SHARD", "None"} <= {*strategies}
    assert ("device_mesh", "sharding_strategy") in calls["torch.distributed.fsdp.FullyShardedDataParallel"].joined
    assert calls["torch.distributed.checkpoint.state_dict.get_state_dict"].subject == "model"
    nothing = [f"{one.name}: {name}" for one in calls.values() for name, labels in one.arguments.items() if not labels]
    assert len(nothing) < 10, f"arguments whose annotation says nothing: {nothing}"


def test_promises_of_this_torch() -> None:
    version, read = surface.promises()
    known = surface.documented()
    if torch.__version__.startswith(f"{version}."):
        assert {*read} == {*known}, "docstrings without a table, or tables without a docstring"
        places = [(name, row.argument) for name, one in read.items() for row in one.promises if row.argument]
        assert [f"{name}: {argument}" for name, argument in places if argument not in known[name]] == []


def test_promises_are_judged_or_open() -> None:
    requirements = {one for _, _, rows in contract.chapters() for one, _, _ in rows}
    for name, docstring in surface.promises()[1].items():
        rows = docstring.promises
        assert {one for row in rows for one in row.requirements} <= requirements, f"{name} names no requirement"
        assert all(row.requirements or row.open for row in rows), f"a promise of {name} is neither judged nor open"
        assert len({(row.argument, row.promise) for row in rows}) == len(rows), f"{name} promises a thing twice"


def test_promises_on_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = (surface.Promise("One.", "modules", "A-1"), surface.Promise("Two.", "", ["A-1", "A-2"], "half"))
    read = {"torch.distributed.fsdp.share_comm_ctx": (*rows, surface.Promise("Three.", open="all")), "gone": rows[:1]}
    made = {name: surface.Docstring(row) for name, row in read.items()}
    monkeypatch.setattr(surface, "promises", lambda: ("0", made))
    text = surface.page({}, [])
    assert "promises 3 things: 1 are judged, 1 in part, and 1 are open." in text
    assert "- promised of `modules`: One. `A-1`\n- promised: Two. `A-1`, `A-2`, **open**: half\n" in text
    assert "- promised: Three. **open**: all\n" in text and "- promised: unread" in text
    assert f"A table of promises.toml is of no docstring of torch {torch.__version__}: gone" in text


@pytest.mark.parametrize("body", ["", 'nothing = "w"\npromises = [{ promise = "p", open = "o" }]'])
def test_table_of_no_effect(body: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "promises.toml"
    path.write_text(f'torch = "2.13"\n[[docstring]]\nin = "f"\n{body}\n')
    monkeypatch.setattr(surface, "PROMISES", path)
    with pytest.raises(ValueError, match="f needs one table"):
        surface.promises()
