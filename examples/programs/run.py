"""Runs the doctor on public training programs, from checkouts that the user names, and prints a table.

    python examples/programs/run.py --checkouts FOLDER [--only NAME ...] [--table FILE]

FOLDER has one clone for each repository of ``programs.toml``, under the repository's name. A clone is only read: its
files of the revision are copied to a temporary folder, and edited there. Each program runs as it is, under the doctor,
and under the doctor with the mistake of its row. docs/programs.md says what each run shows.
"""

import argparse
import ast
import dataclasses
import io
import json
import os
import pathlib
import re
import subprocess
import sys
import tarfile
import tempfile
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
#: The folder of checkouts, if no option names it.
VARIABLE = "SHARDPROOF_PROGRAMS"
#: Seconds after which a run is given up.
LIMIT = 300

#: A line of a file, a part of it that must be there, and what replaces the part; without a part, a line before it.
Edit = tuple[int, str, str]
Edits = Mapping[str, Sequence[Edit]]


class Unusable(Exception):
    """A checkout, or a row, that cannot be run; its text is one line."""


@dataclasses.dataclass(frozen=True)
class Program:
    """A row of ``programs.toml``."""

    name: str
    repository: str
    revision: str
    script: str
    mistake: str  # in words
    found: str  # the check that finds it
    arguments: str = ""
    folder: str = "."  # where the program is started
    path: str = ""  # folders of the checkout to import from, besides the script's
    ranks: int = 2
    needs: tuple[str, ...] = ()
    edits: Edits = dataclasses.field(default_factory=dict)
    planted: Edits = dataclasses.field(default_factory=dict)
    findings: tuple[str, ...] = ()  # of the program as it is published
    notes: tuple[str, ...] = ()
    judged: str = ""

    @property
    def clone(self) -> str:
        return self.repository.rpartition("/")[2]


@dataclasses.dataclass(frozen=True)
class Ran:
    """How a run ended, and what it printed."""

    code: int
    text: str
    losses: tuple[str, ...]  # of the ranks, in hexadecimal
    seconds: float

    def said(self, kind: str) -> tuple[str, ...]:
        """The checks of the findings ("step") or notes ("note"), in their order, each once."""
        found = re.findall(rf"shardproof doctor: {kind}\b.*\[(D\d+)", self.text)
        return tuple(dict.fromkeys(found))

    @property
    def is_watched(self) -> bool:
        return "shardproof doctor: steps 0-" in self.text or "shardproof doctor: step 0 of" in self.text


def read(file: pathlib.Path = HERE / "programs.toml") -> list[Program]:
    """Read the rows."""
    rows = tomllib.loads(file.read_text())["program"]
    return [
        Program(**{key: tuple(value) if isinstance(value, list) else value for key, value in row.items()})
        for row in rows
    ]


