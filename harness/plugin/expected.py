"""Inline expected texts, compared and accepted once per case, in the pytest process, with expecttest."""

from collections.abc import Sequence

from expecttest import PositionInfo, assert_expected_inline

from shardproof.harness.judging.observations import ExpectedText


def compare(by_rank: Sequence[Sequence[ExpectedText]]) -> str | None:
    """Compare the texts that the ranks of one case rendered, in the order of the calls, with the literals at the calls.

    With ``EXPECTTEST_ACCEPT=1`` a literal that differs is rewritten instead. Returns the first difference, between
    ranks or from a literal, or None.
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
