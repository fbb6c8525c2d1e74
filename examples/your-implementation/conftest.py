"""Loads shardproof's plugin, which runs the cases of conformance/ on ranks."""

pytest_plugins = ["shardproof.plugin"]
