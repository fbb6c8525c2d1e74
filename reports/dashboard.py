"""A run of profiles as a dashboard takes it: counts by profile, and the requirements that fail; docs/vendor-ci.md.

Its parts ``test_results`` and ``failed_tests_detail`` have the form of the callback of PyTorch's cross-repository CI.
"""

import json
from collections.abc import Iterator, Mapping, Sequence

from shardproof import contract
from shardproof.door import printable
from shardproof.jsonfiles import described, says, written
from shardproof.reports.profiles import asked_for, standings
from shardproof.runfile import SPENT, CaseRecord, Run, Verdict, tally

VERSION = 1

#: The callback takes so many failures, so many bytes of the message of each, and its action all of them as one variable
#: of the environment, which Linux limits.
_MOST, _BYTES, _ALL_BYTES = 1000, 1024, 100_000

#: Of a requirement that fails, the ids of so many cases.
_IDS = 10


@described()
class Counts:
    """A profile of an implementation: each of its items is in one of the counts."""

    implementation: str = says("its name")
    version: str = says("its version; may be empty")
    profile: str = says("the name of the profile")
    hardware: str = says("the hardware class, which decides the items")
    items: int = says("the items that the hardware class can have")
    passed: int = says("items that passed")
    failed: int = says("items that failed, or passed although an entry of the expectations expects a failure")
    known_failures: int = says("items that failed as an entry of the expectations says")
    skipped: int = says("items that need a capability or hardware that is missing")
    left_out: int = says("items for which no time was left")
    not_run: int = says("items without a record for another reason, as of a run that was interrupted")
    seconds: float = says("what the items took")
    covered: int = says("requirements of the profile with an item that ran")
    requirements: int = says("requirements of the profile with an item")


@described()
class FailedRequirement:
    """A requirement of which an item failed, and not as expected."""

    implementation: str = says("the implementation")
    requirement: str = says("its id, as `shardproof explain` takes it")
    message: str = says("why the first of its cases failed, in one line")
    cases: Sequence[str] = says(f"the ids of its failed cases, {_IDS} at most")
    failed: int = says("the number of its failed cases")


@described()
class Dashboard:
    """A run of profiles, for a dashboard."""

    dashboard_version: int = written("the version of this form", default=VERSION)
    verdict: str = says('"passed", or "failed" if the exit code of the run is not 0')
    why: Sequence[str] = says("what fails the run, in one line each")
    run_id: str = says("identifies the run")
    device: str = says("the device type of the ranks")
    backend: str = says("the backend of their process groups")
    torch: str = says("the version of torch")
    revision: str = says("the commit from which torch was built")
    shardproof: str = says("the version of shardproof")
    shardproof_revision: str = says("its commit")
    contract: str = says("the version of the contract")
    started: str = says("when the run started, in ISO 8601 and UTC")
    seconds: float = says("how long it took")
    exit_code: int = says("its exit code")
    profiles: Sequence[Counts] = says("the profiles that the run asked for, by implementation")
    failed_requirements: Sequence[FailedRequirement] = says("the requirements that fail, and not as expected")
    test_results: Mapping[str, int] = says("passed, failed, skipped and total of all items, as the callback takes them")
    failed_tests_detail: Sequence[Mapping[str, str]] = says("name, classname and message of each failed case, likewise")


def dashboard(run: Run) -> Dashboard:
    """Return a run as a dashboard takes it."""
    failed = [case for case in run.cases if case.verdict.fails]
    env = run.environment
    return Dashboard(
        verdict="failed" if run.end.exit_code or run.incomplete else "passed",
        why=[*_why(run, failed)],
        run_id=run.run_id,
        device=env.device,
        backend=env.backend,
        torch=env.torch,
        revision=env.torch_git_version,
        shardproof=env.shardproof,
        shardproof_revision=env.shardproof_commit,
        contract=env.contract,
        started=env.started,
        seconds=run.end.seconds,
        exit_code=run.end.exit_code,
        profiles=[*_profiles(run)],
        failed_requirements=[*_requirements(failed)],
        test_results=_results(run),
        failed_tests_detail=[*_details(failed)],
    )


