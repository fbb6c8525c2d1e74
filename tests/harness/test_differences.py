"""What is missing and what is extra in a trace: against a case's numbers, another rank, and other units."""

from expecttest import assert_expected_inline

from shardproof.harness.collectives.differences import between_ranks, between_texts, lacking_collectives, marked_counts
from shardproof.harness.collectives.trace import Collective, Trace

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


def test_the_last_ones_are_extra_where_no_unit_tells():
    trace = Trace([of("all_reduce", "", "clip"), of("all_reduce", "", "clip")])
    lines = marked_counts(trace, "clip", {"all_reduce": 1}, UNITS)
    assert [line[0] for line in lines[1:]] == [" ", "+"]


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
