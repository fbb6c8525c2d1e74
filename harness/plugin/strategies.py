"""Hypothesis strategies of what cases draw. Only this module imports hypothesis, which is the extra ``fuzz``.

A strategy draws what the implementation under test claims, so that no example is thrown away. What comes first in a
list of choices is what a failing example shrinks to.
"""

import dataclasses
import itertools
from collections.abc import Iterable
from typing import Any, Literal, get_args

import torch
from hypothesis import strategies as st

from shardproof.harness.adapters.base import Accumulation
from shardproof.harness.adapters.capability import Capability
from shardproof.harness.models.drawn import Block, Kind, Part, Plan, has_trained
from shardproof.harness.models.plain import Container
from shardproof.harness.models.programs import KINDS, Call, Program, playable
from shardproof.harness.models.recomputation import Means
from shardproof.harness.models.trainings import Step, Training, needs_of

#: Levels of blocks below the trunk, and blocks in one list.
_DEPTH, _BREADTH = 3, 3

#: The kinds of parts that have a width.
_WIDE: tuple[Kind, ...] = ("wide", "cube", "conv", "listed", "embedding")

_KINDS: tuple[Kind, ...] = get_args(Kind)
_CONTAINERS: tuple[Container, ...] = get_args(Container)
_MEANS: tuple[Means, ...] = get_args(Means)


def strategy_of(
    kind: type, *, capabilities: frozenset[str], wrong_calls: frozenset[str], world_size: int
) -> st.SearchStrategy[Any]:
    """Return the strategy of a kind of parameter: :class:`Training` or :class:`Program`."""
    if kind is Program:
        return _Programs(capabilities, world_size, wrong_calls).program()
    assert kind is Training, f"no strategy draws a {kind.__name__}"
    return _Trainings(capabilities, world_size).training()


class _Claimed:
    """What one implementation claims on so many ranks."""

    def __init__(self, capabilities: frozenset[str], world_size: int) -> None:
        self._capabilities = capabilities
        self._size = world_size

    def _if(self, needed: str | Iterable[str], *choices: Any) -> list[Any]:
        """Return the choices if the implementation has these capabilities, and none otherwise."""
        names = {needed} if isinstance(needed, str) else set(needed)
        return list(choices) if names <= self._capabilities else []


