"""The seam at which unsharded parameters are freed."""

from typing import Protocol


class Freeable(Protocol):
    """Memory of unsharded parameters."""

    def free(self) -> None:
        """Give the bytes back as soon as nothing reads them."""
        ...


def reshard(buffer: Freeable, *, unit: str) -> None:
    """Free the unsharded parameters of ``unit``; the caller has registered the sharded ones already."""
    buffer.free()
