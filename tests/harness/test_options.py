"""Options that another plugin or a conftest has too: it keeps the short form, and ours has the prefixed one."""

from __future__ import annotations

import pytest

from tests.harness.inner import CASE, QUIET

THEIRS = """
def pytest_addoption(parser):
    parser.addoption("--device", help="theirs")
    parser.getgroup("theirs").addoption("--report", action="store_true")

def pytest_report_header(config):
    return f"their device is {config.getoption('--device')}, their report {config.getoption('--report')}"
"""
NAMES_US = 'pytest_plugins = ["shardproof.plugin"]\n'
WANTED = ("--shardproof-impl", "ddp", "--shardproof-device", "cpu", "--shardproof-report", "run.json")


def named_by_a_conftest(pytester):
    pytester.makeconftest(NAMES_US + THEIRS)
    return (), pytester.path / "conftest.py"


def named_by_a_conftest_before_another(pytester):
    """pytest loads the conftest of a folder that it is given after that of the root."""
    pytester.makeconftest(NAMES_US)
    folder = pytester.mkdir("folder")
    (folder / "conftest.py").write_text(THEIRS)
    return ("folder", "test_inner.py"), folder / "conftest.py"


def named_by_p_before_a_conftest(pytester):
    pytester.makeconftest(THEIRS)
    return ("-p", "shardproof.plugin"), pytester.path / "conftest.py"


def named_by_p_after_a_plugin(pytester):
    pytester.syspathinsert()
    pytester.makepyfile(their_plugin=THEIRS)
    return ("-p", "their_plugin", "-p", "shardproof.plugin"), pytester.path / "their_plugin.py"


def named_by_p_before_a_plugin(pytester):
    pytester.syspathinsert()
    pytester.makepyfile(their_plugin=THEIRS)
    return ("-p", "shardproof.plugin", "-p", "their_plugin"), pytester.path / "their_plugin.py"


@pytest.mark.parametrize(
    "named",
    [
        named_by_a_conftest,
        named_by_a_conftest_before_another,
        named_by_p_before_a_conftest,
        named_by_p_after_a_plugin,
        named_by_p_before_a_plugin,
    ],
    ids=lambda named: named.__name__,
)
def test_another_owner_keeps_its_options(pytester, named):
    pytester.makepyfile(test_inner=CASE.format(body="pass"))
    arguments, owner = named(pytester)
    result = pytester.runpytest_inprocess(
        "-p", "no:cacheprovider", *arguments, "--device", "tpu", "--report", "--world", "2", *WANTED
    )
    result.assert_outcomes(passed=1)
    lines = [line for line in result.stdout.lines if line.startswith("shardproof: --")]
    assert lines == [
        f"shardproof: --device is an option of {owner}; shardproof's own is --shardproof-device",
        f"shardproof: --report is an option of {owner}; shardproof's own is --shardproof-report",
    ]
    result.stdout.fnmatch_lines(["their device is tpu, their report True", "ddp: 1 pass", "run file: run.json"])
    assert (pytester.path / "run.json").exists()


def test_without_another_owner_nothing_is_printed_and_both_forms_mean_the_same(pytester):
    pytester.makeconftest(NAMES_US)
    pytester.makepyfile(test_inner=CASE.format(body="pass"))
    for prefix in ("--", "--shardproof-"):
        result = pytester.runpytest_inprocess("-p", "no:cacheprovider", f"{prefix}impl", "ddp", f"{prefix}world=2")
        result.assert_outcomes(passed=1)
        result.stdout.no_fnmatch_line("shardproof: --*")


def test_help_names_both_forms(pytester):
    text = pytester.runpytest_inprocess(*QUIET, "--help").stdout.str()
    for name in ("impl", "device", "world", "report", "check-collectives", "isolate", "effort", "deadline"):
        assert f"--shardproof-{name}" in text
        assert f" --{name}" in text


def test_an_owner_that_cannot_be_asked_is_no_error(pytester):
    """Its hook fails with the stand-in for a parser, after it has added its option."""
    theirs = 'def pytest_addoption(parser):\n    parser.addoption("--world")\n    parser.prog\n'
    pytester.makeconftest(NAMES_US + theirs)
    pytester.makepyfile(test_inner=CASE.format(body="pass"))
    result = pytester.runpytest_inprocess("-p", "no:cacheprovider", "--impl", "ddp", "--shardproof-world", "2")
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["shardproof: --world is an option of *conftest.py; shardproof's own is *-world"])
