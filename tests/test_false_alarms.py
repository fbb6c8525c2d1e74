"""The doctor watches cases that pass, and finds nothing in them."""

import datetime
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

import planted.run
from planted import table, watched
from shardproof.harness.plugin.known_failures import KnownFailures, load
from tests.harness.inner import name_of, run_cases

ROOT = pathlib.Path(__file__).parents[1]
FILES = [f"suites/test_{chapter}.py" for chapter in table.WATCHED]
#: By class of ``planted.watched``, the implementation that it watches.
WATCHED = {one.__name__: one.name.removeprefix("watched.") for one in watched.SOUND}

#: The cases of a short run: a few steps on two ranks, and each a way of training of its own.
SHORT = ("test_single_unit", "test_unit_called_twice", "test_forwards_run_ahead")


def test_a_part_of_them(tmp_path: pathlib.Path) -> None:
    options = ["--world", "2", "--effort", "quick", "-k", " or ".join(SHORT)]
    records = run((watched.Reference, watched.TorchFullyShard), options, tmp_path, timeout=300)
    assert [*problems(records)] == []


@pytest.mark.nightly
@pytest.mark.parametrize("kind", watched.SOUND, ids=WATCHED.values())
def test_by_night(tmp_path: pathlib.Path, kind: type) -> None:
    records = run((kind,), ["--world", "1,2,4", "--deadline", "240"], tmp_path, timeout=6 * 3600)
    assert [*problems(records)] == []


@pytest.mark.nightly
def test_a_bug_is_found(tmp_path: pathlib.Path) -> None:
    """It does watch: without a doctor the item would fail by another text."""
    bug = table.watched(table.read("accumulation")["flat-existing-replaced"])
    item = bug.with_bug(bug.item)
    records = planted.run.records_of([item], [bug.name], tmp_path, "--device", "cpu")
    text = planted.run.text_of(records[item])
    assert f"{table.UNHEALTHY} 0: gradients lack microbatches [D11, S4]" in text


def run(kinds: Sequence[type], options: Sequence[str], folder: pathlib.Path, *, timeout: float) -> list[dict[str, Any]]:
    """The records of the cases of the chapters that are watched."""
    records, done = run_cases(folder, map(name_of, kinds), *FILES, *options, timeout=timeout)
    assert records, done.stdout + done.stderr
    return records


def problems(records: Sequence[dict[str, Any]]) -> Iterator[str]:
    """One text for each false alarm and each other failure."""
    ran = [one for one in records if one["verdict"] not in ("unsupported", "unmet") and not is_known(one)]
    if not ran:
        yield "no case ran"
    for record in ran:
        text = record["failure"]["text"] if record["failure"] else ""
        if text:
            yield f"{record['nodeid']}: {text[max(0, text.find(table.UNHEALTHY)) :][:2000]}"


def is_known(record: dict[str, Any]) -> bool:
    """Whether the implementation is known to fail the case, without a doctor."""
    entries = load(ROOT / "suites/expectations", WATCHED[_class(record)])
    options: dict[str, Any] = {"torch_version": torch.__version__, "device": "cpu", "backend": "gloo"}
    known = KnownFailures(entries, today=datetime.date.today(), **options)
    return known.first(record["id"]) is not None


def _class(record: dict[str, Any]) -> str:
    name: str = record["implementation"].partition(":")[2]
    return name
