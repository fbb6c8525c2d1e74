"""A command of the warm Python begins with nothing of this run; the tests that use it show how it runs and ends."""

from __future__ import annotations

import json
import subprocess

from tests import warm


def test_nothing_of_this_project_or_of_pytests_plugins_is_imported():
    command = [warm.python(), "-c", "import json, sys; print(json.dumps([*sys.modules]))"]
    done = subprocess.run(command, capture_output=True, text=True)
    packages = {name.partition(".")[0] for name in json.loads(done.stdout)}
    assert {"torch", "pytest"} <= packages
    assert not packages & {"shardproof", "fsdp_impl", "tests", "suites", "harness", "xdist", "conftest"}
