"""Renders plan files as one HTML page: tables, and plots of memory and traffic."""

from collections.abc import Sequence
from typing import Any

from shardproof.planfile import Plan
from shardproof.reports import plan_text
from shardproof.reports.page import assets


def render_plans(plans: Sequence[Plan], *, title: str) -> str:
    """Render plans as a page, below each other. Of the same plans the HTML is always the same.

    Texts of plan files reach the page through the template, which escapes them, and as compressed JSON, which the
    script shows as text; a content security policy allows two scripts by their hashes, as on the page of run files.
    """
    shown, drawn = [_shown(plan) for plan in plans], [_drawn(plan) for plan in plans]
    return assets.rendered("plan.html", assets.PLAN_SCRIPTS, drawn, title=title, plans=shown)


def _shown(plan: Plan) -> dict[str, Any]:
    """The texts and tables of a plan: of each table its caption, its rows, and how many columns are no numbers."""
    unit = plan_text.unit_of(plan)
    world = plan.worlds[0]
    tables = [
        (f"Memory of rank {plan.rank} in {unit[0]}, when it holds most in each phase",
         plan_text.memory_rows(plan, world, unit), 1),
        (f"The most of each kind in {unit[0]}, each at its own moment", plan_text.most_rows(plan, world, unit), 1),
        (f"Traffic of rank {plan.rank} in a step, in {unit[0]}", plan_text.traffic_rows(world, unit), 3),
    ]  # fmt: skip
    if world.formulas:
        tables.append((f"Closed formulas, in {unit[0]}", plan_text.formula_rows(world, unit), 2))
    tables.append((f"World sizes, in {unit[0]}", plan_text.world_rows(plan, unit), 1))
    facts = {"shardproof": plan.shardproof, "torch": plan.torch, "command": " ".join(plan.command)}
    return {
        "name": f"{plan.model} under {plan.implementation}",
        "heading": plan_text.heading(plan),
        "tables": tables,
        "kinds": [(kind, plan.kinds.get(kind, "")) for kind in plan_text.shown_kinds(plan)],
        "assumptions": plan.assumptions,
        "facts": [(name, value) for name, value in facts.items() if value],
    }


def _drawn(plan: Plan) -> dict[str, Any]:
    """What the plots of a plan draw, in its unit of bytes."""
    unit = plan_text.unit_of(plan)

    def scaled(value: float) -> float:
        return float(f"{value / unit[1]:.6g}")

    kinds = plan_text.shown_kinds(plan)
    first, worlds = plan.worlds[0], plan_text.by_size(plan)
    return {
        "name": f"{plan.model} under {plan.implementation}", "unit": unit[0], "kinds": kinds, "ranks": first.ranks,
        "phases": [phase.name for phase in first.phases],
        "memory": [[scaled(phase.at_peak.get(kind, 0)) for phase in first.phases] for kind in kinds],
        "worlds": [world.ranks for world in worlds],
        "peaks": [[scaled(world.peak.at_peak.get(kind, 0)) for world in worlds] for kind in kinds],
        "sent": [scaled(sum(one.sent for one in world.traffic)) for world in worlds],
        "across": [scaled(sum(one.across for one in world.traffic)) for world in worlds],
    }  # fmt: skip