def revision_of(checkout: pathlib.Path) -> str | None:
    """The revision of a checkout; nothing if the folder is none."""
    if not (checkout / ".git").exists():
        return None
    done = subprocess.run(["git", "-C", checkout, "rev-parse", "HEAD"], capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else None


def copy(program: Program, checkout: pathlib.Path, to: pathlib.Path) -> None:
    """Copy the files of the row's revision."""
    at = revision_of(checkout)
    if at is None:
        raise Unusable(f"{checkout} is no checkout of git")
    if at != program.revision:
        raise Unusable(f"{checkout} is at {at[:12]}, and the row at {program.revision[:12]}")
    parts = [program.folder, *program.path.split()]
    archive = subprocess.run(["git", "-C", checkout, "archive", "HEAD", *parts], capture_output=True)
    if archive.returncode:
        raise Unusable(f"{checkout}: {archive.stderr.decode(errors='replace').strip().splitlines()[-1]}")
    with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as files:
        files.extractall(to, filter="data")


def edit(folder: pathlib.Path, edits: Edits) -> None:
    """Apply edits; line numbers are those of the checkout."""
    for name, rows in edits.items():
        file = folder / name
        if not file.is_file():
            raise Unusable(f"the patch does not apply: no {name}")
        lines = file.read_text().split("\n")
        for number, part, new in rows:
            line = lines[number - 1] if number <= len(lines) else ""
            if part not in line:
                raise Unusable(f"the patch does not apply: {name}:{number} has no {part!r}")
            indent = line[: len(line) - len(line.lstrip())]
            # A line before this one stays in its place of the list, so that numbers after it hold.
            lines[number - 1] = line.replace(part, new, 1) if part else f"{indent}{new}\n{line}"
        file.write_text("\n".join(lines))


def begin(script: pathlib.Path) -> None:
    """Let a script import :mod:`on_cpu` before its own first import."""
    text = script.read_text()
    statements = [
        one
        for one in ast.parse(text).body
        if not (isinstance(one, ast.Expr) and isinstance(one.value, ast.Constant))
        and not (isinstance(one, ast.ImportFrom) and one.module == "__future__")
    ]
    lines = text.split("\n")
    lines.insert(statements[0].lineno - 1, "import on_cpu")
    script.write_text("\n".join(lines))


def prepared(program: Program, checkout: pathlib.Path, to: pathlib.Path, *, planted: bool = False) -> pathlib.Path:
    """Copy and edit; return the folder."""
    copy(program, checkout, to)
    edit(to, _joined(program.edits, program.planted) if planted else program.edits)
    begin(to / program.folder / program.script)
    return to


def _joined(first: Edits, second: Edits) -> Edits:
    return {name: [*first.get(name, ()), *second.get(name, ())] for name in {**first, **second}}


def run(program: Program, folder: pathlib.Path, data: pathlib.Path, *under: str) -> Ran:
    """Run the program in its folder on two ranks."""
    cwd = folder / program.folder
    paths = [
        str(HERE),
        str(ROOT),
        *(str(folder / one) for one in program.path.split()),
        os.environ.get("PYTHONPATH", ""),
    ]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "PROGRAMS_DATA": str(data),
        "PROGRAMS_LOSSES": str(folder / "losses"),
        "HF_HUB_OFFLINE": "1",
        "WANDB_MODE": "disabled",
    }
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(program.ranks)]
    command = [*launcher, *under, program.script, *program.arguments.replace("{data}", str(data)).split()]
    began = time.monotonic()
    try:
        done = subprocess.run(
            command, cwd=cwd, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            errors="replace", timeout=LIMIT,
        )  # fmt: skip
        code, text = done.returncode, done.stdout
    except subprocess.TimeoutExpired as error:
        code, text = 124, (error.stdout or b"").decode(errors="replace")
    losses = tuple(file.read_text() for file in sorted(folder.glob("losses.*")))
    return Ran(code, text, losses, time.monotonic() - began)


