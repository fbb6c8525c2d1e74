"""The pytest plugin, under the name that a conftest gives: ``pytest_plugins = ["shardproof.plugin"]``."""

from shardproof.harness.plugin.hooks import pytest_addoption as pytest_addoption
from shardproof.harness.plugin.hooks import pytest_collect_directory as pytest_collect_directory
from shardproof.harness.plugin.hooks import pytest_collection_finish as pytest_collection_finish
from shardproof.harness.plugin.hooks import pytest_collection_modifyitems as pytest_collection_modifyitems
from shardproof.harness.plugin.hooks import pytest_configure as pytest_configure
from shardproof.harness.plugin.hooks import pytest_generate_tests as pytest_generate_tests
from shardproof.harness.plugin.hooks import pytest_pycollect_makemodule as pytest_pycollect_makemodule
from shardproof.harness.plugin.hooks import pytest_pyfunc_call as pytest_pyfunc_call
from shardproof.harness.plugin.hooks import pytest_report_collectionfinish as pytest_report_collectionfinish
from shardproof.harness.plugin.hooks import pytest_report_header as pytest_report_header
from shardproof.harness.plugin.hooks import pytest_runtest_makereport as pytest_runtest_makereport
from shardproof.harness.plugin.hooks import pytest_sessionfinish as pytest_sessionfinish
from shardproof.harness.plugin.hooks import pytest_sessionstart as pytest_sessionstart
from shardproof.harness.plugin.hooks import pytest_terminal_summary as pytest_terminal_summary
from shardproof.harness.plugin.hooks import pytest_unconfigure as pytest_unconfigure
from shardproof.harness.plugin.hooks import rank as rank
