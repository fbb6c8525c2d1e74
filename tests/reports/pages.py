"""Pages as a browser reads them: their elements, and the data in their scripts."""

import base64
import gzip
import json
from html.parser import HTMLParser

from shardproof.reports.page import Source, render
from shardproof.runfile import parse_run


class Page(HTMLParser):
    """A page that was rendered from run files.

    Attributes:
        html: its text.
        elements: (tag, names of attributes) of each element, in order.
        attributes: (name, value) of each attribute of each element.
        scripts: the content of each script, by its id; that without one runs.
        text: what is outside of scripts and styles.
    """

    def __init__(self, html):
        super().__init__()
        self.html = html
        self.elements, self.attributes, self.scripts, self.text = [], [], {}, ""
        self._inside = None
        self.feed(html)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, sorted(name for name, _ in attrs)))
        self.attributes += attrs
        if tag in ("script", "style"):
            self._inside = dict(attrs).get("id", tag)

    def handle_endtag(self, tag):
        if tag in ("script", "style"):
            self._inside = None

    def handle_data(self, data):
        if self._inside is None:
            self.text += data
        else:
            self.scripts[self._inside] = self.scripts.get(self._inside, "") + data

    def unpacked(self, name):
        return gzip.decompress(base64.b64decode(self.scripts[name], validate=True)).decode()

    @property
    def table(self):
        return json.loads(self.unpacked("data"))

    @property
    def records(self):
        """The records by case and column, with their traces as lines."""
        table, found = self.table, {}
        for number, first in enumerate(table["chunks"]):
            chunk = json.loads(self.unpacked(f"details-{number}"))
            for offset, records in enumerate(chunk["records"]):
                for column, record in records.items():
                    traces = [
                        {"ranks": ranks, "trace": [chunk["lines"][line] for line in chunk["traces"][trace]]}
                        for ranks, trace in record.get("collectives", [])
                    ]
                    whole = record | ({"collectives": traces} if traces else {})
                    found[table["cases"][first + offset], int(column)] = whole
        return found


def told(value, text, *, names=(), kept=()):
    """A file, or a part of one, with this text wherever it has one, and for these names of what it lists."""
    if isinstance(value, dict):
        changed = {key: one if key in kept else told(one, text, names=names, kept=kept) for key, one in value.items()}
        return {text if key in names else key: one for key, one in changed.items()}
    if isinstance(value, list):
        return [told(one, text, names=names, kept=kept) for one in value]
    return text if isinstance(value, str) else value


def page(*runs, names=None, title="a title"):
    """Render run files, given as JSON data."""
    paths = names or [f"run{i}.json" for i in range(len(runs))]
    return Page(render([Source(path, parse_run(run)) for path, run in zip(paths, runs, strict=True)], title=title))
