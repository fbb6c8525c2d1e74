"""Writes the page of the published runs, those of docs/matrix.md, as out/published/index.html.

Run as ``python docs/make_page.py`` in the repository's root, where the extra ``page`` is installed.
"""

from generating import ROOT
from make_matrix import PLACES, run_of

from shardproof.reports.page import Source, render

OUT = ROOT / "out/published/index.html"


def published() -> str:
    """Render a page with a run for each table of docs/matrix.md."""
    sources = [Source(" + ".join(place.files), run_of(place)) for place in PLACES]
    return render(sources, title="shardproof: published runs")


def main() -> None:
    """Write the page."""
    text = published()
    OUT.parent.mkdir(parents=True, exist_ok=True)
    OUT.write_text(text)
    print(f"{OUT.relative_to(ROOT)}: {len(text) / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
