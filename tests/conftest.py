"""What tests share."""

pytest_plugins = ["pytester"]
