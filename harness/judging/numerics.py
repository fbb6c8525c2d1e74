"""The tolerances: how far from the oracle a tensor of the sharded run may be, and how far apart what is alike.

The error of a tensor is its largest absolute difference to the oracle (float64, one process), in ulps of the tensor's
own dtype at the oracle's largest magnitude. Measured so, the error does not depend on the scale of the values. The
error of the sharded run may be at most ``BASELINE_FACTOR`` times the error of the unsharded baseline of the same dtype,
plus ``SLACK_ULPS``. For a scalar (loss, total norm) it may exceed the baseline's error by ``SLACK_ULPS`` and no factor
applies, because the baseline's error is then a single sample.

The design fixes the constants. How close correct runs come to them was measured in the run files that were published at
89387d6, from the worst distance of each stage and step of a passing case (torch 2.11 on H100s and H200s, NCCL and gloo;
torch 2.13, gloo). None of the 376,888 distances recorded there used more than 0.66 of the allowed error, and no loss or
total norm was off by more than 7.6 ulps.

The constants of ``training``, which judges trainings of users, stand here too, by who asks: a check, a comparison of
recordings, the doctor. How close right trainings come to them is measured where a constant says so; that none goes
beyond is tested with the scripts of ``examples/healthy``. No module that judges has a threshold of its own
(``tests/harness/test_numerics.py``).
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

#: Largest error of the baseline, in ulps, at which it still counts as a reference. Above it a case is ill-conditioned,
#: and the suites raise an error instead of accepting a correspondingly large error. A check of the user's own training
#: counts in ulps of the narrowest dtype of the step, and judges nothing by such a tensor.
BASELINE_LIMIT_ULPS = 4096.0

# Of a check of the user's own training.

#: By how many ulps of the narrowest dtype an element that was chosen may be below the one that should have been.
ROUTING_ULPS = 64.0

#: How far sketches may be apart beyond 4 times the baseline's distance, in eps of the narrowest dtype.
SKETCH_EPS = 64.0

#: By how many eps of the narrowest dtype a factor may be off its name, and a gradient off what it is said to be; and
#: the most of each, however narrow the dtypes.
SAID_EPS = 64.0
MOST_OF_A_FACTOR, MOST_OF_A_GRADIENT = 2.0**-8, 2.0**-4

#: How much looser scalars are compared where ranks compute parts of one forward: they round otherwise than one rank
#: does, and a scalar shows all of it.
LOOSER_IN_PARTS = 8.0

#: Relative distance of two norms that rounding explains, and no sum over ranks.
NORM_ROUNDING = 1e-4

#: From which distance the gradient of one batch is another one than that of its microbatches.
MICROBATCHES_APART = 1e-4

# Of copies that follow a model.

#: From which correlation on a copy is like its original, below which it has nothing to do with it, and from which
#: cosine on a movement is one toward the original.
COPY_IS_LIKE, COPY_IS_UNLIKE, COPY_FOLLOWS = 0.5, 0.3, 0.9

#: From which cosine on a movement is a part of the way, and by which part of each other parts of it differ.
COPY_FOLLOWS_BY, COPY_RATES_DIFFER = 0.9999, 0.1

# Of values that a load has changed.

#: Of their size the least by which it changes them; of this change the most that is left where a step undoes it, and
#: the most that is missing when the step begins.
LOAD_CHANGES, LOAD_IS_UNDONE, LOAD_IS_THERE = 0.25, 0.1, 0.05

# Of a comparison of two recordings.

#: What two right runs may differ by, in eps of the narrowest dtype; and how much more than two runs of the reference.
RUNS_EPS = 32.0
RUNS_FACTOR = 4.0

#: What is allowed by a narrow dtype, above which a comparison says what it did not judge.
WIDE = 0.01

#: By how much the distance of parameters before a step may grow in it.
GROWTH = 16.0

#: Gradients of at most so many eps of the model's average, or of this part of it, are rounding noise, of which an
#: optimizer like Adam makes updates.
NOISE_OF_AVERAGE = (64.0, 0.05)

#: Elements of a gradient of one dimension that are at most so many eps of its largest are rounding noise.
NOISE_OF_LARGEST_EPS = 16.0

#: By which part of itself an update may be uncertain and still tell a learning rate or a weight decay, and within which
#: those of several parameters are one.
UPDATES_TELL, UPDATES_ALIKE = 0.1, 0.05

#: Relative distance of the sketches of two tensors up to which these are equal: sketches are written with 9 digits.
EQUAL_SKETCHES = 1e-7

#: Relative difference up to which two settings of optimizers are one: schedulers compute them in several orders.
SAME_SETTING = 1e-6

#: Up to which size the weight of a microbatch is none.
NO_WEIGHT = 1e-6

# Of what the doctor sees of all ranks.

#: The spacing of numbers at 1.
EPS = {"float64": 2.0**-52, "float32": 2.0**-23, "bfloat16": 2.0**-7, "float16": 2.0**-10}

#: The spacing of the smallest numbers, below which a number is 0.
SMALLEST = {"float64": 2.0**-1074, "float32": 2.0**-149, "bfloat16": 2.0**-133, "float16": 2.0**-24}

#: How often a loop multiplies a gradient between backward and the step, which rounds it to its dtype each time: by the
#: reciprocal of a count or of a loss scale, and by the factor of clipping.
ROUNDINGS_OF_A_SCALE = 2

#: The eps that rounding explains in a sum of gradients, for the square root of each rank; and those within which two
#: ranks have computed the same gradients. In this unit the residuals of right sums were at most 0.54 in 18 runs of 14
#: scripts of ``examples/healthy`` on 2 and 4 ranks (gloo; float32, float16 and bfloat16), and at most 2.1 in simulated
#: sums of up to 64 ranks and 64 microbatches, of which the unit does not count the microbatches.
SUM_EPS = 8.0
SAME_GRADIENT_EPS = 64.0

#: Relative difference up to which microbatches count alike.
ALIKE = 1e-3

#: How far values that are added and taken away again are from where they were, in eps of their dtype.
STAYED_EPS = 32.0

#: Relative distance below which gradients of replicas differ by no more than rounding.
REPLICAS_NOISE = 1e-5

#: Relative difference of the scales of ranks from which they are several, of a norm from that of all gradients from
#: which it is another one, and up to which two norms, or products of a scale with a norm or a count, are one. Each is
#: of exact gradients: what their dtypes round (:func:`rounding`) is allowed beyond it.
SCALES_APART = 1e-4
NORMS_APART = 1e-2
SAME_NORM = 1e-3

#: What ``clip_grads_with_norm_`` adds to a norm, so as not to divide by zero.
ADDED_TO_NORM = 1e-6

#: The relative distance within which gradients that cross the boundary of two stages are one, as after rounding to
#: bfloat16 on the way; and how many times as far as another gradient the own one is at least.
ONE_GRADIENT, TIMES_AS_FAR = 0.01, 4

#: Within which the gradients of a rank have one scale between backward and step.
ONE_SCALE = 2e-2

#: By which part a norm is lower after clipping; how near to each other limits of two steps are, and to a round number.
CLIPPED = 1e-6
LIMITS_APART = 1e-4
ROUND = 1e-4

#: The part of the elements of a narrow parameter above which a step that leaves them as they are is lost to rounding,
#: and by how much of the spacing at 1 an update is less than half of the spacing at each value.
MOST_LOST = 0.5
LESS_THAN_HALF = 0.25

#: How far rounding moves the factor of a sum of gradients, and within which of a number it is its factor.
FACTOR_ROUNDING = 1e-5
ONE_FACTOR = 1e-3

#: How near two factors are that are one of a series over layers.
SERIES_OF_FACTORS = 1e-2

#: Of gradients that a hook compresses: how much nearer those without a rank must be.
COMPRESSED_NEARER = 0.6

# Of texts that name a mistake: they affect the text of a failure only, and never the verdict.

#: Relative difference up to which a wrong tensor counts as equal to what a suspected bug produces.
LIKENESS = 1e-3

#: An error of rounding to a dtype is at most half an ulp. The largest of many is seldom below a quarter, and a sum of a
#: few rounded values has a few times the error of one.
ROUNDING_ULPS = (0.25, 4.0)

#: The part of an element from which its error is none of rounding, which leaves no element that counts far from what it
#: was.
NOT_ROUNDED = 0.25

#: How much nearer than the sum of all parts a mistake must be, to be named.
NEARER = 8.0

#: The relative distance within which a factor is exactly that of a name, at least.
NAMED_FACTOR = 1e-5

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


def rounding(dtype: str, numel: int = 0, norm: float = math.inf) -> float:
    """By which part of its norm a tensor moves at most when its elements are rounded once: half a spacing of each.

    Args:
        dtype: without its "torch." prefix; one that is not known counts as bfloat16.
        numel: how many elements it has, each of which may be among the smallest numbers of the dtype.
        norm: that of the tensor.
    """
    known = dtype if dtype in EPS else "bfloat16"
    smallest = SMALLEST[known] * math.sqrt(numel) / norm if norm else math.inf
    return (EPS[known] + smallest) / 2


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
