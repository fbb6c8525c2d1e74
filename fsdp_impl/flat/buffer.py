"""The memory of a unit's unsharded flat parameter.

The gather writes straight into it, so it belongs to the gather stream, while compute on the current stream reads it.
Autograd keeps references to its tensors between forward and backward: the storage stays, its bytes come and go.
"""

import torch

from fsdp_impl.common import streams
from fsdp_impl.common.streams import Event
from fsdp_impl.flat.context import FlatContext


class FlatBuffer:
    """A storage for ``numel`` elements of ``dtype``, without bytes at first.

    Attributes:
        leaf: what autograd differentiates with respect to.
        target: another tensor on the same storage, with its own version counter: a gather that writes to it does not
            look to autograd like a change of what it saved.
    """

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        self._nbytes = numel * dtype.itemsize
        # Normal tensors even if the first unshard happens under inference mode: training may follow.
        with torch.inference_mode(False), torch.no_grad():
            self._storage = torch.empty(0, dtype=torch.uint8, device=device).untyped_storage()
            self.leaf, self.target = (
                torch.empty(0, dtype=dtype, device=device).set_(self._storage, 0, (numel,), (1,)) for _ in range(2)
            )
            # set_ gave the storage bytes, of the stream that is current here: compute queued on it may still be reading
            # what they held before, which the first gather, on its own stream, would overwrite.
            self.drop()
        self._device = device
        self.context = FlatContext(device)

    def allocate(self) -> None:
        """Give the storage its bytes, in the memory of the current stream (the gather stream)."""
        retired = self.context.take_back(self)
        if retired is not None:
            # The bytes are still there; whoever read them before has to be done before the gather overwrites them.
            streams.wait(streams.current(self._device), retired)
        if self._storage.size() != self._nbytes:
            self._storage.resize_(self._nbytes)

    def free(self) -> None:
        """Let the bytes go once all that is queued on the current stream has read them."""
        used: Event = streams.record(streams.current(self._device))
        if used is None:
            self.drop()
        else:
            self.context.retire(self, used)

    def drop(self) -> None:
        """Give the bytes back at once."""
        if self._storage.size() != 0:
            self._storage.resize_(0)

    @property
    def is_allocated(self) -> bool:
        return self._storage.size() == self._nbytes


class Alias:
    """In the place of a :class:`FlatBuffer` where nothing is sharded or cast: the flat parameter itself."""

    def __init__(self, flat: torch.Tensor) -> None:
        with torch.inference_mode(False):
            self.leaf = flat.detach()
        self.context = FlatContext(flat.device)

    def free(self) -> None:
        """Nothing to free: these are the parameters themselves."""
