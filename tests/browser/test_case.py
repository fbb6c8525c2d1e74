"""An opened case in Chromium: what is said, what is drawn, and the way back."""

import json

from selenium.webdriver.common.keys import Keys

from shardproof.planfile import parse_plan
from shardproof.reports.page import render_plans
from tests.browser import runs
from tests.reports import samples
from tests.reports.test_page import HOSTILE, full_of
from tests.reports.test_plan_page import plan_data

CLIP = "#case=suites/test_clipping.py::test_clip%5Bw2%5D&of=other"


def sections(browser, selector):
    """The texts in each record, by run."""
    script = """
        const text = (one) => one.textContent.replace(/\\s+/g, ' ').trim();
        return [...document.querySelectorAll('.record')].map((record) =>
          [...record.querySelectorAll(arguments[0])].map(text));"""
    return browser.run(script, selector)


def definitions(browser):
    """The terms of each record with what stands beside them."""
    script = """
        return [...document.querySelectorAll('.record')].map((record) =>
          Object.fromEntries([...record.querySelectorAll('dt')].map((dt) =>
            [dt.textContent, dt.nextSibling.textContent])));"""
    return browser.run(script)


def plots(browser):
    """For each plot, by record, the names and the values of its traces as plotly has them."""
    script = """
        return [...document.querySelectorAll('.record')].map((record) =>
          [...record.querySelectorAll('.plot')].map((plot) =>
            Object.fromEntries(plot.data.map((trace) => [trace.name, [...trace.y]]))));"""
    return browser.run(script)


def test_what_is_said_of_a_failed_case(browser, small):
    browser.open(small, CLIP)
    assert browser.texts("#case-title") == ["suites/test_clipping.py::test_clip[w2]"]
    (requirement,) = browser.texts("#case .requirements li")
    assert requirement.startswith("CLIPPING-1 The total norm is that of the full, averaged gradients")
    assert browser.texts("#case > dl > div") == ["ranks2", "reshardtrue"]
    assert sections(browser, "h3") == [["CUDA, torch 2.11.0 fail"], ["CPU, torch 2.13.0 pass"]]
    assert sections(browser, ".failure pre") == [[runs.FAILURE["text"]], []]
    old, new = definitions(browser)
    place = {"stage": "gradient", "step": "1", "rank": "0", "tensor": "head0.weight", "element": "[3, 4]"}
    assert place.items() <= old.items() and not place.keys() & new.keys()
    assert (old["seeds"], old["device"], new["device"]) == ("init 7, data 8", "cuda", "cpu")
    assert sections(browser, ".command pre")[0] == ["(cd /work && python -m pytest 'test_clip[w2]')"]


def test_the_verdicts_of_all_implementations_and_runs(browser, small):
    browser.open(small, CLIP)
    assert browser.texts("#case .verdicts tbody tr") == [
        "referencepasspass", "other differs between runsfailgradient of head0.weight diverges in step 1 on rank 0pass"
    ]  # fmt: skip
    assert browser.texts("#case [aria-current]") == ["other"]
    next(link for link in browser.all("#case .verdicts a") if link.text == "reference").click()
    browser.until_drawn()
    assert browser.texts(".records > h2") == ["reference"]


def test_losses_distances_and_collectives_are_drawn(browser, small):
    browser.open(small, CLIP)
    (losses, distances, collectives), of_other_run = plots(browser)
    assert losses.keys() == {"oracle", "baseline", "sharded"}
    assert losses["sharded"] == [1.5, 1.5, None] and losses["oracle"] == [1.5, 1.25, 1.125]
    assert {name: len(values) for name, values in distances.items()} == {"allowed": 12, "baseline": 12, "sharded": 12}
    assert distances["sharded"][6] == 4e6
    # Two ranks: the second lacks one gather.
    assert {kind: len(values) for kind, values in collectives.items()} == {"all_gather": 5, "reduce_scatter": 4}
    assert len(of_other_run) == 3
    drawn = browser.run(
        "return [...document.querySelectorAll('.plot')].map((one) => one.querySelectorAll('.point').length)"
    )
    assert drawn[:3] == [8, 36, 9], "a mark for each finite loss, each distance and each collective"