class _Trainings(_Claimed):
    """Strategies of the parts of a training."""

    def training(self) -> st.SearchStrategy[Training]:
        return st.composite(lambda draw: self._training(draw))()

    def _training(self, draw: st.DrawFn) -> Training:
        plan = draw(self._plan())
        microbatches = draw(st.integers(1, 3))
        reshards = draw(st.sampled_from(self._reshards()))
        replicas = draw(st.sampled_from(self._replicas()))
        if isinstance(reshards, int) and not isinstance(reshards, bool) and not self._divides(reshards, replicas):
            reshards = True
        accumulation = draw(st.sampled_from(self._accumulations(plan, microbatches, reshards, replicas)))
        optimizer = draw(st.sampled_from(["sgd", "momentum", *self._if(Capability.ADAM, "adam")]))
        steps = tuple(draw(self._steps(len(plan.heads), most=1 if optimizer == "adam" else 3)))
        # What is flat is trained and used as a whole.
        can_be_flat = not any(part.frozen for part in plan.parts()) and not _skips(plan)
        can_be_flat = can_be_flat and all(len(step.uses) > len(plan.heads) for step in steps)
        training = Training(
            plan=plan,
            steps=steps,
            rows=draw(st.integers(1, 3)),
            inputs_require_grad=draw(st.booleans()) or _needs_inputs(plan),
            replicas=replicas,
            reshard_after_forward=reshards,
            microbatches=microbatches,
            accumulation=accumulation,
            ahead=draw(st.integers(0, microbatches - 1)) if accumulation and accumulation.set_is_last_backward else 0,
            clip=draw(st.sampled_from(self._clips(plan))),
            offloads=draw(st.sampled_from([False, *self._if((Capability.OFFLOAD, Capability.PAGEABLE_OFFLOAD), True)])),
            flat_parameters=can_be_flat and draw(st.sampled_from([False, *self._if("flat_parameters", True)])),
            prefetches=not _skips(plan)
            and draw(st.sampled_from([False, *self._if(Capability.EXPLICIT_PREFETCH, True)])),
            optimizer=optimizer,
            seed=draw(st.integers(0, 9)),
        )
        assert needs_of(training, world_size=self._size) <= self._capabilities, f"{training} needs more than is claimed"
        return training

    # the model ---------------------------------------------------------------------------

    def _plan(self) -> st.SearchStrategy[Plan]:
        trunk = st.builds(Block, self._parts(2), self._blocks(_DEPTH), self._parts(1)).map(_trained)
        heads = self._blocks(1, most=2) if self._if(Capability.UNUSED_OUTPUT, True) else st.just(())
        if not self._if(Capability.GROUPED_UNIT, True):
            heads = heads.map(lambda blocks: tuple(dataclasses.replace(block, unit="own") for block in blocks))
        return st.builds(Plan, root=trunk, heads=heads, dim=st.integers(1, 5))

    def _parts(self, most: int) -> st.SearchStrategy[tuple[Part, ...]]:
        kinds = [kind for kind in _KINDS if kind != "tied" or self._if(Capability.TIED_PARAMETERS, True)]
        frozen = st.sampled_from(["", "", "", "first", "all"])
        part = st.sampled_from(kinds).flatmap(
            lambda kind: st.builds(
                Part,
                st.just(kind),
                width=st.integers(1, 7) if kind in _WIDE else st.just(1),
                frozen=st.just("") if kind == "buffer" else frozen,
            )
        )
        return st.lists(part, max_size=most).map(tuple)

    def _blocks(self, depth: int, most: int = _BREADTH) -> st.SearchStrategy[tuple[Block, ...]]:
        if depth == 0:
            return st.just(())
        # Fewer the deeper they are, so that a model stays small.
        return st.lists(self._block(depth), max_size=min(most, depth)).map(tuple)

    def _block(self, depth: int) -> st.SearchStrategy[Block]:
        return self._any_block(depth).map(self._as_unit).map(_recomputable)

    def _as_unit(self, block: Block) -> Block:
        """Return the block, as a unit of its own if it is left out at times and the implementation needs that.

        Where a unit is one flat parameter, as wherever it cannot be put together from several modules, a part of it
        that no rank used has a gradient of zeros.
        """
        if block.runs == "always" or self._if(Capability.GROUPED_UNIT, True):
            return block
        return dataclasses.replace(block, unit="own")

    def _any_block(self, depth: int) -> st.SearchStrategy[Block]:
        often, seldom = [""] * 4, self._if(Capability.UNUSED_MODULE, "even", "odd", "never")
        containers = [one for one in _CONTAINERS if one != "dataclass"]
        return st.builds(
            Block,
            self._parts(2),
            self._blocks(depth - 1, most=1),
            self._parts(1),
            unit=st.sampled_from(["", "own", "own", *self._if(Capability.GROUPED_UNIT, "joined")]),
            calls=st.sampled_from([1, 1, 1, *self._if(Capability.MULTIPLE_FORWARD, 2)]),
            runs=st.sampled_from(["always"] * 5 + seldom),
            returns=st.sampled_from(
                often
                + self._if(Capability.CONTAINER_OUTPUT, *containers)
                + self._if(Capability.DATACLASS_OUTPUT, "dataclass")
                + self._if(Capability.UNUSED_OUTPUT, "spare")
            ),
            recomputed=st.sampled_from(often + self._if(Capability.RECOMPUTATION, *_MEANS)),
        )

    # policies and the schedule -----------------------------------------------------------

    def _reshards(self) -> list[bool | int | None]:
        to_size = [size for size in range(2, self._size) if self._size % size == 0]
        return [
            None,
            *self._if(Capability.RESHARD_AFTER_FORWARD, True, False),
            *self._if(Capability.RESHARD_TO_SIZE, *to_size),
        ]

    def _replicas(self) -> list[int]:
        """The numbers of replicas of the meshes that are possible; 0 has one dimension and comes more often."""
        some = [count for count in range(1, self._size) if self._size % count == 0]
        alone = self._if((Capability.HYBRID, Capability.SINGLE_RANK), self._size)
        return [0, 0, 0, *self._if(Capability.HYBRID, *some), *alone]

    def _divides(self, reshards: int, replicas: int) -> bool:
        shards = self._size // max(1, replicas)
        return reshards < shards and shards % reshards == 0

    def _accumulations(
        self, plan: Plan, microbatches: int, reshards: bool | int | None, replicas: int
    ) -> list[Accumulation | None]:
        if microbatches == 1:
            return [None]
        per_unit = self._if("accumulation.units", "root-only", *[(unit[0],) for unit in plan.units()])
        skips = ["reduction", *(self._if("accumulation.skips", "all-reduce") if replicas else [])]
        # A unit that is freed after forward can be kept after backward only if flags are set for each unit.
        keeps = self._if("accumulation.reshard_after_backward", True) if reshards is False or per_unit else []
        deferred = [
            Accumulation(units=units, skips=skip, reshard_after_backward=not kept, set_is_last_backward=marks)
            for units in ("all", *per_unit)
            for skip in skips
            for kept in (False, *keeps)
            for marks in (False, *self._if("accumulation.set_is_last_backward", True))
        ]
        return [None, *self._if(Capability.DEFERRED_REDUCTION, *deferred)]

    def _clips(self, plan: Plan) -> list[Literal["", "1", "2", "3", "inf"]]:
        two = self._if((Capability.CLIP_BY_CALL, Capability.CLIP_EMPTY_SHARDS), "2")
        # torch has no inf-norm of a tensor without elements, and the baseline clips by torch.
        largest = [] if any(part.kind == "no-rows" for part in plan.parts()) else ["inf"]
        return ["", "", *two, *(self._if("clip.norm_type", "1", "3", *largest) if two else [])]

    def _steps(self, heads: int, *, most: int) -> st.SearchStrategy[list[Step]]:
        outputs = range(heads + 1)
        every = st.just(tuple(outputs))
        some = st.lists(st.sampled_from(outputs), min_size=1, unique=True).map(lambda uses: tuple(sorted(uses)))
        step = st.builds(
            Step,
            evaluates=st.lists(st.sampled_from(["no_grad", "inference_mode"]), max_size=2).map(tuple),
            unshards=st.sampled_from([False, *self._if(Capability.ASYNC_UNSHARD, True)]),
            uses=some if self._if(Capability.UNUSED_OUTPUT, True) else every,
            set_to_none=st.sampled_from([True, False]),
        )
        return st.lists(step, min_size=1, max_size=most)


