"""docs/seeds.toml lists every case of the suites, and docs/seeds.md is up to date.

The violations are planted in a copy of the table. The cases that the real table lists stand for the collected suites,
so that only the first test collects them.
"""

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TABLE = ROOT / "docs/seeds.toml"
CASE = "test_tied.py::test_tied_embedding"
SEED = "test_fully_shard_training.py::test_train_parity_with_shared_params"
OWN = "test_training.py::test_first_step_of_adam"


@pytest.fixture
def make_seeds(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "docs")
    return importlib.import_module("make_seeds")


@pytest.fixture
def items(make_seeds):
    """One item of each case."""
    return {case: 1 for case, _ in make_seeds.read().places()}


@pytest.fixture
def planted(make_seeds, tmp_path):
    """Read a copy of the table in which one text, which occurs once, is replaced."""

    def planted(old, new):
        text = TABLE.read_text()
        assert text.count(old) == 1
        copy = tmp_path / "seeds.toml"
        copy.write_text(text.replace(old, new))
        return make_seeds.read(copy)

    return planted


def test_the_page_is_up_to_date():
    done = subprocess.run(
        [sys.executable, "docs/make_seeds.py", "--check"], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_table_as_it_is_has_no_problems(make_seeds, items):
    assert make_seeds.problems(make_seeds.read(), items) == []


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        pytest.param(
            f'cases = ["{CASE}"]',
            "cases = []",
            f"lacks {CASE}: add it to the cases of the seed test that it replaces, or to own",
            id="lacks-a-seeds-case",
        ),
        pytest.param(
            f'    "{OWN}",\n',
            "",
            f"lacks {OWN}: add it to the cases of the seed test that it replaces, or to own",
            id="lacks-an-own-case",
        ),
        pytest.param(
            f'cases = ["{CASE}"]',
            f'cases = ["{CASE}", "test_tied.py::test_gone"]',
            "lists test_tied.py::test_gone, which the suites do not have: correct its name or remove it",
            id="seeds-case-does-not-exist",
        ),
        pytest.param(
            "own = [",
            'own = ["test_tied.py::test_gone",',
            "lists test_tied.py::test_gone, which the suites do not have: correct its name or remove it",
            id="own-case-does-not-exist",
        ),
        pytest.param(
            "own = [",
            f'own = ["{CASE}",',
            f"lists {CASE} in own and beside {SEED}: remove it from one of them",
            id="in-both",
        ),
        pytest.param(
            "own = [",
            f'own = ["{OWN}",',
            f"lists {OWN} twice in own: remove one",
            id="twice-in-one-list",
        ),
    ],
)
def test_a_table_that_disagrees_with_the_suites(make_seeds, items, planted, old, new, problem):
    assert make_seeds.problems(planted(old, new), items) == [f"docs/seeds.toml {problem}"]


NOTE = 'note = "the vocabulary does not divide by the ranks"'


@pytest.mark.parametrize(
    ("old", "new", "error"),
    [
        pytest.param("own = [", 'owned = "x"\nown = [', "unknown keys owned: expected own and", id="at-the-top"),
        pytest.param(
            NOTE,
            f'{NOTE}\nwhy = "x"',
            f"{SEED}: unknown keys why: expected combinations, cases and note",
            id="of-a-test",
        ),
        pytest.param(
            "own = [", '"test_new.py".combinations = 1\nown = [', "test_new.py::combinations is an", id="of-a-file"
        ),
    ],
)
def test_unknown_keys(planted, old, new, error):
    with pytest.raises(ValueError) as raised:
        planted(old, new)
    assert str(raised.value).startswith(f"docs/seeds.toml: {error}")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("old", "new", "error"),
    [
        pytest.param(f'cases = ["{CASE}"]', "", f": {SEED}: cases must be a list of strings, not None", id="no-cases"),
        pytest.param("own = [", "own = [1,", ": own must be a list of strings, not [1, ", id="own-of-numbers"),
        pytest.param(NOTE, "note = 3", f": {SEED}: note must be a string, not 3", id="note"),
        pytest.param("own = [", "own = [[", " is not TOML: ", id="not-toml"),
    ],
)
def test_wrong_values(planted, old, new, error):
    with pytest.raises(ValueError) as raised:
        planted(old, new)
    assert str(raised.value).startswith(f"docs/seeds.toml{error}")
