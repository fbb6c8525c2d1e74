"""Which element of a tensor is wrong, and what several runs have there."""

import math
from collections.abc import Mapping

import torch

from shardproof.harness.judging.finding import Numbers
from shardproof.harness.judging.numerics import Distance


def exact_difference(first: torch.Tensor, second: torch.Tensor) -> tuple[tuple[int, ...], float, float] | None:
    """The index and the values of the first element in which two tensors of one shape differ, or None.

    NaN differs from everything, NaN too. Equal infinities do not differ, nor do 0.0 and -0.0.
    """
    assert first.shape == second.shape, f"shapes {tuple(first.shape)} and {tuple(second.shape)} differ"
    if torch.equal(first, second):
        return None
    index = tuple(int(part) for part in (first != second).nonzero()[0])
    return index, float(first[index]), float(second[index])


def numbers_of(result: Distance, runs: Mapping[str, torch.Tensor]) -> tuple[str, Numbers]:
    """Describe in two lines, and in numbers, the element in which the sharded run is farthest from the oracle.

    ``runs`` has the tensor by the name of a run, in one shape.
    """
    values = {who: float(tensor.flatten()[result.index]) for who, tensor in runs.items()}
    if bad := [who for who, value in values.items() if not math.isfinite(value)]:
        away = f"not finite: {', '.join(bad)}"
    else:
        away = (
            f"off by {result.sharded_ulps:.3g} ulps (1 ulp is {result.unit:.3g}); the baseline is "
            f"off by {result.baseline_ulps:.3g} ulps, so at most {result.allowed_ulps:.3g} ulps are allowed"
        )
    text = f"{', '.join(f'{who} {value:.9g}' for who, value in values.items())}\n  {away}"
    ulps = {"sharded": result.sharded_ulps, "baseline": result.baseline_ulps, "allowed": result.allowed_ulps}
    return text, Numbers(result.index, values, ulps)
