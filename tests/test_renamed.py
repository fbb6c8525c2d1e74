"""Ids, capabilities and options of older versions are read by the names that they have now."""

import dataclasses
import gzip
import json
from pathlib import Path

import pytest

from shardproof import contract, renamed
from shardproof.harness.adapters import config
from shardproof.harness.adapters.base import Adapter
from shardproof.harness.adapters.capability import EVERY
from shardproof.harness.adapters.fsdp1 import Fsdp1Methods
from shardproof.harness.plugin import changed, known_failures
from shardproof.listing import collected
from shardproof.reports import accepted
from shardproof.runfile import load_run, parse_run
from tests.reports import samples

PUBLISHED = sorted((Path(__file__).parents[1] / "reports/published").glob("*.json.gz"))
OLD = "suites/test_prefetch.py::test_what_is_gathered_in_vain_is_freed"
NEW = "suites/test_prefetch.py::test_unused_prefetched_unit_is_resharded"
CHOICE = "suites/test_prefetch.py::test_when_backward_gathers_ahead"


@pytest.fixture
def table(tmp_path, monkeypatch):
    """Writes another table, and forgets the one that was read."""

    def write(text):
        monkeypatch.setattr(renamed, "TABLE", tmp_path / "renamed.tsv")
        renamed.TABLE.write_text(text)
        renamed.rows.cache_clear()

    yield write
    renamed.rows.cache_clear()


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (OLD, NEW),
        (f"{OLD}[w2]", f"{NEW}[w2]"),
        (f"{OLD}*", f"{NEW}*"),
        (f"{CHOICE}[w2-before-backward]", f"{CHOICE}[w2-BACKWARD_PRE]"),
        (f"{CHOICE}[w*-after-backward]", f"{CHOICE}[w*-BACKWARD_POST]"),
        (f"{CHOICE}[*before-backward*]", f"{CHOICE}[*BACKWARD_PRE*]"),
        (f"{CHOICE}[w2-nevermore]", f"{CHOICE}[w2-nevermore]"),
        ("suites/test_evaluation.py::test_whole_parameters_of_replicas[w2-flat]",
         "suites/test_evaluation.py::test_full_parameters_of_replicas[w2-True-flat]"),
        ("test_own.py::test_x[w2-before-backward]", "test_own.py::test_x[w2-before-backward]"),
        ("suites/test_prefetch*", "suites/test_prefetch*"),
    ],
)  # fmt: skip
def test_ids_and_patterns(old, new):
    assert renamed.item(old) == new
    assert renamed.item(new) == new


@pytest.fixture(scope="module")
def items():
    """The ids of all items that the suites have."""
    return collected().items.keys()


def test_every_new_name_exists(items):
    kinds = {name: kind for name, kind in vars(config).items() if dataclasses.is_dataclass(kind)}
    cases = {id_.partition("[")[0] for id_ in items}
    for old, new in renamed.rows().items():
        of, _, name = new.partition(".")
        case, _, values = new.partition("[")
        if "::" in new:
            found = case in cases and any(id_.startswith(case) and values.removesuffix("]") in id_ for id_ in items)
        elif old.startswith("capability:"):
            found = {*renamed.capability(old.removeprefix("capability:"))} <= EVERY
        elif name.endswith("()"):
            found = hasattr(Fsdp1Methods if of == "Fsdp1Methods" else Adapter, name.removesuffix("()"))
        else:
            found = of in kinds and name in {field.name for field in dataclasses.fields(kinds[of])}
        assert found, f"{old!r} is now {new!r}, which does not exist"


def test_items_of_closed_versions_can_still_run(items):
    for version in [version for version, commit in contract.versions().items() if commit]:
        assert sorted(contract.items(version).keys() - items) == [], version


@pytest.mark.parametrize("path", PUBLISHED, ids=lambda path: path.name)
def test_published_runs_have_known_ids(path, items):
    """Except runs older than the first version of the contract, whose items nobody promised to keep."""
    run = load_run(path)
    assert not run.environment.contract or sorted({case.id for case in run.cases} - items) == []
    assert {name for one in run.environment.implementations.values() for name in one.capabilities} <= EVERY


