"""The night's fuzzer: files that are nearly right, of every schema, through every command that reads them."""

import json
import resource

import pytest

from tests.door import hostile

hypothesis = pytest.importorskip("hypothesis")
pytest.importorskip("shardproof.reports.page.assets")
pytestmark = pytest.mark.nightly

#: Files of each kind; 5,250 in all.
COUNTS = {"run": 2600, "recording": 1400, "accepted": 400, "expected": 400, "summary": 250, "plan": 200}


def fuzz(kind, strategy, read):
    """Read as many files as COUNTS says, each drawn anew; this process stays below 1 GB."""

    @hypothesis.settings(
        max_examples=COUNTS[kind], deadline=None, database=None, suppress_health_check=list(hypothesis.HealthCheck)
    )
    @hypothesis.given(strategy, hypothesis.strategies.integers(0, 1 << 16))
    def run(data, number):
        read(data, number)

    run()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < 1 << 20, "more than 1 GB"


@pytest.fixture(autouse=True)
def _plain(monkeypatch):
    """No colours."""
    monkeypatch.setenv("NO_COLOR", "1")


@pytest.mark.parametrize("kind", hostile.SCHEMAS)
def test_files_of_json(tmp_path, kind):
    path, (schema, honest) = tmp_path / "x.json", hostile.SCHEMAS[kind]

    def read(data, number):
        if kind == "summary":
            return hostile.read_summary(data, tmp_path)
        path.write_text(json.dumps(hostile.signed(data) if kind == "run" else data))
        return hostile.read_run_file(path, tmp_path, number) if kind == "run" else hostile.read_plan(path, tmp_path)

    fuzz(kind, hostile.near(schema, honest()), read)


@pytest.mark.parametrize("kind", hostile.TOMLS)
def test_files_of_toml(tmp_path, kind):
    fuzz(kind, hostile.near_toml(hostile.TOMLS[kind]), lambda text, _: hostile.read_toml(kind, text, tmp_path))


def test_recordings(tmp_path):
    from tests.harness.test_recording import train

    honest = tmp_path / "ref"
    train(honest, detail="tensors", microbatches=2)

    def read(lines, number):
        hostile.write_recording(honest, tmp_path / "x", lines)
        hostile.read_recording(honest, tmp_path / "x", number)

    fuzz("recording", hostile.near_recording(honest), read)
