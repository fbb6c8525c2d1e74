"""Makes one HTML page of run files, or of plan files. Needs the extra ``page``; nothing but the subcommand imports it.

The modules, each importing from those above it:

assets: templates, styles, scripts, the plotting library, and data compressed for a script element
table: what the matrix needs, of all cases: the contract and the verdicts
details: what a case needs when it is opened, in chunks
render: the page of run files, with names that tell runs apart
plan: the page of plan files
"""

from shardproof.reports.page.plan import render_plans
from shardproof.reports.page.render import Source, render

__all__ = ["Source", "render", "render_plans"]
