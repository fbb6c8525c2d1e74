"""The shell lines of a GitHub workflow, and what a runner does with them: a workflow of ours runs here as it is.

Reads the YAML that our workflows have: two spaces a level, steps as a list, values on their line or in a block.
"""

import dataclasses
import os
import pathlib
import re
import subprocess
import textwrap
from collections.abc import Iterator, Mapping


@dataclasses.dataclass(frozen=True)
class Step:
    """A step with ``run``.

    Attributes:
        name: its name; empty if it has none.
        run: its lines, as the shell has them.
        always: whether it runs after a failure too.
    """

    name: str
    run: str
    always: bool


def steps(workflow: str, job: str = "") -> list[Step]:
    """Return the steps with ``run`` of a job, or of all jobs."""
    jobs = re.split(r"^  (?=[\w-]+:$)", workflow.partition("\njobs:\n")[2], flags=re.M)
    found = [_step(block) for one in jobs if not job or one.startswith(f"{job}:") for block in _blocks(one)]
    return [step for step in found if step.run]


def _blocks(job: str) -> Iterator[str]:
    """The text of each step, its keys at the beginning of lines."""
    for block in re.split(r"^      - ", job, flags=re.M)[1:]:
        yield textwrap.dedent(f"        {block}")


def _step(block: str) -> Step:
    return Step(_value(block, "name"), _value(block, "run"), _value(block, "if").strip("${ }") == "always()")


def _value(block: str, key: str) -> str:
    """The value of a key: of its line, of a block that keeps its lines (``|``), or of one that folds them (``>-``)."""
    found = re.search(rf"^{key}: (?:([|>])-?\n((?:  .*\n|\n)*)|(.*))", f"{block}\n", flags=re.M)
    if found is None:
        return ""
    kind, body, line = found.groups()
    if not kind:
        return line.strip()
    kept = textwrap.dedent(body)
    return kept if kind == "|" else " ".join(kept.split())


def variables(workflow: str) -> dict[str, str]:
    """Return the variables of all steps, of a workflow's ``env``."""
    (block,) = re.findall(r"^env:\n((?:  .*\n)+)", workflow, flags=re.M)
    return dict(re.findall(r'^  (\w+): "?(.*?)"?$', block, flags=re.M))


@dataclasses.dataclass(frozen=True)
class Done:
    """What a job came to: what failed first ("" for none), the output of each step by its name, and what steps set."""

    failed: str
    printed: Mapping[str, str]
    outputs: str
    summary: str


def run_job(workflow: str, job: str, folder: pathlib.Path, only: str = "", **replaced: str) -> Done:
    """Run the steps of a job in a folder, as a runner does: with bash, and after a failure only those of ``always()``.

    Args:
        workflow: its text.
        job: the name of the job.
        folder: the checkout.
        only: the first step that runs, if those before it have run.
        replaced: variables with other values than those of the workflow.
    """
    files = {name: folder.parent / name.lower() for name in ("GITHUB_OUTPUT", "GITHUB_STEP_SUMMARY")}
    for file in files.values():
        file.write_text("")
    env = os.environ | variables(workflow) | replaced | {name: str(file) for name, file in files.items()}
    # What the runner of the tests has is not there: the workflow has a virtual environment of its own.
    for name in ("PYTHONPATH", "VIRTUAL_ENV", "PYTEST_CURRENT_TEST", "PYTEST_XDIST_WORKER"):
        env.pop(name, None)
    failed, printed, begun = "", {}, not only
    for step in steps(workflow, job):
        begun = begun or step.name == only
        if not begun or (failed and not step.always):
            continue
        command = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step.run]
        done = subprocess.run(
            command, cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=1500
        )
        printed[step.name] = done.stdout
        failed = failed or (step.name if done.returncode else "")
    return Done(failed, printed, *(file.read_text() for file in files.values()))