def test_a_run_of_an_older_version_is_read_by_new_names():
    skipped = samples.case(id=f"{OLD}[w2]", verdict="unsupported", missing=["gathers-ahead", "mixed-precision"])
    known = {"source": "torch.fsdp.toml entry 1", "case": f"{OLD}*", "link": "findings/F001.py", "torch": ""}
    excused = samples.case(id=f"{CHOICE}[w2-never]", verdict="expected-fail", known_failure=known)
    told = {"reference": {"version": "1", "capabilities": ["whole-parameters", "adam"]}}
    run = samples.run(skipped, excused, implementations=told) | {"selected": {"reference": [f"{OLD}[w2]"]}}
    run["left_out"] = [{"id": f"{OLD}[w4]", "implementation": "reference", "reason": "no"}]
    read = parse_run(run)
    assert [case.id for case in read.cases] == [f"{NEW}[w2]", f"{CHOICE}[w2-none]"]
    assert [*read.cases[0].missing] == [
        *("backward-prefetch", "precision.param_dtype", "precision.reduce_dtype", "precision.buffer_dtype")
    ]
    assert read.cases[1].known_failure.case == f"{NEW}*"
    assert [*read.environment.implementations["reference"].capabilities] == ["summon-full-params", "adam"]
    assert (read.selected["reference"], read.left_out[0].id) == ((f"{NEW}[w2]",), f"{NEW}[w4]")


def test_accepted_regressions_have_old_ids_too(tmp_path):
    path = tmp_path / "accepted.toml"
    path.write_text(
        f'[[accept]]\nimplementation = "reference"\ncase = "{OLD}*"\nkind = "more bytes"\nreason = "meant"\n'
    )
    assert [one.case for one in accepted.load(str(path))] == [f"{NEW}*"]


def test_known_failures_have_old_ids_too(tmp_path):
    entry = f'[[expect]]\ncases = ["{OLD}*"]\nverdict = "fail"\nreason = "raises"\nlink = "findings/F001.py"\n'
    (tmp_path / "torch.fsdp.toml").write_text(entry)
    assert [one.case for one in known_failures.load(tmp_path, "torch.fsdp")] == [f"{NEW}*"]


def test_the_map_of_changed_functions_has_old_ids_too(tmp_path):
    path = tmp_path / "functions.json.gz"
    items = {f"{OLD}[reference-w2]": [0]}
    path.write_bytes(gzip.compress(json.dumps({"torch": "2.0.1", "functions": ["m:f"], "items": items}).encode()))
    assert changed.read(path).called_by("reference", f"{NEW}[w2]") == {"m:f"}


@pytest.mark.parametrize(
    ("made", "old", "new"),
    [
        (lambda: config.Precision(), "compute", "Precision.param_dtype"),
        (lambda: config.Accumulation(), "marks_last", "Accumulation.set_is_last_backward"),
        (lambda: config.Clip(1.0), "raises", "Clip.error_if_nonfinite"),
        (lambda: config.Settings(), "force_sum", "Settings.force_sum_reduction_for_comms"),
        (lambda: config.Config(mesh=None), "gathers_ahead", "Config.backward_prefetch"),  # type: ignore[arg-type]
    ],
)  # fmt: skip
def test_an_old_field_names_the_new_one(made, old, new):
    with pytest.raises(ValueError, match=f"{old} was renamed: it is {new}$"):
        getattr(made(), old, "a default that would hide it")


def test_an_unknown_field_is_an_attribute_error():
    with pytest.raises(AttributeError, match="Clip has no 'moderately'"):
        _ = config.Clip(1.0).moderately  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("a\n", r"line 1: 'a' is not an old name that is new here, a tab, a new name"),
        ("a\tb\tc\n", r"line 1: .* is not an old name"),
        ("a\tb\na\tc\n", r"line 2: .* is not an old name that is new here"),
        ("a\tb\nb\tc\n", r"'b' is both an old name and a new one"),
    ],
)
def test_a_table_that_is_wrong(table, text, told):
    table(text)
    with pytest.raises(ValueError, match=told):
        renamed.rows()
