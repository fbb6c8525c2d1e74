"""Training scripts on ranks that are forked from a process with torch, as ``torchrun`` would start them.

A rank costs a fork instead of an import of torch, which takes longer than the training of a small model.

    python -m tests.harness.forked examples/healthy/ddp_plain.py --ranks 1,2,4 --seeds 2

prints what the doctor finds and where bits differ with the doctor and without.
"""

import argparse
import dataclasses
import faulthandler
import os
import pathlib
import re
import runpy
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence

import shardproof.__main__
from shardproof.harness.watching import script as scripts
from shardproof.harness.worlds import forkserver, gloo

#: Seconds after which a run is ended: a script of a few steps takes one or two.
PATIENCE = 100.0

#: In a rank, what the script has left.
_kept: list[object] = []


@dataclasses.dataclass
class Ran:
    """Exit codes, standard output and standard error, each by rank."""

    codes: list[int | None]
    out: list[str]
    err: list[str]

    @property
    def is_complete(self) -> bool:
        """Whether every rank came to its end."""
        return not any(code is None or code for code in self.codes)

    @property
    def bits(self) -> list[str]:
        """What ranks print with all bits: losses and checksums."""
        return re.findall(r"^rank \d+ .*$", "".join(self.out), re.MULTILINE)

    @property
    def text(self) -> str:
        """All that was printed."""
        return "".join(
            f"--- rank {rank}, exit code {code}\n{out}{err}"
            for rank, (code, out, err) in enumerate(zip(self.codes, self.out, self.err, strict=True))
        )


def run(
    script: pathlib.Path,
    ranks: int,
    *arguments: str,
    command: Sequence[str] = (),
    double: bool = False,
    mended: bool = True,
    **variables: str,
) -> Ran:
    """Run a script on so many ranks, under a command of shardproof if one is given.

    Args:
        script: the path.
        ranks: their number.
        arguments: those of the script.
        command: ``("doctor", "--strict")``, for example.
        double: whether float64 is the default dtype.
        mended: whether gloo's groups have one worker thread each; two may crash (F-270).
        variables: of the environment.
    """
    import torch.distributed as dist

    forkserver.start()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory(prefix="sp-forked-") as name:
        folder = pathlib.Path(name)
        common = {
            "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "GROUP_RANK": "0", "ROLE_RANK": "0",
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_MAX_RESTARTS": "0",
            "CUDA_VISIBLE_DEVICES": "", "GLOO_SOCKET_IFNAME": "lo", "HF_HUB_OFFLINE": "1", **variables,
        }  # fmt: skip
        processes = []
        for rank in range(ranks):
            environment = {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            given = [*command, str(script.resolve()), *arguments]
            target = (str(folder), rank, bool(command), given, environment, double, mended)
            process = forkserver.context().Process(target=_rank, args=target)
            forkserver.spawn(process, f"rank {rank} of {script.name}")
            processes.append(process)
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end and any(one.exitcode is None for one in processes):
            if any(one.exitcode for one in processes):  # the others may wait for it
                end = min(end, time.monotonic() + 5)
            time.sleep(0.02)
        codes = [one.exitcode for one in processes]
        for one in processes:
            if one.exitcode is None:
                one.kill()
            one.join()
        texts = [[(folder / f"{rank}.{kind}").read_text() for rank in range(ranks)] for kind in ("out", "err")]
    return Ran(codes, *texts)


def _rank(
    folder: str,
    rank: int,
    is_watched: bool,
    given: Sequence[str],
    environment: dict[str, str],
    double: bool,
    mended: bool,
) -> None:
    forkserver.leave_with_the_controller()
    os.environ.update(environment)
    working = pathlib.Path(folder) / f"work{rank}"
    working.mkdir()
    os.chdir(working)
    for number, kind in ((1, "out"), (2, "err")):
        with (pathlib.Path(folder) / f"{rank}.{kind}").open("wb") as file:
            os.dup2(file.fileno(), number)
    sys.stdout, sys.stderr = (os.fdopen(os.dup(number), "w", 1) for number in (1, 2))
    if mended:
        gloo.mend_groups()
    run_path = runpy.run_path
    # With its objects a script would free groups whose threads may wait for the interpreter that frees them.
    runpy.run_path = lambda *given, **named: _kept.append(run_path(*given, **named))  # type: ignore[assignment]
    if double:
        import torch

        torch.set_default_dtype(torch.float64)
    faulthandler.dump_traceback_later(PATIENCE / 2)  # says where it hangs
    try:
        if is_watched:
            sys.exit(shardproof.__main__.main(list(given)))
        scripts.run(given)
    except SystemExit:
        raise
    except BaseException:
        traceback.print_exc()
        sys.exit(1)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def findings(text: str) -> list[str]:
    """The findings that the doctor prints, without notes."""
    lines = [line for line in text.splitlines() if "shardproof doctor: step " in line and "note: " not in line]
    return [line for line in lines if line.endswith("]")]


def losses(ran: Ran) -> list[list[float]]:
    """The losses of each step, one for each rank that prints some."""
    found = [[float.fromhex(one) for one in re.findall(r" loss \S+ (\S+)", text)] for text in ran.out]
    return [list(step) for step in zip(*filter(None, found), strict=True)]


def main() -> int:
    """Print a line for each run, and what the doctor says where it finds something."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scripts", nargs="+", type=pathlib.Path)
    parser.add_argument("--ranks", default="1,2,4")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--double", action="store_true", help="print losses in float64, the mean of all ranks")
    parser.add_argument("--print", action="store_true", help="print all that a run prints")
    options = parser.parse_args()
    bad = 0
    for script in options.scripts:
        for ranks in map(int, options.ranks.split(",")):
            for seed in range(options.seeds):
                begin = time.monotonic()
                watched = run(script, ranks, command=("doctor", "--strict"), SEED=str(seed))
                alone = run(script, ranks, SEED=str(seed))
                seconds = time.monotonic() - begin
                found = findings(watched.text)
                is_whole = watched.is_complete and "internal error" not in watched.text
                said = "ok" if not found and is_whole else f"{len(found)} findings {watched.codes}"
                said += "" if alone.is_complete else f"; alone {alone.codes}"
                said += "" if watched.bits == alone.bits else "; OTHER BITS"
                if options.double:
                    double = run(script, ranks, double=True, SEED=str(seed))
                    said += "  float64 " + " ".join(f"{loss:.13f}" for loss in map(statistics.mean, losses(double)))
                print(f"{script.stem} ranks {ranks} seed {seed}: {said} ({seconds:.1f} s)", flush=True)
                is_bad = not said.startswith("ok") or "OTHER" in said or not alone.is_complete
                bad += is_bad
                if not alone.is_complete:
                    print(alone.text[-1500:])
                if options.print or is_bad:
                    print(watched.text if options.print else "".join(watched.err)[-1500:], flush=True)
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
