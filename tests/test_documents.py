"""The examples of docs/cases.md and docs/rank.md name what they import, and run; docs/adapters.md has a template's."""

import ast
import builtins
import re

import pytest

from shardproof.harness.plugin.terminal import same_failure
from shardproof.harness.verdicts.finding import Finding, Location, Stage
from tests.installations import ROOT, run

DOCUMENT = "".join((ROOT / "docs" / name).read_text() for name in ("cases.md", "rank.md"))
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
