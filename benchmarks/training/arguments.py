"""Types of arguments that several benchmarks take on their command lines."""

import argparse
from collections.abc import Callable, Sequence


def names_in(allowed: Sequence[str]) -> Callable[[str], list[str]]:
    """Make the type of an argument that is a comma-separated list of these names."""

    def split(text: str) -> list[str]:
        found = [name for name in text.split(",") if name]
        for name in found:
            if name not in allowed:
                raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(allowed)}")
        return found

    return split