def _trained(trunk: Block) -> Block:
    """Return the trunk, with a parameter that every microbatch trains."""
    return trunk if has_trained(trunk) else Block((*trunk.parts, Part()), trunk.blocks, trunk.after)


def _recomputable(block: Block) -> Block:
    """Return the block, recomputed by another means if it cannot be by a re-entrant call.

    Such a call has a backward of its own, in which the gradients of its parameters become final: those of a whole unit,
    which runs once and trains something. It follows no tensor into a container.
    """
    is_whole = block.unit == "own" and block.calls == 1 and has_trained(block) and not block.returns
    if block.recomputed != "reentrant-call" or is_whole:
        return block
    return dataclasses.replace(block, recomputed="call")


def _skips(plan: Plan) -> bool:
    return any(block.runs != "always" for _, block in plan.blocks())


def _needs_inputs(plan: Plan) -> bool:
    # A re-entrant recomputation has gradients only if its input requires some.
    return any(block.recomputed == "reentrant-call" for _, block in plan.blocks())


# Programs of calls

#: What parts of a program's model compute with: nothing that runs seldom, and nothing without elements.
_CALLED: tuple[Kind, ...] = (
    "linear", "shift", "bias-free", "wide", "norm", "listed", "embedding", "row", "cube", "tied", "buffer",
)  # fmt: skip

#: How many calls are drawn, of which those that are not legal where they stand are left out: about half.
_DRAWN_CALLS = 90


