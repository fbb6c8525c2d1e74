"""The page for a keyboard, a screen reader, dark systems, narrow windows and paper."""

import base64

import pytest
from selenium.webdriver.common.keys import Keys

from tests.browser.test_case import CLIP

VIEWS = {
    "matrix": "",
    "opened": "#open=CLIPPING-1&open=AUTOGRAD-1",
    "cases": "#rows=cases&verdict=fail",
    "empty": "#text=nothing",
    "case": CLIP,
    "skipped": "#case=suites/test_autograd.py::test_unused%5Bw2-True%5D&of=other",
    "gone": "#case=gone",
}


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("view", VIEWS)
def test_an_accessibility_checker_finds_nothing(browser, small, axe, view, dark):
    browser.media(dark=dark)
    browser.open(small, VIEWS[view])
    browser.run("for (const one of document.querySelectorAll('details')) one.open = true")
    browser.run(axe)
    results = browser.driver.execute_async_script(
        "const done = arguments[0]; axe.run(document).then(done, (error) => done({error: String(error)}))"
    )
    assert "error" not in results, results
    assert len(results["passes"]) > 20, "it has looked"
    found = [(one["id"], [node["html"][:200] for node in one["nodes"]][:3]) for one in results["violations"]]
    assert found == []


def press(browser, *keys):
    for key in keys:
        browser.driver.switch_to.active_element.send_keys(key)


def active(browser):
    return browser.driver.switch_to.active_element


def tab_until(browser, found, most=60):
    for _ in range(most):
        press(browser, Keys.TAB)
        if found(active(browser)):
            return
    raise AssertionError(
        f"not reached with {most} tabs; the last was {active(browser).get_attribute('outerHTML')[:200]}"
    )


def test_a_keyboard_alone_filters_opens_and_comes_back(browser, small):
    browser.open(small)
    press(browser, Keys.TAB)
    assert active(browser).text == "skip to the content" and active(browser).is_displayed()
    tab_until(browser, lambda one: one.get_attribute("value") == "fail")
    press(browser, Keys.SPACE)
    assert browser.one("#count").text == "1 of 5 cases"
    tab_until(browser, lambda one: one.text == "CLIPPING-1")
    press(browser, Keys.ENTER)
    tab_until(browser, lambda one: one.text == "test_clip[w2]", most=2)
    press(browser, Keys.ENTER)
    browser.until_drawn()
    assert active(browser).get_attribute("id") == "case-title"
    assert browser.texts(".records > h2") == ["other"], "the implementation with the gravest verdict"
    tab_until(browser, lambda one: one.tag_name == "summary")
    press(browser, Keys.ENTER)
    assert browser.all(".record table")[0].is_displayed()
    press(browser, Keys.ESCAPE)
    browser.until("return document.activeElement.textContent === 'test_clip[w2]'")


def test_what_has_the_focus_is_outlined(browser, small):
    browser.open(small)
    tab_until(browser, lambda one: one.text == "AUTOGRAD-1")
    assert browser.run("return getComputedStyle(document.activeElement).outlineStyle") == "solid"


def test_every_cell_has_its_heads(browser, small):
    """A screen reader names the row and the column of a cell from the scopes of their heads."""
    browser.open(small, "#open=CLIPPING-1")
    scopes = "return [...document.querySelectorAll('#matrix th')].map((one) => one.scope)"
    assert set(browser.run(scopes)) == {"col", "colgroup", "row", "rowgroup"}
    widths = "return [...document.querySelectorAll('#matrix tbody tr, #matrix tfoot tr')].map((row) => "
    widths += "[...row.cells].reduce((sum, cell) => sum + cell.colSpan, 0))"
    assert set(browser.run(widths)) == {7}


def colour(browser, selector, name):
    return browser.run("return getComputedStyle(document.querySelector(arguments[0]))[arguments[1]]", selector, name)


def test_dark_systems_get_dark_colours_in_plots_too(browser, small):
    browser.media(dark=True)
    browser.open(small, CLIP)
    assert colour(browser, "body", "backgroundColor") == "rgb(20, 24, 29)"
    assert colour(browser, ".plot .xtick text", "fill") == "rgb(228, 233, 238)"
    browser.media(dark=False)
    assert colour(browser, "body", "backgroundColor") == "rgb(255, 255, 255)"
    assert colour(browser, ".plot .xtick text", "fill") == "rgb(27, 37, 48)"


@pytest.mark.parametrize("fragment", ["#open=CLIPPING-1", CLIP], ids=["matrix", "case"])
def test_paper_is_light_and_has_nothing_to_press(browser, small, fragment):
    browser.media(dark=True)
    browser.open(small, fragment)
    browser.media(dark=True, kind="print")
    assert colour(browser, "body", "color") == "rgb(27, 37, 48)"
    shown = "return all('form, nav, .command button').filter((one) => one.checkVisibility()).length"
    clipped = "return all('.scroll').filter((one) => getComputedStyle(one).overflowY !== 'visible').length"
    every = "const all = (selector) => [...document.querySelectorAll(selector)];"
    assert browser.run(every + shown) == 0
    assert browser.run(every + clipped) == 0, "paper does not scroll"
    pdf = base64.b64decode(browser.driver.execute_cdp_cmd("Page.printToPDF", {"landscape": True})["data"])
    assert pdf.startswith(b"%PDF-") and len(pdf) > 10_000


@pytest.mark.parametrize("view", ["opened", "case"])
def test_a_narrow_window_scrolls_in_one_direction(browser, small, view):
    browser.resize(400, 800)
    browser.open(small, VIEWS[view])
    assert browser.run("return document.documentElement.scrollWidth") <= 400
