"""The styles and scripts of the page, and the plotting library."""

import base64
import hashlib
from collections.abc import Sequence
from importlib import resources

from plotly.offline import get_plotlyjs

STYLES = ("colours", "layout", "matrix", "case", "plan", "print")
"""The files of style/, in the order of the cascade."""

SCRIPTS = ("dom", "verdicts", "data", "address", "filters", "matrix", "plots", "collectives", "record", "case", "main")
"""The files of script/: each uses what those before it define."""


PLAN_SCRIPTS = ("dom", "data", "plots", "plan")
"""Those of a page of plans."""


def style() -> str:
    """The style sheet of the page."""
    return "\n".join(_text(f"style/{name}.css") for name in STYLES)


def script(names: Sequence[str] = SCRIPTS) -> str:
    """The script of a page. Its files share one function, so that they define nothing outside of it.

    Args:
        names: of the files of script/, in their order.
    """
    body = "\n".join(_text(f"script/{name}.js") for name in names)
    return f'"use strict";\n(() => {{\n{body}\n}})();\n'


def plotting_library() -> str:
    """The source of plotly.js, as plotly's package has it."""
    source: str = get_plotlyjs()
    return source


def content_hash(source: str) -> str:
    """The hash by which a content security policy allows one script and no other."""
    return f"sha256-{base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()}"


def _text(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")
