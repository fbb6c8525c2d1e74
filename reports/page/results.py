"""Renders what a results repository makes of its summaries: the index, badges, and a page that links to the others."""

import json
from collections.abc import Mapping
from itertools import groupby

from markupsafe import Markup

from shardproof.reports.page import assets
from shardproof.reports.results import INDEX, newest, rows_of


def render_results(summaries: Mapping[str, Mapping[str, object]]) -> dict[str, str]:
    """Return all files of a repository by path; of the same summaries they are always the same."""
    rows = rows_of(summaries.values())
    latest = newest(rows)
    classes = sorted({row["hardware"] for row in latest})
    environment = assets.environment()
    badge = environment.get_template("badge.svg")
    page = environment.get_template("results.html").render(
        title="Results of shardproof",
        style=Markup(assets.style(("colours", "layout"))),
        profiles=list(dict.fromkeys(name for row in rows for name in row["profiles"])),
        latest=[(name, [row for row in latest if row["hardware"] == name]) for name in classes],
        history=[(name, list(group)) for name, group in groupby(rows, lambda row: row["implementation"])],
    )
    data = {**summaries, INDEX: rows}
    texts = {name: json.dumps(one, indent=1) + "\n" for name, one in data.items()}
    return texts | {row["badge"]: badge.render(row=row) for row in latest} | {"index.html": page}
