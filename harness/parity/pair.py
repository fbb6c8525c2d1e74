"""Trains a sharded run, its baseline and the oracle on the same data, and compares them step by step."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from shardproof.harness.adapters.base import Adapter, Config, Precision
from shardproof.harness.adapters.config import EvaluationMode
from shardproof.harness.collectives.differences import marked_counts
from shardproof.harness.collectives.trace import Trace, count_difference, first_difference, gathered_in
from shardproof.harness.collectives.units import ROOT, UnitSize
from shardproof.harness.judging.finding import Divergence, Finding, Location, Stage, raise_first
from shardproof.harness.models.plain import mean_square
from shardproof.harness.parity.comparison import Context, StepComparison
from shardproof.harness.parity.coverage import Counts, state_numel
from shardproof.harness.parity.divergences import OfStep
from shardproof.harness.parity.oracle import Oracle, OracleStep
from shardproof.harness.parity.rank_state import Member
from shardproof.harness.parity.replay import Baseline, Replay, State
from shardproof.harness.parity.run import Loss, Run, RunOptions, StepPicture, sharded_run
from shardproof.harness.tensors import notes
from shardproof.harness.tensors.trees import map_tensors, on_host
from shardproof.harness.watching import capture
from shardproof.harness.watching.capture import Inputs, as_inputs
from shardproof.harness.watching.observation import Observed

_WRONG_COLLECTIVES = "the collectives do not match the contract"


@dataclasses.dataclass
class _Step:
    """A step of the sharded run that has not been compared yet, with what it takes to replay the step.

    ``is_checked``: a check has begun to compare it, also one that raised.
    """

    number: int
    sharded: StepPicture
    batch: list[Inputs]
    ahead: int
    options: dict[str, Any]
    is_checked: bool = False


@dataclasses.dataclass
class _Evaluation:
    """A forward without autograd of the sharded run, before the step ``number``, that has not been compared yet."""

    number: int
    outputs: list[torch.Tensor]
    inputs: Inputs
    options: dict[str, Any]
    captured: Sequence[Observed] = ()
    is_checked: bool = False


class Pair:
    """The implementation under test beside its baseline and the oracle.

    All three start from copies of one model and receive the same data. ``step`` trains the sharded run and records the
    step; ``check`` replays the step on the baseline and the oracle and compares. Every rank must call both.

    Args:
        member: this rank.
        model: float32, on this rank's device, equal on all ranks; from here on it belongs to the sharded run.
        config: how to shard the model.
        options: how to drive the sharded run; the optimizer must not be None. The baseline and the oracle use the
            optimizer alone, and what is compared of the baseline is rounded alike.
        baseline: "ddp", or "replicated" where DDP cannot express the case, or "single-process", which trains on the
            whole batch with one loss.

    Attributes:
        sharded: the run of the implementation under test.
    """

    def __init__(
        self, member: Member, model: nn.Module, *, config: Config, options: RunOptions, baseline: Baseline
    ) -> None:
        self._member = member
        if member.index not in config.data_ranks:
            raise ValueError(f"rank {member.index} is not in the mesh, whose ranks are {list(config.data_ranks)}")
        self._position = config.data_ranks.index(member.index)
        assert options.optimizer is not None, "a pair trains with an optimizer"
        assert config.precision == Precision() and not config.unit_precision, "a pair has no casts; use CastReplica"
        self._replay = Replay(
            member, model, config=config, optimizer=options.optimizer, baseline=baseline,
            compared_as=options.compared_as,
        )  # fmt: skip
        self.sharded = sharded_run(member, model, config=config, options=options)
        self.sharded.foreign = self._replay.storages
        self._must_clip = options.must_clip
        self._unchecked: list[_Step | _Evaluation] = []
        #: The last step that was compared, and the oracle's: where the next of an adaptive optimizer begins.
        self._compared: tuple[StepPicture, OracleStep] | None = None
        self._steps = 0
        self._state_kinds = 0
        self._step_starts: list[int] = []

    @property
    def runs(self) -> tuple[Run, ...]:
        """The sharded run, and the baseline where it was made."""
        return (self.sharded, *self._replay.runs)

    @property
    def baseline(self) -> Run:
        """The run of the baseline (collective at its first use)."""
        return self._replay.expose()[0]

    @property
    def oracle(self) -> Oracle:
        """The float64 oracle (collective at its first use)."""
        return self._replay.expose()[1]

    @property
    def adapter(self) -> Adapter:
        """The adapter of the sharded run, for operations other than training steps."""
        return self.sharded.adapter

    @property
    def units(self) -> list[UnitSize]:
        """The units of the sharded run, the root's own last."""
        return self.sharded.units

    def step(
        self,
        batch: Any,
        *,
        labels: Any = None,
        loss: Loss = mean_square,
        global_loss: Loss | None = None,
        before_loss: Callable[[Any], None] | None = None,
        submodule: str = "",
        set_to_none: bool = True,
        ahead: int = 0,
    ) -> None:
        """Train one step of the sharded run; :meth:`check` replays it on the baseline and the oracle.

        The replay is deferred so that steps between two checks follow each other on the device as in training, without
        the host waiting.

        Args:
            batch: this rank's arguments of one forward (:class:`Inputs`, a tuple, or a single tensor), or a list of
                such, one per microbatch.
            labels: what the loss takes besides the output: a tensor, a tuple of several, or a list of such, one per
                microbatch. None of it reaches the model.
            loss: maps a forward's output, and the labels, to a scalar. Give it no state of its own, or the baseline and
                the oracle are computed anew in every case.
            global_loss: with the baseline "single-process", the loss of the whole batch, of the outputs and the labels
                of all ranks and microbatches, joined in their first dimension; by default ``loss``.
            before_loss: called with each output of the sharded run alone, before its loss.
            submodule: the name of a module to call directly and train alone; the baseline must then be "replicated".
            set_to_none: whether gradients are set to None after the step, or to zeros.
            ahead: the number of forwards that run before the first backward, as in a pipeline. If it is not 0, the
                baseline must be "replicated", because DDP decides in forward whether the backward reduces gradients.
        """
        mine = [as_inputs(arguments) for arguments in (batch if isinstance(batch, list) else [batch])]
        assert len(mine) == self.adapter.config.microbatches, (
            f"step() got {len(mine)} microbatches, but the pair is configured for {self.adapter.config.microbatches}"
        )
        if labels is not None:
            listed = labels if isinstance(batch, list) else [labels]
            mine = [
                dataclasses.replace(one, labels=label if isinstance(label, tuple) else (label,))
                for one, label in zip(mine, listed, strict=True)
            ]
        options: dict[str, Any] = {"loss": loss, "submodule": submodule, "set_to_none": set_to_none}
        # SGD with momentum moves a parameter whose gradient is zero and leaves one whose gradient is None. If the
        # implementation has zeros for unused parameters, the baseline and the oracle must keep zeros as well.
        filled = options | {"set_to_none": set_to_none and self.adapter.traits.unused_gradient == "none"}
        filled["global_loss"] = global_loss
        if before_loss is not None:
            options["loss"] = functools.partial(_loss_after, before_loss, loss)
        self._step_starts.append(len(self.sharded.trace))
        with self._member.stopwatch.during("training"):
            sharded = self.sharded.step(_copies(mine), ahead=ahead, **options)
        self._unchecked.append(_Step(self._steps, sharded, mine, ahead, filled))
        self._steps += 1

    def checked_step(self, batch: Any, **options: Any) -> None:
        """Train a step, with the options of :meth:`step`, and compare it at once (collective)."""
        self.step(batch, **options)
        self.check()

    def evaluate(self, batch: Any, *, mode: EvaluationMode = "no_grad", submodule: str = "") -> None:
        """Run one forward of the sharded run without autograd; :meth:`check` compares its output.

        Its collectives are in the phase "evaluation" of the trace.

        Args:
            batch: this rank's arguments of one forward.
            mode: the context in which the forward runs.
            submodule: the name of a module to call directly; the baseline must then be "replicated".
        """
        inputs = as_inputs(batch)
        outputs = self.sharded.evaluate(_copies([inputs])[0], mode=mode, submodule=submodule)
        options = {"mode": mode, "submodule": submodule}
        captured = capture.taken(self.sharded.capture)
        self._unchecked.append(_Evaluation(self._steps, outputs, inputs, options, captured))

    def check(self) -> None:
        """Compare all steps since the last check, stage by stage.

        Raises:
            Divergence: on every rank, at the first place where any rank's sharded run diverges, or where the ranks of
                a group issued different collectives.
            AssertionError: there was no step since the last check; or clipping or a delay never took effect, so that
                the case proves nothing about it; or a later step under an adaptive optimizer has no state to begin
                with.
            RuntimeError: the baseline's own error exceeds ``BASELINE_LIMIT_ULPS``.
        """
        notes.tell("check", kind="numbers")
        assert self._unchecked, "nothing to check: no step since the last check"
        for one in self._unchecked:
            one.is_checked = True
        # Replay all steps before comparing any: a replay is collective, and a rank that stopped at its first finding
        # would leave the other ranks waiting in the next replay.
        with self._member.stopwatch.during("replaying"):
            comparisons = self._replay_unchecked()
        with self._member.stopwatch.during("comparing"):
            finding = self._first_finding(comparisons)
        steps = [(one.number, one.sharded) for one in self._unchecked if isinstance(one, _Step)]
        self._unchecked.clear()
        self._agree(finding, steps)
        self.sharded.perturbation.assert_met()

    def _replay_unchecked(self) -> list[StepComparison]:
        """Replay what has not been checked (collective)."""
        comparisons = []
        for one in self._unchecked:
            comparisons.append(self._replayed(one) if isinstance(one, _Step) else self._replayed_evaluation(one))
            if self._member.explainer is not None:
                trace = self._trace_of(one.number) if isinstance(one, _Step) else Trace()
                self._member.explainer.add(OfStep(comparisons[-1], trace, self.units))
        return comparisons

    def assert_compared(self) -> None:
        """Check that no step and no evaluation is left that :meth:`check` has not compared."""
        left = [one for one in self._unchecked if not one.is_checked]
        steps = [one.number for one in left if isinstance(one, _Step)]
        if steps:
            several = f"steps {steps[0]} to {steps[-1]} of a pair were"
            which = several if len(steps) > 1 else f"step {steps[0]} of a pair was"
            raise AssertionError(f"{which} trained and never compared: call check() of the pair after its steps")
        assert not left, "an evaluation of a pair was never compared: call check() of the pair after it"

    def replay_rest(self) -> None:
        """Replay for the explanation what a failure has left unchecked (collective); the record stays as it is."""
        losses = {name: [*values] for name, values in self._member.record.losses.items()}
        self._replay_unchecked()
        self._unchecked.clear()
        self._member.record.losses = losses

    def _first_finding(self, comparisons: list[StepComparison]) -> Finding | None:
        for comparison in comparisons:
            finding = comparison.first_finding()
            self._member.record.add_distances(comparison.measured)
            if finding is not None:
                return self._with_units_not_gathered(finding, comparison.context.step)
        return None

    def _with_units_not_gathered(self, finding: Finding, step: int) -> Finding:
        """Add the units that this step's forward did not gather, although that of the first step did.

        A unit that is not resharded keeps the values of an earlier step, and what diverges is an output or a gradient
        far away from it.
        """
        if step == len(self._step_starts):
            return finding  # an evaluation that no step follows
        first, this = (set(gathered_in(self._trace_of(number))) for number in (0, step))
        if not (missing := sorted(first - this)):
            return finding
        listed = ", ".join(missing)
        text = f"this forward did not gather {listed}, the first step's did, as when it was never resharded"
        return dataclasses.replace(finding, text=f"{finding.text}\n  {text}")

    def _replayed(self, one: _Step) -> StepComparison:
        """Replay a step with the baseline and the oracle (collective), and record the losses of all three."""
        replayed = self._replay.step(_copies(one.batch), options=one.options, ahead=one.ahead, start=self._start())
        one.sharded = self.sharded.settle(one.sharded)
        self._compared = one.sharded, replayed.oracle
        self._state_kinds = replayed.state_kinds
        self._assert_clipped(replayed.oracle)
        self._member.record.add_losses(
            sharded=sum(map(float, one.sharded.losses)),
            baseline=sum(map(float, replayed.baseline.losses)),
            oracle=sum(map(float, replayed.oracle.losses[self._position])),
        )
        return StepComparison(one.sharded, replayed.baseline, replayed.oracle, self._context(one.number))

    def _start(self) -> State | None:
        """What the sharded run begins a step with (collective), where the replay must begin with the same.

        An adaptive optimizer moves an element by all of the learning rate for a gradient of rounding noise, so that
        from the second step on, runs that are right begin with parameters that differ.
        """
        if not self._replay.is_adaptive or self._compared is None:
            return None
        sharded, oracle = self._compared
        assert sharded.state is not None, "without optimizer_state(), Adam is judged in the first step only: use SGD"
        start = {
            name: {key: torch.zeros_like(full) for key, full in {"": value, **oracle.state[name]}.items()}
            for name, value in oracle.parameters.items()
        }
        held = {
            (name, key): (piece.cut(torch.arange(start[name][key].numel()).view_as(start[name][key])), piece.tensor)
            for name, parameter in sharded.parameters.items()
            for key, piece in {"": parameter, **sharded.state.get(name, {})}.items()
            if piece is not None and key in start[name]
        }
        for one in self._member.exchange(held):
            for (name, key), (positions, values) in one.items():
                start[name][key].view(-1)[positions.flatten()] = values.flatten().to(start[name][key].dtype)
        return start

    def _replayed_evaluation(self, one: _Evaluation) -> StepComparison:
        """Replay a forward with the baseline and the oracle (collective)."""
        found = self._replay.evaluate(_copies([one.inputs])[0], options=one.options, start=self._start())
        ranks = self.adapter.config.data_ranks
        replayed = OracleStep([[[found.oracle]] for _ in ranks], captured=[found.captured[1] for _ in ranks])
        context = dataclasses.replace(self._context(one.number), evaluates=True)
        mine = _output_alone(on_host(one.outputs), on_host(one.captured))
        return StepComparison(mine, _output_alone(found.baseline, found.captured[0]), replayed, context)

    def check_counts(self, phase: str, **expected: int) -> None:
        """Check that the last step issued exactly these collectives in one phase (collective).

        Args:
            phase: "forward", "backward", "clip" or "step".
            **expected: the number of collectives of each kind of the trace's vocabulary, such as ``all_gather``; a kind
                that is not given is expected 0 times.

        Raises:
            Divergence: on every rank, with the counts per unit.
        """
        notes.tell("check", kind="counts", phase=phase, expected=expected)
        labels = [unit.label for unit in self.units]
        finding = count_difference(self.last_trace(), phase, expected, units=labels, root=ROOT)
        if finding is not None:
            here = dataclasses.replace(finding.location, step=self._steps - 1, rank=self._member.index)
            finding = dataclasses.replace(finding, location=here)
            if self._member.explainer is not None:
                self._member.explainer.expected = marked_counts(self.last_trace(), phase, expected, labels)
        self._member.agree(finding, title=_WRONG_COLLECTIVES)

    def check_bytes(self) -> None:
        """Check that every all-gather and reduce-scatter of the last step has the size of a unit (collective).

        A collective has the size of a unit if it has at least the bytes of the unit's parameters and at most those of
        the parameters with the padding that the adapter declares.

        Raises:
            Divergence: on every rank, with the first collective that fits no unit.
        """
        sized = (item for item in self.last_trace() if item.kind in ("all_gather", "reduce_scatter"))
        finding = None
        if item := next((item for item in sized if not item.unit), None):
            sizes = ", ".join(f"{unit.label} {unit.numel}-{unit.padded_numel}" for unit in self.units)
            step, rank = self._steps - 1, self._member.index
            text = f"{item.kind} of {item.nbytes} bytes fits no unit (unit sizes in elements: {sizes})"
            finding = Finding(Location(stage=Stage.COLLECTIVES, phase=item.phase, step=step, rank=rank), text)
        self._member.agree(finding, title=_WRONG_COLLECTIVES)

    def last_trace(self) -> Trace:
        """The collectives that this rank's sharded run issued in the last step."""
        return self._trace_of(len(self._step_starts) - 1)

    def _trace_of(self, step: int) -> Trace:
        """The collectives of one step, and of what the case does before the next."""
        starts = [*self._step_starts, len(self.sharded.trace)]
        return Trace(self.sharded.trace[starts[step] : starts[step + 1]])

    def _context(self, step: int) -> Context:
        config = self.adapter.config
        return Context(
            step=step, rank=self._member.index, member=self._position, size=len(config.data_ranks),
            norm_type=config.clip.norm_type if config.clip else 2.0,
            unused_is_zero=self.adapter.traits.unused_gradient != "none", adaptive=self._replay.is_adaptive,
            frozen=self._replay.frozen(), draws_random_numbers=self._replay.draws_random_numbers,
            single_process=self._replay.is_single_process,
            untied={name: f"untied: {tie}" for tie in self.sharded.untied for name in tie.names},
        )  # fmt: skip

    def _assert_clipped(self, oracle: OracleStep) -> None:
        clip, norm = self.adapter.config.clip, oracle.norm
        if clip is None or self._must_clip is None:
            return
        assert norm is not None
        nothing = f"clipping at {clip.max_norm:g} did nothing to a total norm of {norm}: a wrong norm would pass"
        assert not self._must_clip or float(norm) > clip.max_norm, nothing
        below = f"must_clip=False expects a total norm below {clip.max_norm:g}, not {norm}"
        assert self._must_clip or float(norm) < clip.max_norm, below

    def _agree(self, finding: Finding | None, steps: list[tuple[int, StepPicture]]) -> None:
        """Raise on every rank what any rank has found, in one exchange (collective).

        Then check over all ranks that the pieces of these steps cover the model, and that collectives match: all
        members of a group must issue the same sequence on it; otherwise a collective cannot complete.
        """
        shown = [picture.show(step=step) for step, picture in steps] if finding is None else []
        if shown and steps[0][0] == 0:
            shown[0].counts |= self._counts(steps[0][1])
        everyone = self._member.exchange((finding, shown, self.sharded.trace))
        what = "one process with the whole batch" if self._replay.is_single_process else "the baseline"
        raise_first([found for found, _, _ in everyone], title=f"the sharded run diverges from {what}")
        for index in range(len(steps)):
            self.sharded.coverage.judge([shown[index] for _, shown, _ in everyone])
        difference = first_difference([trace for _, _, trace in everyone])
        if difference is not None:
            raise Divergence(f"collectives differ between ranks: {difference.text}", difference.location)

    def _counts(self, picture: StepPicture) -> dict[str, Counts]:
        """Count what this rank holds of gradients and optimizer state after the first step, where that can tell."""
        can_tell = picture.parameters and self.sharded.coverage.can_tell(self._replay.frozen())
        if not can_tell or self.adapter.config.shard_size == 1:
            return {}
        trained = self._replay.trained_numel()
        return {
            "gradients": Counts(picture.gradient_numel, trained),
            "optimizer": Counts(state_numel(self.adapter), trained * self._state_kinds),
        }


def _loss_after(look: Callable[[Any], None], loss: Loss, output: Any, *labels: Any) -> torch.Tensor:
    look(output)
    return loss(output, *labels)


def _output_alone(outputs: list[torch.Tensor], captured: Sequence[Observed]) -> StepPicture:
    """Return a picture of a forward that nothing follows."""
    return StepPicture([outputs], [], {}, None, None, {}, captured=captured)


def _copies(microbatches: list[Inputs]) -> list[Inputs]:
    """Copies of the microbatches, so that an implementation that writes to its input changes no other run's data."""
    return [map_tensors(torch.clone, arguments) for arguments in microbatches]
