"""The first function of a rank process. Light, so that the controller can name it without importing torch."""

from __future__ import annotations

from multiprocessing.connection import Connection

from shardproof.harness.worlds.jobs import RankSpec

#: Imported once by the forkserver; a rank then costs about a fork.
PRELOADED = "shardproof.harness.worlds.loop"


def main(connection: Connection, spec: RankSpec) -> None:
    """Become a rank."""
    from shardproof.harness.worlds import loop

    loop.main(connection, spec)
