"""Bounds on the size of a case's record, whatever a case or an implementation puts into it."""

from __future__ import annotations

import json
from typing import Any

#: Bytes of JSON that a record may have. The largest of the published runs have 61 kB, nearly all of it traces.
MOST_BYTES = 1 << 18

#: Characters of one string in the parameters of a case, such as the representation of an object.
MOST_OF_A_PARAMETER = 1000

#: Fields that are emptied in this order until a record is small enough; a verdict does not depend on them.
_DISPENSABLE = ("collectives", "distances", "losses", "parameters", "missing")


def bounded(record: dict[str, Any]) -> dict[str, Any]:
    """Return a record of at most ``MOST_BYTES``.

    Args:
        record: a record as JSON values.

    Returns:
        The record; if it was too large, with empty fields, which "shortened" names.
    """
    shortened: list[str] = []
    for name in _DISPENSABLE:
        if len(json.dumps(record)) <= MOST_BYTES:
            break
        record = record | {name: type(record[name])(), "shortened": [*shortened, name]}
        shortened.append(name)
    return record
