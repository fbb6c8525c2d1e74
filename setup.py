"""Writes the commit into wheels and sdists; everything else about the build is in pyproject.toml."""

import runpy
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist

PACKAGE = Path(__file__).parent / "shardproof"
# The code by which a clone knows its commit; an sdist has the file in the package alone.
ORIGIN = runpy.run_path(str(PACKAGE / "harness/plugin/origin.py"))


def write_commit(root: str) -> None:
    """Write the commit of these sources into a folder that will be packed, never into the sources."""
    file = Path(root, "shardproof", ORIGIN["COMMIT_FILE"])
    file.unlink(missing_ok=True)  # in an sdist it may be a hard link
    file.write_text(ORIGIN["commit"](PACKAGE) + "\n", encoding="utf-8")


class BuildWithCommit(build_py):
    def run(self) -> None:
        super().run()
        if not self.editable_mode:  # an editable installation is a clone, which asks git
            write_commit(self.build_lib)


class SdistWithCommit(sdist):
    def make_release_tree(self, base_dir: str, files: list[str]) -> None:
        super().make_release_tree(base_dir, files)
        write_commit(base_dir)


setup(cmdclass={"build_py": BuildWithCommit, "sdist": SdistWithCommit})
