"""The doctor watches cases that pass, and finds in them only what they do on purpose."""

import dataclasses
import datetime
import fnmatch
import pathlib
import re
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


@dataclasses.dataclass(frozen=True)
class Meant:
    """What a case does on purpose, and the doctor finds: no false alarm.

    Attributes:
        case: a pattern of ids of cases, in which brackets are literal.
        check: the check of the doctor.
        line: the line of the case's file that causes it.
        only: the implementation in which it does; "" for all.
    """

    case: str
    check: str
    line: str
    only: str = ""

    def has(self, record: dict[str, Any], check: str) -> bool:
        """Whether a check of a record is meant by it."""
        is_of = fnmatch.fnmatchcase(record["id"], self.case.replace("[", "[[]"))
        return is_of and check == self.check and self.only in ("", WATCHED[_class(record)])


MEANT = (
    # The parameter is 1, and the loss calls the model on its output, which is the input once more.
    Meant(
        "suites/test_training.py::test_root_called_on_its_output[*]", "D9",
        "step = run.step(inputs, loss=lambda output: run.adapter.forward(output).float().sum())",
    ),
    # Forwards that are refused count as microbatches, each of the same batch.
    *[
        Meant(
            "suites/test_accumulation.py::test_finalization_refused[*]", check,
            'refuses("a forward before wait()", lambda: root(batch), "waited on")',
        )
        for check in ("D9", "D11")
    ],
)  # fmt: skip

#: The cases of a short run: a few steps on two ranks, and each a way of training of its own.
SHORT = ("test_single_unit", "test_unit_called_twice", "test_forwards_run_ahead")


def test_a_part_of_them(tmp_path: pathlib.Path) -> None:
    options = ["--world", "2", "--effort", "quick", "-k", " or ".join(SHORT)]
    records = run((watched.Reference, watched.TorchFullyShard), options, tmp_path, timeout=300)
    assert [*problems(records, is_complete=False)] == []


@pytest.mark.nightly
@pytest.mark.parametrize("kind", watched.SOUND, ids=WATCHED.values())
def test_by_night(tmp_path: pathlib.Path, kind: type) -> None:
    records = run((kind,), ["--world", "1,2,4", "--deadline", "240"], tmp_path, timeout=6 * 3600)
    assert [*problems(records, is_complete=True)] == []


@pytest.mark.nightly
def test_a_bug_is_found(tmp_path: pathlib.Path) -> None:
    """It does watch: without a doctor the item would fail by another text."""
    bug = table.watched(table.read("accumulation")["flat-existing-replaced"])
    item = bug.with_bug(bug.item)
    records = planted.run.records_of([item], [bug.name], tmp_path, "--device", "cpu")
    text = planted.run.text_of(records[item])
    assert f"{table.UNHEALTHY} 0: gradients lack microbatches [D11, S4]" in text


def test_each_line_is_in_its_file() -> None:
    lost = [one for one in MEANT if one.line not in (ROOT / one.case.partition("::")[0]).read_text()]
    assert not lost, f"what is meant is not there: {lost}"


def run(kinds: Sequence[type], options: Sequence[str], folder: pathlib.Path, *, timeout: float) -> list[dict[str, Any]]:
    """The records of the cases of the chapters that are watched."""
    records, done = run_cases(folder, map(name_of, kinds), *FILES, *options, timeout=timeout)
    assert records, done.stdout + done.stderr
    return records


def problems(records: Sequence[dict[str, Any]], *, is_complete: bool) -> Iterator[str]:
    """One text for each false alarm and each other failure, and for each line of the table that finds nothing."""
    ran = [one for one in records if one["verdict"] not in ("unsupported", "unmet") and not is_known(one)]
    if not ran:
        yield "no case ran"
    unused = {one for one in MEANT if any(one.has(record, one.check) for record in ran)}
    count = 0
    for record in ran:
        text = record["failure"]["text"] if record["failure"] else ""
        heads = re.findall(r"step \d+: .* \[(.*)\]$", text, re.MULTILINE)
        checks = {check for head in heads for check in re.findall(r"D\d+", head)}
        meant = {one for one in MEANT for check in checks if one.has(record, check)}
        unused -= meant
        count += bool(checks)
        if checks - {one.check for one in meant} or (text and table.UNHEALTHY not in text):
            yield f"{record['nodeid']}: {text[max(0, text.find(table.UNHEALTHY)) :][:2000]}"
    if is_complete and unused:
        yield f"the doctor finds nothing where the table says so: {unused}"
    if is_complete and count > len(ran) / 20:
        yield f"{count} of {len(ran)} cases have a finding"


def is_known(record: dict[str, Any]) -> bool:
    """Whether the implementation is known to fail the case, without a doctor."""
    entries = load(ROOT / "suites/expectations", WATCHED[_class(record)])
    options: dict[str, Any] = {"torch_version": torch.__version__, "device": "cpu", "backend": "gloo"}
    known = KnownFailures(entries, today=datetime.date.today(), **options)
    return known.first(record["id"]) is not None


def _class(record: dict[str, Any]) -> str:
    name: str = record["implementation"].partition(":")[2]
    return name
