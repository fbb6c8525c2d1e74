"""The page of a results repository, opened from disk."""

import shutil

import pytest

from tests.installations import ROOT


@pytest.fixture
def opened(browser, tmp_path):
    """The example, copied, in the browser."""
    folder = shutil.copytree(ROOT / "examples/results-repository", tmp_path / "a folder")
    browser.driver.get((folder / "index.html").as_uri())
    return folder.as_uri()


def test_the_newest_results_and_their_history_are_shown_and_linked(browser, opened):
    assert browser.texts("h2") == ["cpu-4", "nccl-2", "History"]
    rows = browser.texts("table.latest tbody tr")
    assert any(row.startswith("torch.fully_shard") and "1399/1558" in row and "2.15.0" in row for row in rows), rows
    history = browser.texts("#of-torch\\.fully_shard ~ div td:nth-child(4)")
    assert history == ["2.15.0", "2.14.1", "2.13.0", "2.11.0", "2.11.0"]
    for link, shown in (
        (".latest a[href^=runs]", '"run_id"'),
        (".latest a[href^=badges]", "<title>"),
        ("footer a", "["),
    ):
        browser.driver.get(browser.all(link)[-1].get_attribute("href"))
        assert browser.driver.current_url.startswith(opened) and shown in browser.driver.page_source
        browser.driver.back()


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_an_accessibility_checker_finds_nothing(browser, opened, axe, dark):
    browser.media(dark=dark)
    browser.run(axe)
    violations = browser.driver.execute_async_script("axe.run(document).then((done) => arguments[0](done.violations))")
    assert [(one["id"], one["nodes"][0]["html"][:200]) for one in violations] == []
