"""Makes the plugin known in a clone that is not installed; installed, pytest registers it once all the same."""

pytest_plugins = ["harness.plugin"]
