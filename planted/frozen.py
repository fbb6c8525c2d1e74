"""Freezes what the project says of all that it judges, so that a change of the engine can be held against it.

    python -m planted.frozen make FILE [--part PART ...] [--jobs N] [--seconds N] [--only REGEX]
    python -m planted.frozen compare OLD NEW

``make`` appends to FILE what it does not have yet, so that a call that was killed is repeated: a JSON line for each
judged thing, and one with "done" behind those of each piece of work (by which ``--only`` chooses). A FILE is of one
tree. ``compare`` prints a line for each difference, and exits with 1 if there is one.

| part | one line for |
|---|---|
| rows | each planted row: its item with the bug; ``sound`` is that without, ``as_row`` if it says what the row does |
| history | each row of ``planted.upstream``: the item that found it, with the bug |
| scripts | the scripts of examples and the loops of the doctor's tests, sound and broken, under the tests' commands |
| standard | each item of ``--effort standard --world 1,2,4`` of the four built-in implementations on a CPU |

A line has no text, time or address, but ``found``: stage, step, rank, name and signature of each failure or finding.
Run files have these of suites, ``compare`` and ``check`` but for the signature, which only ``check`` writes: it is the
code in the text or, as suites print none, that of the sentence (:data:`SENTENCES`). Findings of the doctor are taken
in rank 0, because its run file has neither notes nor fields; a finding has checks, signature and step, but names and
ranks stand in its text alone: those are the parameters that it quotes, and what follows the word "rank".

Not frozen: elements, numbers, guesses without a signature; of drawn items more than verdict and number of the example;
what needs GPUs or packages that are not installed; rows of history that no item has found; ``check --bisect``.
"""

import argparse
import collections
import concurrent.futures
import importlib.util
import itertools
import json
import pathlib
import re
import shutil
import sys
import tempfile
import threading
import time
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

HERE = pathlib.Path(__file__).resolve().parent
EXAMPLES = HERE.parent / "examples"
IMPLEMENTATIONS = ("reference", "reference.flat", "torch.fully_shard", "torch.fsdp")
#: Rows that share a run of pytest, which takes as long to start as some of them.
TOGETHER = 20

#: The sentences by which suites tell a signature, as ``judging/signatures.py`` makes them.
SENTENCES = (
    ("S13", r"it equals the expected value rounded|all of its elements are|its errors are as large"),
    ("S6", r"it equals the norm of this rank's shards|it is the oracle's times"),
    ("S1", r"it is \S+ times the oracle's"),
    ("S2", r"it is (this rank's own gradient|the gradient of rank)|it has .* microbatches of all ranks, and this"),
    ("S3", r"it is reduced (over|without)|it counts rank"),
    ("S5", r"it counts parts of the batch|it has microbatches of different weights"),
    ("S12", r"it is the gradient of (the step|\d+ steps) before"),
    ("S4", r"it (has|lacks|counts|is|still) .*(microbatch|gradients of the )"),
)

Line = dict[str, Any]


class Work(NamedTuple):
    """What is run at once and gives lines, and is done again if it did not come to its end."""

    part: str
    name: str
    run: Callable[[pathlib.Path], Iterable[Line]]  # given an empty folder


# Lines from the records of run files.


def line_of(record: Mapping[str, Any] | None) -> Line:
    """What a record of a run file says."""
    if record is None:
        return {"verdict": "not run"}
    failure, own = record["failure"], record.get("own") or {}
    if not failure:
        return {"verdict": record["verdict"]}
    if record.get("examples") is not None:  # it is shrunk for a minute: to which example depends on the machine
        return {"verdict": record["verdict"], "examples": record["examples"]}
    place = {key: failure[key] for key in ("stage", "step", "rank", "name") if failure.get(key) is not None}
    signature = own["signature"] if "signature" in own else signature_of(failure["text"])
    return {"verdict": record["verdict"], "found": [{**place, "signature": signature}]}


def signature_of(text: str) -> str:
    """The signature that the text of a failure names; of several the first, and empty for none."""
    if code := re.search(r"\[(?:D\d+, )*(S\d+)\]", text):
        return code[1]
    lines = [line.strip() for line in text.splitlines()]
    return next((code for line in lines for code, form in SENTENCES if re.match(form, line)), "")


# Parts.


