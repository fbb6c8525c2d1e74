"""A plan as text for a terminal: memory and traffic of one rank, with the formulas, and all world sizes."""

import textwrap
from collections.abc import Sequence

from shardproof.door import printable
from shardproof.planfile import Formula, Plan, World
from shardproof.reports.texts import table

_COLUMNS = 120
#: Differences below this part of the value are printed in bytes.
_SMALL = 10_000
_UNITS = (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10))


def render_plan(plan: Plan) -> str:
    """Format a plan: memory, traffic and formulas of its first world, and a table of worlds if there are several."""
    unit = unit_of(plan)
    world = plan.worlds[0]
    lines = [*heading(plan), ""]
    lines += [f"memory of rank {plan.rank} in {unit[0]}, when it holds most in each phase", ""]
    lines += [*_aligned(memory_rows(plan, world, unit)), ""]
    lines += [f"the most of each kind in {unit[0]}, each at its own moment", ""]
    lines += [*_aligned(most_rows(plan, world, unit)), ""]
    lines += [f"traffic of rank {plan.rank} in a step, in {unit[0]}", ""]
    lines += [*_aligned(traffic_rows(world, unit), left=3), ""]
    if world.formulas:
        lines += [f"closed formulas, in {unit[0]}", ""]
        lines += [*_aligned(formula_rows(world, unit), left=2), ""]
    if len(plan.worlds) > 1:
        lines += [f"world sizes, in {unit[0]}", "", *_aligned(world_rows(plan, unit)), ""]
    for assumption in plan.assumptions:
        lines += textwrap.wrap(printable(assumption), _COLUMNS, initial_indent="- ", subsequent_indent="  ")
    return "".join(f"{line}\n" for line in lines)


def heading(plan: Plan) -> list[str]:
    """The model and the simulated rank, in a few lines."""
    about = f" ({plan.about})" if plan.about else ""
    units = ", ".join(f"{count} of {name}" for name, count in plan.units.items() if name != "root")
    if "root" in plan.units:
        units = f"{units} and the root's own" if units else "the root's own alone"
    settings = ", ".join(f"{name} {value}".strip() for name, value in plan.settings.items())
    lines = [
        f"{plan.model}{about}: {plan.numel:,} parameters; units: {units}",
        f"{plan.implementation} {plan.version}, {mesh_text(plan.worlds[0])}".replace(" ,", ","),
        settings,
    ]
    return [line for one in lines for line in textwrap.wrap(printable(one), _COLUMNS, subsequent_indent="  ")]


def mesh_text(world: World) -> str:
    """A mesh with its names, its ranks and its hosts."""
    mesh = " x ".join(f"{one.size} ({one.name})" for one in world.mesh)
    return f"mesh {mesh}: {_number(world.ranks, 'rank')} on {_number(world.hosts, 'host')}"


def unit_of(plan: Plan) -> tuple[str, int]:
    """The unit in which bytes are printed: the largest of which the first world's peak has at least one."""
    peak = plan.worlds[0].peak.total
    return next((unit for unit in _UNITS if peak >= unit[1]), _UNITS[-1])


def memory_rows(plan: Plan, world: World, unit: tuple[str, int]) -> list[list[str]]:
    """Bytes by kind at the peak of each phase, with a heading and the sums."""
    rows = [["", *(phase.name for phase in world.phases)]]
    for kind in shown_kinds(plan):
        rows.append([kind, *(_bytes(phase.at_peak.get(kind, 0), unit) for phase in world.phases)])
    return [*rows, ["all", *(_bytes(phase.total, unit) for phase in world.phases)]]


def most_rows(plan: Plan, world: World, unit: tuple[str, int]) -> list[list[str]]:
    """The most bytes of each kind in each phase, with a heading."""
    rows = [["", *(phase.name for phase in world.phases)]]
    for kind in shown_kinds(plan):
        rows.append([kind, *(_bytes(phase.most.get(kind, 0), unit) for phase in world.phases)])
    return rows


