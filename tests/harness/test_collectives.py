"""The trace: one vocabulary for every way in which a collective is issued, and what differs between ranks."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from expecttest import assert_expected_inline
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from shardproof.harness.collectives.announce import Announcer
from shardproof.harness.collectives.delays import Delay, Perturbation
from shardproof.harness.collectives.differences import between_ranks, between_texts, lacking_collectives, marked_counts
from shardproof.harness.collectives.recorder import Recorder, UnknownCollective, kind_of
from shardproof.harness.collectives.trace import (
    Collective,
    Trace,
    count_difference,
    first_difference,
    rendered_difference,
)
from shardproof.harness.judging.finding import Finding, Location, Stage
from shardproof.harness.parity.rank import Rank
from shardproof.testing import world


def recorded(function, unit_of=None):
    recorder = Recorder(unit_of) if unit_of else Recorder()
    with recorder.during("forward"):
        function()
    return recorder.trace


@pytest.mark.filterwarnings("ignore")
@world(2)
def test_every_spelling_of_a_gather_and_of_a_reduction_is_one_kind(rank: Rank):
    shard, full = torch.ones(3), torch.ones(6)
    spellings = {
        "into tensor": lambda: dist.all_gather_into_tensor(full, shard),
        "list": lambda: dist.all_gather(list(full.chunk(2)), shard),
        "functional": lambda: functional.all_gather_tensor(shard, 0, dist.group.WORLD).sum(),
    }
    reductions = {
        "tensor": lambda: dist.reduce_scatter_tensor(shard, full),
        "functional": lambda: functional.reduce_scatter_tensor(full, "sum", 0, dist.group.WORLD).sum(),
    }
    if hasattr(dist, "all_gather_single"):
        spellings["single"] = lambda: dist.all_gather_single(full, shard)
        reductions["single"] = lambda: dist.reduce_scatter_single(shard, full)
    for kind, calls in (("all_gather", spellings), ("reduce_scatter", reductions)):
        for name, call in calls.items():
            assert recorded(call) == [Collective("forward", kind, "float32", 24, (0, 1))], f"{kind} {name}"


@world(2)
def test_reducer_of_ddp_and_norm_of_a_dtensor_are_seen(rank: Rank):
    model = DistributedDataParallel(torch.nn.Linear(3, 1, bias=False))
    loss = model(torch.ones(1, 3)).sum()
    assert recorded(loss.backward) == [Collective("forward", "all_reduce", "float32", 12, (0, 1))]
    sharded = distribute_tensor(torch.ones(4), rank.mesh(), [Shard(0)])
    trace = recorded(lambda: sharded.norm().full_tensor())
    assert [item.kind for item in trace] == ["all_reduce"]


@world(4)
def test_group_is_told_by_its_ranks(rank: Rank):
    mesh = rank.mesh((2, 2), ("replicate", "shard"))
    trace = recorded(lambda: dist.all_reduce(torch.ones(2), group=mesh.get_group("replicate")))
    assert trace[0].group == ((0, 2) if rank.index % 2 == 0 else (1, 3))
    assert str(trace[0]).endswith("ranks 0,2" if rank.index % 2 == 0 else "ranks 1,3")


@world(2)
def test_delay_meets_both_generations_of_names(rank: Rank):
    delay = Delay(milliseconds=1, collective="all_gather")
    names = ["all_gather_into_tensor", *(["all_gather_single"] if hasattr(dist, "all_gather_single") else [])]
    for count, name in enumerate(names, start=1):
        recorder, perturbation = Recorder(), Perturbation([delay], rank=rank.index, device_type="cpu")
        perturbation.install(recorder)
        with recorder.during("forward"):
            getattr(dist, name)(torch.empty(4), torch.ones(2))
            dist.all_reduce(torch.ones(1))
        assert perturbation.met == {delay: 1}, (count, name)
        perturbation.assert_met()


@world(1)
def test_delay_that_met_nothing_is_an_error(rank: Rank):
    perturbation = Perturbation([Delay(milliseconds=1, at="step")], rank=0, device_type="cpu")
    with pytest.raises(AssertionError, match="matched nothing in this run, so it had no effect"):
        perturbation.assert_met()
    perturbation.at("step")
    perturbation.assert_met()


@pytest.mark.parametrize(
    "options",
    [
        *({"milliseconds": 0}, {"milliseconds": float("nan")}, {"milliseconds": float("inf")}, {"ranks": ()}),
        *({"at": "loss", "collective": "all_gather"}, {"at": "loss", "when": "after"}, {"at": "backward"}),
        *({"when": "during"}, {"collective": "allgather"}, {"collective": "barrier"}),
    ],
    ids=str,
)
def test_delay_refuses_what_can_never_be_met(options):
    with pytest.raises(ValueError, match=r"^Delay\([^\n]*$"):
        Delay(**{"milliseconds": 1} | options)


@world(2)
def test_a_scatter_moves_as_many_bytes_on_all_ranks(rank: Rank):
    pieces = [torch.ones(3), torch.zeros(3)] if rank.index == 0 else None
    trace = recorded(lambda: dist.scatter(torch.empty(3), pieces, src=0))
    assert trace == [Collective("forward", "scatter", "float32", 24, (0, 1))]


def gathers(*nbytes, group=(0, 1), phase="forward"):
    return Trace(Collective(phase, "all_gather", "float32", size, group) for size in nbytes)


def test_ranks_that_issue_the_same_do_not_differ():
    assert first_difference([gathers(8, 16), gathers(8, 16)]) is None
    # Members of different groups may do different things.
    assert first_difference([gathers(8, group=(0,)), gathers(16, group=(1,))]) is None


@pytest.mark.parametrize(
    ("second", "told"),
    [((8, 24), "rank 1 issued [forward all_gather float32 24 B ranks 0-1]"), ((8,), "rank 1 issued [nothing more]")],
)
def test_first_difference_names_rank_and_collective(second, told):
    difference = first_difference([gathers(8, 16), gathers(*second)])
    assert difference.location == Location(stage=Stage.COLLECTIVES, rank=1)
    assert difference.text.startswith("collective 1 on ranks [0, 1] differs: rank 0 issued [forward all_gather")
    assert told in difference.text


def test_counts_name_the_unit_that_stands_out():
    trace = Trace(Collective("forward", "all_gather", "float32", 8, (0, 1), unit) for unit in ("a", "b", "b"))
    assert count_difference(trace, "forward", {"all_gather": 3}) is None
    assert count_difference(trace, "forward", {"all_gather": 2}) == Finding(
        Location(stage=Stage.COLLECTIVES, phase="forward", name="b"), "3 all_gather instead of 2 in forward: a 1, b 2"
    )
    missing = count_difference(trace, "backward", {"all_gather": 1})
    assert missing.text == "0 all_gather instead of 1 in backward: none"


def test_counts_name_the_unit_that_lacks_one():
    """The root's own unit may be kept after forward by right, so that it does not make the choice ambiguous."""
    trace = Trace(Collective("backward", "all_gather", "float32", 8, (0, 1), unit) for unit in ("a", "b|c"))
    units = ["a", "b", "d", "root"]
    told = "2 all_gather instead of 3 in backward: a 1, b|c 1; none of d, as when it was not resharded after forward"
    found = count_difference(trace, "backward", {"all_gather": 3}, units=units, root="root")
    assert found == Finding(Location(stage=Stage.COLLECTIVES, phase="backward", name="d"), told)
    found = count_difference(trace, "backward", {"all_gather": 4}, units=units, root="root")
    assert (found.location.name, "none of d, root, as when" in found.text) == (None, True)
    found = count_difference(Trace(), "clip", {"all_reduce": 1}, units=units, root="root")
    assert found.text == "0 all_reduce instead of 1 in clip: none"


