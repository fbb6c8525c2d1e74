"""The matrix in Chromium: its cells, its filters, and their state in the address."""

from urllib.parse import parse_qs, urlsplit

import pytest
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import Select

from tests.browser import runs
from tests.reports import samples


def rows(browser):
    """The shown requirements or cases, by the text of their first column without the requirement's text."""
    return browser.texts("#matrix .requirement .opener, #matrix tr.case th a")


def cells(browser, name):
    """The texts of the cells behind the first two of a row."""
    script = """
        const row = [...document.querySelectorAll('#matrix tr')].find((row) =>
          row.querySelector('.opener, th a')?.textContent === arguments[0]);
        return [...row.cells].slice(2).map((cell) => cell.textContent.trim());"""
    return browser.run(script, name)


def fragment(browser):
    return parse_qs(urlsplit(browser.driver.current_url).fragment)


def heads(browser):
    return browser.texts("#matrix thead tr:first-child th")[2:]


def choose(browser, name, value):
    browser.one(f"#filters input[name={name}][value='{value}']").click()


def test_cells_count_the_verdicts_of_each_run(browser, small):
    browser.open(small)
    assert heads(browser) == ["reference", "other", "mine:Alone"]
    assert browser.texts("#matrix thead tr + tr th") == [
        "CUDA, torch 2.11.0 0.1.0", "CPU, torch 2.13.0 0.1.0", "CUDA, torch 2.11.0", "CPU, torch 2.13.0",
        "CUDA, torch 2.11.0",
    ]  # fmt: skip
    assert rows(browser) == ["AUTOGRAD-1", "AUTOGRAD-2", "CLIPPING-1", "OURS-1"]
    assert cells(browser, "CLIPPING-1") == [
        "2 pass", "2 pass", "1 fail1 expected-fail1 differ between runs", "1 pass1 differ between runs", "no case"
    ]  # fmt: skip
    assert browser.one("#count").text == "all 5 cases"


def test_a_requirement_opens_to_its_cases_and_the_address_says_so(browser, small):
    browser.open(small)
    opener = browser.one("[data-requirement='AUTOGRAD-1']")
    opener.click()
    assert opener.get_attribute("aria-expanded") == "true"
    assert rows(browser)[:3] == ["AUTOGRAD-1", "test_unused[w2-False]", "test_unused[w2-True]"]
    assert cells(browser, "test_unused[w2-True]")[:4] == ["pass", "pass", "unsupported", "unsupported"]
    assert fragment(browser) == {"open": ["AUTOGRAD-1"]}
    opener.click()
    assert len(rows(browser)) == 4 and fragment(browser) == {}


@pytest.mark.parametrize(
    ("verdict", "expected"),
    [("fail", ["CLIPPING-1"]), ("expected-fail", ["AUTOGRAD-2", "CLIPPING-1"]), ("unsupported", ["AUTOGRAD-1"])],
)
def test_verdicts_are_chosen_by_click(browser, small, verdict, expected):
    browser.open(small)
    choose(browser, "verdict", verdict)
    assert rows(browser) == expected
    assert browser.one("#count").text == "1 of 5 cases"
    assert fragment(browser) == {"verdict": [verdict]}


def test_a_verdict_counts_in_the_columns_that_are_shown(browser, small):
    browser.open(small)
    choose(browser, "verdict", "fail")
    choose(browser, "impl", "reference")
    assert rows(browser) == []
    assert browser.one("#none").is_displayed()


def test_chapters_are_chosen(browser, small):
    browser.open(small)
    Select(browser.one("select[name=chapter]")).select_by_value("CLIPPING")
    # The case of two chapters counts for the requirement of this one alone.
    assert rows(browser) == ["CLIPPING-1"]
    assert browser.one("#count").text == "2 of 5 cases"
    assert fragment(browser) == {"chapter": ["CLIPPING"]}


