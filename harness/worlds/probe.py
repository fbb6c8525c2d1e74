"""Do the process groups of a backend move data? Some have collectives that return at once and write nothing."""

import torch
import torch.distributed as dist


class MovesNoData(RuntimeError):
    """A collective has written no data, or the wrong ones. The text is one line."""


def check(device: torch.device) -> None:
    """Add up and gather a number of each rank of the default group on the rank's device.

    A case on a group that moves nothing would fail for reasons that are not its implementation's.

    Raises:
        MovesNoData: the results are not those numbers.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    total = torch.tensor([rank + 1.0], device=device)
    dist.all_reduce(total)
    parts = [torch.zeros(1, device=device) for _ in range(size)]
    dist.all_gather(parts, torch.tensor([rank + 1.0], device=device))
    found = {"all_reduce": total.tolist(), "all_gather": torch.cat(parts).tolist()}
    numbers = [one + 1.0 for one in range(size)]
    for name, expected in (("all_reduce", [sum(numbers)]), ("all_gather", numbers)):
        if found[name] != expected:
            raise MovesNoData(
                f"process groups of the backend {dist.get_backend()} move no data on {device.type}: {name} of "
                f"{numbers} gave {found[name]} on rank {rank}, not {expected}"
            )
