"""Writes into wheels and sdists what a clone has elsewhere; everything else about the build is in pyproject.toml.

That is the commit, the contract, and the pages of ``python docs/make.py`` if they were made of these sources; and
README, whose links lead into a clone. All of it takes the standard library alone, so that installing needs no torch.
"""

import re
import runpy
import tomllib
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist

PACKAGE = Path(__file__).parent / "shardproof"
# The code by which a clone knows its commit; an sdist has the file in the package alone.
ORIGIN = runpy.run_path(str(PACKAGE / "harness/plugin/origin.py"))
# The code that reads the contract, of a clone or of an sdist.
CONTRACT = runpy.run_path(str(PACKAGE / "contract.py"))
# The code that finds the pages of `shardproof explain`, likewise.
PAGES = runpy.run_path(str(PACKAGE / "pages.py"))


def write_made(root: str) -> None:
    """Write the files into a folder that will be packed, never into the sources."""
    package = Path(root, "shardproof")
    made = {"contract.md": CONTRACT["PAGE"].read_text(encoding="utf-8")}
    for page in CONTRACT["made_pages"]():
        # Without links to files that only a clone has.
        made[f"docs/{page.name}"] = re.sub(r"\[([^]]*)\]\(\.\./[^)]*\)", r"\1", page.read_text(encoding="utf-8"))
    for name in PAGES["names"]():
        made[f"{PAGES['COPIES'].name}/{name}"] = PAGES["read"](name)
    made[ORIGIN["COMMIT_FILE"]] = ORIGIN["commit"](PACKAGE) + "\n"
    for name, text in made.items():
        file = package / name
        file.parent.mkdir(exist_ok=True)
        file.unlink(missing_ok=True)  # in an sdist it may be a hard link
        file.write_text(text, encoding="utf-8")


class BuildWithMade(build_py):
    def run(self) -> None:
        super().run()
        if not self.editable_mode:  # an editable installation is a clone, which has its docs and asks git
            write_made(self.build_lib)


class SdistWithMade(sdist):
    def make_release_tree(self, base_dir: str, files: list[str]) -> None:
        super().make_release_tree(base_dir, files)
        write_made(base_dir)


def readme() -> str:
    """Return README for an index: links into the clone lead to the tag of the release, where `project.urls` has a
    Repository, and are texts otherwise.
    """
    project = tomllib.loads(Path(__file__).with_name("pyproject.toml").read_text(encoding="utf-8"))["project"]
    repository = project.get("urls", {}).get("Repository", "").rstrip("/")
    link = rf"[\1]({repository}/blob/v{project['version']}/\2)" if repository else r"\1"
    text = Path(__file__).with_name("README.md").read_text(encoding="utf-8")
    return re.sub(r"\[([^]]*)\]\((?!https?:|#)([^)]*)\)", link, text)


setup(
    long_description=readme(),
    long_description_content_type="text/markdown",
    cmdclass={"build_py": BuildWithMade, "sdist": SdistWithMade},
)
