"""Writes the page of the published runs, those of docs/matrix.md, as out/published/index.html.

Next to it are the pages of what they were asked, which ``docs/make.py`` makes. Run ``python docs/make_page.py`` in the
repository's root, where the extras ``page`` and ``docs`` are installed. With ``--screenshots`` it also writes those of
docs/page.md, for which the extra ``browser`` and Chromium are needed.
"""

import argparse
import pathlib

import matrix
from make import MADE, linked
from markdown_it import MarkdownIt

from shardproof.reports.page import Source, render

ROOT = matrix.ROOT
OUT = ROOT / "out/published/index.html"
#: The names of the pages next to it, with their titles.
PAGES = {
    "features": "What the suites check",
    "capabilities": "Capabilities",
    "crossed": "Features crossed",
    "history": "History, replayed",
}
_DOCUMENT = """\
<!DOCTYPE html>
<html lang="en">
<meta charset="utf-8">
<title>{title}</title>
<style>body {{ font: 1rem/1.5 sans-serif; margin: 2rem }} td, th {{ border: 1px solid; padding: .2rem .4rem }}</style>
<p><a href="index.html">The published runs</a></p>
{body}
</html>
"""
MOST_BYTES = 150_000  # of one picture in the repository

#: An expected failure of torch 2.11 that torch 2.13 does not have.
CASE = "#case=suites/test_collectives.py::test_unit_with_modules_that_do_not_run%5Bw2-0%5D&of=torch.fully_shard"
#: The name of each picture, with the fragment, whether it is dark, and what is scrolled to.
SHOTS = {
    "page-light": ("", False, ""),
    "page-dark": ("#impl=reference&impl=torch.fully_shard&differ=ran&open=AUTOGRAD-6", True, "#count"),
    "page-case": (CASE, False, ".records"),
    "page-plots": (CASE, False, ".record figure"),
}


def shoot(page: pathlib.Path) -> int:
    """Write the pictures; the exit code is 1 if one would be too large for the repository."""
    from tests.browser.chromium import Browser

    browser, code = Browser(width=1180, height=800), 0
    try:
        for name, (fragment, dark, selector) in SHOTS.items():
            browser.media(dark=dark)
            browser.open(page, fragment)
            if selector:
                browser.run("document.querySelector(arguments[0]).scrollIntoView()", selector)
            path = ROOT / f"docs/{name}.png"
            browser.driver.save_screenshot(str(path))
            print(f"{path.relative_to(ROOT)}: {path.stat().st_size / 1000:.0f} kB")
            code |= path.stat().st_size > MOST_BYTES
    finally:
        browser.close()
    return int(code)


def document(title: str, text: str) -> str:
    """A page of docs/make.py as HTML, with links that lead from the folder of the published runs."""
    html = MarkdownIt("commonmark").enable("table").render(linked(text, OUT.parent))
    for name in PAGES:
        html = html.replace(f'href="{name}.md', f'href="{name}.html')
    return _DOCUMENT.format(title=title, body=html)


def main() -> int:
    """Write the pages and, if they are asked for, the pictures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--screenshots", action="store_true")
    options = parser.parse_args()
    sources = [Source(" + ".join(place.files), run) for place, run in matrix.runs().items()]
    documents = [(title, f"{name}.html") for name, title in PAGES.items()]
    text = render(sources, title="shardproof: published runs", documents=documents)
    OUT.parent.mkdir(parents=True, exist_ok=True)
    OUT.write_text(text)
    for name, title in PAGES.items():
        OUT.with_name(f"{name}.html").write_text(document(title, MADE[name][1]()))
    print(f"{OUT.relative_to(ROOT)}: {len(text) / 1e6:.1f} MB")
    return shoot(OUT) if options.screenshots else 0


if __name__ == "__main__":
    raise SystemExit(main())
