"""5,000 cases: the time until the matrix is there, measured in the browser from the start of the navigation."""

import pytest

from tests.browser import runs

CASES = 5000


@pytest.fixture(scope="module")
def large(written):
    path = written(*runs.large(CASES))
    print(f"{path.stat().st_size / 1e6:.1f} MB")
    return path


@pytest.mark.parametrize("fragment", ["", "#rows=cases"], ids=["requirements", "cases"])
def test_the_matrix_is_there_within_two_seconds(browser, large, fragment):
    browser.open(large, fragment)
    assert browser.one("#count").text == f"all {CASES:,} cases"
    # The next frame is on the screen and the page answers.
    shown = browser.driver.execute_async_script(
        "const done = arguments[0]; requestAnimationFrame(() => setTimeout(() => done("
        "[performance.getEntriesByName('matrix')[0].startTime, document.querySelectorAll('*').length])))"
    )
    milliseconds, elements = shown
    print(f"matrix after {milliseconds:.0f} ms, {elements} elements")
    assert milliseconds < 2000
    assert elements < 20_000, "5,000 cases are not all laid out"


def test_a_filter_answers_at_once(browser, large):
    browser.open(large)
    milliseconds = browser.run(
        "const began = performance.now(); document.querySelector('#filters input[value=fail]').click();"
        "return performance.now() - began"
    )
    assert browser.one("#count").text == f"{CASES // 97 + 1} of {CASES:,} cases"
    print(f"filtered after {milliseconds:.0f} ms")
    assert milliseconds < 1000
