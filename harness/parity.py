"""Side by side: a sharded run, its baseline and the oracle through the same steps on the same data."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from harness import memory
from harness.adapters.base import Adapter, Config, OptimizerFactory, Traits
from harness.adapters.replicas import DdpAdapter, ReplicatedAdapter
from harness.collectives import Trace, count_difference, first_difference
from harness.compare import Context, Finding, StepComparison, exact_difference
from harness.errors import Divergence, Place
from harness.models import mean_square
from harness.numerics import Oracle, OracleStep
from harness.perturb import Delay
from harness.training import AfterBackward, Batch, Loss, Run, StepPicture, as_microbatches
from harness.trees import map_tensors
from harness.units import Unit

if TYPE_CHECKING:
    from harness.rank import Rank

Baseline = Literal["ddp", "replicated"]
Prepare = Callable[[nn.Module], nn.Module]
"""Changes a model, in place or not, before it is sharded; parameters keep their names but for a wrapper's prefix."""

_BASELINES: dict[Baseline, type[Adapter]] = {"ddp": DdpAdapter, "replicated": ReplicatedAdapter}


@dataclasses.dataclass
class _Unchecked:
    """A step of the sharded run, with what the others need to follow."""

    step: int
    sharded: StepPicture
    batch: list[Batch]
    ahead: int
    options: dict[str, Any]