def test_parts_of_an_all_to_all_may_differ_between_ranks():
    traces = [Trace([Collective("forward", "all_to_all", dtype, size, (0, 1))]) for dtype, size in MOVED]
    assert first_difference(traces[:2]) is None
    assert "all_to_all int64 16 B" in first_difference(traces[1:]).text


MOVED = [("float32", 8), ("float32", 16), ("int64", 16)]

LINE = "forward   all_gather      float32      400 B  ranks {}  layers.0"


def test_traces_that_were_sent_as_text_are_compared_in_each_group():
    both, pair = LINE.format("0-3"), LINE.format("1,3")
    assert rendered_difference({0: [both], 1: [both, pair], 2: [both], 3: [pair, both]}) is None
    text = rendered_difference({0: [both], 1: [pair, both, pair], 2: [both], 3: [both, pair]})
    issued = "rank 1 issued [forward all_gather float32 400 B ranks 1,3 layers.0], rank 3 issued [nothing more]"
    assert text == f"collective 1 on ranks 1,3 differs: {issued}"


def test_bytes_of_an_all_to_all_and_sides_of_a_send_may_differ():
    uneven = [LINE.replace("all_gather", "all_to_all").replace("400", number).format("0-1") for number in "48"]
    sends = [LINE.replace("all_gather", kind).format("0-1") for kind in ("send", "recv")]
    assert rendered_difference({0: [uneven[0], sends[0]], 1: [uneven[1], sends[1]]}) is None
    assert rendered_difference({0: [], 1: []}) is None


