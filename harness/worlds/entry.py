"""The first function of a rank process.

Does not import torch at module level, so that the controller can refer to the function without importing torch.
"""

from __future__ import annotations

from multiprocessing.connection import Connection

from shardproof.harness.worlds.jobs import RankSpec

#: The module that the forkserver imports once, so that starting a rank costs about a fork.
PRELOADED = "shardproof.harness.worlds.preloaded"


def main(connection: Connection, spec: RankSpec) -> None:
    """Run this process as a rank until its connection closes.

    Args:
        connection: the rank's end of the pipe to the controller.
        spec: which rank of which world this process is.
    """
    from shardproof.harness.worlds import loop

    loop.main(connection, spec)
