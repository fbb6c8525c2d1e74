"""One Chromium for all tests; a test fails if its page leaves an error in the console."""

import os
import pathlib

import pytest

from shardproof.reports.page import Source, render
from shardproof.runfile import parse_run
from tests.browser import runs
from tests.browser.chromium import Browser


@pytest.fixture(scope="session")
def chromium():
    browser = Browser()
    yield browser
    browser.close()


@pytest.fixture
def browser(chromium):
    chromium.resize(1440, 1000)
    chromium.media()
    chromium.messages()
    yield chromium
    assert chromium.messages() == []


@pytest.fixture(scope="session")
def written(tmp_path_factory):
    """Writes a page of runs, given as JSON data, and returns its path."""

    def write(*data, title="a page"):
        path = tmp_path_factory.mktemp("page") / "index.html"
        sources = [Source(f"run{i}.json", parse_run(one)) for i, one in enumerate(data)]
        path.write_text(render(sources, title=title), errors="backslashreplace")
        return path

    return write


@pytest.fixture(scope="session")
def small(written):
    return written(*runs.small())


@pytest.fixture(scope="session")
def axe():
    """The source of axe-core, the accessibility checker."""
    path = pathlib.Path(os.environ["AXE"])
    return path.read_text()
