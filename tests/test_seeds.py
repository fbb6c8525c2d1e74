"""The suites have an item of each combination of the seed tests, which suites/standard.toml lists."""

import json
import os
import tomllib
from collections import defaultdict
from pathlib import Path

import pytest

from shardproof.harness.plugin import cases, standard
from shardproof.harness.plugin.pairs import WORLD
from tests.harness.inner import python

ROOT = Path(__file__).parents[1]
TABLE = tomllib.loads((ROOT / "suites" / standard.TABLE).read_text())


FILES = {entry["case"].partition("::")[0] for entry in TABLE["always"]}


def pytest_ignore_collect(collection_path):
    """Leave out the files of the suites without seeds, whose collection takes longer than that of the others."""
    is_other = collection_path.parent.name == "suites" and collection_path.name not in FILES
    return True if is_other and collection_path.name.startswith("test_") else None


def pytest_collection_modifyitems(config, items):
    """Keep the items of seeds: this file is a plugin of `.ci/run`, which runs them for torch's implementations."""
    if "ITEMS" in os.environ:
        return
    listed = defaultdict(set)
    for entry in TABLE["always"]:
        listed[entry["case"]].update(standard.product({k: v for k, v in entry.items() if isinstance(v, list)}))
    others = {item for item in items if not any(part <= _values(item).items() for part in listed[_case(item)])}
    config.hook.pytest_deselected(items=list(others))
    items[:] = [item for item in items if item not in others]


def pytest_collection_finish(session):
    """Write the items of the suites: the process that `items` starts has this file as a plugin."""
    if "ITEMS" in os.environ:
        found = defaultdict(list)
        for item in session.items:
            found[_case(item)].append(_values(item))
        Path(os.environ["ITEMS"]).write_text(json.dumps(found))


def _case(item):
    return f"{item.path.name}::{item.function.__name__}"


def _values(item):
    values = {name: standard.text(value) for name, value in item.callspec.params.items() if name != "rank"}
    return {**values, WORLD: standard.text(cases.launch_of(item).size)}


@pytest.fixture(scope="module")
def items(tmp_path_factory):
    path = tmp_path_factory.mktemp("seeds") / "items.json"
    # Any implementation has all items, those that it cannot run too.
    options = ["--collect-only", "-q", "-p", "no:cacheprovider", "-p", "tests.test_seeds", "--impl", "reference"]
    python("-m", "pytest", "suites", *options, ITEMS=str(path), code=0)
    return json.loads(path.read_text())


def problems(table, items):
    """One line for each difference between the table, the items and what the seed tests ran."""
    listed = defaultdict(set)
    for entry in table["always"]:
        case, axes = entry["case"], {name: values for name, values in entry.items() if isinstance(values, list)}
        parts = set(standard.product(axes))
        found = [item.items() for item in items.get(case, ())]
        yield from (f"{case} has no {_show([pair])}" for pair in set().union(*parts) - set().union(*found))
        unnamed = {name for item in items.get(case, ()) for name in item} - axes.keys() - {WORLD}
        yield from (f"{case}: the table lists no {name}" for name in unnamed)
        yield from (f"{case}[{_show(part)}] has no item" for part in parts if not any(part <= item for item in found))
        listed[entry.get("seed")] |= {(case, part) for part in parts}
    yield from (f"{seed} is not among the seeds" for seed in listed.keys() - table["seeds"].keys() - {None})
    for seed, test in table["seeds"].items():
        ran, lost = test["combinations"], test.get("lost", 0)
        if len(listed[seed]) + lost != ran or bool(lost) != ("why" in test):
            yield f"{seed} ran {ran} combinations: {len(listed[seed])} are listed, {lost} lost for a reason"


def _show(part):
    return ", ".join(f"{name}={text}" for name, text in sorted(part))


@pytest.mark.nightly
def test_the_suites_have_every_combination(items):
    found = sorted(problems(TABLE, items))
    assert not found, "\n".join(found)
    assert sum(test["combinations"] for test in TABLE["seeds"].values()) == 230


def test_a_wrong_table(items):
    (seed, ran), case = next(iter(TABLE["seeds"].items())), TABLE["always"][0]["case"]
    wrong = {"always": [{"case": case, "seed": "gone", "norm": [1]}], "seeds": {seed: ran}}
    assert set(problems(wrong, items)) == {
        f"{case} has no norm=1",
        f"{case}: the table lists no reshard_after_forward",
        f"{case}[norm=1] has no item",
        "gone is not among the seeds",
        f"{seed} ran 3 combinations: 0 are listed, 0 lost for a reason",
    }
