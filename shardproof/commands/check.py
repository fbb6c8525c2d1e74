"""The command ``shardproof check``: the user's own training on several ranks, and the same steps in one process."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import io
import json
import os
import pathlib
import shlex
import sys
import tempfile
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from shardproof import commands, folders
from shardproof.commands import judgement, positive
from shardproof.runfile import CaseRecord, Verdict

if TYPE_CHECKING:
    from shardproof.harness.training.request import Request

_PACKAGE = pathlib.Path(__file__).parents[1]

_EPILOG = """\
examples:
  shardproof check --model gpt:0.1b --mesh 2
  shardproof check --model llama:0.9b --mesh 2x2 --impl torch.fully_shard --param-dtype bfloat16
  shardproof check --model my.py:model --parallelize my.py:parallelize --step my.py:step --mesh dp=2,tp=2
  shardproof check --model my.py:model --save my.py:save --load my.py:load --mesh 4 --save-and-resume 3 --resume-mesh 2

The functions are called as model(), parallelize(model, mesh), optimizer(model), data(step, rank) and
step(model, optimizer, microbatches, mesh). docs/check.md describes them and what is compared.

exit codes: 0 all steps agree; 1 one diverges, or the training fails; 2 an option or a function is not valid"""


def check(arguments: Sequence[str]) -> int:
    """Check a training, print what diverges first, and return the exit code."""
    options = _parser().parse_args(arguments)
    if (here := os.getcwd()) not in sys.path:
        sys.path.insert(0, here)
    if "torch" not in sys.modules and "TORCHELASTIC_RUN_ID" not in os.environ:
        # It imports torch while this process does.
        from shardproof.harness.worlds import forkserver

        with contextlib.suppress(OSError):  # pytest says it
            forkserver.start()
    from shardproof.harness.training.request import COMMAND, NotCheckable, functions_of

    try:
        request = _request(options)
        if request.keep:
            _make_folder(request.keep)
            if request.save_and_resume and os.listdir(request.keep):
                raise NotCheckable(f"check: --keep {request.keep} has files: give an empty folder")
        functions_of(request)
        _fits(request, options.device)
        for option in ("bisect", "save_and_resume"):
            if getattr(options, option) and "TORCHELASTIC_RUN_ID" in os.environ:
                name = option.replace("_", "-")
                raise NotCheckable(f"check: --{name} starts checks of its own: start it without torchrun")
        if request.save_and_resume:
            _fits(request.resumed(), options.device)
            if options.bisect or options.explain:
                raise NotCheckable("check: --bisect and --explain are of a check without --save-and-resume")
    except NotCheckable as error:
        print(f"shardproof {error}", file=sys.stderr)
        return commands.BAD_INPUT
    os.environ[COMMAND] = shlex.join(["python", "-m", "shardproof", "check", *arguments])
    if request.save_and_resume:
        return _save_and_resume(request, options)
    with tempfile.TemporaryDirectory(prefix="shardproof-check-") as folder:
        code, record = _recorded(request, options, options.report or os.path.join(folder, "run.json"))
    if record is None:  # as of ranks of torchrun besides the first
        return code
    code = _say(request, record)
    if refused := judgement.write(options.json, _judged(record, code)):
        return refused
    if options.bisect and code == 1:
        from shardproof.harness.training import trials

        given = dict(one.split("=", 1) for one in options.off_as)
        try:
            print(trials.search(request, record, device=options.device, given=given, check=check))
        except NotCheckable as error:
            print(f"shardproof {error}", file=sys.stderr)
            return commands.BAD_INPUT
    return code


def _save_and_resume(request: Request, options: argparse.Namespace) -> int:
    """Run the training that is saved, and then the resumed one in processes of its own."""
    with tempfile.TemporaryDirectory(prefix="shardproof-check-") as folder:
        request = dataclasses.replace(request, shared=request.keep or folder)
        report = options.report or os.path.join(folder, "run.json")
        # The run file of the first part is that of the check if the second one is not begun.
        return _part(request, options, report) or _part(request.resumed(), options, report)


def _part(request: Request, options: argparse.Namespace, report: str) -> int:
    """Run one of the two parts, and print how it ended, but not that the first one has been saved."""
    from shardproof.harness.training import user_calls

    code, record = _recorded(request, options, report)
    if record is None:
        return code or commands.BAD_INPUT
    if record.verdict is Verdict.PASS and not request.readers:
        return 0
    line = "" if record.verdict is Verdict.PASS else user_calls.line_of(pathlib.Path(request.shared), request)
    line = f"{_title(request)}: {line}" if line else ""
    code = _say(request, record, line)
    return judgement.write(options.json, _judged(record, code, line)) or code


def _title(request: Request) -> str:
    return f"{request.model}, {request.implementation}, mesh {request.mesh_text}"


def _recorded(request: Request, options: argparse.Namespace, report: str) -> tuple[int, CaseRecord | None]:
    """Run a check, and return its exit code and its record; of a run without one, print why."""
    from shardproof.harness.training.request import VARIABLE
    from shardproof.harness.training.starting import record_of

    os.environ[VARIABLE] = request.dumps()
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        code = _run(request, options, report)
    record = record_of(report)
    if record is None:
        print(said.getvalue() if code else "", end="", file=sys.stderr)
    return code, record


def _run(request: Request, options: argparse.Namespace, report: str) -> int:
    import pytest

    plugins = dict.fromkeys([*os.environ.get("PYTEST_PLUGINS", "").split(","), "shardproof.plugin"])
    os.environ["PYTEST_PLUGINS"] = ",".join(filter(None, plugins))
    # It has read the request of an earlier check of this process.
    sys.modules.pop("shardproof.own.test_check", None)
    given = [f"--rootdir={_PACKAGE}", "-c", str(_PACKAGE / "suites.ini"), f"--confcutdir={_PACKAGE / 'own'}",
             "--import-mode=importlib", "-p", "no:cacheprovider", "-q", str(_PACKAGE / "own" / "test_check.py"),
             "--impl", request.implementation, "--device", options.device, "--report", report,
             "--deadline", f"{options.deadline:g}", *(["--explain"] if options.explain else [])]  # fmt: skip
    return int(pytest.main(given))


def _say(request: Request, record: CaseRecord, line: str = "") -> int:
    """Print how a check ended, and return the exit code; a line stands for the text of what failed."""
    own = record.own
    if record.verdict is Verdict.PASS and own is not None:
        other = "one process that trains on the microbatches of all ranks"
        if request.save_and_resume:
            other = f"the run that was saved after {request.save_and_resume} steps and went on"
        print(f"pass  {_title(request)}: {request.steps} steps agree with {other}")
        for line in _facts(record):
            print(f"  {line}")
        return 0
    text = record.failure.text if record.failure is not None else "; ".join(record.missing)
    if text.startswith("check: "):
        print(f"shardproof {text.splitlines()[0]}", file=sys.stderr)
        return commands.BAD_INPUT
    print(f"{record.verdict}  {line or text}")
    found = record.failure.stage if record.failure is not None else None
    if record.explanation is None and found in ("output", "loss", "gradient before its reduction"):
        print("--explain names the first module whose output or gradient diverges")
    print(f"reproduce: {record.reproduction}")
    return 1


def _judged(record: CaseRecord, code: int, line: str = "") -> judgement.Judgement:
    """Return the judgement of a check; a line stands for the text of what failed, as where it is printed."""
    if record.failure is None:
        text = "\n".join(record.missing or (_facts(record) if record.own is not None else ()))
        return judgement.of("check", (), text, is_judged=code == 0)
    failure, own = record.failure, record.own
    where = {name: value for name in ("stage", "step", "name", "rank", "element")
             if (value := getattr(failure, name)) is not None}  # fmt: skip
    title, *lines = (line or failure.text).splitlines() or [record.verdict]
    codes = [own.signature] if own is not None and own.signature else []
    item = judgement.Item(kind="divergence", title=title, codes=codes, lines=lines, where=where)
    return judgement.of("check", [item], f"reproduce: {record.reproduction}")


def _facts(record: CaseRecord) -> list[str]:
    own = record.own
    assert own is not None
    facts = [f"compared  {own.compared} tensors in {record.seconds:.0f} s"]
    facts += [f"agree     {line}" for line in own.lines]
    if own.loss_factor is not None:
        facts[0] += f"; losses are {own.loss_factor:.6g} x the reference's, gradients 1 x"
    used = [(one.sharded_ulps / one.allowed_ulps, one) for one in own.distances if one.allowed_ulps]
    if used:
        part, worst = max(used, key=lambda one: one[0])
        facts.append(f"worst     {part:.2f} of the allowed error: {worst.stage} of {worst.name!r} in step {worst.step}")
    return facts + [f"{'note' if '[S' in text else 'not seen':<10}{text}" for text in own.notes]


def _fits(request: Request, device: str) -> None:
    """Refuse more ranks than there are devices."""
    from shardproof.harness.tensors import devices
    from shardproof.harness.training.request import NotCheckable

    try:
        devices.check(device)
    except ValueError as error:
        raise NotCheckable(f"check: {error}") from None
    count = devices.count() if device in ("auto", devices.accelerator()) else 0
    if (device not in ("auto", "cpu") or count > 1) and request.size > count:
        raise NotCheckable(f"check: --mesh {request.mesh_text} needs {request.size} devices; this host has {count} for "
                           f"--device {device}; pass --device cpu to run on the CPU")  # fmt: skip


def _request(options: argparse.Namespace) -> Request:
    from shardproof.harness.training.request import OWN, Request, data_dims_of, parse_mesh

    mesh = parse_mesh(options.mesh)
    own: dict[str, Any] = {
        "implementation": options.impl or (OWN if options.parallelize else "torch.fully_shard"), "mesh": mesh,
        "data_dims": data_dims_of(mesh, tuple(filter(None, options.data_dims.split(",")))),
        "axes": dict(map(_axis, options.axis)), "keep": os.path.abspath(options.keep) if options.keep else "",
    }  # fmt: skip
    return Request(**commands.values_of(options, Request) | own)


def _make_folder(path: str) -> None:
    from shardproof.harness.training.request import NotCheckable

    try:
        folders.make(pathlib.Path(path))
    except OSError as error:
        raise NotCheckable(f"check: --keep {path}: {error.strerror}: give a folder that can be written") from None
    if links := sorted(one.name for one in pathlib.Path(path).iterdir() if one.is_symlink()):
        raise NotCheckable(f"check: --keep {path}: {links[0]} is a symbolic link: give a folder without any")


def _axis(text: str) -> tuple[str, Any]:
    name, _, value = text.partition("=")
    with contextlib.suppress(ValueError):
        return name, json.loads(value)
    return name, {"True": True, "False": False, "None": None}.get(value, value)


def _off(text: str) -> tuple[str, ...]:
    from shardproof.harness.training.switches import OWN

    names = tuple(text.split(","))
    if unknown := [name for name in names if name not in OWN]:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is unknown; known are {', '.join(sorted(OWN))}")
    return names


def _pair(text: str) -> str:
    if not text.partition("=")[0].isidentifier() or "=" not in text:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    return text


def _parser() -> argparse.ArgumentParser:
    parser = commands.parser(
        "shardproof check",
        description="Train your model for a few steps on several ranks, and the same steps in one process with the "
        "microbatches of all ranks, in float64 and in the run's own precision; compare every stage of each step.",
        epilog=_EPILOG,
    )
    dtypes = ("float32", "bfloat16", "float16", "float64")
    add = parser.add_argument
    add("--model", required=True, metavar="NAME", help="a known shape such as gpt:0.1b, module:function or "
        "file.py:function, as for `shardproof plan`")  # fmt: skip
    add("--layers", type=positive, metavar="N", help="cut a known shape down to so many layers")
    add("--dim", type=positive, metavar="N", help="cut a known shape down to this width")
    add("--mesh", required=True, metavar="MESH", help="ranks (4), replicas x shards (2x2), or names (dp=2,tp=2)")
    add("--parallelize", default="", metavar="NAME", help="your function that shards the model; it may return its "
        "optimizer too")  # fmt: skip
    add("--impl", metavar="NAME", help="shard by an implementation of `shardproof implementations` (default: own with "
        "--parallelize, else torch.fully_shard)")  # fmt: skip
    add("--optimizer", default="adamw", metavar="NAME", help="adamw, sgd, or your function (default: adamw)")
    add("--data", default="", metavar="NAME", help="your function that returns the microbatches of a data rank "
        "(default: seeded random tokens)")  # fmt: skip
    add("--step", default="", metavar="NAME", help="your function that trains one step (default: mean of the losses, "
        "clipping, step, zero_grad)")  # fmt: skip
    add("--plain", default="", metavar="NAME", help="your function that adds the methods of the sharded model's "
        "wrapper to the unsharded model")  # fmt: skip
    add("--axis", action="append", default=[], metavar="NAME=VALUE", help="a keyword argument of --parallelize")
    add("--off", type=_off, default=(), metavar="NAMES", help="turn these off: clipping, compile, foreach, "
        "mixed-precision, offload, prefetch, recomputation, reshard-after-forward, ties")  # fmt: skip
    add("--bisect", action="store_true", help="find the smallest configuration that still fails, by turning off what "
        "--off can name, mesh dimensions, dtypes, microbatches, and arguments of --parallelize")  # fmt: skip
    add("--off-as", action="append", default=[], type=_pair, metavar="NAME=VALUE", help="with --bisect: the value that "
        "turns off this argument of --parallelize")  # fmt: skip
    add("--save-and-resume", type=positive, default=0, metavar="N", help="save after N steps, resume in new processes, "
        "and compare with the run that went on")  # fmt: skip
    add("--resume-mesh", default="", metavar="MESH", help="the mesh of the resumed training (default: --mesh)")
    add("--save", default="", metavar="NAME", help="your function that saves (default: torch.distributed.checkpoint)")
    add("--load", default="", metavar="NAME", help="your function that loads, and may return the step to go on with")
    add("--objects", default="", metavar="NAME", help="your function that returns a dict of what else the training "
        "has: scheduler, loader, EMA")  # fmt: skip
    add("--data-dims", default="", metavar="DIMS", help="mesh dimensions whose ranks read different data (default: "
        "dimensions with names such as dp)")  # fmt: skip
    add("--steps", type=positive, default=3, metavar="N", help="steps to train (default: 3)")
    add("--microbatches", type=positive, default=2, metavar="N", help="microbatches a step, if no --data (default: 2)")
    add("--batch", type=positive, default=2, metavar="N", help="sequences of a microbatch (default: 2)")
    add("--sequence", type=positive, default=32, metavar="N", help="tokens of a sequence (default: 32)")
    add("--max-norm", type=float, default=1.0, metavar="X", help="total norm to clip to; 0 does not clip (default: 1)")
    add("--dtype", choices=dtypes, default="float32", help="dtype of the parameters (default: float32)")
    add("--param-dtype", choices=dtypes, default="", help="dtype of gathers and compute (default: --dtype)")
    add("--reduce-dtype", choices=dtypes, default="", help="dtype in which gradients are reduced")
    add("--oracle", choices=("float64", "float32", "none"), default="float64", help="the dtype of the reference "
        "without sharding; none: the run is compared with the baseline alone (default: float64)")  # fmt: skip
    add("--device", default="auto", metavar="TYPE", help="cpu, or the type of the accelerator here (default: auto)")
    add("--seed", type=int, default=0, metavar="N", help="seed of the model and of the default data (default: 0)")
    add("--explain", action="store_true", help="run a diverging step again, and name the first module that diverges")
    add("--keep", default="", metavar="DIR", help="leave the tensors that were compared in this folder")
    add("--report", metavar="FILE", help="write a run file, which the page and the gate read")
    judgement.add_option(parser)
    add("--deadline", type=float, default=900.0, metavar="SECONDS", help="time limit of the whole check (default: 900)")
    return parser
