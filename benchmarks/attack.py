"""Cases with known verdicts while ranks, workers and the controller are attacked at random.

    python benchmarks/attack.py [--cases 1000] [--workers 0] [--seed 0]

Every case records its own number; a third of the cases fail with a message of their own. Meanwhile random ranks are
killed, or stopped and continued, the pytest process that runs cases gets exceptions as pytest-timeout raises them, and
with xdist some workers are killed. Then every record must be that of its case: either the known verdict, or one that
names an attack; every selected case must have a record or be listed as not run; and no process or folder may be left.

Prints the number of attacks and of verdicts, and every violation; the exit code is 1 if there is any.
"""

from __future__ import annotations

import argparse
import collections
import os
import pathlib
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time

ROOT = pathlib.Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from shardproof.reports.record import CaseRecord  # noqa: E402
from shardproof.reports.run import Run, load_run  # noqa: E402

CASES = """
import os, pathlib, time
import pytest
import torch.distributed as dist
from shardproof.testing import world

@world(2)
@pytest.mark.parametrize("number", range({cases}))
def test_known(rank, number):
    rank.record.add_losses(number=float(number))
    time.sleep({seconds} * (number % 5))
    dist.barrier()
    assert number % 3, f"the failure of case {{number}}"
"""

#: Loaded into every pytest process: it leaves its process id, and raises what the attacker asks for.
PLUGIN = """
import os, pathlib, signal
import pytest

class Attack(Exception):
    pass

def attack(number, frame):
    raise Attack("an attack on the controller")

def pytest_sessionstart(session):
    pathlib.Path({folder!r}, f"controller-{{os.getpid()}}").touch()

@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem):
    # Not in pytest's own code around the case, which ends the whole run.
    try:
        signal.signal(signal.SIGUSR2, attack)
        return (yield)
    finally:
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)

signal.signal(signal.SIGUSR2, signal.SIG_IGN)
"""

#: What a record of a case that was attacked may say.
SIGNS = (
    "killed by SIGKILL",
    "did not answer before the deadline",
    "still waiting",
    "an attack on the controller",
    "did not start",
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
)


class Attacker(threading.Thread):
    """Attacks the processes of a run until :meth:`end` is called.

    Args:
        process: the run.
        folder: where the pytest processes leave their ids.
        seed: of the random choices.
    """

    def __init__(self, process: subprocess.Popen[bytes], folder: pathlib.Path, *, seed: int) -> None:
        super().__init__(daemon=True)
        self.done: collections.Counter[str] = collections.Counter()
        self._process, self._folder, self._random = process, folder, random.Random(seed)
        self._ended = threading.Event()

    def run(self) -> None:
        kinds = ["kill a rank", "stop a rank", "interrupt a controller", "interrupt a controller", "kill a worker"]
        while not self._ended.wait(self._random.uniform(0.5, 4.0)):
            kind = self._random.choices(kinds, weights=[4, 4, 4, 4, 1])[0]
            if self._attack(kind):
                self.done[kind] += 1

    def end(self) -> None:
        """Stop attacking."""
        self._ended.set()
        self.join()

    def _attack(self, kind: str) -> bool:
        controllers = [pid for pid in self._controllers() if pid in processes_of(self._folder)]
        workers = [pid for pid in controllers if pid != self._process.pid]
        pool = {"interrupt a controller": controllers, "kill a worker": workers}.get(kind)
        victims = pool if pool is not None else ranks_of(self._folder)
        if not victims:
            return False
        victim = self._random.choice(victims)
        if kind == "stop a rank":
            return send(victim, signal.SIGSTOP) and self._continue(victim)
        return send(victim, signal.SIGUSR2 if kind == "interrupt a controller" else signal.SIGKILL)

    def _continue(self, victim: int) -> bool:
        """Let the rank go on at once, soon, or when the case's deadline is over."""
        self._ended.wait(self._random.choice([0.01, 0.5, 8.0]))
        send(victim, signal.SIGCONT)
        return True

    def _controllers(self) -> list[int]:
        return [int(path.name.partition("-")[2]) for path in self._folder.glob("controller-*")]


