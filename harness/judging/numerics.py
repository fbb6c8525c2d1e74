"""The tolerances: how far from the oracle a tensor of the sharded run may be.

The error of a tensor is its largest absolute difference to the oracle (float64, one process), in ulps of the tensor's
own dtype at the oracle's largest magnitude. Measured so, the error does not depend on the scale of the values. The
error of the sharded run may be at most ``BASELINE_FACTOR`` times the error of the unsharded baseline of the same dtype,
plus ``SLACK_ULPS``. For a scalar (loss, total norm) it may exceed the baseline's error by ``SLACK_ULPS`` and no factor
applies, because the baseline's error is then a single sample.

The design fixes the constants. How close correct runs come to them was measured in the run files that were published at
89387d6, from the worst distance of each stage and step of a passing case (torch 2.11 on H100s and H200s, NCCL and gloo;
torch 2.13, gloo). None of the 376,888 distances recorded there used more than 0.66 of the allowed error, and no loss or
total norm was off by more than 7.6 ulps.
"""

import dataclasses
import math
from collections.abc import Mapping

import torch

#: The sharded run's error may be this many times the baseline's. Sharding changes only the order of sums, so both
#: errors are samples of one distribution.
BASELINE_FACTOR = 4.0

#: Error in ulps that is allowed even if the baseline happens to equal the oracle: a few roundings in the last place.
SLACK_ULPS = 8.0

#: Gradient elements below this many ulps (at their tensor's largest magnitude) are rounding noise. Adam divides them by
#: their own running magnitude, that is noise by noise.
ADAM_NOISE_ULPS = 64.0

#: Elements of which errors are computed at a time, on the host and on an accelerator.
_PART, _PART_THERE = 1 << 18, 1 << 26


def ulp(magnitude: float, dtype: torch.dtype) -> float:
    """The spacing of ``dtype`` at ``magnitude``: eps x 2^floor(log2(magnitude)).

    Args:
        magnitude: an absolute value; below the smallest normal number, that number counts instead.
        dtype: a floating-point dtype.
    """
    info = torch.finfo(dtype)
    magnitude = max(magnitude, info.tiny)
    return float(info.eps) * 2.0 ** math.floor(math.log2(magnitude))


@dataclasses.dataclass(frozen=True)
class Distance:
    """The distances to the oracle of one tensor of the sharded run and of the baseline.

    Attributes:
        sharded_ulps: the sharded run's error in ulps.
        baseline_ulps: the baseline's error in ulps.
        index: the flat index of the sharded run's worst element; -1 if the tensor is empty.
        unit: the size of one ulp.
        is_scalar: whether the tensor is zero-dimensional, so that no factor applies to the baseline's error.
    """

    sharded_ulps: float
    baseline_ulps: float
    index: int
    unit: float
    is_scalar: bool = False

    @property
    def allowed_ulps(self) -> float:
        """The largest allowed error of the sharded run, in ulps."""
        return (1.0 if self.is_scalar else BASELINE_FACTOR) * self.baseline_ulps + SLACK_ULPS

    @property
    def is_too_far(self) -> bool:
        """Whether the sharded run's error exceeds the allowed error; a NaN always does."""
        return not self.sharded_ulps <= self.allowed_ulps


def distance(sharded: torch.Tensor, baseline: torch.Tensor, oracle: torch.Tensor, *, magnitude: float) -> Distance:
    """Measure the distances of a tensor, or of one shard of it, to the oracle.

    Args:
        sharded: the sharded run's tensor, any shape and floating-point dtype; its dtype determines the ulp.
        baseline: the same elements of the baseline, in the same shape.
        oracle: the same elements of the oracle, in the same shape, float64.
        magnitude: the largest absolute value of the oracle's full tensor, so that all ranks that hold shards of it
            measure with the same ulp.
    """
    unit = ulp(magnitude, sharded.dtype)
    if sharded.numel() == 0:
        return Distance(0.0, 0.0, -1, unit)
    sharded_error, worst = _largest_error(sharded, oracle)
    sharded_ulps, baseline_ulps = sharded_error / unit, _largest_error(baseline, oracle)[0] / unit
    return Distance(sharded_ulps, baseline_ulps, worst, unit, is_scalar=oracle.ndim == 0)


def not_finite(runs: Mapping[str, torch.Tensor]) -> str | None:
    """Say which of the runs have NaN or an infinity in a tensor, and which do not; None if all of it is finite.

    Args:
        runs: the tensor by the name of a run, such as "the baseline"; any shapes.
    """
    if all(_is_finite(tensor) for tensor in runs.values()):
        return None
    kinds: dict[str, list[str]] = {"NaN": [], "infinite": [], "finite": []}
    for name, tensor in runs.items():
        kinds["finite" if _is_finite(tensor) else "NaN" if bool(tensor.isnan().any()) else "infinite"].append(name)
    return "is " + ", ".join(f"{kind} in {' and '.join(names)}" for kind, names in kinds.items() if names)


def _is_finite(tensor: torch.Tensor) -> bool:
    # The least and the greatest are NaN if one element is, and take no memory for all.
    return tensor.numel() == 0 or all(math.isfinite(one) for one in torch.aminmax(tensor))


def _largest_error(value: torch.Tensor, oracle: torch.Tensor) -> tuple[float, int]:
    """Return the largest error of an element, and the first flat index that has it."""
    largest, index = -1.0, 0
    # In parts that stay in a cache: what a large tensor makes in float64 is memory that the system would have to give.
    # Those of an accelerator are larger, because the host waits for each.
    size = _PART if oracle.device.type == "cpu" else _PART_THERE
    parts = zip(value.reshape(-1).split(size), oracle.reshape(-1).split(size), strict=True)
    for number, (mine, exact) in enumerate(parts):
        error = _error(mine, exact)
        at = int(error.argmax())
        if (found := float(error[at])) > largest:
            largest, index = found, number * size + at
    return largest, index


def _error(value: torch.Tensor, oracle: torch.Tensor) -> torch.Tensor:
    """|value - oracle| per element, in float64.

    It is 0 where both are the same infinity or both NaN, and inf where only one side is finite or only one is NaN.
    """
    value = value.double()
    error = (value - oracle).abs()
    if math.isfinite(error.max()):  # as almost always; the rest takes longer than all above
        return error
    same = (value == oracle) | (value.isnan() & oracle.isnan())
    return error.nan_to_num(nan=math.inf).masked_fill(same, 0.0)
