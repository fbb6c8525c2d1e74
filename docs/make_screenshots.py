"""Writes the screenshots of docs/page.md: a page of published runs in Chromium, light, dark, and with an opened case.

Run as ``tox -e screenshots``, or as ``python docs/make_screenshots.py`` where the extras ``page`` and ``browser`` are
installed and Chromium with its driver is.
"""

import pathlib
import tempfile

from generating import ROOT
from make_page import published

from tests.browser.chromium import Browser

FOLDER = ROOT / "docs"
SIZE = (1180, 800)
MOST_BYTES = 150_000  # of one file in the repository

#: An expected failure of torch 2.11 that torch 2.13 does not have.
CASE = "#case=suites/test_collectives.py::test_unit_with_modules_that_do_not_run%5Bw2-0%5D&of=torch.fully_shard"
SHOTS = {
    "page-light": ("", False, ""),
    "page-dark": ("#impl=reference&impl=torch.fully_shard&differ=ran&open=AUTOGRAD-6", True, "#count"),
    "page-case": (CASE, False, ".records"),
    "page-plots": (CASE, False, ".record figure"),
}
"""The name of each file, with the fragment, whether it is dark, and what is scrolled to."""


def main() -> int:
    """Write the files; the exit code is 1 if a file would be too large for the repository."""
    browser = Browser(width=SIZE[0], height=SIZE[1])
    code = 0
    try:
        with tempfile.TemporaryDirectory() as folder:
            page = pathlib.Path(folder) / "index.html"
            page.write_text(published())
            for name, (fragment, dark, selector) in SHOTS.items():
                browser.media(dark=dark)
                browser.open(page, fragment)
                if selector:
                    browser.run("document.querySelector(arguments[0]).scrollIntoView()", selector)
                path = FOLDER / f"{name}.png"
                browser.driver.save_screenshot(str(path))
                print(f"{path.relative_to(ROOT)}: {path.stat().st_size / 1000:.0f} kB")
                code |= path.stat().st_size > MOST_BYTES
    finally:
        browser.close()
    return int(code)


if __name__ == "__main__":
    raise SystemExit(main())