def test_what_a_plot_cannot_show_is_said(browser, small):
    browser.open(small, CLIP)
    notes, of_other_run = sections(browser, ".note")
    assert "The loss of sharded in step 2 is nan." in notes
    assert "1 distance above what is allowed, drawn as crosses." in notes
    assert any("logarithmic" in note for note in notes)
    assert any("2 different sequences" in note for note in notes)
    assert any(note.startswith("The collectives of rank 0 are those of CUDA") for note in of_other_run)


def test_values_are_tables(browser, small):
    browser.open(small, CLIP)
    tables = """return [...document.querySelectorAll('.record')].map((record) =>
        [...record.querySelectorAll('figure table')].map((table) => [...table.rows].map((row) =>
          [...row.cells].map((cell) => cell.textContent))))"""
    (losses, distances, first, second), _ = browser.run(tables)
    assert losses == [
        ["step", "oracle", "baseline", "sharded"], ["0", "1.5", "1.5", "1.5"], ["1", "1.25", "1.25", "1.5"],
        ["2", "1.125", "1.125", "nan"],
    ]  # fmt: skip
    assert distances[7] == ["1", "gradient", "head.weight", "4000000 (above)", "1.5", "14"]
    assert first[2] == ["1", "forward", "all_gather", "float32", "4.52 kB", "0-1", "layers.0"]
    assert [row[0] for row in second[1:]] == ["0", "1", "2", "3"], "it lacks one and has none of its own"
    captions = sections(browser, ".trace caption")[0]
    assert captions == ["rank 0: 5 collectives, 14.4 kB.", "rank 1: 4 collectives, 9.84 kB."]


def test_collectives_that_another_run_lacks_are_counted(browser, written):
    old, new = runs.small()
    one = next(case for case in new["cases"] if case["implementation"] == "other" and "clip" in case["id"])
    one["collectives"] = [
        {"ranks": [0, 1], "trace": [*runs.TRACE[1:], "clip  all_reduce  float32  4 B  ranks 0-1", "odd"]}
    ]
    browser.open(written(old, new), CLIP)
    assert any("2 only here, 1 only there" in note for note in sections(browser, ".note")[1])


def test_the_plotting_library_waits_for_the_first_plot(browser, small):
    browser.open(small, "#rows=cases")
    assert browser.run("return typeof window.Plotly") == "undefined"
    browser.all("#matrix tr.case a")[0].click()
    browser.until_drawn()
    assert browser.run("return typeof window.Plotly") == "object"


def test_where_the_runs_first_diverge(browser, written):
    case = runs.failed("test_explained", explanation=samples.EXPLANATION, peak_bytes=[1000, 2500])
    browser.open(written(samples.run(case)), "#case=suites/test_autograd.py::test_explained")
    (said,) = definitions(browser)
    assert (said["module"], said["offset in shard"], said["also"]) == ("head", "7", "head.bias")
    assert said["values"] == "sharded 2, baseline 1"
    assert said["peak memory"] == "rank 0 1 kB, rank 1 2.5 kB"
    assert browser.texts(".failure pre")[1] == "- forward all_gather + forward all_reduce"


def test_a_skipped_case_says_what_is_missing(browser, small):
    browser.open(small, "#case=suites/test_autograd.py::test_unused%5Bw2-True%5D&of=other")
    assert [one["missing"] for one in definitions(browser)] == ["tensor-parallel", "tensor-parallel"]
    assert browser.all(".plot") == []


def test_a_case_that_no_run_has(browser, small):
    browser.open(small, "#case=gone&of=other")
    assert browser.texts("#case p") == ["None of the runs has gone."]