def test_implementations_are_columns(browser, small):
    browser.open(small)
    choose(browser, "impl", "mine:Alone")
    assert (heads(browser), rows(browser)) == (["mine:Alone"], ["OURS-1"])
    choose(browser, "impl", "other")
    assert heads(browser) == ["other", "mine:Alone"]
    assert fragment(browser) == {"impl": ["other", "mine:Alone"]}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("TEST_UNUSED false", ["AUTOGRAD-1"]), ("clipping-1", ["AUTOGRAD-2", "CLIPPING-1"]),
        ("tensor-parallel", ["AUTOGRAD-1"]), ("head0.weight diverges", ["CLIPPING-1"]), ("nothing of it", []),
    ],
)  # fmt: skip
def test_texts_are_found_in_names_requirements_and_reasons(browser, small, text, expected):
    browser.open(small)
    browser.one("input[name=text]").send_keys(text)
    assert rows(browser) == expected
    assert fragment(browser) == {"text": [text]}


def test_only_cases_about_which_the_runs_disagree(browser, small):
    browser.open(small)
    Select(browser.one("select[name=differ]")).select_by_value("ran")
    assert rows(browser) == ["CLIPPING-1"]
    choose(browser, "rows", "cases")
    assert rows(browser) == ["test_clip[w2]"]
    assert cells(browser, "test_clip[w2]")[2:4] == ["faildiffers between runs", "passdiffers between runs"]


def test_a_skip_differs_from_a_verdict_on_request_alone(browser, written):
    old, new = runs.small()
    old["cases"][0] |= {"verdict": "unmet", "missing": ["a GPU"]}
    browser.open(written(old, new), "#differ=ran&rows=cases")
    assert rows(browser) == ["test_clip[w2]"]
    Select(browser.one("select[name=differ]")).select_by_value("skips")
    assert rows(browser) == ["test_unused[w2-True]", "test_clip[w2]"]


def test_one_run_is_compared_with_none(browser, written):
    browser.open(written(runs.small()[0]))
    assert browser.all("select[name=differ]") == []
    assert browser.all("#matrix .differs") == []
    assert len(browser.all("#matrix thead tr")) == 1


FILTERED = "#verdict=pass&verdict=fail&impl=other&open=CLIPPING-1&chapter=CLIPPING&text=clip&differ=ran"


def test_the_address_restores_everything(browser, small):
    browser.open(small, FILTERED)
    assert rows(browser) == ["CLIPPING-1", "test_clip[w2]"]
    checked = "return [...document.querySelectorAll('#filters :checked')].map((one) => one.value)"
    assert browser.run(checked) == ["CLIPPING", "ran", "requirements", "fail", "pass", "other"]
    assert browser.one("input[name=text]").get_attribute("value") == "clip"


def test_reset_shows_all(browser, small):
    browser.open(small, FILTERED)
    browser.one("#filters button[type=reset]").click()
    browser.until("return document.getElementById('count').textContent === 'all 5 cases'")
    assert fragment(browser) == {"open": ["CLIPPING-1"]}
    assert browser.run("return document.querySelectorAll('#filters input[type=checkbox]:checked').length") == 0


def test_an_address_of_another_page_is_no_error(browser, small):
    browser.open(small, "#chapter=GONE&impl=gone&verdict=gone&open=gone&of=x&unknown=1")
    assert rows(browser) == []
    assert browser.one("#none").is_displayed()
    assert heads(browser) == ["reference", "other", "mine:Alone"], "without a known implementation all are shown"


def test_many_cases_are_laid_out_in_parts(browser, written):
    cases = [samples.case(id=f"suites/test_x.py::test_{i:03}") for i in range(450)]
    browser.open(written(samples.run(*cases)), "#rows=cases")
    assert len(browser.all("#matrix tr.case th")) == 200
    for expected in (400, 450):
        more = browser.one("#matrix .more button")
        assert more.text.startswith(f"show {expected - len(browser.all('#matrix tr.case th'))} of ")
        more.click()
        assert len(browser.all("#matrix tr.case th")) == expected
    assert browser.driver.switch_to.active_element.text == "test_400", "the first of the new ones"
    assert browser.all("#matrix .more") == []


def test_the_cells_of_a_case_lead_to_its_implementation(browser, small):
    browser.open(small, "#rows=cases&text=test_clip")
    row = next(row for row in browser.all("#matrix tr.case") if "test_clip" in row.text)
    row.find_elements(By.TAG_NAME, "a")[3].click()
    browser.until_drawn()
    assert browser.texts(".records > h2") == ["other"]
    assert fragment(browser)["of"] == ["other"]


# Speed: the time until the matrix is there, measured in the browser from the start of the navigation

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
