"""What the units under one root share: streams, buffers in flight, and the state of the running iteration."""

from collections import deque
from typing import TYPE_CHECKING

import torch

from fsdp_impl.common import streams
from fsdp_impl.common.comm_context import CommContext
from fsdp_impl.common.streams import Event

if TYPE_CHECKING:
    from fsdp_impl.common.order import OrderCheck
    from fsdp_impl.flat.buffer import FlatBuffer
    from fsdp_impl.flat.group import FlatGroup
    from fsdp_impl.flat.unit import FlatUnit

# Buffers that keep their bytes although compute with them is queued to its end. With one, a gather waits for the
# compute of the unit before the one that computes just now, which has mostly ended: so gather and compute overlap, and
# three buffers exist at most (computing, retired, being gathered).
_MAX_RETIRED = 1


class FlatContext(CommContext):
    """Streams, and a window over the buffers whose compute may still be running.

    A buffer's bytes are memory of the gather stream. They may go to the next gather only after the current stream has
    read them, so that gather would have to wait for compute. The window says which compute: not the latest.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        # Whether gathers wait for compute at all, so that unsharded buffers are bounded; else bytes are reused only
        # when the device is seen to be done with them, and a host that runs ahead takes more memory.
        self.limits_gathers = True
        self._retired: deque[tuple[FlatBuffer, torch.Event]] = deque()

    def retire(self, buffer: "FlatBuffer", used: torch.Event) -> None:
        """Free ``buffer`` some time after ``used``."""
        self._retired.append((buffer, used))

    def take_back(self, buffer: "FlatBuffer") -> Event:
        """Forget that ``buffer`` is to be freed; returns the event after which it may be written to, if it was."""
        for entry in self._retired:
            if entry[0] is buffer:
                self._retired.remove(entry)
                return entry[1]
        return None

    def release_retired(self, keep: int = _MAX_RETIRED) -> None:
        """Free retired buffers before a gather allocates: the oldest but ``keep``, or what the device is done with."""
        while self._retired and (len(self._retired) > keep if self.limits_gathers else self._retired[0][1].query()):
            self._release_oldest()

    def release_all_retired(self) -> None:
        """Free all retired buffers, where compute ends anyway."""
        while self._retired:
            self._release_oldest()

    def _release_oldest(self) -> None:
        buffer, used = self._retired.popleft()
        streams.wait(self.gather_stream, used)
        buffer.drop()


class IterationContext:
    """The state of one forward and backward of the units under one root.

    Attributes:
        units: all units under the root, in the order of ``modules()``.
        forward_root: the unit whose forward is outermost just now.
        first_order: groups in the order of the first training forward's gathers, each once: what forward prefetches.
        forward_order: groups in the order of their post-forwards since the last backward, with repeats.
        callback_queued: whether this backward's final callback is queued.
        order: checks the order of gathers; ``None`` unless the debug level asks for it.
    """

    def __init__(self) -> None:
        self.units: list[FlatUnit] = []
        self.forward_root: FlatUnit | None = None
        self.first_order: list[FlatGroup] = []
        self.forward_order: list[FlatGroup] = []
        self.callback_queued = False
        self.order: OrderCheck | None = None
