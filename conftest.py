"""Makes the plugin known in a clone, which needs no installation."""

pytest_plugins = ["shardproof.plugin"]

# Links to the folders next to it, from which the tests in them are collected.
collect_ignore = ["shardproof"]
