"""Makes the folder of a file that a command writes, and says so: a misspelt path makes one too."""

from pathlib import Path


def make(folder: Path) -> str:
    """Make a folder, with those above it that are missing.

    Args:
        folder: its path.

    Returns:
        The end of the line that tells of the file, as in " (made the folder out/runs)"; empty if it was there.

    Raises:
        OSError: it cannot be made.
    """
    is_new = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    return f" (made the folder {folder})" if is_new else ""
