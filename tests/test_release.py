"""A release: what its archives say on an index, and that nothing is uploaded but by the workflow, of a signed tag."""

import re
import runpy
import tomllib

import pytest

from tests.installations import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
WORKFLOW = (ROOT / ".github/workflows/release.yml").read_text()


@pytest.fixture
def readme(monkeypatch, tmp_path):
    """README as setup.py gives it to the metadata, with more lines of pyproject.toml."""

    def made(more=""):
        for name in ("README.md", "setup.py"):
            tmp_path.joinpath(name).write_text((ROOT / name).read_text())
        for name in ("shardproof", "harness", "docs"):
            if not (tmp_path / name).exists():
                tmp_path.joinpath(name).symlink_to(ROOT / name)
        tmp_path.joinpath("pyproject.toml").write_text(f"{(ROOT / 'pyproject.toml').read_text()}\n{more}")
        given = {}
        monkeypatch.setattr("setuptools.setup", given.update)
        runpy.run_path(str(tmp_path / "setup.py"))
        return given["long_description"]

    return made


def _links(text):
    return re.findall(r"\[[^]]*\]\(([^)]*)\)", text)


def test_no_link_of_the_readme_on_an_index_leads_into_a_clone(readme):
    text = readme()
    assert [one for one in _links(text) if not one.startswith("https://")] == []
    assert "docs/doctor.md has all checks" in text and len(text) > 10_000
    links = _links(readme('[project.urls]\nRepository = "https://example.org/x/"\n'))
    assert f"https://example.org/x/blob/v{PROJECT['version']}/docs/doctor.md" in links
    assert all(one.startswith("https://") for one in links) and len(links) > 40


def test_the_readme_is_shown_on_an_index(readme):
    markdown = pytest.importorskip("readme_renderer.markdown", reason="`tox -e release` has it")
    assert "<h1>shardproof</h1>" in (markdown.render(readme()) or "")


def test_the_changelog_is_one_page_and_begins_with_the_version():
    text = (ROOT / "CHANGELOG.md").read_text()
    assert re.findall(r"^## (\S+): ", text, re.MULTILINE)[0] == PROJECT["version"]
    assert len(text.splitlines()) <= 60


def test_the_workflow_uploads_what_it_has_checked_and_no_job_has_more_rights_than_it_needs():
    build, publish = WORKFLOW.partition("\n  publish:\n")[::2]
    assert "permissions:\n  contents: read\n\njobs:" in build and "tox -e release" in build
    assert "id-token" not in build and ".verification.verified" in build
    assert "    needs: build\n" in publish and "    environment: pypi\n" in publish
    assert re.findall(r"permissions:\n((?:      .*\n)+)", publish) == ["      id-token: write\n"]
    assert "checkout" not in publish and "run:" not in publish
    pinned = re.findall(r"uses: (\S+)", WORKFLOW)
    assert [one for one in pinned if not re.search(r"@v\d+(\.\d+\.\d+)?$", one)] == []
    assert "pypa/gh-action-pypi-publish@v1.13.0" in pinned
    assert not re.search(r"secrets\.|password|PYPI_TOKEN", WORKFLOW)


def test_nothing_else_uploads():
    others = [*(ROOT / ".github/workflows").glob("*.yml"), *(ROOT / ".ci").iterdir(), ROOT / "tox.ini"]
    said = [one.name for one in others if re.search(r"twine upload|pypi-publish", one.read_text())]
    assert said == ["release.yml"]