def rows() -> Iterator[Work]:
    """The planted rows, some of one file together."""
    import torch

    from planted import run, table

    def work(bugs: Sequence[table.Bug], folder: pathlib.Path) -> Iterator[Line]:
        records = run.run(bugs, folder)
        for bug in bugs:
            line = line_of(records.get(bug.with_bug(bug.item)))
            # What a drawn example says depends on how far it is shrunk.
            said = {} if "examples" in line else {"as_row": run.problem(bug, records) is None}
            yield {"id": bug.id, **line, "sound": line_of(records.get(bug.item))["verdict"], **said}

    def key(bug: table.Bug) -> tuple[str, int, int]:
        return bug.file, bug.gpus, bug.simulate

    able = [bug for bug in table.every().values() if torch.cuda.device_count() >= bug.gpus]
    for (file, gpus, simulate), group in itertools.groupby(sorted(able, key=key), key=key):
        bugs = [*group]
        for start in range(0, len(bugs), TOGETHER):
            name = f"{file} {gpus} GPUs, {simulate} simulated, {start}"
            yield Work("rows", name, lambda folder, some=bugs[start : start + TOGETHER]: work(some, folder))


def history() -> Iterator[Work]:
    """The rows of history that an item has found."""
    from planted import run
    from planted.upstream import __main__ as upstream

    items = {one["row"]: one["found_by"] for one in upstream.results(upstream.RESULTS) if "found_by" in one}

    def work(row: upstream.Row, folder: pathlib.Path) -> Iterator[Line]:
        item, options = items[row.id], ("--device", "cpu", "-n", "0", "--deadline", "30")
        try:
            records = run.records_of([item], [row.implementation], folder, *options, timeout=600,
                                     environment=row.environment, early=True)  # fmt: skip
        except RuntimeError:  # with the bug pytest itself may not start
            records = {}
        yield {"id": row.id, **line_of(records.get(item))}

    for row in upstream.rows():
        if row.id in items and not row.skipped():
            yield Work("history", row.id, lambda folder, row=row: work(row, folder))


def standard() -> Iterator[Work]:
    """One run of the built-in implementations, a chapter of one of them at a time."""
    from planted import run, table

    def work(file: str, implementation: str, folder: pathlib.Path) -> Iterator[Line]:
        options = ("--device", "cpu", "-n", "0", "--effort", "standard", "--world", "1,2,4")
        for item, record in run.records_of([file], [implementation], folder, *options).items():
            yield {"id": item, **line_of(record)}

    for file in (f"suites/test_{chapter}.py" for chapter in table.chapters()):
        for name in IMPLEMENTATIONS:
            yield Work("standard", f"{file} {name}", lambda folder, file=file, name=name: work(file, name, folder))


def scripts() -> Iterator[Work]:
    """The scripts of examples and the loops of the doctor's tests, with their mistakes and without."""
    yield from _healthy()
    yield from _incidents()
    from tests.harness import test_doctor_gathers as gathers
    from tests.harness import test_doctor_loops as loops
    from tests.harness import test_doctor_states as states

    tables = {
        "HEALTHY": loops.HEALTHY, "BROKEN": loops.BROKEN, "HEALTHY states": states.HEALTHY,
        "BROKEN states": states.BROKEN, "LOOPS": gathers.LOOPS, "LOOPS wrong": gathers.LOOPS,
    }  # fmt: skip
    for table, name in ((table, name) for table, names in tables.items() for name in names):
        yield _script(f"loop of tests/{table}/{name}", watched, 2, table, name)


def _script(name: str, run: Callable[..., Line], *given: Any, **named: Any) -> Work:
    return Work("scripts", name, lambda folder: [{"id": name, **run(folder, *given, **named)}])


def _healthy() -> Iterator[Work]:
    from tests import test_healthy as healthy

    for row, ranks in healthy.WORLDS:
        if all(importlib.util.find_spec(one) for one in filter(None, row.needs.split(", "))):
            script, mended = EXAMPLES / "healthy" / f"{row.name}.py", row.name not in healthy.TWO_THREADS
            yield _script(f"healthy/{row.name}-w{ranks}", watched, ranks, "doctor", script, mended=mended)
    for name, (_, right, wrong, _) in healthy.TWINS.items():
        yield _script(f"twin/{name}", _twin, name, right, wrong)


def _incidents() -> Iterator[Work]:
    from tests import test_incidents as incidents

    for name, words in incidents.LOOPS.items():
        script = EXAMPLES / "loops" / f"{name.partition('-')[0]}.py"
        yield _script(f"loop/{name}", watched, 4, "doctor", script, *words)
    for name, words in itertools.product((*incidents.SAID, "g14_mean_of_means"), ([], ["healthy"])):
        script = EXAMPLES / "incidents" / f"{name}.py"
        yield _script("-".join([f"incident/{name}", *words]), watched, 4, "doctor", script, *words)
    for (name, (ranks, *_)), words in itertools.product(incidents.COMPARED.items(), ([], ["healthy"])):
        yield _script("-".join([f"compare/{name}", *words]), _compared, name, ranks, words)
    for name, (wrong, others, _) in incidents.CHECKED.items():
        for function in (wrong, "healthy"):
            functions = {one: one for one in ("model", wrong, *others)} | {wrong: function}
            yield _script(f"check/{name}-{function}", _checked, name, functions)


