"""Text and JSON for a ``<script>`` element: compressed, in characters that mean nothing to HTML."""

import base64
import gzip
import json
import math
from typing import Any


def packed(text: str) -> str:
    """Compress a text with gzip and write it in base64, without line breaks."""
    # The time in the header would make two pages of the same runs differ.
    return base64.b64encode(gzip.compress(text.encode(), compresslevel=9, mtime=0)).decode()


def packed_json(value: Any) -> str:
    """Write a value as compact JSON in ASCII, and pack it.

    Args:
        value: data as JSON has them. Numbers that JSON lacks become the strings "nan", "inf" and "-inf".
    """
    return packed(json.dumps(finite(value), separators=(",", ":"), allow_nan=False))


def finite(value: Any) -> Any:
    """Return data with the strings of run files in place of numbers that JSON lacks."""
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, dict):
        return {str(key): finite(one) for key, one in value.items()}
    return [finite(one) for one in value] if isinstance(value, list | tuple) else value
