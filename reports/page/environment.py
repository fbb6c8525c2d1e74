"""The templates of the pages."""

import jinja2


def environment() -> jinja2.Environment:
    """The environment of the templates, which escapes every text that is no ``Markup``."""
    return jinja2.Environment(
        loader=jinja2.PackageLoader(__package__ or "", "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
