"""What a page is made of: its templates, styles, scripts, the plotting library, and its data, packed."""

import base64
import functools
import gzip
import hashlib
import json
from collections.abc import Sequence
from importlib import resources
from typing import Any

import jinja2
from markupsafe import Markup
from plotly.offline import get_plotlyjs

from shardproof.door import printable
from shardproof.jsonfiles import encode

STYLES = ("colours", "layout", "matrix", "case", "plan", "print")
"""The files of style/, in the order of the cascade."""

SCRIPTS = (
    "dom", "verdicts", "data", "address", "filters", "matrix", "plots", "collectives", "own", "record", "case", "main",
)  # fmt: skip
"""The files of script/: each uses what those before it define."""


PLAN_SCRIPTS = ("dom", "data", "plots", "plan")
"""Those of a page of plans."""


@functools.cache
def environment() -> jinja2.Environment:
    """The environment of the templates, which escapes every text that is no ``Markup``; each template is read once."""
    made = jinja2.Environment(
        loader=jinja2.PackageLoader(__package__ or "", "templates"), autoescape=True, undefined=jinja2.StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    made.filters["printable"] = printable  # XML has no control characters, and no way to write one
    return made


def rendered(template: str, scripts: Sequence[str], data: Any, **fields: Any) -> str:
    """Render a page with its style sheet, its scripts, the plotting library and the data that the scripts draw."""
    plotting, plotting_hash = _packed_plotting()
    source = script(scripts)
    # What is not escaped is our own source and base64.
    return environment().get_template(template).render(
        style=Markup(style()), script=Markup(source), script_hash=content_hash(source),
        plotting=Markup(plotting), plotting_hash=plotting_hash, data=Markup(packed_json(data)),
        **fields,
    )  # fmt: skip


def style(names: Sequence[str] = STYLES) -> str:
    """The style sheet of a page."""
    return "\n".join(_text(f"style/{name}.css") for name in names)


def script(names: Sequence[str] = SCRIPTS) -> str:
    """The script of a page. Its files, in this order, share one function, so that they define nothing outside of it."""
    body = "\n".join(_text(f"script/{name}.js") for name in names)
    return f'"use strict";\n(() => {{\n{body}\n}})();\n'


def plotting_library() -> str:
    """The source of plotly.js, as plotly's package has it."""
    source: str = get_plotlyjs()
    return source


@functools.cache
def _packed_plotting() -> tuple[str, str]:
    """The plotting library, packed, and its hash; it is most of a page, and the same in each."""
    source = plotting_library()
    return packed(source), content_hash(source)


def content_hash(source: str) -> str:
    """The hash by which a content security policy allows one script and no other."""
    return f"sha256-{base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()}"


def packed(text: str) -> str:
    """Compress a text with gzip and write it in base64, in characters that mean nothing to HTML."""
    # The time in the header would make two pages of the same runs differ.
    return base64.b64encode(gzip.compress(text.encode(), compresslevel=9, mtime=0)).decode()


def packed_json(value: Any) -> str:
    """Write a value, as :func:`shardproof.runfile.encode` makes it, as compact JSON in ASCII, and pack it."""
    return packed(json.dumps(encode(value), separators=(",", ":"), allow_nan=False))


def _text(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")
