"""Makes the plugin known in a clone, which needs no installation."""

pytest_plugins = ["shardproof.plugin"]

# Links to the folders beside it: what is in them is collected from there.
collect_ignore = ["shardproof"]
