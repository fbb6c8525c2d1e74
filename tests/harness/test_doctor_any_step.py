"""No check of the doctor raises, whatever ranks have seen of a step: what one lacks another may have."""

import dataclasses

import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from shardproof.harness.training.doctor import CHECKS
from shardproof.harness.training.examination import Examination
from shardproof.harness.watching.records import Drop, Idle, Missed, Narrow, NormCall, NotFinite, Optimizer, Undone
from tests.harness.test_doctor_checks import EVERY, SHAPES, Made, gradient


def _set(full):
    def change(record, name, _):
        for stage in (record.gradients.after_backward, record.gradients.at_step):
            stage[name] = gradient(full(record, name))

    return change


def _own(record, name):
    """What the rank itself has computed, as where nothing reduces it; the parts are those of :class:`Made`."""
    return sum(record.parts[name])


def _last_of_own(record, name):
    return record.parts[name][-1]


def _unplaced(record, name, _):
    record.gradients.after_backward.pop(name, None)
    record.gradients.at_step.pop(name, None)
    record.gradients.unplaced.append(name)


def _parameter(**changes):
    def change(record, name, _):
        if name in record.parameters:
            record.parameters[name] = dataclasses.replace(record.parameters[name], **changes)

    return change


#: What may be otherwise in the record of one rank, for one parameter.
CHANGES = {
    "no gradient of its own": lambda record, name, _: record.gradients.own.pop(name, None),
    "fewer microbatches": lambda record, name, _: record.gradients.own.update(
        {name: record.gradients.own.get(name, [])[:1]}
    ),
    "zeros of its own": lambda record, name, _: record.gradients.own.update(
        {name: [(0, gradient(torch.zeros(SHAPES[name])))]}
    ),
    "hooks": lambda record, name, _: record.gradients.given.update({name: record.gradients.own.get(name, [])[:1]}),
    "none after backward": lambda record, name, _: record.gradients.after_backward.pop(name, None),
    "none at the step": lambda record, name, _: record.gradients.at_step.pop(name, None),
    "another one": _set(lambda record, name: torch.ones(SHAPES[name]) * (record.rank + 1)),
    "its own": _set(_own),
    "its own of the last microbatch": _set(_last_of_own),
    "none finite": _set(lambda record, name: torch.full(SHAPES[name], float("nan"))),
    "none but zeros": _set(lambda record, name: torch.zeros(SHAPES[name])),
    "not placed": _unplaced,
    "returned": lambda record, name, _: record.gradients.returned.append(name),
    "no parameter": lambda record, name, _: record.parameters.pop(name, None),
    "frozen": _parameter(trains=False),
    "in no optimizer": _parameter(optimizer=None, lr=None),
    "not moved": _parameter(before=(1,), after=(1,), largest=0.5),
    "frozen when stepped": _parameter(is_frozen=True),
    "not stepped": _parameter(before=None, after=None, state={}),
    "partly lost": _parameter(narrow=Narrow(3, 4)),
    "narrow moments": _parameter(
        narrow=Narrow(states={"exp_avg_sq": "bfloat16", "other": "float16"}), settings={"betas": (0.9, 0.999)}
    ),
    "no place": _parameter(box=None),
    "another buffer": lambda record, *_: record.modules.buffers.update(load=(record.rank,)),
    "divided again": lambda record, *_: record.modules.acts.divided.append("AdamW"),
    "idle scheduler": lambda record, *_: record.modules.acts.idle.append(
        Idle("CosineAnnealingLR", "SGD", "AdamW", 2, (0.1, 0.05), 0.1, record.rank == 0)
    ),
    "restored": lambda record, *_: record.modules.acts.restored.append(("Net", 1)),
    "missed": lambda record, *_: record.modules.acts.missed.append(Missed("Net", 3, record.rank, 2, "a.w", "w")),
    "undone": lambda record, *_: record.modules.acts.undone.append(Undone("Net", ("w",), 1, record.rank == 0)),
    "no buffer": lambda record, *_: record.modules.buffers.clear(),
    "idle": lambda record, name, _: record.modules.idle.append(name),
    "gathered": lambda record, name, _: record.modules.gathered.append(name),
    "outdated": lambda record, name, _: record.modules.outdated.append(name),
}

