"""A page of plans in Chromium: its plots are drawn, each with its values as a table."""

from shardproof.reports.page import render_plans
from shardproof.reports.plan import parse_plan
from tests.reports.test_plan_page import plan_data


def test_each_plan_has_three_plots(browser, tmp_path):
    path = tmp_path / "index.html"
    path.write_text(render_plans([parse_plan(plan_data()), parse_plan(plan_data(model="other"))], title="plans"))
    browser.driver.get(path.as_uri())
    browser.until_drawn()
    assert browser.run("return document.querySelectorAll('.plot .main-svg').length") >= 6
    assert browser.texts("figcaption")[:3] == [
        "Memory in each phase, 4 ranks", "Peak by the number of ranks", "Sent by the rank in a step"
    ]  # fmt: skip
