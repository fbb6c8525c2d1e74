"""When two numbers agree.

The error of a tensor is its largest absolute difference to the oracle (float64, one process), in
ulps of its own dtype at the oracle's largest magnitude: one number that does not depend on the
scale of the values. A sharded run may err ``BASELINE_FACTOR`` times as much as the unsharded
baseline of the same dtype did, plus ``SLACK_ULPS``. A scalar (loss, total norm) may err by the slack
more than the baseline's: a factor on a single sample of an error would mean nothing.

The constants are the design's; ``python benchmarks/margins.py reports/published/*.gz`` measures how
near correct runs come. In the 6,508 distances kept there (the worst of each stage and step of a passing
case; torch.fully_shard and the reference, torch 2.11 on H200s, NCCL and gloo) none used more than 0.44
of what is allowed, and no loss or total norm erred by more than 3.5 ulps.
"""

from __future__ import annotations

import dataclasses
import math

import torch

#: How many times the baseline's own error the sharded run's may be. Sharding changes the order of
#: sums only, so both errors are samples of one distribution.
BASELINE_FACTOR = 4.0

#: What a baseline that happened to hit the oracle still leaves: a few roundings in the last place.
SLACK_ULPS = 8.0

#: Gradient elements below this many ulps of their tensor are noise, and Adam divides noise by noise.
ADAM_NOISE_ULPS = 64.0


def ulp(magnitude: float, dtype: torch.dtype) -> float:
    """The spacing of ``dtype`` at ``magnitude``: eps x 2^floor(log2(magnitude)); at 0, the smallest normal's."""
    info = torch.finfo(dtype)
    magnitude = max(magnitude, info.tiny)
    return float(info.eps) * 2.0 ** math.floor(math.log2(magnitude))


@dataclasses.dataclass(frozen=True)
class Distance:
    """How far one tensor of two runs is from the oracle, and whether that is too far.

    ``index`` is the flat index of the worst element of the sharded run, -1 where there is none.
    """

    sharded_ulps: float
    baseline_ulps: float
    index: int
    unit: float
    is_scalar: bool = False

    @property
    def allowed_ulps(self) -> float:
        """What the sharded run may err at most."""
        return (1.0 if self.is_scalar else BASELINE_FACTOR) * self.baseline_ulps + SLACK_ULPS

    @property
    def is_too_far(self) -> bool:
        """Whether the sharded run is outside, a NaN included."""
        return not self.sharded_ulps <= self.allowed_ulps


def distance(sharded: torch.Tensor, baseline: torch.Tensor, oracle: torch.Tensor, *, magnitude: float) -> Distance:
    """Compare equal pieces of one tensor; ``magnitude`` is the oracle's largest in the whole tensor.

    Args:
        sharded: any shape, any floating dtype, whose ulp counts.
        baseline: the same shape.
        oracle: the same shape, float64.
        magnitude: largest absolute value of the full oracle tensor, so that every rank of a sharded
            tensor measures with the same unit.
    """
    unit = ulp(magnitude, sharded.dtype)
    if sharded.numel() == 0:
        return Distance(0.0, 0.0, -1, unit)
    error = _error(sharded, oracle)
    worst = int(error.argmax())
    sharded_ulps, baseline_ulps = float(error.flatten()[worst]) / unit, float(_error(baseline, oracle).max()) / unit
    return Distance(sharded_ulps, baseline_ulps, worst, unit, is_scalar=oracle.ndim == 0)


def _error(value: torch.Tensor, oracle: torch.Tensor) -> torch.Tensor:
    """|value - oracle| in float64; inf where only one is finite or a NaN is on one side only."""
    value = value.double()
    same = (value == oracle) | (value.isnan() & oracle.isnan())
    return (value - oracle).abs().nan_to_num(nan=math.inf).masked_fill(same, 0.0)