PARTS: Mapping[str, Callable[[], Iterator[Work]]] = {
    "rows": rows, "history": history, "scripts": scripts, "standard": standard,
}  # fmt: skip


# Scripts.


def watched(folder: pathlib.Path, ranks: int, what: str, *given: str | pathlib.Path, mended: bool = True) -> Line:
    """What the doctor finds: in a script with its arguments ("doctor"), or in a loop of a table of its tests."""
    from tests.harness import forked

    out = folder / "seen.json"
    ran = forked.run(HERE / "frozen.py", ranks, "watch", str(out), what, *map(str, given), mended=mended, SEED="0")
    seen = json.loads(out.read_text()) if out.exists() else {"watched": "no report"}
    return {"verdict": "pass" if ran.is_complete else "fail", **seen}


def watch(out: str, what: str, *given: str) -> int:
    """In a rank: run a script or a loop under the doctor, whose report is its findings as a line of this file."""
    sys.path.remove(str(HERE))  # its files have names that others have too
    from shardproof import __main__ as command
    from shardproof.harness.training import report

    def write(_: Any, findings: Iterable[Any], seen: Sequence[Any], *others: Any, incomplete: str = "") -> None:
        names = {name for one in seen for name in one.names}
        steps = [seen[0].step, seen[-1].step] if seen else []
        found = [finding_of(one, names) for one in findings]
        pathlib.Path(out).write_text(json.dumps({"watched": steps, "incomplete": bool(incomplete), "found": found}))

    report.write = write
    if what == "doctor":
        return command.main(["doctor", "--strict", "--report", out, *given])
    _loop(out, what, *given)
    return 0


def finding_of(finding: Any, names: Iterable[str]) -> Line:
    """A finding of the doctor, without its text, of a model with parameters of these names."""
    text, known = finding.render(), frozenset(names)
    return {
        "checks": list(finding.checks), "signature": finding.signature, "step": finding.step,
        "is_note": finding.is_note, "names": sorted(known & set(re.findall(r"'([^']+)'", text))),
        "ranks": sorted(set(re.findall(r"\branks? (\d+(?:(?:-|, )\d+)*)", text))),
    }  # fmt: skip


def _loop(out: str, table: str, name: str) -> None:
    import torch.distributed as dist

    from shardproof.harness.training.doctor import Doctor, doctor
    from shardproof.harness.watching.ties import Ties
    from tests.harness import test_doctor_gathers as gathers
    from tests.harness import test_doctor_loops as loops
    from tests.harness import test_doctor_states as states

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    if table.startswith("LOOPS"):
        with Doctor(on_finding="collect", report=out):
            gathers.LOOPS[name][0](types.SimpleNamespace(index=rank), table.endswith("wrong"))
    else:
        kind, _, room = table.partition(" ")
        with doctor(on_finding="collect", patience=20, report=out, registered=Ties()):
            getattr(states if room else loops, kind)[name][0](loops.Data(rank))
    dist.destroy_process_group()


def _twin(folder: pathlib.Path, name: str, right: str, wrong: str) -> Line:
    (folder / f"{name}.py").write_text((EXAMPLES / "healthy" / f"{name}.py").read_text().replace(right, wrong))
    shutil.copy(EXAMPLES / "healthy/common.py", folder)
    return watched(folder, 2, "doctor", folder / f"{name}.py")


def _compared(folder: pathlib.Path, name: str, ranks: int, words: Sequence[str]) -> Line:
    from tests.harness import forked, inner

    for out, count, given in (("ref", ranks, ("healthy",)), ("run", 4, words)):
        command = ["record", "--out", str(folder / out)]
        forked.run(EXAMPLES / "incidents" / f"{name}.py", count, *given, command=command)
    given = [folder / "ref", folder / "run", "--report", folder / "compare.json"]
    code = inner.python("-m", "shardproof", "compare", *given).returncode
    lines = [line_of(case) for case in json.loads((folder / "compare.json").read_text())["cases"]]
    return {"verdict": f"exit code {code}", "found": [found for line in lines for found in line.get("found", ())]}


def _checked(folder: pathlib.Path, name: str, functions: dict[str, str]) -> Line:
    from tests import test_incidents as incidents

    mesh = incidents.MESHES.get(name, ())
    code, _ = incidents._checked(name, functions, *mesh, "--report", str(folder / "check.json"))
    (case,) = json.loads((folder / "check.json").read_text())["cases"]
    return {"code": code, **line_of(case)}


