"""Compares and accepts inline expected texts, once per case, in the pytest process, with expecttest."""

from __future__ import annotations

from collections.abc import Sequence

from expecttest import PositionInfo, assert_expected_inline

from shardproof.harness.verdicts.observations import ExpectedText


def compare(by_rank: Sequence[Sequence[ExpectedText]]) -> str | None:
    """Compare the texts that the ranks of one case rendered with the literals at the calls.

    With ``EXPECTTEST_ACCEPT=1`` a literal that differs is rewritten instead.

    Args:
        by_rank: for each rank, its texts in the order of the calls.

    Returns:
        The first difference, between ranks or from a literal, or None.
    """
    for rank, texts in enumerate(by_rank):
        if [item.text for item in texts] != [item.text for item in by_rank[0]]:
            return f"ranks 0 and {rank} rendered different texts for one inline literal; render what all ranks share"
    for item in by_rank[0]:
        try:
            assert_expected_inline(item.text, item.expected, pos=PositionInfo(item.filename, item.lineno))
        except AssertionError as error:
            return f"{item.filename}:{item.lineno}: {error}"
    return None