class _Programs(_Claimed):
    """Strategies of the parts of a program of calls."""

    def __init__(self, capabilities: frozenset[str], world_size: int, wrong_calls: frozenset[str]) -> None:
        super().__init__(capabilities, world_size)
        self._wrong_calls = wrong_calls

    def program(self) -> st.SearchStrategy[Program]:
        made = st.builds(
            Program,
            plan=self._plan(),
            calls=self._calls(),
            rows=st.integers(1, 3),
            # A world of two has one order of sums; a larger one has it as two replicas of two shards.
            replicas=st.just(0 if self._size == 2 else self._size // 2),
            reshard_after_forward=st.sampled_from([None, *self._if(Capability.RESHARD_AFTER_FORWARD, True, False)]),
            optimizer=st.sampled_from(["momentum", "sgd", *self._if(Capability.ADAM, "adam")]),
            seed=st.integers(0, 9),
        )
        return made.flatmap(self._keeping).map(self._playable)

    def _keeping(self, program: Program) -> st.SearchStrategy[Program]:
        """Let some programs without resharding after forward keep parameters after a deferred backward too."""
        able = program.reshard_after_forward is False and self._if(
            ("accumulation.reshard_after_backward", Capability.DEFERRED_REDUCTION), True
        )
        choices = st.sampled_from([False, True]) if able else st.just(False)
        return choices.map(lambda keeps: dataclasses.replace(program, keeps_unsharded=keeps))

    def _playable(self, program: Program) -> Program:
        return playable(program, self._wrong_calls, torch_version=torch.__version__)

    def _plan(self) -> st.SearchStrategy[Plan]:
        kinds = [kind for kind in _CALLED if kind != "tied" or self._if(Capability.TIED_PARAMETERS, True)]
        part = st.builds(Part, st.sampled_from(kinds), width=st.integers(1, 5))
        parts = st.lists(part, max_size=1).map(lambda several: (Part("linear"), *several))
        # Once each: of a module that is called twice the sums of gradients have no order that implementations share.
        block = st.builds(Block, parts, unit=st.just("own"))
        blocks = st.lists(block, min_size=1, max_size=3).map(tuple)
        return st.builds(Plan, root=st.builds(Block, parts, blocks), dim=st.integers(2, 5))

    def _calls(self) -> st.SearchStrategy[tuple[Call, ...]]:
        """Calls of a few kinds besides those of a step, others in each program: so they come close to each other."""
        able = [kind for kind in KINDS if self._ways(kind)]
        first = [kind for kind in able if kind not in _STEP and kind not in _AFTER.values()]
        some = st.lists(st.sampled_from(first), min_size=_FEW, max_size=_FEW, unique=True)
        # What follows some of them would rarely be chosen with them.
        with_others = some.map(
            lambda kinds: list(dict.fromkeys([*kinds, *(_AFTER[one] for one in kinds if one in _AFTER)]))
        )
        return with_others.flatmap(lambda kinds: self._calls_of([*_STEP, *kinds]))

    def _ways(self, kind: str) -> list[str]:
        return [how for how in KINDS[kind].choices if KINDS[kind].needs_of(how) <= self._capabilities]

    def _calls_of(self, kinds: list[str]) -> st.SearchStrategy[tuple[Call, ...]]:
        """Calls of these kinds; seldom one is left out, to which all shrink: a list of fixed length starts long."""
        every: list[Call | None] = [None]
        for kind in kinds:
            places = range(4) if KINDS[kind].has_places else range(1)
            ways = self._ways(kind)
            if kind == "forward":
                ways = ["reduced", *ways]  # more often: little is legal between a deferred backward and the next one
            made = [Call(kind, how, place) for how in ways for place in places]
            every += [call for _, call in zip(range(_STEP.get(kind, 12)), itertools.cycle(made), strict=False)]
        calls = st.lists(st.sampled_from(every), min_size=_DRAWN_CALLS, max_size=_DRAWN_CALLS)
        return calls.map(lambda drawn: tuple(call for call in drawn if call is not None))


#: How many kinds of calls a program has besides those of a step.
_FEW = 5

#: Kinds that undo or use what others do, which come with them.
_AFTER = {"freeze": "thaw", "save": "load", "save_model": "load", "unshard": "reshard"}

#: The kinds of a step, and how often each is drawn; each other kind twelve times.
_STEP = {"evaluate": 6, "forward": 18, "backward": 30, "step": 12, "zero_grad": 6}