# Making a file.


def read(path: pathlib.Path) -> list[Line]:
    """The lines of a file, without one that a kill has cut."""
    return [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1]]


def make(file: pathlib.Path, part: Iterable[str], *, jobs: int, seconds: float, only: str) -> int:
    """Do what a file does not have yet of some parts, until a time; 1 if anything failed or is left."""
    until, lock = time.monotonic() + seconds, threading.Lock()
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("ab+") as opened:
        opened.seek(0)
        opened.truncate(opened.read().rfind(b"\n") + 1)
    done = {(line["part"], line["done"]) for line in read(file) if "done" in line}
    todo = [work for one in part for work in PARTS[one]() if re.search(only, work.name)]
    left = [work for work in todo if (work.part, work.name) not in done]
    states: collections.Counter[str] = collections.Counter({"done before": len(todo) - len(left)})

    def do(work: Work) -> None:
        if time.monotonic() >= until:
            states["left"] += 1
            return
        begin = time.monotonic()
        try:
            with tempfile.TemporaryDirectory(prefix="frozen-") as folder:
                lines = [{"part": work.part, **line} for line in work.run(pathlib.Path(folder))]
        except Exception as error:  # another call tries it again, and the others go on
            states["failed"] += 1
            print(f"{work.part} {work.name}: {type(error).__name__}: {str(error)[-1500:]}", flush=True)
            return
        with lock, file.open("a") as opened:
            opened.writelines(json.dumps(line) + "\n" for line in [*lines, {"part": work.part, "done": work.name}])
        states["done"] += 1
        print(f"{work.part} {work.name}: {len(lines)} in {time.monotonic() - begin:.0f} s", flush=True)

    with concurrent.futures.ThreadPoolExecutor(jobs) as workers:
        list(workers.map(do, left))
    print(", ".join(f"{count} {state}" for state, count in states.items()))
    return int(states["failed"] + states["left"] > 0)


# Comparing two.


def differences(old: Iterable[Line], new: Iterable[Line]) -> Iterator[str]:
    """A line for each difference, by part. Ids are compared by the names that they have now (renamed.tsv)."""
    from shardproof import renamed  # late: this file also runs in older trees, which have no such table

    named = ([{**one, "id": renamed.item(one["id"])} for one in lines if "id" in one] for lines in (old, new))
    before, after = ({(one["part"], one["id"]): one for one in lines} for lines in named)
    for part, name in sorted(before.keys() | after.keys()):
        first, second = before.get((part, name)), after.get((part, name))
        if first is None or second is None:
            yield f"{part} {name}: {'new' if first is None else 'missing'}"
            continue
        first, second = _flat(first), _flat(second)
        for key in dict.fromkeys([*first, *second]):
            if first.get(key) != second.get(key):
                yield f"{part} {name}: {key} {json.dumps(first.get(key))} -> {json.dumps(second.get(key))}"


def _flat(line: Line) -> Line:
    found = line.get("found", [])
    fields = {f"{number}.{key}": value for number, one in enumerate(found) for key, value in one.items()}
    return {**line, "found": len(found), **fields}


def compare(old: pathlib.Path, new: pathlib.Path) -> int:
    """Print what differs; 1 if anything does."""
    if missing := [str(path) for path in (old, new) if not path.exists()]:
        raise SystemExit(f"{', '.join(missing)}: there is no such file")
    found = [*differences(read(old), read(new))]
    print(*found, f"{len(found)} differences", sep="\n")
    return int(bool(found))


def main(arguments: Sequence[str] | None = None) -> int:
    """Make a file, or compare two."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments[:1] == ["watch"]:
        return watch(*arguments[1:])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    one = commands.add_parser("make")
    one.add_argument("file", type=pathlib.Path, metavar="FILE")
    one.add_argument("--part", nargs="+", choices=PARTS, default=[*PARTS], help="default: all")
    one.add_argument("--jobs", type=int, default=1, metavar="N", help="pieces of work at a time")
    one.add_argument("--seconds", type=float, default=1e9, metavar="N", help="after which nothing new is begun")
    one.add_argument("--only", default="", metavar="REGEX", help="pieces of work whose name has this")
    one.set_defaults(run=make)
    other = commands.add_parser("compare")
    other.add_argument("old", type=pathlib.Path, metavar="OLD")
    other.add_argument("new", type=pathlib.Path, metavar="NEW")
    other.set_defaults(run=compare)
    options = vars(parser.parse_args(arguments))
    return options.pop("run")(**options)


if __name__ == "__main__":
    sys.exit(main())
