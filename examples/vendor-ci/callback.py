"""Prints the outputs of a step from a dashboard's JSON, which the callback of PyTorch's relay takes as its inputs."""

import json
import pathlib
import sys

found = json.loads(pathlib.Path(sys.argv[1]).read_text())
for name in ("test_results", "failed_tests_detail"):
    print(f"{name}={json.dumps(found[name])}")