class Pair:
    """The implementation under test beside its baseline and the oracle.

    All three start from copies of one model and see the same data. ``step`` takes pictures,
    ``check`` compares them; both are called by every rank.
    """

    def __init__(
        self,
        rank: Rank,
        model: nn.Module,
        *,
        config: Config,
        baseline: Baseline,
        optimizer: OptimizerFactory,
        delays: Sequence[Delay],
        prepare: Prepare | None,
        is_traced: bool = True,
        after_backward: AfterBackward | None = None,
    ) -> None:
        self._rank = rank
        self._member = config.data_ranks.index(rank.index)
        self.oracle = Oracle(model, optimizer=optimizer, clip=config.clip)
        self._adaptive = not isinstance(self.oracle.optimizer, torch.optim.SGD)
        self.baseline = Run(
            _BASELINES[baseline], copy.deepcopy(model), optimizer=optimizer, config=config, rank=rank.index
        )
        self.sharded = sharded_run(
            rank, model, config=config, optimizer=optimizer, delays=delays, prepare=prepare, is_traced=is_traced,
            after_backward=after_backward,
        )  # fmt: skip
        self._unchecked: list[_Unchecked] = []
        self._steps = 0
        self._step_starts: list[int] = []
        rank.watch(self)

    @property
    def adapter(self) -> Adapter:
        """The adapter of the sharded run, for what a case asks beyond training."""
        return self.sharded.adapter

    @property
    def units(self) -> list[Unit]:
        """The units of the sharded run, the root's own last."""
        return self.sharded.units

    def step(
        self, batch: Any, *, loss: Loss = mean_square, submodule: str = "", set_to_none: bool = True, ahead: int = 0
    ) -> None:
        """Train one step of the sharded run; the baseline and the oracle follow in :meth:`check`.

        So steps between two checks follow each other as in training: on a device, without the host waiting.

        Args:
            batch: the arguments of one forward (a tuple, or one tensor), or a list of such, one a
                microbatch; this rank's own.
            loss: from the output to a scalar.
            submodule: train this module alone, called directly; the baseline must be "replicated".
            set_to_none: how gradients are zeroed after the step.
            ahead: forwards that run before the backward of the first, as in a pipeline; the baseline must be
                "replicated", because DDP wants to know in forward which backward reduces.
        """
        mine = as_microbatches(batch)
        assert len(mine) == self.adapter.config.microbatches, (
            f"a step of {len(mine)} microbatches in a pair made for {self.adapter.config.microbatches}"
        )
        options: dict[str, Any] = {"loss": loss, "submodule": submodule, "set_to_none": set_to_none}
        # Momentum moves a parameter whose gradient is zero, so the others have zeros where the implementation has.
        filled = options | {"set_to_none": set_to_none and self.adapter.traits.unused_gradient == "none"}
        self._step_starts.append(len(self.sharded.trace))
        sharded = self.sharded.step(_copies(mine), ahead=ahead, **options)
        self._unchecked.append(_Unchecked(self._steps, sharded, mine, ahead, filled))
        self._steps += 1

    def check(self) -> None:
        """Compare all steps since the last check, stage by stage.

        Raises:
            Divergence: on every rank, at the first place where any rank's run parts.
        """
        assert self._unchecked, "nothing to check: no step since the last check"
        # All of them before any comparison: a rank that stopped at a finding would leave the others waiting.
        replayed = [self._replay(one) for one in self._unchecked]
        finding = None
        for one, (baseline, oracle) in zip(self._unchecked, replayed, strict=True):
            self._assert_clipped(oracle)
            comparison = StepComparison(one.sharded, baseline, oracle, self._context(one.step))
            finding = comparison.first_finding()
            self._rank.record.add_distances(comparison.measured)
            if finding is not None:
                break
        self._unchecked.clear()
        self._rank.agree(finding, title="the sharded run parts from the baseline")
        self._check_same_collectives()
        self.sharded.perturbation.assert_met()

    def _replay(self, one: _Unchecked) -> tuple[StepPicture, OracleStep]:
        """The same step of the baseline and of the oracle."""
        baseline = self.baseline.step(_copies(one.batch), ahead=one.ahead, **one.options)
        everyone = self._rank.exchange_tensors(one.batch)
        oracle = self.oracle.step([everyone[index] for index in self.adapter.config.data_ranks], **one.options)
        self._rank.record.add_losses(
            sharded=sum(map(float, one.sharded.losses)),
            baseline=sum(map(float, baseline.losses)),
            oracle=sum(map(float, oracle.losses[self._member])),
        )
        return baseline, oracle

    def check_counts(self, phase: str, **expected: int) -> None:
        """The last step issued exactly these collectives in the phase; a kind not given is expected 0 times.

        Raises:
            Divergence: on every rank, with the counts per unit.
        """
        problem = count_difference(self.last_trace(), phase, expected)
        place = Place(stage=f"collectives in {phase}", step=self._steps - 1, rank=self._rank.index, name=problem[0])
        self._rank.agree(
            Finding(place, problem[1]) if problem[1] else None, title="the collectives are not the contract's"
        )

    def check_bytes(self) -> None:
        """Every gather and reduction of the last step is as long as a unit, up to the declared padding.

        Raises:
            Divergence: on every rank, with the first collective that fits no unit.
        """
        finding = None
        for item in self.last_trace():
            if item.kind in ("all_gather", "reduce_scatter") and not item.unit:
                sizes = ", ".join(f"{unit.label} {unit.numel}-{unit.padded_numel}" for unit in self.units)
                place = Place(stage=f"collectives in {item.phase}", step=self._steps - 1, rank=self._rank.index)
                finding = Finding(place, f"{item.kind} of {item.nbytes} bytes fits no unit (elements: {sizes})")
                break
        self._rank.agree(finding, title="the collectives are not the contract's")

    def last_trace(self) -> Trace:
        """The collectives of the last step."""
        return Trace(self.sharded.trace[self._step_starts[-1] :])

    def _context(self, step: int) -> Context:
        assert not (self._adaptive and step), (
            "under an adaptive optimizer parameters are comparable after one step only; use SGD"
        )
        config = self.adapter.config
        return Context(
            step=step,
            rank=self._rank.index,
            member=self._member,
            size=len(config.data_ranks),
            norm_type=config.clip.norm_type if config.clip else 2.0,
            unused_is_zero=self.adapter.traits.unused_gradient == "zero",
            adaptive=self._adaptive,
        )

    def _assert_clipped(self, oracle: OracleStep) -> None:
        clip = self.adapter.config.clip
        if clip is not None:
            assert oracle.norm is not None and float(oracle.norm) > clip.max_norm, (
                f"clipping at {clip.max_norm:g} did nothing to a norm of {oracle.norm}: a wrong norm would pass"
            )

    def _check_same_collectives(self) -> None:
        """Every rank of a group issues the same sequence on it, or some collective never completes."""
        difference = first_difference(self._rank.exchange(self.sharded.trace))
        if difference:
            raise Divergence(f"collectives differ between ranks: {difference}", Place(stage="collectives"))


