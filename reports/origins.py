"""The code of a run, in short: the versions and commits of shardproof and torch, and the hash of the suites."""

import re

from shardproof.reports.run import Environment, Run

UNKNOWN = "unknown"
"""What a run file has for a commit that nothing named to its writer."""

_HASH = re.compile(r"\b[0-9a-f]{40}\b")


def shardproof(env: Environment) -> str:
    """Return the version of shardproof with its commit, as in ``0.1.0 (cc0c39b-dirty)``."""
    return _with(env.shardproof, env.shardproof_commit)


def torch(env: Environment) -> str:
    """Return the version of torch with its commit, as in ``2.13.0+cpu (cf30153)``."""
    return _with(env.torch, env.torch_git_version)


def described(run: Run, name: str, path: str) -> str:
    """Return one line about a run that is compared: its file, when it started, and its code."""
    env = run.environment
    ours = env.shardproof if env.shardproof_commit in ("", UNKNOWN) else short(env.shardproof_commit)
    known = [("torch", torch(env)), ("shardproof", ours), ("suites", run.suites)]
    facts = [env.started, *(f"{word} {fact}" for word, fact in known if fact)]
    return f"{name} {path}: {', '.join(filter(None, facts))}"


def short(commit: str) -> str:
    """Return a commit, or several, with seven digits each, as git shows them."""
    return _HASH.sub(lambda found: found[0][:7], commit)


def _with(version: str, commit: str) -> str:
    return version if commit in ("", UNKNOWN) else f"{version} ({short(commit)})"