def make_data(folder: pathlib.Path) -> None:
    """Make small data of the forms that the programs read: images by class, text, and tokens."""
    import numpy
    import PIL.Image

    source = numpy.random.default_rng(0)
    for split in ("train", "val"):
        for kind in ("a", "b"):
            (folder / split / kind).mkdir(parents=True)
            for i in range(32):
                image = PIL.Image.fromarray(source.integers(0, 256, (40, 40, 3), dtype=numpy.uint8))
                image.save(folder / split / kind / f"{i}.png")
        tokens = source.integers(0, 50, 20_000)
        tokens.astype(numpy.uint16).tofile(folder / f"{split}.bin")
        numpy.save(folder / f"{split}_000.npy", tokens.astype(numpy.uint16))
    header = numpy.zeros(256, numpy.int32)
    header[:3] = 20240520, 1, len(tokens)  # the format of llm.c
    (folder / "llmc.bin").write_bytes(header.tobytes() + tokens.astype(numpy.uint16).tobytes())
    letters = numpy.array(list("abcdefghijklmnopqrstuvwxyz \n"))
    text = "".join(source.choice(letters, 20_000))
    (folder / "text.txt").write_text(text)
    rows = [json.dumps({"text": text[i : i + 40]}) for i in range(0, 10_000, 40)]
    (folder / "text.jsonl").write_text("\n".join(rows))


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What is seen of one program."""

    program: Program
    plain: Ran
    watched: Ran
    broken: Ran

    @property
    def problems(self) -> Iterator[str]:
        """What differs from the row, each in a line."""
        program = self.program
        if self.plain.code or len(self.plain.losses) != program.ranks:
            yield f"the program itself ended with {self.plain.code}, and losses of {len(self.plain.losses)} ranks"
        if self.watched.code != self.plain.code:
            yield f"under the doctor it ended with {self.watched.code}"
        if not self.has_equal_bits:
            yield "under the doctor it has other losses"
        if not self.watched.is_watched:
            yield "the doctor watched nothing"
        for kind, seen, expected in (
            ("findings", self.watched.said("step"), program.findings),
            ("notes", self.watched.said("note"), program.notes),
        ):
            if seen != expected:
                yield f"{kind}: {' '.join(seen) or 'none'} instead of {' '.join(expected) or 'none'}"
        if not self.is_found:
            yield f"the mistake is not found by {program.found}: {' '.join(self.broken.said('step')) or 'no finding'}"

    @property
    def has_equal_bits(self) -> bool:
        return self.plain.losses == self.watched.losses

    @property
    def is_found(self) -> bool:
        return self.program.found in self.broken.said("step")

    def row(self) -> str:
        program, watched = self.program, self.watched
        cells = (
            f"{program.name}",
            f"`{program.revision[:12]}`",
            "equal" if self.has_equal_bits else "**differ**",
            " ".join(watched.said("step")) or "none",
            " ".join(watched.said("note")) or "none",
            program.judged,
            program.mistake,
            self.program.found if self.is_found else "**missed**",
        )
        return f"| {' | '.join(cells)} |"


HEAD = """\
| program | revision | losses | findings | notes | judged | mistake | found by |
|---|---|---|---|---|---|---|---|"""


def examine(program: Program, checkout: pathlib.Path, data: pathlib.Path, logs: pathlib.Path | None) -> Outcome:
    """Run a program as it is, under the doctor, and with its mistake."""
    doctor = ("-m", "shardproof", "doctor")
    ran = []
    for name, planted, under in (("plain", False, ()), ("doctor", False, doctor), ("mistake", True, doctor)):
        with tempfile.TemporaryDirectory(prefix="programs-") as scratch:
            folder = prepared(program, checkout, pathlib.Path(scratch), planted=planted)
            ran.append(run(program, folder, data, *under))
        if logs:
            logs.mkdir(parents=True, exist_ok=True)
            (logs / f"{program.name.replace('/', '_')}.{name}.txt").write_text(ran[-1].text)
    return Outcome(program, *ran)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; the exit code is 1 if a program differs from its row, and 2 if a checkout cannot be used."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--checkouts", default=os.environ.get(VARIABLE), help=f"the folder of clones; ${VARIABLE} too")
    parser.add_argument("--only", nargs="+", default=(), metavar="NAME", help="programs whose names begin so")
    parser.add_argument("--table", type=pathlib.Path, help="write the table of docs/programs.md here")
    parser.add_argument("--logs", type=pathlib.Path, help="keep what each run prints in this folder")
    asked = parser.parse_args(arguments)
    if not asked.checkouts:
        print(f"skipped: no folder of checkouts is named (--checkouts, or {VARIABLE})")
        return 0
    rows = [row for row in read() if not asked.only or row.name.startswith(tuple(asked.only))]
    code, table, began = 0, [HEAD], time.monotonic()
    with tempfile.TemporaryDirectory(prefix="programs-data-") as scratch:
        data = pathlib.Path(scratch)
        make_data(data)
        for row in rows:
            checkout = pathlib.Path(asked.checkouts) / row.clone
            if not checkout.exists():
                print(f"skipped: {row.name}: no {checkout}; it is {row.repository} at {row.revision[:12]}", flush=True)
                continue
            try:
                outcome = examine(row, checkout, data, asked.logs)
            except Unusable as error:
                print(f"{row.name}: {error}", flush=True)
                code = 2
                continue
            problems = list(outcome.problems)
            seconds = " ".join(f"{ran.seconds:.0f}" for ran in (outcome.plain, outcome.watched, outcome.broken))
            print(f"{row.name}: {'; '.join(problems) or 'as its row'} ({seconds} s)", flush=True)
            table.append(outcome.row())
            if asked.table:
                asked.table.write_text("\n".join([*table, ""]))
            code = max(code, int(bool(problems)))
    found = sum("**missed**" not in row for row in table[1:])
    print(f"{len(table) - 1} programs in {time.monotonic() - began:.0f} s; {found} of {len(table) - 1} mistakes found")
    return code


if __name__ == "__main__":
    sys.exit(main())
