"""Which ranks hold the same elements of a parameter."""

from shardproof.harness.tensors.fingerprints import Box
from shardproof.harness.training.evidence import Start, holders_of
from shardproof.harness.watching.records import Groups


def test_equal_parts_of_a_constant_are_no_replicas() -> None:
    """A weight of a norm is all ones: the halves that two ranks of a replica hold have one shape and the same bits."""
    groups = [(0, 1), (0, 1), (2, 3), (2, 3)]
    bits = {"norm.weight": (Box((8,)), (), (0, 0))}
    starts = [
        Start(Groups({}, "", ()), bits, replicated=(), model="Norm", shapes={}, flat={"norm.weight": (8, members)})
        for members in groups
    ]
    held, differ = holders_of(starts)
    assert held == {"norm.weight": [(0, 2), (1, 3)]}
    assert not differ