@world(2)
def test_what_process_groups_issue_is_heard_without_a_dispatch_mode(rank: Rank):
    heard: list[Collective] = []
    shard, full = torch.ones(3), torch.empty(6)
    with rank.announcer.heard_by(heard.append, phase="forward"):
        torch.distributed.all_gather_into_tensor(full, shard)
        dist.all_reduce(shard)
    dist.all_reduce(shard)
    issued = [("all_gather", 24), ("all_reduce", 12)]
    assert heard == [Collective("forward", kind, "float32", nbytes, (0, 1)) for kind, nbytes in issued]


def test_every_operator_of_the_installed_torch_is_known():
    """A newer torch that has one more makes this fail: say what it is in recorder.py."""
    torch.distributed.tensor  # noqa: B018  (has operators of its own)
    names = {schema.name for schema in torch._C._jit_get_all_schemas()}
    ours = {name for name in names if name.startswith(("c10d::", "_c10d_functional"))}
    assert len(ours) > 30, "the namespaces have moved"
    kinds = {name: kind_of(name) for name in ours}
    none = {f"_c10d_functional::{name}" for name in ("_wrap_tensor_autograd", "wait_tensor", "wait_tensors")}
    assert {name for name, kind in kinds.items() if kind is None} <= none | {"c10d::check_for_nan"}


def test_gathers_of_torch_2_14_are_known(monkeypatch):
    assert kind_of("c10d::gather_into_tensor_") == "gather"
    called = []
    for name in ("gather_single", "gather_into_tensor"):
        monkeypatch.setattr(dist.ProcessGroup, name, lambda *arguments: called.append(arguments), raising=False)
    before = {name: vars(dist.ProcessGroup).get(name) for name in dir(dist.ProcessGroup)}
    try:
        Announcer(None, rank=0).watch_process_groups()
        announced = {name for name, value in before.items() if vars(dist.ProcessGroup).get(name) is not value}
    finally:
        for name, value in before.items():
            if value is not None:
                setattr(dist.ProcessGroup, name, value)
    assert {"gather", "gather_single", "gather_into_tensor"} <= announced


def test_an_operator_that_no_list_has():
    with pytest.raises(UnknownCollective, match=r"^c10d::novel_ is not known to shardproof; it may be a collective$"):
        kind_of("c10d::novel_")
    assert kind_of("aten::novel_") is None


NOVEL = """
import torch
from shardproof.testing import models, world

@world(2)
def test_case(rank):
    library = torch.library.Library("_c10d_functional", "FRAGMENT")
    library.define("novel(Tensor x) -> Tensor")
    library.impl("novel", lambda x: x.clone(), "CPU")
    pair = rank.pair(models.Tower(dim=4))
    novel = torch.ops._c10d_functional.novel
    pair.step(rank.batch(0, (2, 4)), loss=lambda output: novel(output.detach()).sum() + output.sum())
"""


