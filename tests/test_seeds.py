"""docs/seeds.toml lists every case of the suites, and docs/seeds.md is up to date.

The violations are planted in a copy of the table. The cases that the real table lists stand for the collected suites,
so that only the first test collects them.
"""

import importlib
import itertools
import json
import subprocess
from pathlib import Path

import pytest

from tests import warm

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
    """For each case an item of each combination that the table has of it."""
    table = make_seeds.read()
    found = {case: [] for case, _ in table.places()}
    for _, test in table.tests():
        for grid in test.grids:
            found[grid.case] += [
                dict(zip(grid.axes, values, strict=True)) for values in itertools.product(*grid.axes.values())
            ]
    return found


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
        [warm.python(), "docs/make_seeds.py", "--check"], cwd=ROOT, capture_output=True, text=True, timeout=120
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
    found = [line for line in make_seeds.problems(planted(old, new), items) if "has combinations of" not in line]
    assert found == [f"docs/seeds.toml {problem}"]


GRID = f'{{case = "{CASE}", world = [4], recomputes = [false, true]'
PARITY = "test_train_parity_with_shared_params"


def test_every_combination_with_an_item_is_covered(make_seeds, items):
    for name, test in make_seeds.read().tests():
        assert test.covered(items) == sum(grid.combinations for grid in test.grids), name


@pytest.mark.parametrize(
    ("gone", "covered"),
    [
        pytest.param({"reshard_after_forward": True}, 2, id="a-value"),
        pytest.param({"reshard_after_forward": True, "recomputes": True}, 3, id="an-item"),
        pytest.param({}, 0, id="the-case"),
    ],
)
def test_a_parameter_that_is_deleted_lowers_the_count(make_seeds, items, gone, covered):
    table = make_seeds.read()
    test = table.seeds["test_fully_shard_training.py"][PARITY]
    assert (test.covered(items), test.combinations) == (4, 4)
    items[CASE] = [item for item in items[CASE] if not gone.items() <= item.items()]
    assert (test.covered(items), test.combinations) == (covered, 4)
    row = next(line for line in make_seeds.page(table, items).splitlines() if PARITY in line)
    assert row.startswith(f"| `{PARITY}` | 4 | {covered} |")


def test_true_is_not_one_and_tuples_are_lists(make_seeds):
    grid = make_seeds.Grid("case", {"value": [True, "None", [[1, 2]]]})
    assert grid.covered({"case": [{"value": 1}]}) == 0
    assert grid.covered({"case": [{"value": value} for value in (True, None, ((1, 2),))]}) == 3


def test_items_that_ran_and_items_without_hardware_come_from_run_files(make_seeds, monkeypatch, tmp_path):
    def record(case, implementation, verdict):
        least = {"requirement": "TIED-1", "world": 2, "device": "cpu", "parameters": {}, "seconds": 1.0}
        return {"id": f"suites/{CASE}[{case}]", "implementation": implementation, "verdict": verdict, **least}

    records = [
        record("w2", "reference", "pass"),
        record("w2", "torch.fsdp", "unsupported"),
        record("w4", "reference", "unmet"),
        record("w4", "torch.fsdp", "unsupported"),
        record("w8", "reference", "unsupported"),
        record("w16", "reference", "fail"),
    ]
    monkeypatch.setattr(make_seeds, "PUBLISHED", tmp_path)
    (tmp_path / "run.json").write_text(json.dumps({"schema_version": 1, "environment": {}, "cases": records}))
    assert make_seeds.Outcomes(["run.json"]).show([CASE]) == "2 + 1"


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        pytest.param(
            f"{GRID}, reshard_after_forward = [false, true]",
            f"{GRID}, reshards = [true]",
            f"has combinations of reshards of {CASE} in {SEED}: the case has no such parameter",
            id="unknown-parameter",
        ),
        pytest.param(
            f'cases = ["{CASE}"]',
            f'cases = ["{OWN}"]',
            f"has combinations of {CASE} in {SEED}: add it to the cases there",
            id="case-of-another-test",
        ),
    ],
)
def test_combinations_that_disagree_with_the_cases(make_seeds, items, planted, old, new, problem):
    assert f"docs/seeds.toml {problem}" in make_seeds.problems(planted(old, new), items)


NOTE = 'note = "the vocabulary does not divide by the ranks; layers are counted that compute"'


@pytest.mark.parametrize(
    ("old", "new", "error"),
    [
        pytest.param("own = [", 'owned = "x"\nown = [', "unknown keys owned: expected own, runs and", id="at-the-top"),
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
        pytest.param(
            "{lost = 15",
            '{lost = "15"',
            ": test_fully_shard_training.py::test_train_parity_multi_group: combin",
            id="lost",
        ),
        pytest.param(
            "dim = [16]",
            "dim = 16",
            ": test_fully_shard_clip_grad_norm_.py::test_clip_grad_norm_2d: combin",
            id="no-list",
        ),
    ],
)
def test_wrong_values(planted, old, new, error):
    with pytest.raises(ValueError) as raised:
        planted(old, new)
    assert str(raised.value).startswith(f"docs/seeds.toml{error}")
