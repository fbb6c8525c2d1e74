"""Inline expected texts, compared and accepted once, in the controller, through expecttest."""

from __future__ import annotations

from collections.abc import Sequence

from expecttest import PositionInfo, assert_expected_inline

from shardproof.harness.findings.observations import ExpectedText


def compare(by_rank: Sequence[Sequence[ExpectedText]]) -> str | None:
    """What is wrong with the texts that the ranks of one case gave, or None.

    With ``EXPECTTEST_ACCEPT=1`` the literal at the call is rewritten instead.
    """
    for rank, texts in enumerate(by_rank):
        if [item.text for item in texts] != [item.text for item in by_rank[0]]:
            return f"ranks 0 and {rank} gave different texts for one inline expectation; render what all ranks share"
    for item in by_rank[0]:
        try:
            assert_expected_inline(item.text, item.expected, pos=PositionInfo(item.filename, item.lineno))
        except AssertionError as error:
            return f"{item.filename}:{item.lineno}: {error}"
    return None