def test_the_way_back(browser, small):
    """By the link, by Escape and by the browser's button; each leads to the link that the reader came from."""
    browser.open(small, "#text=test_unused&rows=cases")
    for leave in (
        lambda: browser.all("#case nav a")[0].click(),
        lambda: browser.driver.switch_to.active_element.send_keys(Keys.ESCAPE),
        lambda: browser.driver.back(),
    ):
        browser.all("#matrix tr.case th a")[1].click()
        browser.until_drawn()
        assert browser.driver.title == "test_unused[w2-True] · a page"
        assert browser.driver.switch_to.active_element.get_attribute("id") == "case-title"
        assert not browser.one("#overview").is_displayed()
        leave()
        browser.until("return document.activeElement.textContent === 'test_unused[w2-True]'")
        assert browser.one("#overview").is_displayed() and not browser.one("#case").is_displayed()
        assert browser.driver.title == "a page"


def test_next_and_previous_keep_to_the_shown_cases(browser, small):
    browser.open(small, "#text=test_unused&case=suites/test_autograd.py::test_unused%5Bw2-False%5D")
    assert browser.texts("#case nav a") == ["← matrix", "next"]
    browser.all("#case nav a")[1].click()
    browser.until("return document.getElementById('case-title').textContent.endsWith('[w2-True]')")
    assert browser.texts("#case nav > *") == ["← matrix", "previous", "2 of 2 cases shown"]


def test_the_command_is_copied_or_selected(browser, small):
    browser.open(small, CLIP)
    browser.all(".command button")[0].click()
    said = browser.until("return document.querySelector('.command [role=status]').textContent")
    assert said in ("copied", "selected")
    if said == "selected":
        assert browser.run("return getSelection().toString()").startswith("(cd /work")


# What a run file says is text


def test_hostile_texts_are_shown_and_do_nothing(browser, written):
    path = written(full_of(HOSTILE), title=HOSTILE)
    browser.open(path, "#rows=cases")
    elements = "return document.querySelectorAll('img, script:not([type]), a[href^=http]').length"
    assert browser.run(elements) == 1, "the script of the page"
    assert browser.texts("#matrix tr.case th a") == [" ".join(HOSTILE.split())]
    browser.all("#matrix tr.case a")[0].click()
    browser.until_drawn()
    assert browser.run(elements) == 2, "and plotly"
    assert browser.run("return document.querySelector('.failure pre').textContent") == HOSTILE
    for value in browser.texts(".record dd"):
        assert "<" not in value or "</script>" in value


def test_marks_that_plotly_knows_are_characters(browser, written):
    link = '<a href="https://example.org">x</a><b>y</b>&amp;'
    case = runs.failed("test_marks", losses={link: [1.0, 2.0]})
    case["distances"][0]["stage"] = link
    case["collectives"][0]["trace"] = [f"forward  {link.replace(' ', '_')}  float32  4 B  ranks 0-1"]
    browser.open(written(samples.run(case)), "#case=suites/test_autograd.py::test_marks")
    assert browser.all(".plot a, .plot [style*=bold]") == []
    (texts,) = browser.run("return [[...document.querySelectorAll('.plot text')].map((one) => one.textContent)]")
    assert texts.count(link) == 2, "in a legend and on an axis"


def test_a_script_that_got_into_the_page_would_not_run(browser, small):
    browser.open(small)
    browser.run("const one = document.createElement('script'); one.text = 'window.ran = 1'; document.body.append(one)")
    browser.run(
        "const one = document.createElement('img'); one.src = 'https://example.org/x.png'; document.body.append(one)"
    )
    assert browser.run("return typeof window.ran") == "undefined"
    browser.until("return document.querySelector('img').complete")
    messages = browser.messages()
    assert len([one for one in messages if "Content Security Policy" in one]) == len(messages) == 2, json.dumps(
        messages
    )


# Plans


def test_each_plan_has_three_plots(browser, tmp_path):
    path = tmp_path / "index.html"
    path.write_text(render_plans([parse_plan(plan_data()), parse_plan(plan_data(model="other"))], title="plans"))
    browser.driver.get(path.as_uri())
    browser.until_drawn()
    assert browser.run("return document.querySelectorAll('.plot .main-svg').length") >= 6
    assert browser.texts("figcaption")[:3] == [
        "Memory in each phase, 4 ranks", "Peak by the number of ranks", "Sent by the rank in a step"
    ]  # fmt: skip
