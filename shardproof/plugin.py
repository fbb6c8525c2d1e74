"""The pytest plugin, under the name that a conftest gives: ``pytest_plugins = ["shardproof.plugin"]``."""

from shardproof.harness.plugin.hooks import (
    pytest_addoption,
    pytest_collect_directory,
    pytest_collection_finish,
    pytest_collection_modifyitems,
    pytest_configure,
    pytest_generate_tests,
    pytest_pycollect_makemodule,
    pytest_pyfunc_call,
    pytest_report_collectionfinish,
    pytest_report_header,
    pytest_runtest_makereport,
    pytest_sessionfinish,
    pytest_sessionstart,
    pytest_terminal_summary,
    pytest_unconfigure,
    rank,
)

__all__ = [
    "pytest_addoption", "pytest_collect_directory", "pytest_collection_finish", "pytest_collection_modifyitems",
    "pytest_configure", "pytest_generate_tests", "pytest_pycollect_makemodule", "pytest_pyfunc_call",
    "pytest_report_collectionfinish", "pytest_report_header", "pytest_runtest_makereport", "pytest_sessionfinish",
    "pytest_sessionstart", "pytest_terminal_summary", "pytest_unconfigure", "rank",
]  # fmt: skip
