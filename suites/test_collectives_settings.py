"""Chapter COLLECTIVES: on which units a setting acts, where units are inside of units."""

import dataclasses
import types
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shardproof.suites.apis import Own
from shardproof.testing import Capability, Rank, Run, contract, needs, world
from shardproof.testing.measure import ROOT, Collective

pytestmark = needs(
    Capability.UNIT_SETTINGS, Capability.COUNTED_UNITS, Capability.RESHARD_AFTER_FORWARD, Capability.ROOT_RESHARD,
    Capability.FSDP2_API, "accumulation.units", "accumulation.reshard_after_backward",
)  # fmt: skip

DIM = 5
#: By unit, those inside of it.
INSIDE = {"": ("a", "a.inner", "b"), "a": ("a.inner",), "a.inner": (), "b": ()}


class _Shift(nn.Module):
    """Adds rows of its own, whose gradients need no parameter, and then calls the modules in it. Input: (..., dim)."""

    def __init__(self, rows: int, **inside: nn.Module) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.randn(rows, DIM))
        for name, module in inside.items():
            self.add_module(name, module)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.rows.sum(0)
        for module in self.children():
            x = module(x)
        return x


class _Noted(Own):
    """A collective of user code that notes the elements of what it gathers or of its share."""

    def __init__(self, sizes: list[int]) -> None:
        super().__init__()
        self._sizes = sizes

    def __call__(self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, **options: Any) -> Any:
        self._sizes.append(min(output_tensor.numel(), input_tensor.numel()))
        return super().__call__(output_tensor, input_tensor, group, **options)


@dataclasses.dataclass
class _Seen:
    """What two steps have shown.

    Attributes:
        steps: the collectives of each.
        sizes: the elements of the shares that functions and collectives of user code have got.
        gradients: a gradient of each unit, by label, as it was in the second.
        operators: those by which collectives of user code have reduced units in the second, by label.
        groups: the process groups among which these have done so, by label.
    """

    steps: list[list[Collective]]
    sizes: list[int]
    gradients: dict[str, torch.Tensor]
    operators: dict[str, Any]
    groups: dict[str, dist.ProcessGroup]

    def units(self, step: int, phase: str, kind: str) -> set[str]:
        """The units of collectives."""
        return {item.unit for item in self.steps[step] if (item.phase, item.kind) == (phase, kind)}


@dataclasses.dataclass(frozen=True)
class _Setting:
    """A setter with a visible effect.

    Attributes:
        name: its name.
        make: the value to set, from where functions of user code note the sizes of what they get; None for the default.
        back: the value that takes it back.
        found: the labels of the units on which it acts, or the elements of their shares, from what steps without and
            with it have shown; None if user code has noted these.
        recursive: whether it takes ``recurse``.
    """

    name: str
    make: Callable[[list[int]], Any] | None
    back: Callable[[], Any]
    found: Callable[[_Seen, _Seen], set[Any]] | None
    recursive: bool = True


def _missing(step: int, phase: str, kind: str) -> Callable[[_Seen, _Seen], set[str]]:
    """The units whose collectives of a kind are gone."""
    return lambda usual, now: usual.units(step, phase, kind) - now.units(step, phase, kind)


def _by_sums(usual: _Seen, now: _Seen) -> set[str]:
    return {name for name, operator in now.operators.items() if operator == dist.ReduceOp.SUM}


def _in_own_groups(usual: _Seen, now: _Seen) -> set[str]:
    return {name for name, group in now.groups.items() if group is not usual.groups[name]}