def test_an_operator_that_no_list_has_is_an_error_of_the_harness(run):
    result = run(NOVEL)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["harness-error: every rank of 2:", "_c10d_functional::novel is not known*"])


# What is missing and what is extra in a trace: against a case's numbers, another rank, and other units

UNITS = ["a", "b", "(root)"]


def of(kind, unit, phase="forward", nbytes=100, group=(0, 1)):
    return Collective(phase, kind, "float32", nbytes, group, unit)


def shown(lines):
    return "".join(f"{line}\n" for line in lines)


def test_what_a_case_expects_is_marked_by_unit():
    trace = Trace([of("all_gather", "a"), of("all_gather", "a"), of("all_gather", "b"), of("broadcast", "")])
    trace.append(of("reduce_scatter", "a", "backward"))
    assert_expected_inline(
        shown(marked_counts(trace, "forward", {"all_gather": 3, "barrier": 1}, UNITS)),
        """\
collectives in forward, against the numbers that the case expects:
  forward all_gather float32 100 B ranks 0-1 a
+ forward all_gather float32 100 B ranks 0-1 a
  forward all_gather float32 100 B ranks 0-1 b
+ forward broadcast float32 100 B ranks 0-1
- forward all_gather (root)
- forward barrier
""",
    )


def test_a_rank_is_marked_against_the_first_of_its_group():
    first = [str(of("all_gather", unit)) for unit in "abcdefgh"]
    second = [line for line in first if not line.endswith("f")] + [str(of("all_gather", "i"))]
    alone = [str(of("broadcast", "", group=(2,)))]
    assert between_ranks({0: first, 1: first, 2: alone}) == []
    assert_expected_inline(
        shown(between_ranks({0: first, 1: second})),
        """\
collectives of rank 1 on ranks 0-1, against those of rank 0:
  forward all_gather float32 100 B ranks 0-1 d
  forward all_gather float32 100 B ranks 0-1 e
- forward all_gather float32 100 B ranks 0-1 f
  forward all_gather float32 100 B ranks 0-1 g
  forward all_gather float32 100 B ranks 0-1 h
+ forward all_gather float32 100 B ranks 0-1 i
""",
    )


def test_the_last_ones_are_extra_where_no_unit_tells():
    trace = Trace([of("all_reduce", "", "clip"), of("all_reduce", "", "clip")])
    lines = marked_counts(trace, "clip", {"all_reduce": 1}, UNITS)
    assert [line[0] for line in lines[1:]] == [" ", "+"]


def test_the_bytes_of_an_all_to_all_may_differ_and_those_of_a_gather_not():
    def lines(kind):
        return {rank: [str(of(kind, "", nbytes=100 * rank))] for rank in (0, 1)}

    assert between_ranks(lines("all_to_all")) == []
    assert len(between_ranks(lines("all_gather"))) == 3


def test_a_long_difference_is_cut():
    many = [str(of("all_gather", str(number))) for number in range(100)]
    lines = between_ranks({0: many, 1: []})
    assert len(lines) == 41
    assert lines[-1] == "  ... 61 more lines"


def test_an_expected_text_is_marked():
    assert between_texts(["a  b", "c"], ["a b", "d"]) == [
        "collectives, against the trace that the case expects:", "  a b", "- d", "+ c",
    ]  # fmt: skip
    assert between_texts(["a  b"], ["a b"]) == []


def test_a_unit_lacks_what_the_others_have():
    trace = Trace([of("all_gather", unit) for unit in UNITS])
    trace += [of(kind, unit, "backward") for unit in UNITS[:2] for kind in ("all_gather", "reduce_scatter")]
    told = lacking_collectives(trace, "(root)", root="(root)")
    assert told == ["- backward reduce_scatter (root) (of other units: a, b)"], "the root may stay gathered"
    assert lacking_collectives(trace, "a", root="(root)") == []


def test_units_of_one_size_are_counted_together():
    trace = Trace([of("reduce_scatter", "a|b", "backward")])
    assert lacking_collectives(trace, "b", root="") == ["- backward reduce_scatter of one of a|b: 1 of 2 units"]
    trace *= 2
    assert lacking_collectives(Trace(trace), "b", root="") == []
