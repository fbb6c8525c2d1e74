"""Runs for the pages of these tests: small ones with several verdicts, and ones with as many cases as asked for."""

from tests.reports import samples

TRACE = [
    "forward   all_gather      float32      400 B  ranks 0-1  (root)",
    "forward   all_gather      float32     4520 B  ranks 0-1  layers.0",
    "backward  all_gather      float32     4520 B  ranks 0-1  layers.0",
    "backward  reduce_scatter  float32     4520 B  ranks 0-1  layers.0",
    "backward  reduce_scatter  float32      400 B  ranks 0-1  (root)",
]
STAGES = ("output", "loss", "gradient", "parameter after step")
FAILURE = samples.whole_case()["failure"]


def record(name="test_unused[w2-True]", **changes):
    """A passing case with losses, distances, and two ranks with the same collectives."""
    distances = [
        {
            "stage": stage, "step": step, "name": "head.weight", "sharded_ulps": 1.5, "baseline_ulps": 1.5,
            "allowed_ulps": 14,
        }
        for step in range(3)
        for stage in STAGES
    ]  # fmt: skip
    return samples.case(
        **{
            "id": f"suites/test_autograd.py::{name}",
            "nodeid": f"suites/test_autograd.py::{name}",
            "seeds": {"init": 7, "data": 8},
            "losses": {run: [1.5, 1.25, 1.125] for run in ("sharded", "baseline", "oracle")},
            "distances": distances,
            "collectives": [{"ranks": [0, 1], "trace": TRACE}],
        }
        | changes
    )


def failed(name, **changes):
    """A case whose sharded run diverges from the second step on."""
    case = record(name, verdict="fail", failure=FAILURE, reproduce=f"(cd /work && python -m pytest '{name}')")
    case["losses"] = {"sharded": [1.5, 1.5, "nan"], "baseline": [1.5, 1.25, 1.125], "oracle": [1.5, 1.25, 1.125]}
    case["distances"][6] = case["distances"][6] | {"sharded_ulps": 4e6}
    case["collectives"] = [{"ranks": [0], "trace": TRACE}, {"ranks": [1], "trace": [*TRACE[:2], *TRACE[3:]]}]
    return case | changes


def small():
    """Two runs, with torch 2.11 on GPUs and 2.13 on the CPU, of three implementations."""
    other = {"implementation": "other"}
    missing = {
        "verdict": "unsupported", "missing": ["tensor-parallel"], "losses": {}, "distances": [], "collectives": [],
    }  # fmt: skip
    shared = [
        record("test_unused[w2-True]"),
        record("test_unused[w2-False]"),
        record("test_clip[w2]", requirement="CLIPPING-1", id="suites/test_clipping.py::test_clip[w2]"),
        record("test_both[w2]", requirement="AUTOGRAD-2, CLIPPING-1"),
        record("test_unused[w2-True]", **other | missing),
    ]
    old = [
        *shared,
        failed("test_clip[w2]", requirement="CLIPPING-1", id="suites/test_clipping.py::test_clip[w2]", **other),
        failed(
            "test_both[w2]",
            requirement="AUTOGRAD-2, CLIPPING-1",
            verdict="expected-fail",
            expected="fail: F-1",
            **other,
        ),
        record("test_alone", implementation="mine:Alone", requirement="OURS-1"),
    ]
    new = [
        *shared,
        record("test_clip[w2]", requirement="CLIPPING-1", id="suites/test_clipping.py::test_clip[w2]", **other),
    ]
    runs = [samples.journal(*old), samples.journal(*new)]
    runs[0]["run_id"] = "1" * 32
    cpu = {"device": "cpu", "torch": "2.13.0", "accelerators": [], "nccl": None}
    runs[1]["environment"] = runs[1]["environment"] | cpu
    for one in runs[0]["cases"]:
        one["device"] = "cuda"
    return runs


def large(cases):
    """Two runs of this many cases on three implementations, each record with losses, distances and collectives."""
    chapters = ("AUTOGRAD", "CLIPPING", "TRAINING", "STATE", "COLLECTIVES", "PRECISION", "OFFLOAD", "HYBRID")
    runs = []
    for number in range(2):
        records = []
        for i in range(cases):
            name = f"test_number_{i // 25}[w2-{i % 25}-some-more-parameters]"
            of = {"requirement": f"{chapters[i % 8]}-{i // 8 % 12 + 1}"}
            for implementation in ("reference", "torch.fully_shard", "torch.fsdp"):
                bad = i % 97 == 0 and implementation == "torch.fsdp" and number == 0
                one = (failed if bad else record)(name, implementation=implementation, **of)
                records.append(_varied(one, 1 + len(records) / 7919))
        run = samples.journal(*records) | {"run_id": f"{number:032x}"}
        run["environment"] = run["environment"] | {"torch": f"2.1{number + 1}.0"}
        runs.append(run)
    return runs


def _varied(case, factor):
    """The case with numbers of its own, which compress as those of a real run do."""
    losses = {run: [loss if loss == "nan" else loss * factor for loss in case["losses"][run]] for run in case["losses"]}
    distances = [one | {"sharded_ulps": one["sharded_ulps"] * factor} for one in case["distances"]]
    return case | {"losses": losses, "distances": distances}