def _all_reduced(usual: _Seen, now: _Seen) -> set[int]:
    """The elements of the shares that are not all-reduced any more."""
    before, after = ({item.nbytes // 4 for item in seen.steps[1] if item.kind == "all_reduce"} for seen in (usual, now))
    return before - after


def _doubled(usual: _Seen, now: _Seen) -> set[str]:
    return {name for name, value in now.gradients.items() if torch.equal(value, 2 * usual.gradients[name])}


def _of(value: Any) -> Callable[..., Any]:
    return lambda *_: value


def _nothing(share: torch.Tensor) -> None:
    """Do nothing."""


SETTINGS = (
    _Setting("set_reshard_after_forward", _of(False), _of(True), _missing(1, "backward", "all_gather")),
    _Setting("set_reshard_after_backward", _of(False), _of(True), _missing(1, "forward", "all_gather")),
    _Setting("set_requires_gradient_sync", _of(False), _of(True), _missing(1, "backward", "reduce_scatter")),
    _Setting("set_unshard_in_backward", _of(False), _of(True), _missing(1, "backward", "all_gather"), False),
    _Setting(
        "set_all_reduce_hook", lambda sizes: lambda share: sizes.append(share.numel()), _of(_nothing), None, False
    ),
    _Setting("set_custom_all_gather", _Noted, Own, None, False),
    _Setting("set_custom_reduce_scatter", _Noted, Own, None, False),
)
SUMS = _Setting("set_force_sum_reduction_for_comms", _of(True), _of(False), _by_sums, False)
OWN_GROUP = _Setting("set_separate_reduce_scatter_group", None, _of(False), _in_own_groups)
FACTOR = _Setting("set_gradient_divide_factor", _of(1.0), _of(2.0), _doubled, False)
EARLIER_FACTOR = dataclasses.replace(FACTOR, name="set_reduce_scatter_divide_factor")
ALL_REDUCE = _Setting("set_requires_all_reduce", _of(False), _of(True), _all_reduced)


@contract("COLLECTIVES-10")
@world(2)
def test_units_of_a_setting(rank: Rank) -> None:
    """Each setter acts on its unit, with ``recurse``, which is the default where there is one, on those inside too."""
    run = _run(rank)
    check_settings(rank, run, SETTINGS)
    reduces = {name or ROOT: Own() for name in INSIDE}
    for name, reduce in reduces.items():
        _unit(run, "" if name == ROOT else name).set_custom_reduce_scatter(reduce)
    has_own = "settings.separate_reduce_scatter_group" in rank.implementation.capabilities()
    check_settings(rank, run, (SUMS, *([OWN_GROUP] if has_own else [])), reduces)
    for name in INSIDE:
        _unit(run, name).set_force_sum_reduction_for_comms(True)  # over gloo torch takes a factor for sums alone
        _unit(run, name).set_gradient_divide_factor(2.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        warnings.simplefilter("ignore", DeprecationWarning)  # about the earlier name
        check_settings(rank, run, (FACTOR, EARLIER_FACTOR))


@contract("COLLECTIVES-10")
@world(4)
@needs(Capability.HYBRID, "accumulation.skips")
def test_units_of_a_setting_on_replicas(rank: Rank) -> None:
    """On replicas the all-reduce is deferred for the unit on which that is set, or for those inside too."""
    check_settings(rank, _run(rank, mesh=rank.mesh((2, 2), ("replicate", "shard"))), (ALL_REDUCE,))


@contract("COLLECTIVES-10")
@world(2)
@needs(Capability.EXPLICIT_PREFETCH)
def test_units_with_cleared_prefetch(rank: Rank) -> None:
    """A list of units to gather ahead that is set on a unit replaces that of no unit inside."""
    run = _run(rank)
    _steps(rank, run, [])
    notes: list[list[str]] = []

    def note(*_: Any) -> None:
        notes.append([item.unit for item in run.trace if item.kind == "all_gather"])

    inner = _unit(run, "a.inner")
    inner.register_forward_pre_hook(note)
    inner.set_modules_to_forward_prefetch([_unit(run, "b")])
    for outer in ("a", ""):
        _unit(run, outer).set_modules_to_forward_prefetch([])
    _steps(rank, run, [])
    assert notes[-1] == [ROOT, "a", "a.inner", "b"], f"when a.inner computes, these are gathered: {notes[-1]}"


def check_settings(
    rank: Rank, run: Run, settings: Sequence[_Setting], reduces: Mapping[str, Own] = types.MappingProxyType({})
) -> None:
    """Set each on each unit, see on which units it acts in the second step, and take it back (collective)."""
    usual = _steps(rank, run, [], reduces)
    numbers = {unit.padded_numel // run.adapter.config.shard_size: unit.label for unit in run.units}
    for setting in settings:
        for name in ("", "a"):
            # By default, which is tried on the root, a setter that can act on all units inside does.
            for recurse in (False, True) if setting.recursive else (False,):
                options = {"recurse": recurse} if setting.recursive and (name or not recurse) else {}
                sizes: list[int] = []
                setter = getattr(_unit(run, name), setting.name)
                setter(*([setting.make(sizes)] if setting.make else []), **options)
                seen = _steps(rank, run, sizes, reduces)
                noted = setting.found(usual, seen) if setting.found else {*sizes}
                found = {numbers[one] if isinstance(one, int) else one for one in noted}
                expected = {name or ROOT, *(INSIDE[name] if recurse else ())}
                assert found == expected, (
                    f"{setting.name}() on {name or ROOT}, {_said(options)}, acts on {sorted(found)}, not on "
                    f"{sorted(expected)}"
                )
                # What it leaves, such as gathered parameters, is gone after the first of the next two steps.
                setter(setting.back(), **options)


def _said(options: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in options.items()) or "by default"


def _run(rank: Rank, **options: Any) -> Run:
    model = _Shift(2, a=_Shift(4, inner=_Shift(6)), b=_Shift(8))
    return rank.run(model, units=[["a.inner"], ["a"], ["b"]], reshard_after_forward=True, **options)


def _unit(run: Run, name: str) -> Any:
    return run.adapter.module.get_submodule(name)


def _steps(rank: Rank, run: Run, sizes: list[int], reduces: Mapping[str, Own] = types.MappingProxyType({})) -> _Seen:
    """Two forwards and backwards on one batch, and what they show (collective)."""
    steps = []
    for _ in range(2):
        _step(rank, run)
        steps.append([*run.trace])
    gradients = {
        name.rpartition(".")[0] or ROOT: piece.tensor.clone()
        for name, piece in run.adapter.gradients().items()
        if piece is not None
    }
    operators, groups = ({name: getattr(one, kind)[-1] for name, one in reduces.items()} for kind in ("ops", "groups"))
    return _Seen(steps, sizes, gradients, operators, groups)


def _step(rank: Rank, run: Run) -> None:
    run.adapter.zero_grad(set_to_none=True)
    run.trace.clear()
    run.forward_backward((rank.batch(0, (3, DIM)),), loss=torch.sum)
