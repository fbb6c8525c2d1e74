"""What a rank sends in a collective, and which part of it leaves a host: by the ring algorithm.

A ring of n ranks passes each n-th part of the data from rank to rank, in the order of the ranks, n - 1 times in a
gather or a reduce-scatter, and twice as often in an all-reduce (P. Patarasuk, X. Yuan: "Bandwidth optimal all-reduce
algorithms for clusters of workstations", 2009; the factors of the "bus bandwidth" of NCCL's tests are the same). NCCL
may choose trees, several rings or a switch that reduces instead.
"""

from __future__ import annotations

from collections.abc import Sequence

#: How often the data of a ring's collective pass each link, in units of (n - 1) / n.
_PASSES = {"all_gather": 1, "reduce_scatter": 1, "all_to_all": 1, "all_reduce": 2}

ASSUMPTION = (
    "ring algorithm: of N bytes gathered or reduced among n ranks a rank sends (n - 1) / n x N, in an all-reduce twice "
    "that; the ring follows the ranks, and what leaves a host is sent over the links between ranks of different hosts"
)


def sent(kind: str, nbytes: int, size: int) -> float:
    """The bytes that a rank sends in one collective.

    Args:
        kind: of the collective, as in a trace.
        nbytes: the bytes of the unsharded side: the output of a gather, the input of a reduction.
        size: the number of ranks in the group.

    Returns:
        The bytes. Of kinds without a ring, such as a broadcast, all of ``nbytes`` are passed on once.
    """
    if size == 1:
        return 0.0
    passes = _PASSES.get(kind)
    return float(nbytes) if passes is None else passes * nbytes * (size - 1) / size


def crossing(group: Sequence[int], node_size: int) -> float:
    """The part of a ring's links that lie between ranks of different hosts, from 0 to 1.

    Args:
        group: the global ranks, in the order of the ring.
        node_size: ranks of a host, which has successive ranks.
    """
    hosts = [rank // node_size for rank in group]
    links = zip(hosts, [*hosts[1:], hosts[0]], strict=True)
    return sum(one != other for one, other in links) / len(hosts)
