"""The command line: ``shardproof run``, ``report`` and others, also as ``python -m shardproof``."""

import importlib
import importlib.util
import io
import os
import sys
from collections.abc import Callable, Sequence

from shardproof import garbage, torch_versions

USAGE = """\
usage: shardproof COMMAND ...

shardproof trains small models under implementations of sharded data parallelism and under
DistributedDataParallel, compares every stage of each step, and writes a run file. The commands
other than run, doctor, record, compare, state, check, plan, implementations, torch-names, findings and
explain read run files; they need neither torch nor a GPU.

commands:
  run      run the packaged suites with pytest; takes pytest's arguments and shardproof's options
  report   print a run file's matrix, failures and skips
  page     write an HTML page of one or more run files: the matrix, and each case with its plots
  gate     compare a change's run file with that of the commit before; exit code 1 if something got worse
  expectations
           draft the known failures of an implementation from a run file
  findings
           list the known errors of other implementations, run the program that shows each, or report one
  merge    join the run files of several environments into one
  submit   check a run file and put its summary into a repository of results
  doctor   run your own training script and report mistakes in its first steps; under torchrun
  record   run your own training script and write what each rank sees of some steps; under torchrun
  compare  report where two such recordings first diverge; their ranks, mesh and accumulation may differ
  state    report what two states of a training, or their checkpoints, have otherwise
  reproduce
           write a failing case of torch's own implementations as a program of plain torch
  check    train your own model on several ranks and in one process, and compare every stage
  plan     simulate a step of your own model: memory and traffic of a rank, at any number of ranks
  implementations
           list the implementations that --impl accepts, with version and devices, or why they do not run
  explain  print the documentation of a code of the doctor, a finding, a requirement or an exit code
  torch-names
           list the private names of torch that shardproof uses and the installed torch lacks

A first run, its matrix, why a case fails, and whether a change made anything worse:

  shardproof run --impl reference,torch.fully_shard --effort quick --report run.json
  shardproof report run.json
  shardproof run "suites/test_clipping.py" --impl torch.fully_shard -k empty --runxfail --explain
  shardproof gate base.json run.json

`shardproof COMMAND --help` describes a command. Words with a meaning of their own, such as case,
world and verdict, are in the glossary of CONTRIBUTING.md; README.md names the other documents.
"""

#: The commands that do more than read files, with the packages that they import first.
NEEDS = {
    "run": ("torch", "pytest"), "plan": ("torch",), "doctor": ("torch",), "record": ("torch",), "compare": ("torch",),
    "state": ("torch",),
    "check": ("torch", "pytest"), "reproduce": ("torch", "pytest"), "implementations": ("torch",),
    "torch-names": ("torch",),
}  # fmt: skip

#: Those that need the torch of the suites; the others run with an older one, too.
_OF_SUITES = ("run", "plan", "reproduce")

COMMANDS = (
    "run", "report", "page", "gate", "expectations", "findings", "merge", "submit", "doctor", "record", "compare",
    "state", "check", "reproduce", "plan", "implementations", "explain", "torch-names",
)  # fmt: skip

#: Those that run a user's script in this process.
_USERS = ("doctor", "record")

BAD_USAGE = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command, by default that of the process, and return its exit code.

    It is 2 with one line on stderr for a command that does not exist, or whose packages are not installed.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    command = given[0] if given else ""
    if command in ("-h", "--help"):
        print(USAGE, end="")
        return 0
    # A help is read before anything is installed.
    needs = () if {"-h", "--help"} & set(given[1:2]) else NEEDS.get(command, ())
    if missing := [name for name in needs if importlib.util.find_spec(name) is None]:
        names = " and ".join(missing)
        how = f"`pip install {' '.join(missing)}` brings what is missing"
        print(f"shardproof {command} needs {names}; {how}", file=sys.stderr)
        return BAD_USAGE
    if needs and command in _OF_SUITES and (refusal := torch_versions.refusal(f"shardproof {command}")):
        print(refusal, file=sys.stderr)
        return BAD_USAGE
    if command in COMMANDS:
        # Each command is imported when it is chosen: a run file can be read without torch and pytest.
        name = command.replace("-", "_")
        if command not in _USERS:
            garbage.retire_at_exit()
        with garbage.resting():
            chosen: Callable[[list[str]], int] = getattr(importlib.import_module(f"shardproof.commands.{name}"), name)
        return chosen(given[1:])
    known = f"{', '.join(COMMANDS[:-1])} or {COMMANDS[-1]}"
    print(f"shardproof: {command!r} is not a command; use {known}" if command else USAGE, file=sys.stderr)
    return BAD_USAGE


def console() -> int:
    """The entry point of the installed command: :func:`main` for a terminal that may be closed or lack Unicode."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        code = main()
        sys.stdout.flush()
    except BrokenPipeError:  # the reader, `head` say, has seen enough; the flush at exit must not complain either
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return code


if __name__ == "__main__":
    sys.exit(console())