def sharded_run(
    rank: Rank,
    model: nn.Module,
    *,
    config: Config,
    optimizer: OptimizerFactory | None,
    delays: Sequence[Delay] = (),
    prepare: Prepare | None = None,
    is_traced: bool = True,
    after_backward: AfterBackward | None = None,
) -> Run:
    """A run of the implementation under test, proven to be sharded where its adapter says so.

    Raises:
        Divergence: on every rank, if any holds more parameter bytes than its share.
    """
    limit, share = _byte_limits(model, config, rank.implementation.traits)
    before = memory.held_bytes(rank.device) - memory.bytes_of(model.parameters())
    run = Run(
        rank.implementation, model, optimizer=optimizer, config=config, rank=rank.index, delays=delays, prepare=prepare,
        is_traced=is_traced, after_backward=after_backward,
    )  # fmt: skip
    if "parameters" in rank.implementation.traits.shards and share and config.shard_size > 1:
        held = memory.held_bytes(rank.device) - before
        text = f"holds {held} bytes of parameters after sharding; its share is {share}"
        finding = Finding(Place(stage="sharding", rank=rank.index), text) if held > limit else None
        rank.agree(finding, title="the model is not sharded")
    return run


def _byte_limits(model: nn.Module, config: Config, traits: Traits) -> tuple[int, int]:
    """The most bytes of parameters that a sharded rank may hold, and its share with padding."""
    parameters = list(model.parameters())
    itemsize = config.cast.itemsize if config.cast else max((value.element_size() for value in parameters), default=0)
    copies = 1 + len(traits.held_from_start - {"gathered"})
    full = copies * itemsize * sum(value.numel() for value in parameters)
    padding = traits.collective_padding * (len(config.units) + 1)
    shares = [traits.local_numel(value.shape, config.shard_size) for value in parameters]
    share = copies * itemsize * (padding + sum(shares))
    if "gathered" in traits.held_from_start or config.sync_states:
        # What was sent or gathered last is whole as long as a thread of the communication library has it.
        share += itemsize * config.shard_size * max(shares, default=0)
    # Half of what sharding saves: bookkeeping tensors are small, an unsharded model is not.
    return share + max(full - share, 0) // 2, share


def check_exact(rank: Rank, first: StepPicture, second: StepPicture, *, step: int, why: str) -> None:
    """Two runs of the same implementation agree bitwise.

    Args:
        why: the reason for which the arithmetic is the same by construction.

    Raises:
        Divergence: on every rank, naming the first tensor that differs.
    """
    finding = None
    for stage, name, one, other in _exact_pairs(first, second):
        difference = exact_difference(one, other)
        if difference:
            index, a, b = difference
            place = Place(stage=stage, step=step, rank=rank.index, name=name, element=index)
            finding = Finding(place, f"{a!r} and {b!r} (element of the local shard); expected equal bits: {why}")
            break
    rank.agree(finding, title="two runs that should be the same part")


def _exact_pairs(first: StepPicture, second: StepPicture) -> Any:
    for number, (one, other) in enumerate(zip(first.losses, second.losses, strict=True)):
        yield "loss", f"microbatch {number}", one, other
    assert first.parameters.keys() == second.parameters.keys()
    for name, piece in first.parameters.items():
        counterpart = second.parameters[name]
        assert piece is not None and counterpart is not None
        yield "parameter after step", name, piece.tensor, counterpart.tensor


def _copies(microbatches: list[Batch]) -> list[Batch]:
    """An implementation that writes to its input must not change what the others see."""
    return [map_tensors(torch.clone, arguments) for arguments in microbatches]


def render(finding: Finding, *, title: str, also: Sequence[int]) -> str:
    """The text of a failed comparison: where, by how much, and who else."""
    place = finding.place
    where = [place.stage or "", f"of {place.name!r}" if place.name else ""]
    where += [f"at step {place.step}" if place.step is not None else ""]
    where += [f"on rank {place.rank}" if place.rank is not None else ""]
    where += [f"element {list(place.element)}" if place.element is not None else ""]
    lines = [f"{title}: {' '.join(filter(None, where))}", f"  {finding.text}"]
    if also:
        lines.append(f"  the same stage parts on rank{'s' * (len(also) > 1)} {', '.join(map(str, also))} as well")
    return "\n".join(lines)
