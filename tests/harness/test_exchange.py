"""Exchanges between ranks, through files on a host and sockets between hosts: every rank gets every value, in order."""

import concurrent.futures
import random
import socket
import threading
import time

import pytest

from shardproof.harness.parity.exchange import _LENGTH, Exchange, HostExchange, Seal


def _world(folder, nodes):
    """The ranks of a world, each with its part of the exchanges, by the hosts on which they are; and their sockets."""
    size = len(nodes)
    peers = [{} for _ in range(size)]
    for one in range(size):
        for other in range(one):
            if nodes[one] != nodes[other]:
                peers[one][other], peers[other][one] = socket.socketpair()
    ranks, within = [], []
    for index, node in enumerate(nodes):
        here = [rank for rank, its in enumerate(nodes) if its == node]
        (folder / f"host{node}").mkdir(exist_ok=True)
        within.append(Exchange(folder / f"host{node}", index=here.index(index), size=len(here)))
        seals = {rank: Seal(b"key", mine=bytes([index, rank]), theirs=bytes([rank, index])) for rank in peers[index]}
        ranks.append(HostExchange(within[-1], here=here, peers=peers[index], seals=seals))
    for exchange in within:
        exchange.connect()
    return (within if len(set(nodes)) == 1 else ranks), peers


def _together(*functions):
    """Call functions at the same time and return what they return; a rank that waits for ever fails the test."""
    found = {}
    calls = [
        threading.Thread(target=lambda i=i, call=call: found.update({i: call()}), daemon=True)
        for i, call in enumerate(functions)
    ]
    for call in calls:
        call.start()
    until = time.monotonic() + 30
    for call in calls:
        call.join(max(0.0, until - time.monotonic()))
    return [found.get(index, "has not ended") for index in range(len(functions))]


@pytest.mark.parametrize(
    "nodes", [(0,), (0,) * 2, (0,) * 4, (0,) * 8, (0, 1), (0, 0, 1, 1), (0, 1, 0, 1), (0, 1, 2, 2, 1)], ids=str
)
def test_every_rank_gets_every_value_of_every_round(tmp_path, nodes):
    ranks, _ = _world(tmp_path, nodes)
    is_one_host = len(set(nodes)) == 1

    def value(index, round_):
        # Values shrink and grow, so that the rest of a longer one would show; the longest is larger than a pipe holds,
        # or than a socket takes at once, so that ranks that only send would block each other.
        length = [0, 5, 70_000 if is_one_host else 1_500_000, 3, 1][(index + round_) % 5]
        return bytes([index, round_ % 256]) * length

    def run(index):
        order = random.Random(index)
        for round_ in range(200 if is_one_host else 20):
            if order.random() < 0.2:
                sum(range(order.randrange(20_000)))  # be late
            found = ranks[index].gather(value(index, round_))
            assert found == [value(other, round_) for other in range(len(nodes))], (index, round_)
        return True

    assert _together(*(lambda i=i: run(i) for i in range(len(nodes)))) == [True] * len(nodes)


def test_a_rank_that_is_ahead_changes_nothing_that_others_have_yet_to_read(tmp_path):
    (first, second), _ = _world(tmp_path, (0, 0))
    with concurrent.futures.ThreadPoolExecutor(1) as threads:
        later = threads.submit(lambda: [first.gather(bytes([number])) for number in range(3)])
        found = [second.gather(b"") for _ in range(2)]
        assert not later.done()
        found.append(second.gather(b""))
        assert found == [[bytes([number]), b""] for number in range(3)]
        assert later.result() == found


def test_the_next_value_of_a_rank_that_is_ahead_is_left_for_the_next_exchange(tmp_path):
    ranks, _ = _world(tmp_path, (0, 1))
    one, other = ranks
    # The other rank has sent its next value before this one has read the first.
    for value in (b"first", b"second"):
        sealed = other._seals[0].close(value)
        other._peers[0].send(_LENGTH.pack(len(sealed)) + sealed)

    def gathered():
        return [one.gather(b"a"), one.gather(b"b")]

    assert _together(gathered) == [[[b"a", b"first"], [b"b", b"second"]]]


def test_the_end_of_a_rank_is_an_error_that_names_it(tmp_path):
    ranks, peers = _world(tmp_path, (0, 1, 2))
    peers[2][0].close()
    peers[2][1].close()
    with pytest.raises(ConnectionError, match=r"Connection closed by peer: rank 2 ended|Broken pipe|reset by peer"):
        ranks[0].gather(b"value")
