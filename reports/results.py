"""A results repository: which runs it takes, a summary of each, and what is made of all summaries.

Everything but the summaries is made anew from them, so that the order in which runs are submitted does not matter.
docs/results.md describes the checks and the folder.
"""

import os
import re
import socket
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from shardproof import contract, folders
from shardproof.door import BadFile, load
from shardproof.jsonfiles import RecordError, decode, described, kind_of, mapped, says, shown
from shardproof.reports.profiles import standings
from shardproof.runfile import Run, Verdict, digest_of, fingerprint, parse_run, public_version

BEFORE = "before 2026.12"
"""What stands for the version of the contract in summaries of runs from before it had one."""

INDEX = "index.json"
"""The file of a repository with a row for each implementation in each run."""

#: The hardware classes whose runs it takes.
_PUBLISHED = ("cpu-4", "nccl-2")

HOMES = r"(?<![\w./-])[\w./-]*/(?:home|Users)/[\w.@-]+|(?<![\w./-])/root(?![\w.-])|[A-Za-z]:\\Users\\[\w.@-]+"
"""The directories of users. A run itself writes ~ for that of its user.

A match begins where a path does, and nowhere inside: a long word is read once.
"""


def summary_of(path: str | Path, *, without_digest: bool = False) -> dict[str, Any]:
    """Check that a run file can be published, and return its summary as JSON values.

    Args:
        path: the run file.
        without_digest: whether the file of a run from before there were digests is taken.

    Raises:
        BadFile: it cannot be published. The message is one line that names the file and the field.
    """
    return load(path, lambda data: _summary(_checked(data, without_digest)))


def _checked(data: Any, without_digest: bool) -> Run:
    run = parse_run(data)
    env, found = run.environment, digest_of(map(fingerprint, data.get("cases", ())))
    lost = f"digest: it is {run.digest[:12]}, that of the records {found[:12]}: one was changed, added or lost"
    _refuse(run.incomplete, f"it is incomplete ({run.incomplete})")
    _refuse(run.merged, "merged: submit the run files that it was merged from")
    _refuse(not re.fullmatch("[0-9a-f]{32}", run.run_id), f"run_id: {run.run_id!r} is no id of a run")
    _refuse_private(data)
    _refuse(run.digest and run.digest != found, lost)
    _refuse(not run.digest and not without_digest, "digest: it is missing; --without-digest takes files of older runs")
    _refuse(not env.device, "environment.device: it is missing")
    _refuse(not re.fullmatch(r"\d+\.\d+[\w.+-]*", env.torch), f"environment.torch: {env.torch!r} is no version")
    _refuse(not env.cpu_count, "environment.cpu_count: it is missing")
    _refuse(env.device != "cpu" and not env.nccl, f"environment.nccl: it is missing, and {env.device!r} needs it")
    _refuse(env.nccl and not env.accelerators, "environment.accelerators: it is empty")
    hardware, known = _hardware(run), ", ".join(_PUBLISHED)
    _refuse(not hardware, f"environment.device: {env.device!r} has too few ranks for each class of {known}")
    if env.contract:
        what = f"environment.contract: {env.contract!r} is none of {', '.join(contract.versions())}"
        _refuse(env.contract not in contract.versions(), what)
        items, profile = contract.items(env.contract).items(), run.effort.profile if run.effort else ""
        of_class = [id_ for id_, item in items if contract.CLASSES[hardware].has(item)]
        if profile:
            _refuse("," in profile, f"effort.profile: {profile!r} are several: submit a run of each")
            what = f"effort.profile: {profile!r} is none of {', '.join(contract.profiles())}"
            _refuse(profile not in contract.profiles(), what)
            of_class = sorted(contract.items_of_profile(profile, hardware, of=env.contract))
        for name in run.implementations:
            recorded = {case.id for case in run.cases if case.implementation == name}
            lacking = [id_ for id_ in of_class if id_ not in recorded] or [""]
            of = f"profile {profile} of contract" if profile else "contract"
            what = f"{len(lacking)} of {len(of_class)} items of {of} {env.contract} on {hardware}"
            _refuse(lacking[0], f"cases: {name} has no record of {what}, such as {lacking[0]}")
    return run


