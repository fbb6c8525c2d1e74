"""The command ``shardproof page``: writes a page of run files, or of plan files."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from shardproof import commands, extras, folders
from shardproof.door import printable
from shardproof.planfile import Plan, is_plan, load_plan
from shardproof.reports.texts import counted
from shardproof.runfile import Run, load_run

FILE = "index.html"
"""The name of the page in its folder."""

_EPILOG = """\
examples:
  shardproof page run.json -o out/page
  shardproof page cpu.json gpu.json -o out/page --title "CPU and GPU"
  shardproof plan --model llama:8b --mesh 64x8 --json plan.json; shardproof page plan.json -o out/plan

Exit codes: 0, or 2 if a file cannot be read or written, a run is given twice, or the extra is not
installed. Failed cases do not change it. docs/page.md describes the page.
"""


@commands.reader
def page(arguments: Sequence[str]) -> int:
    """Write one HTML page of run files, or one of plan files.

    Failing cases do not change the exit code: the runs have already judged them. It is 0; or 2 if a file cannot be read
    or written, a run is given twice, run files and plan files are mixed, or the extra ``page`` is not installed, with
    one line on stderr.
    """
    options = _parser().parse_args(arguments)
    out = Path(options.output) / FILE
    try:
        # Here and not above: the other commands need the standard library alone.
        from shardproof.reports.page import Source, render, render_plans
    except ModuleNotFoundError as error:
        return commands.refuse(extras.lacking("the page", "page", error))
    try:
        if plans := _plans(options.runs):
            text, what = render_plans(plans, title=options.title), counted(len(plans), "plan")
        else:
            runs = _load(options.runs)
            text = render([Source(path, run) for path, run in runs], title=options.title)
            records = counted(sum(len(run.cases) for _, run in runs), "record")
            what = f"{counted(len(runs), 'run')}, {records}"
    except ValueError as error:
        return commands.refuse(printable(str(error)))
    try:
        folders.write(out.parent, {out.name: text})
    except folders.NotWritten as error:
        return commands.refuse(printable(str(error)))
    print(printable(f"{out}: {what}, {out.stat().st_size / 1e6:.1f} MB"))
    return 0


def _plans(paths: Sequence[str]) -> list[Plan]:
    """Read plan files; nothing if none of the files is one, ValueError if some are or one cannot be read."""
    found = [path for path in paths if is_plan(path)]
    if found and len(found) < len(paths):
        other = next(path for path in paths if path not in found)
        raise ValueError(f"{found[0]} is a plan and {other} is none: a page has run files or plan files")
    return [load_plan(path) for path in found]


def _load(paths: Sequence[str]) -> list[tuple[str, Run]]:
    """Read run files; ValueError if one cannot be read or two are of one run."""
    runs: list[tuple[str, Run]] = []
    for path in paths:
        run = load_run(path)
        same = next((other for other, one in runs if run.run_id and one.run_id == run.run_id), None)
        if same is not None:
            raise ValueError(f"{same} and {path} are of the same run: give it once")
        runs.append((path, run))
    return runs


def _parser() -> argparse.ArgumentParser:
    description = (
        f"Write DIR/{FILE}, one page of one or more runs that a browser opens from disk: the matrix with filters, and "
        "for each case its failure, losses, distances and collectives, the runs side by side. Plan files of "
        "'shardproof plan --json' give tables and plots of memory and traffic. Needs the extra 'page'."
    )
    parser = commands.parser("shardproof page", description=description, epilog=_EPILOG)
    parser.add_argument(
        "runs", nargs="+", metavar="RUN", help="a run file, the FILE.partial of an incomplete run, or a plan file"
    )
    parser.add_argument("-o", "--output", required=True, metavar="DIR", help="the folder for the page")
    parser.add_argument("--title", default="shardproof", help="the title of the page (default: shardproof)")
    return parser