#: The same of the whole record.
OF_ALL = {
    "no optimizer": lambda record, *_: record.optimizers.clear(),
    "another optimizer": lambda record, *_: record.optimizers.append(Optimizer("SGD", 3, 1, True)),
    "no inputs": lambda record, *_: record.forwards.inputs.clear(),
    "no forward": lambda record, *_: setattr(record, "forwards", type(record.forwards)()),
    "no backward": lambda record, *_: setattr(record, "backwards", 0),
    "one backward more": lambda record, *_: setattr(record, "backwards", record.backwards + 1),
    "no norm": lambda record, *_: record.norms.calls.clear(),
    "a norm of its own": lambda record, *_: record.norms.calls.append(NormCall("get_total_norm", 7.0, None, 2.0)),
    "a norm that is not finite": lambda record, *_: record.norms.calls.append(
        NormCall("clip_grads_with_norm_", float("nan"), 1.0, float("inf"))
    ),
    "not finite": lambda record, *_: record.not_finite.append(NotFinite(0, "output of '0'")),
    "dropped": lambda record, name, flag: record.gradients.drops.append(Drop(1, flag)),
    "leaks": lambda record, *_: setattr(record.gradients, "leaks", True),
    "tokens": lambda record, name, flag: record.losses.tokens.append((8 * flag, 0.25)),
    "no collective": lambda record, *_: record.collectives.clear(),
    "memory": lambda record, *_: setattr(record, "memory", 1 << 20),
    "redrawn": lambda record, name, flag: record.modules.redrawn.update({name: flag}),
    "replaced": lambda record, name, flag: (
        record.modules.replaced.append(name),
        setattr(record.modules, "gone", flag),
    ),
    "no tie": lambda record, *_: record.modules.ties.clear(),
    "nothing": lambda record, *_: record.parameters.clear(),
}

DRAWN = st.lists(
    st.tuples(st.sampled_from([*CHANGES, *OF_ALL]), st.sets(st.sampled_from(EVERY), min_size=1),
              st.sampled_from([*SHAPES]), st.booleans()), max_size=6,
)  # fmt: skip


def judged(steps, sharded, tensors_over):
    """Judge steps with these changes, and all of them together."""
    examination = Examination(CHECKS, waits=True)
    for number, changes in enumerate(steps):
        made = Made(sharded=sharded, tensors_over=tensors_over)
        for record in made.records:
            record.step = number
            record.forwards.inputs = [
                dataclasses.replace(one, batch=one.batch + 100 * number) for one in record.forwards.inputs
            ]
            record.parts = {name: [part[name] for part in made.parts[record.rank]] for name in SHAPES}
            for kind, ranks, name, flag in changes:
                if record.rank in ranks:
                    (CHANGES | OF_ALL)[kind](record, name, flag)
        examination.add(examination.judge(made.evidence(), [("head", "w")]))
        examination.add(examination.settle())
    for found in examination.at_the_end():
        examination.add(found)
    return examination.findings


@settings(max_examples=150, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@example([[("its own", {*EVERY}, "w", False), ("no gradient of its own", {*EVERY}, "b", False)]], False, "")
@given(st.lists(DRAWN, min_size=1, max_size=2), st.booleans(), st.sampled_from(["", "model"]))
def test_no_check_raises(steps, sharded, tensors_over):
    for finding in judged(steps, sharded, tensors_over):
        assert finding.render()


def test_a_healthy_step_has_no_finding():
    for sharded in (False, True):
        assert judged([[], []], sharded, "") == []