def _refuse(is_wrong: object, why: str) -> None:
    if is_wrong:
        raise RecordError(why)


def _hardware(run: Run) -> str:
    """Return the largest hardware class whose ranks the run had; empty if there is none."""
    kind, gpus = "nccl" if run.environment.nccl else "cpu", len(run.environment.accelerators)
    ranks = gpus or max((case.world for case in run.cases if not case.verdict.is_skip), default=0)
    found = [(contract.CLASSES[name].ranks, name) for name in _PUBLISHED if name.startswith(kind)]
    return max((one for one in found if one[0] <= ranks), default=(0, ""))[1]


def _refuse_private(data: dict[str, Any]) -> None:
    user, host = map(re.escape, (os.path.basename(os.path.expanduser("~")) or "root", socket.gethostname()))
    paths = re.compile(rf"(?:{HOMES}|(?<![\w./-])/(?:[\w.-]+/){{0,3}}{user}(?![\w.-]))[\w.@+/\\-]*")
    # A name without a digit, such as "gpu", may be a word of a text.
    hosts = re.compile(rf"(?<![\w.-]){host}(?![\w-])" if re.search(r"\d", host) else "(?!)")

    def check(text: str, where: str) -> str:
        _refuse((found := paths.search(text)), f"{where}: has a private path: {found and found[0]}")
        is_host = hosts.search(text) or (text and where.endswith((".host", ".hosts[0]")))
        _refuse(is_host, f"{where}: names a host: {text}")
        return text

    mapped(data, check)


def _summary(run: Run) -> dict[str, Any]:
    env, hardware = run.environment, _hardware(run)
    results: dict[str, dict[str, Any]] = {}
    for name in sorted(run.implementations):
        cases = sorted((case for case in run.cases if case.implementation == name), key=lambda case: case.id)
        verdicts = Counter(case.verdict for case in cases)
        asked = sum(count for verdict, count in verdicts.items() if not verdict.is_skip)
        failed = [one for one in Verdict if verdicts[one] and not one.is_skip and one is not Verdict.PASS]
        results[name] = {
            "version": public_version(env.implementations[name].version),
            "score": f"{verdicts[Verdict.PASS]}/{asked}",
            "profiles": {},
            "verdicts": {verdict: verdicts[verdict] for verdict in Verdict if verdicts[verdict]},
            "failed": {verdict: [case.id for case in cases if case.verdict is verdict] for verdict in failed},
        }
    for one in standings(run):
        if one.hardware == hardware:
            results[one.implementation]["profiles"][one.profile] = one.cell
    return {
        "run_id": run.run_id, "digest": run.digest, "contract": env.contract or BEFORE, "hardware": hardware,
        "accelerators": Counter(one.name for one in env.accelerators), "cpu_count": env.cpu_count,
        "nccl": env.nccl, "torch": public_version(env.torch), "torch_git_version": env.torch_git_version,
        "shardproof": env.shardproof, "shardproof_commit": env.shardproof_commit, "suites": run.suites,
        "effort": run.effort.name if run.effort else "full", "started": env.started,
        "profiles_of": contract.version_of(env.contract), "implementations": results,
    } | ({"profile": run.effort.profile} if run.effort and run.effort.profile else {})  # fmt: skip


@described()
class ResultOf:
    """What a summary has of an implementation, as far as it is shown."""

    version: str = says("its version")
    score: str = says("passed of all cases that ran")
    profiles: Mapping[str, str] = says("by profile, how far it is from it")


@described()
class Summary:
    """A summary, as far as something is made of it."""

    run_id: str = says("identifies the run")
    digest: str = says("of the records of the run")
    contract: str = says("the version of the contract")
    hardware: str = says("the hardware class")
    torch: str = says("the version of torch")
    shardproof: str = says("the version of shardproof")
    shardproof_commit: str = says("its commit")
    started: str = says("when the run was started")
    implementations: Mapping[str, ResultOf] = says("by name")
    profile: str = says("the profile whose items alone were asked for", default="")


