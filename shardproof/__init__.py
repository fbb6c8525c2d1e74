"""Conformance of sharded data parallel training in PyTorch: the one package under which everything is imported.

``harness``, ``suites`` and ``reports`` are links to the folders of the same names in the root of a clone; in an
installation they are folders. ``testing`` is what cases import, ``plugin`` what a project's conftest names in
``pytest_plugins``; ``commands`` has the commands, and ``__main__`` calls them.
"""