def shown_kinds(plan: Plan) -> list[str]:
    """The kinds of memory of which some world has any, in the plan's order."""
    found = {kind for world in plan.worlds for phase in world.phases for kind, nbytes in phase.most.items() if nbytes}
    return [kind for kind in plan.kinds if kind in found] + sorted(found - plan.kinds.keys())


def traffic_rows(world: World, unit: tuple[str, int]) -> list[list[str]]:
    """A row for each group, kind and dtype, with a heading and the sums."""
    rows = [["group", "kind", "dtype", "collectives", "gathered or reduced", "sent", "sent to other hosts"]]
    for one in world.traffic:
        named = f"{one.group} ({one.ranks})"
        volume = [_bytes(value, unit) for value in (one.nbytes, one.sent, one.across)]
        rows.append([named, one.kind, one.dtype, str(one.count), *volume])
    total = [sum(values) for values in zip(*((one.sent, one.across) for one in world.traffic), strict=True)] or [0, 0]
    count = sum(one.count for one in world.traffic)
    return [*rows, ["all", "", "", str(count), "", *(_bytes(value, unit) for value in total)]]


def formula_rows(world: World, unit: tuple[str, int]) -> list[list[str]]:
    """A row for each formula, with a heading."""
    rows = [["quantity", "formula", "by the formula", "simulated", "difference"]]
    for one in world.formulas:
        rows.append([one.quantity, one.text, _quantity(one, one.value, unit), _quantity(one, one.simulated, unit),
                     _difference(one)])  # fmt: skip
    return rows


def _quantity(formula: Formula, value: float, unit: tuple[str, int]) -> str:
    return _bytes(value, unit) if formula.unit == "B" else f"{value:,.0f}"


def _difference(formula: Formula) -> str:
    if formula.simulated == formula.value:
        return "none"
    if formula.unit == "B" and abs(formula.simulated - formula.value) < formula.value / _SMALL:
        return f"{formula.simulated - formula.value:+,.0f} B"
    return f"{formula.simulated / formula.value - 1:+.2%}" if formula.value else f"{formula.simulated:+,}"


def world_rows(plan: Plan, unit: tuple[str, int]) -> list[list[str]]:
    """A column for each world, after a heading: memory by kind at the peak, and traffic."""
    worlds = by_size(plan)
    rows = [
        ["ranks", *(f"{world.ranks:,}" for world in worlds)],
        ["mesh", *("x".join(str(one.size) for one in world.mesh) for world in worlds)],
        ["hosts", *(f"{world.hosts:,}" for world in worlds)],
    ]
    for kind in shown_kinds(plan):
        rows.append([kind, *(_bytes(world.peak.at_peak.get(kind, 0), unit) for world in worlds)])
    return [
        *rows,
        ["peak", *(_bytes(world.peak.total, unit) for world in worlds)],
        ["sent", *(_bytes(sum(one.sent for one in world.traffic), unit) for world in worlds)],
        ["sent to other hosts", *(_bytes(sum(one.across for one in world.traffic), unit) for world in worlds)],
        ["collectives", *(f"{sum(one.count for one in world.traffic):,}" for world in worlds)],
    ]


def by_size(plan: Plan) -> list[World]:
    """The worlds of a plan, the smallest first."""
    return sorted(plan.worlds, key=lambda world: world.ranks)


def _bytes(value: float, unit: tuple[str, int]) -> str:
    return f"{value / unit[1]:,.3f}"


def _number(count: int, word: str) -> str:
    return f"{count:,} {word}" if count == 1 else f"{count:,} {word}s"


def _aligned(rows: Sequence[Sequence[str]], *, left: int = 1) -> list[str]:
    """Align rows into a table: so many columns to the left, the others, which have numbers, to the right."""
    rows = [[printable(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return table([[cell if i < left else cell.rjust(widths[i]) for i, cell in enumerate(row)] for row in rows])