#: What names a place in the repository, and what such names are.
_PLACES = {
    "run_id": r"[0-9a-f]{32}", "contract": r"[\w.-]{1,40}( [\w.-]{1,40})?", "hardware": r"[\w-]{1,40}",
    "torch": r"\d{1,9}\.\d{1,9}[\w.+-]{0,40}", "profile": r"[\w-]{0,40}",
}  # fmt: skip


def _checked_summary(data: object) -> dict[str, Any]:
    """Return a summary as JSON values, if it is one."""
    summary = decode(Summary, data)
    for name, pattern in _PLACES.items():
        value = getattr(summary, name)
        _refuse(not re.fullmatch(pattern, value, re.ASCII), f"{name}: {shown(value)} should match {pattern}")
    _refuse(re.search(r"\d{10}", summary.contract), f"contract: {shown(summary.contract)} is no version")
    for name, one in summary.implementations.items():
        wrong = not re.fullmatch(r"\d{1,9}/\d{1,9}", one.score, re.ASCII)
        _refuse(wrong, f"implementations.{name}.score: {shown(one.score)} is not like 3/4")
    return kind_of(data, dict, "the file")


def summaries_in(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the summaries of a repository by their paths in it.

    Raises:
        BadFile: one cannot be read, or is in another place than its content says.
    """
    found = {}
    for path in sorted((folder / "runs").rglob("*.json")):
        one = load(path, _checked_summary)
        place = place_of(one)
        if path != folder / place:
            raise BadFile(f"{path}: it is the summary of {place}")
        found[place] = one
    return found


def place_of(summary: Mapping[str, Any]) -> str:
    """Return the path of a summary in a repository."""
    contract_, id_ = summary["contract"].replace(" ", "-"), summary["run_id"][:12]
    return f"runs/{contract_}/{summary['hardware']}/torch-{summary['torch']}/{id_}.json"


def rows_of(summaries: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return a row of the index for each implementation in each run: by name and hardware, the newest first."""
    shared = ("contract", "hardware", "torch", "shardproof", "shardproof_commit", "started", "digest", "profile")
    rows = [
        {"implementation": name.encode(errors="backslashreplace").decode()}
        | {key: result[key] for key in ("version", "score", "profiles")}
        | {key: one[key] for key in shared if key != "profile" or key in one}
        | {"summary": place_of(one), "badge": f"badges/{folders.name_of('-'.join([name, *_of(one)]), ending='.svg')}"}
        for one in sorted(summaries, key=_age, reverse=True)
        for name, result in one["implementations"].items()
    ]
    return sorted(rows, key=lambda row: (not row["badge"].startswith("badges/reference"), row["badge"]))


def _of(summary: Mapping[str, Any]) -> list[str]:
    """What a result is of: a hardware class, and a profile if no more was asked for."""
    return [summary["hardware"], *([summary["profile"]] if "profile" in summary else [])]


def _age(summary: Mapping[str, Any]) -> tuple[Any, ...]:
    versions = [[int(number) for number in re.findall(r"\d+", summary[name])] for name in ("contract", "torch")]
    return versions[0], summary["contract"] != BEFORE, versions[1], summary["started"], summary["run_id"]


def newest(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the first of the rows of each implementation and hardware class, and profile if no more was asked for."""
    found: dict[str, dict[str, Any]] = {}
    for row in rows:
        found.setdefault(row["badge"], row)
    return list(found.values())


def write(folder: Path, content: Mapping[str, str]) -> str:
    """Write the files of a repository, and delete badges that its index names and that are not among them.

    Returns:
        Whether the folder was made, in words.

    Raises:
        NotWritten: nothing has changed.
    """
    # The index comes last: it names what is there.
    files = {name: text for name, text in content.items() if name != INDEX}
    return folders.write(folder, {**files, INDEX: content[INDEX]}, deletes=_badges_in(folder))


def _badges_in(folder: Path) -> list[str]:
    """Return the badges that the index of a repository names; none if it cannot be read, or is a link."""
    if (folder / INDEX).is_symlink():
        return []
    try:
        rows = load(folder / INDEX, lambda data: kind_of(data, list, "the file"))
    except BadFile:
        return []
    named = [row.get("badge") for row in rows if isinstance(row, dict)]
    return [one for one in named if isinstance(one, str) and re.fullmatch(r"badges/[^/\0]+\.svg", one)]
