"""What the tests of the door share."""

import pytest


@pytest.fixture(autouse=True)
def valid_run_files():
    """In place of the check of all run files that a test leaves: here they are wrong on purpose."""
