"""Writes docs/seeds.md from the cases' own marks; with ``--check``, says whether it is up to date.

Run as ``python docs/make_seeds.py`` in the repository's root.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import io
import pathlib
import sys
from collections.abc import Sequence

import pytest

ROOT = pathlib.Path(__file__).parents[1]
PAGE = ROOT / "docs/seeds.md"

#: The tests of torch that the suites began from, with the combinations that each really ran, after its own
#: skips, on four devices. Compiled and eager runs of one test count apart where both ran.
SEEDS = {
    "test_fully_shard_autograd.py": {
        "test_unused_forward_output": 3,
        "test_unused_forward_module": 3,
        "test_nontensor_activations": 4,
        "test_post_acc_grad_hook_runs": 1,
        "test_post_acc_grad_hook_optim_parity": 1,
    },
    "test_fully_shard_clip_grad_norm_.py": {
        "test_clip_grad_norm_1d": 3,
        "test_clip_grad_norm_2d": 4,
    },
    "test_fully_shard_training.py": {
        "test_root_move_forward_input_to_device": 1,
        "test_param_registration_after_forward": 3,
        "test_param_registration_after_backward": 3,
        "test_to_float64_after_init": 1,
        "test_train_parity_single_group": 2,
        "test_train_parity_multi_group": 18,
        "test_train_parity_multi_group_cpu_offload_eager": 12,
        "test_non_root_forward_backward": 1,
        "test_multi_forward_module": 3,
        "test_explicit_prefetching": 1,
        "test_post_optim_event": 1,
        "test_train_parity_with_activation_checkpointing": 15,
        "test_train_parity_with_shared_params": 4,
        "test_gradient_accumulation": 42,
        "test_1f1b_microbatching": 4,
        "test_train_parity_2d_mlp": 12,
        "test_tp_with_fsdp_offloading": 1,
        "test_train_parity_2d_transformer_checkpoint_resume": 8,
        "test_2d_mlp_with_nd_mesh": 12,
        "test_train_parity_hsdp": 24,
        "test_register_fsdp_forward_method": 1,
    },
    "test_fsdp_exec_order.py": {
        "test_invalid_first_iter_order": 2,
        "test_invalid_later_iter_order": 4,
        "test_train_eval": 2,
    },
    "test_fsdp_tp_integration.py": {
        "test_fsdp_tp_integration": 8,
        "test_fsdp_tp_extension_grad": 1,
        "test_fsdp_tp_sync_module_state": 1,
    },
}

_HEAD = """\
# From the seeds to the suites

The suites began from five test files of torch, of the middle of 2024: three for `fully_shard`, two for
`FullyShardedDataParallel`. This page says which cases took the place of each of their tests. *Combinations* are those
that the seed's test ran, within one test and after its skips; *items* are pytest items of one implementation, worlds
counted apart, each of which can fail alone.

Everywhere: gradients and every stage of a step are compared, not the losses alone; each rank has data of its own; three
steps take the place of ten; SGD takes that of Adam, which divides noise by noise.

Written by `python docs/make_seeds.py` from the marks of the cases; `tests/test_seeds.py` keeps it so.
"""


class Collector:
    """The collected items' ``seed`` marks: {seed test: {case: items}}, and the notes."""

    def __init__(self) -> None:
        self.cases: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
        self.notes: dict[str, list[str]] = collections.defaultdict(list)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Called by pytest."""
        for item in session.items:
            for mark in item.iter_markers("seed"):
                test, note = mark.args[0], mark.kwargs["note"]
                self.cases[test][item.nodeid.partition("[")[0].removeprefix("suites/")] += 1
                if note and note not in self.notes[test]:
                    self.notes[test].append(note)


def collected() -> Collector:
    """The marks of all cases, nightly ones included."""
    collector = Collector()
    arguments = ["--collect-only", "-q", "-p", "no:cacheprovider", "-m", "nightly or not nightly", str(ROOT / "suites")]
    with contextlib.redirect_stdout(io.StringIO()) as output:
        code = pytest.main(arguments, plugins=[collector])
    if code != pytest.ExitCode.OK:
        raise SystemExit(f"the suites cannot be collected:\n{output.getvalue()}")
    return collector


def page(found: Collector) -> str:
    """The whole page.

    Raises:
        SystemExit: a case names a test that the seeds do not have.
    """
    known = {f"{file}::{test}" for file, tests in SEEDS.items() for test in tests}
    if unknown := sorted(found.cases.keys() - known):
        raise SystemExit(f"cases name tests that the seeds do not have: {', '.join(unknown)}")
    lines = [_HEAD]
    for file, tests in SEEDS.items():
        lines += [f"## {file}", "", "| test | combinations | cases | items | what changed |", "|---|---|---|---|---|"]
        for test, combinations in tests.items():
            cases = found.cases.get(f"{file}::{test}", collections.Counter[str]())
            names = "<br>".join(f"`{name}`" for name in sorted(cases)) or "none yet"
            note = "; ".join(found.notes.get(f"{file}::{test}", ()))
            lines.append(f"| `{test}` | {combinations} | {names} | {cases.total()} | {note} |")
        covered = [test for test in tests if f"{file}::{test}" in found.cases]
        lines += ["", f"{len(covered)} of {len(tests)} tests, {sum(tests[test] for test in covered)} of "
                  f"{sum(tests.values())} combinations.", ""]  # fmt: skip
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the page, or compare it."""
    parser = argparse.ArgumentParser(description="docs/seeds.md from the marks of the cases")
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 if the page is out of date")
    options = parser.parse_args(arguments)
    text = page(collected())
    if not options.check:
        PAGE.write_text(text)
        return 0
    if PAGE.is_file() and PAGE.read_text() == text:
        return 0
    print("docs/seeds.md is out of date: run python docs/make_seeds.py", file=sys.stderr)
    return 1


if __name__ == "__main__":
    raise SystemExit(main())
