"""Exchanges between ranks through files: every rank gets every value, in order, whoever is late."""

import concurrent.futures
import random

import pytest

from shardproof.harness.parity.exchange import Exchange


def _world(folder, size):
    ranks = [Exchange(folder, index=index, size=size) for index in range(size)]
    for rank in ranks:
        rank.connect()
    return ranks


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_every_rank_gets_every_value_of_every_round(tmp_path, size):
    ranks = _world(tmp_path, size)

    def values(index, round_):
        # Values shrink and grow, so that the rest of a longer one would show; the last is larger than a pipe holds.
        length = [0, 5, 70_000, 3, 1][(index + round_) % 5]
        return bytes([index, round_ % 256]) * length

    def run(index):
        order = random.Random(index)
        found = []
        for round_ in range(200):
            if order.random() < 0.2:
                sum(range(order.randrange(20_000)))  # be late
            found.append(ranks[index].gather(values(index, round_)))
        return found

    with concurrent.futures.ThreadPoolExecutor(size) as threads:
        for found in threads.map(run, range(size)):
            for round_, gathered in enumerate(found):
                assert gathered == [values(index, round_) for index in range(size)], f"round {round_}"


def test_a_rank_that_is_ahead_changes_nothing_that_others_have_yet_to_read(tmp_path):
    first, second = _world(tmp_path, 2)
    with concurrent.futures.ThreadPoolExecutor(1) as threads:
        later = threads.submit(lambda: [first.gather(bytes([number])) for number in range(3)])
        found = [second.gather(b"") for _ in range(2)]
        assert not later.done()
        found.append(second.gather(b""))
        assert found == [[bytes([number]), b""] for number in range(3)]
        assert later.result() == found
