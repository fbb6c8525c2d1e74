"""Exchanges between ranks of several hosts: every rank gets every value, in order, whoever is late."""

import concurrent.futures
import random
import socket

import pytest

from shardproof.harness.parity.exchange import Exchange
from shardproof.harness.parity.host_exchange import HostExchange


def _world(folder, nodes):
    """The ranks of a world, each with its part of the exchanges."""
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
        ranks.append(HostExchange(within[-1], here=here, peers=peers[index]))
    for exchange in within:
        exchange.connect()
    return ranks, peers


@pytest.mark.parametrize("nodes", [(0, 1), (0, 0, 1, 1), (0, 1, 0, 1), (0, 1, 2, 2, 1)], ids=str)
def test_every_rank_gets_every_value_of_every_round(tmp_path, nodes):
    ranks, _ = _world(tmp_path, nodes)

    def value(index, round_):
        # Also values that no socket takes at once, so that ranks that only send would block each other.
        length = [0, 5, 1_500_000, 3, 1][(index + round_) % 5]
        return bytes([index, round_ % 256]) * length

    def run(index):
        order = random.Random(index)
        for round_ in range(20):
            if order.random() < 0.1:
                order.random()
            found = ranks[index].gather(value(index, round_))
            assert found == [value(other, round_) for other in range(len(nodes))], (index, round_)
        return True

    with concurrent.futures.ThreadPoolExecutor(len(nodes)) as threads:
        assert all(threads.map(run, range(len(nodes))))


def test_the_next_value_of_a_rank_that_is_ahead_is_left_for_the_next_exchange(tmp_path):
    ranks, peers = _world(tmp_path, (0, 1))
    peers[0][1].setblocking(True)
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        first = thread.submit(ranks[1].gather, b"first")
        assert ranks[0].gather(b"one") == [b"one", b"first"]
        assert first.result() == [b"one", b"first"]
        # Rank 1 has sent its second value before rank 0 begins its own second exchange, and then its third.
        second = thread.submit(lambda: [ranks[1].gather(b"second"), ranks[1].gather(b"third")])
        assert ranks[0].gather(b"two") == [b"two", b"second"]
        assert ranks[0].gather(b"three") == [b"three", b"third"]
        assert second.result() == [[b"two", b"second"], [b"three", b"third"]]


def test_the_end_of_a_rank_is_an_error_that_names_it(tmp_path):
    ranks, peers = _world(tmp_path, (0, 1, 2))
    peers[2][0].close()
    peers[2][1].close()
    with pytest.raises(ConnectionError, match=r"Connection closed by peer: rank 2 ended|Broken pipe|reset by peer"):
        ranks[0].gather(b"value")
