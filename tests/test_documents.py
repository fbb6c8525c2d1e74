"""The examples of docs/cases.md run, docs/adapters.md has a template's, and links of all pages lead somewhere."""

import ast
import builtins
import re

import pytest

from shardproof.harness.judging.finding import Finding, Location, Stage
from shardproof.harness.plugin.terminal import same_failure
from tests.installations import ROOT, run

DOCUMENT = (ROOT / "docs/cases.md").read_text()
EXAMPLES = re.findall(r"^```python\n(.*?)^```$", DOCUMENT, flags=re.DOTALL | re.MULTILINE)
CASES = [example for example in EXAMPLES if "def test_" in example]

#: What the text around a fragment of a case introduces.
INTRODUCED = {"rank", "model", "units", "batch", "first", "second", "run"}


@pytest.mark.parametrize("example", EXAMPLES, ids=range(len(EXAMPLES)))
def test_an_example_has_its_imports(example):
    names = [node for node in ast.walk(ast.parse(example)) if isinstance(node, ast.Name)]
    bound = {node.id for node in names if isinstance(node.ctx, ast.Store)} | set(dir(builtins))
    for node in ast.walk(ast.parse(example)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            bound |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.FunctionDef):
            bound |= {node.name, *(argument.arg for argument in [*node.args.args, *node.args.kwonlyargs])}
    # pytest_plugins is read by pytest, and torch by whoever copies a fragment with a dtype.
    used = {node.id for node in names if isinstance(node.ctx, ast.Load)} - {"torch"}
    assert used - bound <= INTRODUCED, used - bound


def test_the_tutorial_prints_the_adapter_of_the_template():
    text = (ROOT / "docs/adapters.md").read_text()
    adapter = (ROOT / "examples/your-implementation/your_implementation/adapter.py").read_text()
    assert f"```python\n{adapter}```" in text and len(text.encode()) <= 15_000


def test_the_tutorial_shows_a_failure_as_it_is_printed():
    """Its block has no line that the code words otherwise."""
    text = (ROOT / "docs/adapters.md").read_text()
    block = next(one for one in text.split("```") if "fail: the sharded run diverges" in one)
    title = "fail: the sharded run diverges from the baseline"
    where = {"stage": Stage.GRADIENT, "step": 0, "name": "layers.0.in_proj.bias", "element": (0,)}
    places = [Location(**where, rank=rank) for rank in range(4)]
    first, *others = (Finding(place, "numbers") for place in places)
    said, _, ranks = first.render(title=title, others=others, size=4).splitlines()
    assert {said, ranks, same_failure(1)} <= set(block.splitlines()), block


#: What git has is linked to; generated pages are not there in a clone.
PAGES = sorted(
    path
    for pattern in (
        "*.md",
        "docs/*.md",
        "skills/**/*.md",
        "examples/**/*.md",
        "reports/published/*.md",
        ".github/**/*.md",
    )
    for path in ROOT.glob(pattern)
)


def anchors(page):
    """The anchors of a page's headings, as GitHub makes them."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    heads = [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", one) for one in re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)]
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    text = re.sub(r"^```.*?^```$|`[^`\n]*`", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    found = re.findall(r"\]\(([^)\s]*)\)|^\[[^]]+\]: (\S+)$", text, flags=re.MULTILINE)
    for link in {one or other for one, other in found}:
        if not link.startswith(("http:", "https:", "mailto:")):
            name, _, anchor = link.partition("#")
            target = (page.parent / name).resolve() if name else page
            assert target.exists(), f"{link} leads nowhere"
            assert not anchor or anchor in anchors(target), f"{link}: {target.name} has no such heading"


def test_a_page_shows_each_picture():
    shown = "".join(page.read_text() for page in PAGES)
    pictures = {path.name for kind in ("png", "svg") for path in (ROOT / "docs").glob(f"*.{kind}")}
    assert pictures and {name for name in pictures if f"]({name})" not in shown} == set()


def test_what_code_says_of_documents_is_there():
    """Messages, docstrings and tables name pages of a clone, some with a heading."""
    folders = ("harness", "shardproof", "reports", "fsdp_impl", "suites", "planted", "findings", "benchmarks", "docs")
    files = [
        path for folder in folders for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".toml", ".ini")
    ]
    for path in files:
        for name, anchor in re.findall(r"(?<![\w/])docs/([\w-]+\.(?:md|py))(?:#([\w-]+))?", path.read_text()):
            target = ROOT / "docs" / name
            assert target.exists(), f"{path.relative_to(ROOT)} names docs/{name}"
            assert not anchor or anchor in anchors(target), f"{path.relative_to(ROOT)} names docs/{name}#{anchor}"


@pytest.mark.nightly
def test_the_cases_are_collected_and_the_first_two_run(tmp_path):
    (tmp_path / "conftest.py").write_text('pytest_plugins = ["shardproof.plugin"]\n')
    for number, example in enumerate(CASES):
        (tmp_path / f"test_example_{number}.py").write_text(example)
    common = ["-m", "pytest", "-p", "no:cacheprovider", "--impl", "reference", "--device", "cpu"]
    listed = run(*common, "--collect-only", "-q", cwd=tmp_path, path=ROOT, code=0)
    files = {line.partition("::")[0] for line in listed.stdout.splitlines() if "::" in line}
    assert files == {f"test_example_{number}.py" for number in range(len(CASES))}
    files = (f"test_example_{number}.py" for number in range(2))
    done = run(*common, *files, "--world", "2", "--effort", "quick", cwd=tmp_path, path=ROOT)
    assert done.returncode == 0 and "reference: 2 pass" in done.stdout, done.stdout + done.stderr
