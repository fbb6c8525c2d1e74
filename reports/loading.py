"""Reads and parses a JSON file; any error becomes one line that begins with the path."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from shardproof.reports import files
from shardproof.reports.fields import RecordError

_Content = TypeVar("_Content")


def load(path: str | Path, parse: Callable[[object], _Content], error_type: type[ValueError]) -> _Content:
    """Read and parse a file, which may be compressed or a journal.

    Args:
        path: the path of the file.
        parse: makes the result of the JSON data; raises a RecordError where they violate the schema.
        error_type: the class of the error to raise.

    Raises:
        ValueError: of ``error_type``; the file is missing, is no regular file, is too large, is not JSON, or violates
            the schema; or the journal of a newer, incomplete run exists next to it.
    """
    path = Path(path)
    try:
        return parse(json.loads(files.read(path)))
    except OSError as error:
        raise error_type(f"{path}: {error.strerror or error}") from error
    except (RecordError, files.FileError) as error:
        raise error_type(f"{path}: {error}") from error
    except (ValueError, RecursionError) as error:  # not JSON, not Unicode, a number of 5000 digits, nested too deeply
        raise error_type(f"{path}: not a JSON file: {error}") from error
