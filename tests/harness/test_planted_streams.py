"""Bugs of streams, of the lifetimes of buffers and of overlap are caught on GPUs, each by the case that names it."""

from __future__ import annotations

import pytest
import torch

from tests.harness import planted_streams as planted
from tests.harness.planted import Killer, assert_killed, assert_sound_passes, cases_of, selected

pytestmark = pytest.mark.slow("the tests share one run of the suites, in which planted bugs fail")

OVERLAPS = "test_collectives_run_beside_computation and w2"
AHEAD = "test_host_runs_ahead and w2-plain"
LATE = "test_one_rank_is_late and w2-{}"
REUSED = "test_memory_is_not_reused_early and w2-{}"
OFFLOADED = "test_offloaded and w2-{}-pinned"
PEAKS = "test_peaks and w2-shards"
OTHER_STREAM = "test_training_on_another_stream and w2-None"
SHARDS = "test_memory_of_shards and w2-1-pinned"
HOOKS = "test_step_waits_for_hooks"
OUTPUT, GRADIENT, WAITED = "output of 'microbatch 0", "gradient of '", "the host waited for the device"
KILLED = {
    "gathers-before-the-step": Killer(LATE.format("all_gather-before"), OUTPUT),
    "waits-for-all-behind-the-event": Killer("test_gathers_wait_for_the_event_alone", "it waited for it"),
    "event-not-waited-for": Killer("test_gathers_wait_for_the_step and w2-False", OUTPUT),
    "computes-before-the-gather": Killer(LATE.format("all_gather-before"), OUTPUT),
    "gathers-before-the-copy-out": Killer(REUSED.format("None-all-delayed"), ""),
    "reduces-before-backward": Killer(LATE.format("reduce_scatter-before"), GRADIENT),
    "all-reduces-before-the-reduce-scatter": Killer(LATE.format("all_reduce-before"), GRADIENT),
    "reduce-input-freed-early": Killer(LATE.format("reduce_scatter-before"), GRADIENT),
    "reduce-input-not-kept": Killer(LATE.format("reduce_scatter-before"), GRADIENT),
    "steps-before-the-reductions": Killer(HOOKS, ""),
    "host-reads-before-the-copy": Killer(OFFLOADED.format("all-delayed"), ""),
    "default-stream-for-the-current-one": Killer(OTHER_STREAM, ""),
    "gradients-stay-on-the-device": Killer(SHARDS, ""),
    "gradients-not-pinned": Killer(SHARDS, "is_pinned() is False"),
    "units-kept-whole": Killer("test_memory_to_shard_a_model_on_the_cpu", "but the ranks took"),
    "gathers-on-the-current-stream": Killer(OVERLAPS, "no overlap"),
    "reductions-on-the-current-stream": Killer(OVERLAPS, "it waited for it"),
    "gathers-wait-for-computation": Killer(OVERLAPS, "no overlap"),
    "computation-waits-for-reductions": Killer(OVERLAPS, "it waited for it"),
    "host-waits-for-reductions": Killer(AHEAD, WAITED),
    "host-waits-for-gathers": Killer(AHEAD, WAITED),
    "all-reduce-inputs-kept": Killer(PEAKS, "layers"),
    "gradients-kept-until-the-end": Killer("test_what_is_held and w2-shards", "times its share"),
    "flat-gathers-before-the-step": Killer(LATE.format("all_gather-before"), OUTPUT),
    "flat-computes-before-the-gather": Killer(LATE.format("all_gather-before"), OUTPUT),
    "flat-buffer-freed-early": Killer(REUSED.format("None-all-delayed"), ""),
    "flat-buffer-dropped-at-once": Killer(LATE.format("all_gather-before"), OUTPUT),
    "flat-reduces-before-backward": Killer(LATE.format("reduce_scatter-before"), GRADIENT),
    "flat-all-reduces-before-the-reduce-scatter": Killer(LATE.format("all_reduce-before"), GRADIENT),
    "flat-reduce-input-not-kept": Killer(LATE.format("reduce_scatter-before"), GRADIENT),
    "flat-host-reads-before-the-copy": Killer(OFFLOADED.format("all-delayed"), ""),
    "flat-default-stream-for-the-current-one": Killer(OTHER_STREAM, ""),
    "flat-gradients-not-pinned": Killer(SHARDS, "is_pinned() is False"),
    "flat-keeps-three-buffers": Killer(PEAKS, "layers"),
    "flat-retired-while-gathering-ahead": Killer(PEAKS, "layers"),
    "flat-gathers-behind-what-computes": Killer(OVERLAPS, "no overlap"),
}


@pytest.fixture(scope="module")
def cases(request, tmp_path_factory):
    """The cases of one run of every selected bug's item, with the bug and with the reference that it is a bug of."""
    if torch.cuda.device_count() < 2:
        pytest.skip("unmet: two GPUs, whose streams these bugs are about")
    items = {bug: KILLED[bug].item for bug in selected(request)}
    folder = tmp_path_factory.mktemp("planted")
    return cases_of(items, planted.ADAPTERS, flat=planted.FLAT, folder=folder, device="cuda", workers=4)


def test_every_bug_has_a_case():
    assert KILLED.keys() == planted.ADAPTERS.keys()


def test_the_sound_references_pass_the_same_cases(cases):
    assert_sound_passes(cases)


@pytest.mark.parametrize("bug", KILLED)
def test_bug_is_caught(cases, bug):
    assert_killed(cases, planted.ADAPTERS[bug], KILLED[bug])
