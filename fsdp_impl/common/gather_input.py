"""What an all-gather reads: the shard as it is, or a copy of it in the gather's own output."""

import torch


def ready_to_gather(shard: torch.Tensor, output: torch.Tensor, rank: int) -> torch.Tensor:
    """``shard`` if an all-gather into ``output`` can read it as it is, else a copy that :func:`own_part` makes."""
    is_ready = shard.dtype == output.dtype and shard.device == output.device
    return shard if is_ready else own_part(output, shard, rank)


def own_part(output: torch.Tensor, shard: torch.Tensor, rank: int) -> torch.Tensor:
    """Write ``shard`` (1-D, ``n``, any dtype and device) to its place in a gather's ``output``; returns that place.

    An all-gather may be given its own part of the output as its input. So a shard that has to be moved or cast takes no
    memory beside the output, for as long as the gather is in flight. The copy is queued on the current stream, as the
    gather is; it casts where ``output`` lives, because the host is slower and would be waited for.
    """
    own = output.narrow(0, rank * shard.numel(), shard.numel())
    moved = shard if shard.dtype == own.dtype else shard.to(own.device, non_blocking=True)
    return own.copy_(moved, non_blocking=True)
