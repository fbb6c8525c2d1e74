"""The parts of ``python -m benchmarks sweep``: the changes, ranks that run changed code, and pytest's side of it."""