def send(pid: int, number: signal.Signals) -> bool:
    """Send a signal; return whether the process was there."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


def processes_of(folder: pathlib.Path) -> dict[int, str]:
    """The processes of the run, which have the folder in their environment, with their command lines."""
    found = {}
    for path in pathlib.Path("/proc").iterdir():
        if path.name.isdecimal():
            try:
                if f"ATTACKED={folder}".encode() in path.joinpath("environ").read_bytes().split(b"\0"):
                    found[int(path.name)] = path.joinpath("cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                continue
    return found


def ranks_of(folder: pathlib.Path) -> list[int]:
    """The rank processes of the run: children of a forkserver that lead sessions of their own."""
    known = processes_of(folder)
    servers = {pid for pid, command in known.items() if "forkserver" in command}
    return [pid for pid in known if pid in servers and parent(pid) in servers]


def parent(pid: int) -> int:
    """The id of a process's parent; 0 if it has ended."""
    try:
        return int(pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()[1])
    except OSError:
        return 0


def violation(case: CaseRecord) -> str | None:
    """What is wrong with a record, given the number of its case."""
    number = case.parameters["number"]
    text = case.failure.text if case.failure else ""
    if case.losses.get("number", (float(number),)) != (float(number),):
        return f"case {number} has the losses of case {case.losses['number']}"
    if any(sign in text for sign in SIGNS):
        return None
    known = "pass" if number % 3 else "fail"
    if case.verdict != known:
        return f"case {number} is {case.verdict}, not {known}: {text[:300]}"
    if known == "fail" and set(re.findall(r"the failure of case (\d+)", text)) != {str(number)}:
        return f"case {number} has another failure: {text[:300]}"
    return None


def run(folder: pathlib.Path, options: argparse.Namespace) -> tuple[Run, collections.Counter[str], int]:
    """Run the cases under attack; return what the run file says, the attacks, and the exit code."""
    folder.joinpath("test_known.py").write_text(CASES.format(cases=options.cases, seconds=0.01))
    folder.joinpath("attacked.py").write_text(PLUGIN.format(folder=str(folder)))
    report, scratch = folder / "run.json", folder / "tmp"
    scratch.mkdir()
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "shardproof.plugin"]
    command += ["-p", "attacked", "--impl", "ddp", "--device", "cpu", "--deadline", "5", "--report", str(report)]
    command += ["-n", str(options.workers), "--max-worker-restart", "1000", "--tb", "no", "--no-header"]
    path = os.pathsep.join(filter(None, [str(ROOT), str(folder), os.environ.get("PYTHONPATH")]))
    environment = os.environ | {"PYTHONPATH": path, "TMPDIR": str(scratch), "ATTACKED": str(folder)}
    # torch makes a folder for compiled code when it is imported, and leaves it.
    environment |= {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor")}
    with folder.joinpath("output").open("wb") as output:
        process = subprocess.Popen(command, cwd=folder, env=environment, stdout=output, stderr=output)
        attacker = Attacker(process, folder, seed=options.seed)
        attacker.start()
        code = process.wait()
        attacker.end()
    partial = report.with_name(report.name + ".partial")
    return load_run(partial if partial.exists() else report), attacker.done, code


def main() -> int:
    """Run the cases under attack, and print what came of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        started = time.monotonic()
        result, attacks, code = run(folder, options)
        seconds = time.monotonic() - started
        wrong = [text for case in result.cases if (text := violation(case))]
        count = len(result.cases) + len(result.not_run)
        if count != options.cases:
            wrong.append(f"{count} of {options.cases} cases have a record or are listed as not run")
        if result.not_run and not result.incomplete:
            wrong.append(f"{len(result.not_run)} cases did not run, and the run calls itself complete")
        until = time.monotonic() + 10
        while processes_of(folder) and time.monotonic() < until:
            time.sleep(0.1)
        wrong += [f"process {pid} is left: {command}" for pid, command in processes_of(folder).items()]
        left = [
            path.name
            for path in (folder / "tmp").iterdir()
            if not path.name.startswith(("shardproof-leases", "pytest-of-"))
        ]
        wrong += [f"{path} is left" for path in left]
        if code not in (0, 1):
            wrong.append(f"exit code {code}: {folder.joinpath('output').read_text(errors='replace')[-2000:]}")
    verdicts = collections.Counter(str(case.verdict) for case in result.cases)
    where = f"{os.cpu_count()} cores"
    print(f"{options.cases} cases, {options.workers} workers, {seconds:.0f} s, seed {options.seed}, {where}")
    print(f"attacks: {dict(attacks)}")
    print(f"records: {dict(verdicts)}, not run: {len(result.not_run)} ({result.incomplete or 'complete'})")
    print("\n".join(wrong) or "every verdict belongs to its case, and nothing is left")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
