"""Runs a benchmark by its name: ``python -m benchmarks NAME [arguments]``, for the file ``benchmarks/NAME.py``."""

import pathlib
import runpy
import sys

FOLDER = pathlib.Path(__file__).parent


def main() -> None:
    """Run the benchmark that the first argument names."""
    names = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem != "__main__")
    if len(sys.argv) < 2 or sys.argv[1] not in names:
        raise SystemExit(f"usage: python -m benchmarks NAME [arguments]; the names are {', '.join(names)}")
    script = FOLDER / f"{sys.argv[1]}.py"
    sys.argv[:2] = [str(script)]
    sys.path.insert(0, str(FOLDER))
    runpy.run_path(str(script), run_name="__main__")


if __name__ == "__main__":
    main()
