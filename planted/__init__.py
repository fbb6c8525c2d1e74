"""The proof of the suites: bugs of the reference implementation, one place each, and the item that finds each of them.

- ``<chapter>.toml``: the rows, in the file of the chapter whose case finds the bug (``table.Bug`` has the keys).
- ``adapters.py``: the adapters that ``--impl`` takes, those of edits and those that are written out.
- ``run.py``: runs the items of rows, judges what they say, and counts what shorter runs find.

``tests/test_planted.py`` has a test for each row.
"""