def _profiles(run: Run) -> Sequence[Counts]:
    asked, found = asked_for(run), []
    version = contract.version_of(run.environment.contract)
    items = contract.items(version)
    for one in standings(run):
        if one.profile not in asked:
            continue
        ids = contract.items_of_profile(one.profile, one.hardware, of=version)
        wanted = contract.profiles()[one.profile].requirements & {
            name for id_ in ids for name in items[id_].requirements
        }
        mine = [case for case in run.cases if case.implementation == one.implementation and case.id in ids]
        out = {each.id for each in run.left_out if each.implementation == one.implementation and _is_spent(each.reason)}
        counts = tally(case.verdict for case in mine)
        ran = {name for case in mine if not case.verdict.is_skip for name in case.requirements}
        told = run.environment.implementations.get(one.implementation)
        found.append(
            Counts(
                implementation=one.implementation,
                version=told.version if told else "",
                profile=one.profile,
                hardware=one.hardware,
                items=one.items,
                passed=counts.passed,
                failed=counts.failed,
                known_failures=counts.known,
                skipped=counts.skipped,
                left_out=len(out & ids),
                not_run=one.not_run - len(out & ids),
                seconds=round(one.seconds, 1),
                covered=len(wanted & ran),
                requirements=len(wanted),
            )
        )
    return found


def _is_spent(reason: str) -> bool:
    return reason.startswith(SPENT)


def _requirements(failed: Sequence[CaseRecord]) -> Sequence[FailedRequirement]:
    of: dict[tuple[str, str], list[CaseRecord]] = {}
    for case in failed:
        for name in case.requirements:
            of.setdefault((case.implementation, name), []).append(case)
    return [
        FailedRequirement(
            implementation=implementation,
            requirement=name,
            message=_line(cases[0]),
            cases=[case.id for case in cases[:_IDS]],
            failed=len(cases),
        )
        for (implementation, name), cases in of.items()
    ]


def _details(failed: Sequence[CaseRecord]) -> Iterator[dict[str, str]]:
    """The failures, until one more would be too much for the callback."""
    left = _ALL_BYTES
    for case in failed[:_MOST]:
        one = {"name": case.id, "classname": case.implementation, "message": _line(case)}
        left -= len(json.dumps(one)) + 2
        if left < 0:
            return
        yield one


def _results(run: Run) -> dict[str, int]:
    counts = tally(case.verdict for case in run.cases)
    skipped = counts.skipped + counts.known + len(run.left_out)
    return {
        "passed": counts.passed,
        "failed": counts.failed,
        "skipped": skipped,
        "total": counts.passed + counts.failed + skipped,
    }


def _why(run: Run, failed: Sequence[CaseRecord]) -> Sequence[str]:
    """What fails the run, a line each: cases, entries of the expectations that do not fail any more, other problems."""
    lines = [f"incomplete: {run.incomplete}"] if run.incomplete else []
    for case in failed:
        kind = "fails no more" if case.verdict is Verdict.UNEXPECTED_PASS else "new failure"
        lines.append(f"{kind}: {case.id} on {case.implementation}: {_line(case)}")
    return [*lines, *run.end.problems]


def _line(case: CaseRecord) -> str:
    """Why a case failed, in one line that the callback takes whole."""
    text = case.expected or case.why if case.verdict is Verdict.UNEXPECTED_PASS else case.why
    return text.encode()[:_BYTES].decode(errors="ignore")


def lines(found: Dashboard) -> str:
    """Return the lines that a CI prints: why the run is red, one each, or that it is not."""
    told = ["GREEN: no failure but known ones"]
    if found.verdict == "failed":
        told = [f"RED: {one}" for one in found.why] or [f"RED: exit code {found.exit_code}"]
    return "\n".join(map(printable, ["", *told, ""]))
