"""Runs torch's own tests of FSDP against the reference and against torch, and prints a table by file.

python -m tests.fsdp_impl.upstream --checkout pytorch=/src/pytorch --checkout xpu=/src/torch-xpu-ops
"""

import argparse
import concurrent.futures
import dataclasses
import json
import os
import pathlib
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from tests.fsdp_impl.upstream import private, running, sources, table
from tests.fsdp_impl.upstream.job import Job

IMPLEMENTATIONS = ("reference", "torch")
#: Checkouts as ``--checkout`` takes them, with blanks between.
VARIABLE = "SHARDPROOF_UPSTREAM"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code, which is 0 also if no checkout is named."""
    asked = _parser().parse_args(arguments)
    try:
        if asked.show:
            _print(json.loads(pathlib.Path(asked.show).read_text()))
        else:
            with tempfile.TemporaryDirectory(prefix="upstream-") as folder:
                _run(asked, pathlib.Path(folder))
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def _run(asked: argparse.Namespace, scratch: pathlib.Path) -> None:
    files = _files(asked, scratch)
    found = {name: private.names_by_test(_text(job)) for name, job in files.items()}
    if asked.private:
        _print_private(found)
    elif files:
        outcomes = _outcomes(asked, files)
        named = {name: {test: sorted(names) for test, names in tests.items() if names} for name, tests in found.items()}
        written = {"torch": torch.__version__, "device": asked.device, "ranks": asked.ranks, "files": outcomes}
        if asked.results:
            pathlib.Path(asked.results).write_text(json.dumps(written | {"private": named}, indent=1))
        _print(written | {"private": named})


def _files(asked: argparse.Namespace, scratch: pathlib.Path) -> dict[str, Job]:
    """Return the files of the named checkouts, each with its job but for the implementation."""
    rows = sources.read()
    named = _checkouts([*os.environ.get(VARIABLE, "").split(), *asked.checkout], [row.name for row in rows])
    found: dict[str, Job] = {}
    for row in rows:
        if row.name not in named:
            print(f"skipped: {row.name} ({row.repository} at {row.revision[:12]}): no checkout is named")
            continue
        folder = scratch / row.name
        for path in sources.files_of(row, named[row.name], folder):
            name = f"{row.name}/{path.name}"
            if not asked.only or any(part in name for part in asked.only):
                module = f"upstream_{row.name.replace('-', '_')}_{path.stem}"
                patch = row.patch_for(asked.device)
                found[name] = Job(module, str(path), patch, "", asked.device, asked.ranks, str(scratch / module))
    return found


def _outcomes(asked: argparse.Namespace, files: Mapping[str, Job]) -> dict[str, dict[str, Any]]:
    """Run every file for both implementations; return by file and implementation what :class:`running.Ran` has."""
    until = time.monotonic() + asked.within
    # The longest first, so that none is left to the end.
    order = sorted(files.items(), key=lambda one: -len(_text(one[1])))
    jobs = [
        (name, dataclasses.replace(job, implementation=implementation, events=events, part=part, parts=asked.parts))
        for name, job in order
        for part in range(asked.parts)
        for implementation in IMPLEMENTATIONS
        for events in [f"{job.events}-{implementation}-{part}.jsonl"]
    ]

    def one(name: str, job: Job) -> running.Ran:
        began = time.monotonic()
        ran = running.run(job, asked.limit, until)
        kinds = [f"{sum(one.outcome == kind for one in ran.outcomes.values())} {kind}" for kind in ("pass", "fail")]
        took = time.monotonic() - began
        part = f", part {job.part + 1} of {job.parts}" if job.parts > 1 else ""
        print(f"{name} {job.implementation}{part}: {ran.unusable or ', '.join(kinds)} in {took:.0f} s", flush=True)
        return ran

    outcomes = {name: {implementation: running.Ran({}) for implementation in IMPLEMENTATIONS} for name in files}
    with concurrent.futures.ThreadPoolExecutor(asked.jobs) as pool:
        for (name, job), ran in zip(jobs, pool.map(lambda given: one(*given), jobs), strict=True):
            whole = outcomes[name][job.implementation]
            whole.outcomes.update(ran.outcomes)
            whole.unusable = whole.unusable or ran.unusable
    return {name: {of: dataclasses.asdict(ran) for of, ran in both.items()} for name, both in outcomes.items()}


def _print(written: Mapping[str, Any]) -> None:
    files = {}
    for name, ran in written["files"].items():
        ours, theirs = (_ran(ran[implementation]) for implementation in IMPLEMENTATIONS)
        names = {test: frozenset(used) for test, used in written["private"][name].items()}
        files[name] = (table.compare(ours, theirs, names), theirs.unusable or ours.unusable)
    print(f"\ntorch {written['torch']}, {written['ranks']} ranks on {written['device']}\n")
    print(table.printed(files))


def _ran(written: Mapping[str, Any]) -> running.Ran:
    outcomes = {test: running.Outcome(**outcome) for test, outcome in written["outcomes"].items()}
    return running.Ran(outcomes, written["unusable"])


def _print_private(found: Mapping[str, Mapping[str, frozenset[str]]]) -> None:
    for name, tests in found.items():
        print(f"{name}: {sum(bool(names) for names in tests.values())} of {len(tests)} tests use private names")
        for test, names in tests.items():
            if names:
                print(f"    {test}: {', '.join(sorted(names))}")


def _text(job: Job) -> str:
    return pathlib.Path(job.path).read_text(encoding="utf-8")


def _checkouts(written: Sequence[str], names: Sequence[str]) -> dict[str, pathlib.Path]:
    named = {}
    for one in written:
        name, equals, folder = one.partition("=")
        if not equals or name not in names:
            raise ValueError(f"--checkout {one}: say NAME=FOLDER, with one of the names {', '.join(names)}")
        if not pathlib.Path(folder).is_dir():
            raise ValueError(f"--checkout {one}: {folder} is no folder")
        named[name] = pathlib.Path(folder).resolve()
    return named


def _parser() -> argparse.ArgumentParser:
    has_devices = torch.cuda.is_available()
    parser = argparse.ArgumentParser(prog=f"python -m {__package__}", description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--checkout",
        action="append",
        default=[],
        metavar="NAME=FOLDER",
        help=f"a row of sources.toml: a clone that has the row's revision, or its files (also {VARIABLE})",
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if has_devices else "cpu")
    parser.add_argument("--ranks", type=int, default=torch.cuda.device_count() if has_devices else 2)
    parser.add_argument("--only", action="append", default=[], metavar="TEXT", help="only files whose name has it")
    parser.add_argument(
        "--jobs",
        type=int,
        default=1,
        help="jobs at a time: a file, or a part of it, for one implementation (default: %(default)s)",
    )
    parser.add_argument(
        "--parts", type=int, default=1, help="jobs into which each file is divided (default: %(default)s)"
    )
    parser.add_argument("--limit", type=float, default=120.0, help="seconds of a test (default: %(default)s)")
    parser.add_argument("--within", type=float, default=86400.0, help="seconds of the run (default: %(default)s)")
    parser.add_argument("--results", metavar="FILE", help="write all outcomes as JSON")
    parser.add_argument("--show", metavar="FILE", help="print the table of such a file, and run nothing")
    parser.add_argument("--private", action="store_true", help="list the tests that use private names; run nothing")
    return parser


if __name__ == "__main__":
    sys.exit(main())
