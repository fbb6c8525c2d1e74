"""A sink gets each tensor of a watched step in execution order, and a watch without one records what it did."""

import dataclasses

import torch

from shardproof.harness.judging.finding import Stage
from shardproof.harness.watching.records import Usage
from shardproof.harness.watching.watch import Watch
from tests.harness.test_doctor import net, sgd, train


def fail(error):
    raise error


def watched(**options):
    """The records of two steps, and the losses."""
    model, records = net(), []
    watch = Watch(records.append, steps=[0, 1], on_error=fail, **options)
    watch.attach(model)
    losses = train(model, sgd(model), steps=2, microbatches=2)
    watch.end_step()
    assert not watch.is_attached
    return [dataclasses.replace(one, usage=Usage()) for one in records], losses


def test_events_come_in_execution_order_with_what_each_tensor_is():
    seen = []
    records, losses = watched(
        sink=lambda one: seen.append(dataclasses.replace(one, value=one.value.clone())), modules=True
    )
    half = len(seen) // 2
    texts = [f"{one.stage.value}:{one.parameter or one.module}{one.state and '.' + one.state}" for one in seen[:half]]
    microbatch = [
        "input:", *(f"output of a module:{name}" for name in ("0", "1", "2", "")), "loss:",
        "gradient of a module's output:", "gradient of a module's output:2",
        "gradient before its reduction:2.bias", "gradient before its reduction:2.weight",
        "gradient of a module's output:1", "gradient of a module's output:0",
        "gradient before its reduction:0.bias", "gradient before its reduction:0.weight",
    ]  # fmt: skip
    names = ["0.weight", "0.bias", "2.weight", "2.bias"]
    gradients, clipped, initial = (
        [f"{stage}:{n}" for n in names] for stage in ("gradient", "clipped gradient", "parameter before step")
    )
    after = [f"{what}" for n in names for what in (f"parameter after step:{n}", f"optimizer state:{n}.momentum_buffer")]

    def ordered(found):
        """With outputs of one tensor, whose hooks run in the order in which autograd has them, sorted."""
        return [*found[:6], *sorted(found[6:8]), *sorted(found[8:10]), *found[10:12], *sorted(found[12:14])]

    count = len(microbatch)
    assert ordered(texts[:count]) == ordered(microbatch)
    rest = texts[count:]
    assert rest[:4] == gradients and ordered(rest[4 : 4 + count]) == ordered(microbatch)
    assert rest[4 + count :] == [*gradients, "total norm:", *clipped, *initial, *after]
    assert [one.microbatch for one in seen if one.stage is Stage.OWN_GRADIENT] == ([0] * 4 + [1] * 4) * 2
    assert [float(one.value) for one in seen if one.stage is Stage.LOSS] == losses
    sums = {one.parameter: 0 for one in seen if one.parameter}
    for event in seen[:half]:
        tensor = event.value
        assert not tensor.requires_grad and (event.layout is None) == (event.stage.value.count("output") + (
            event.stage is Stage.INPUT) > 0)  # fmt: skip
        if event.stage is Stage.OWN_GRADIENT:
            sums[event.parameter] = sums[event.parameter] + tensor
        elif event.stage is Stage.GRADIENT:
            assert torch.equal(tensor, sums[event.parameter])
    assert [event.parameter for event in seen if event.stage is Stage.CLIPPED_GRADIENT] == names * 2
    assert (records, losses) == watched(), "a sink changes neither the records nor the losses"


def test_without_digests_a_record_has_neither_gradients_nor_bits():
    seen = []
    records, losses = watched(sink=lambda one: seen.append(one.stage), digests=False)
    full, same = watched()
    assert losses == same and not {Stage.MODULE_OUTPUT, Stage.OUTPUT_GRADIENT} & set(seen)
    for one, other in zip(records, full, strict=True):
        assert not one.gradients.own and not one.gradients.at_step and other.gradients.own and other.gradients.at_step
        assert (one.forwards, one.modules.ties) == (other.forwards, other.modules.ties) and one.forwards.count == 2
        assert {name: part.after for name, part in one.parameters.items()} == dict.fromkeys(other.parameters)


def test_an_error_of_a_sink_ends_the_watching_and_not_the_training():
    model, errors = net(), []
    watch = Watch(print, steps=[0], on_error=lambda error: (errors.append(error), watch.detach()),
                  sink=lambda one: fail(KeyError("mine")))  # fmt: skip
    watch.attach(model)
    losses, unwatched = (train(one, sgd(one), steps=1, microbatches=2) for one in (model, net()))
    assert losses == unwatched and [str(one) for one in errors] == ["'mine'"]
