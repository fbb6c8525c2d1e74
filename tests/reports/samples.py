"""Run files as plain data, small enough to read in a test."""

from typing import Any

ID = "0123456789abcdef0123456789abcdef"


def case(**changes: Any) -> dict[str, Any]:
    """A passing case with only the fields that the schema demands, and what `changes` adds or replaces."""
    least = {
        "id": "suites/test_autograd.py::test_unused[w2]", "implementation": "reference", "requirement": "AUTOGRAD-1",
        "world": 2, "device": "cpu", "parameters": {"reshard": True}, "verdict": "pass", "seconds": 0.25,
    }  # fmt: skip
    return least | changes


def run(*cases: dict[str, Any], **environment: Any) -> dict[str, Any]:
    """A complete run of `cases` without what may be missing, and an environment that says what `environment` says."""
    head = {"schema_version": 2, "run_id": ID, "environment": environment, "selected": {}}
    return head | {"cases": [*cases], "end": {"complete": True, "reason": ""}}


def whole_case() -> dict[str, Any]:
    """A failing case with all fields that every writer writes."""
    where = {"stage": "gradient", "step": 1, "name": "head0.weight"}
    return case(
        nodeid="suites/test_autograd.py::test_unused[reference-w2]",
        seeds={"init": 1, "data": 2},
        verdict="fail",
        missing=[],
        expected="",
        failure=where | {"rank": 0, "element": [3, 4], "text": "the sharded gradient is twice the baseline's"},
        losses={"sharded": [1.5, 1.25], "baseline": [1.5, 1.0], "oracle": [1.5, "nan"]},
        distances=[where | {"sharded_ulps": 4e6, "baseline_ulps": 1, "allowed_ulps": 12.0}],
        collectives=[{"ranks": [0, 1], "trace": ["forward all_gather float32 1024"]}],
    )


def failure(text: str) -> dict[str, Any]:
    """A failure that is nowhere in a step."""
    return {"text": text} | dict.fromkeys(("stage", "step", "rank", "name", "element"))


#: Why a case failed, when it ran again with capture on.
EXPLANATION = {
    "again": "fail",
    "alike": True,
    "first": {
        "stage": "gradient", "step": 1, "rank": 0, "name": "head.weight", "element": [3, 4],
        "module": "head", "parameter": "head.weight", "where": "the second call", "offset": 7,
        "values": {"sharded": 2.0, "baseline": 1.0},
        "ulps": {"sharded": 4e6, "allowed": 12.0}, "also": ["head.bias"],
    },
    "compared": 12,
    "unseen": ["the sharded run did not show: buffer"],
    "stopped": "",
    "collectives": ["- forward all_gather", "+ forward all_reduce"],
    "text": "the same in words",
}  # fmt: skip


def whole_environment() -> dict[str, Any]:
    """An environment with all fields but `mends` and `torchrun`."""
    return {
        "shardproof": "0.1.0",
        "shardproof_commit": "c0ffee" * 6 + "c0ff",
        "python": "3.12.3",
        "torch": "2.11.0+cu130",
        "torch_git_version": "70d9" * 10,
        "platform": "Linux",
        "cpu_count": 64,
        "device": "cuda",
        "accelerators": [{"name": "GPU X", "memory_bytes": 150_000_000_000}] * 4,
        "nccl": "2.28.9",
        "started": "2026-01-02T03:04:05+00:00",
        "command": ["pytest", "suites"],
        "implementations": {"reference": {"version": "0.1.0", "capabilities": ["reshard_after_forward"]}},
        "numerics": {"slack_ulps": 8},
    }


def journal(*cases: dict[str, Any], selected: dict[str, list[str]] | None = None, reason: str = "") -> dict[str, Any]:
    """A run with all that a writer writes; complete unless there is a reason."""
    by_name: dict[str, list[str]] = {}
    for one in cases:
        by_name.setdefault(one["implementation"], []).append(one["id"])
    rest = {"nodeid": "", "seeds": {}, "missing": [], "expected": "", "losses": {}, "distances": [], "collectives": []}
    rest |= {"failure": None, "spent": {}}
    return {
        "schema_version": 2,
        "run_id": ID,
        "environment": whole_environment(),
        "suites": "0a1b2c3d4e5f",
        "selected": by_name if selected is None else selected,
        "cases": [rest | one | {"failure": one.get("failure") and failure("") | one["failure"]} for one in cases],
        "left_out": [],
        "end": {"complete": not reason, "reason": reason, "exit_code": 0, "seconds": 7.5},
    }
