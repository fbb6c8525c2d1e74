"""What the scripts of this folder share: they write files or compare them."""

import argparse
import pathlib
import sys
from collections.abc import Callable, Mapping

ROOT = pathlib.Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))  # a clone need not be installed


def write_or_compare(make: Callable[[], Mapping[pathlib.Path, str]], about: str | None) -> int:
    """Write files, or compare them with what would be written, as the command line says; return the exit code.

    It is 1 if a file is out of date, or if ``make``, which makes the contents of each, raises a ValueError that says
    why.
    """
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 if a file is out of date")
    options = parser.parse_args()
    try:
        texts = make()
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    outdated = [path for path, text in texts.items() if not (path.is_file() and path.read_text() == text)]
    for path in outdated:
        if options.check:
            print(f"{path.relative_to(ROOT)} is out of date: run python docs/{parser.prog}", file=sys.stderr)
        else:
            path.write_text(texts[path])
    return int(options.check and bool(outdated))
