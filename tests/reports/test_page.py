"""What a page of run files holds, and that nothing in a run file becomes part of the page itself."""

import hashlib
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.reports import samples

pytest.importorskip("plotly", reason="the page needs its extra: pip install '.[page]'")


from shardproof import contract
from shardproof.reports.page import Source, assets, render
from shardproof.runfile import Verdict, load_run, parse_run
from tests.reports.pages import Page, page, told

ROOT = Path(__file__).parents[2]


def environment(**changes):
    return samples.whole_environment() | changes


def run_of(*cases, **changes):
    """A complete run of version 2 with an environment that says what `changes` says."""
    run_id = hashlib.md5(json.dumps([cases, changes]).encode()).hexdigest()
    return samples.journal(*cases) | {"environment": environment(**changes), "run_id": run_id}


def column(table, implementation, run=0):
    (found,) = (one for one in table["columns"] if (one["implementation"], one["run"]) == (implementation, run))
    return found


# What it holds


def test_a_record_is_whole():
    """Everything that the run file has of a case, with the numbers that JSON lacks as the run file writes them."""
    given = samples.whole_case() | {"spent": {"training": 0.125}, "reproduce": "(cd /x && pytest)"}
    made = page(run_of(given))
    (record,) = made.records.values()
    same = ("verdict", "world", "device", "parameters", "seconds", "seeds", "losses", "collectives", "spent")
    assert {name: record[name] for name in same} == {name: given[name] for name in same}
    assert (record["failure"], record["reproduce"]) == (given["failure"], given["reproduce"])
    assert record["distances"] == [["gradient", 1, "head0.weight", 4e6, 1, 12.0]]


def test_profiles_say_what_is_missing():
    first = next(id_ for id_, item in contract.items().items() if item.requirements == ("ACCUMULATION-12",))
    made = page(samples.run(samples.case(id=first, verdict="fail")))
    assert re.search(r"Profiles.*cpu-4, torch.*0/(\d+) \+\1not run: \1\b", made.text, flags=re.DOTALL)
    assert "Profiles" not in page(samples.run(samples.case())).text, "a run of other cases has none"


def test_without_the_items_of_an_open_version_the_page_says_why(monkeypatch):
    def no_list(version=None):
        raise contract.NoList("contract 2030.1 is open: its items are collected, which needs torch")

    monkeypatch.setattr(contract, "items", no_list)
    made = page(samples.run(samples.case()))
    assert "Profiles" not in page(samples.run(samples.case(requirement="the-norm-is-the-norm"))).text, (
        "no item, and none is looked for"
    )
    assert re.search(r"Profiles\s+contract 2030.1 is open: .*, which needs torch\.\s", made.text)


def test_pages_next_to_it_are_linked():
    run = Source("run.json", parse_run(samples.run(samples.case())))
    html = render([run], title="one", documents=[("What <it> is", "features.html")])
    assert '<li><a href="features.html">What &lt;it&gt; is</a></li>' in html
    assert 'aria-label="pages"' not in render([run], title="one")


def test_what_a_run_file_lacks_is_left_out():
    made = page(samples.run(samples.case()))
    (record,) = made.records.values()
    assert record == {
        "verdict": "pass", "world": 2, "device": "cpu", "parameters": {"reshard": True}, "seconds": 0.25
    }  # fmt: skip


def test_a_record_has_its_explanation_and_its_peak_memory():
    made = page(samples.run(samples.whole_case() | {"explanation": samples.EXPLANATION, "peak_bytes": [1024, 2048]}))
    (record,) = made.records.values()
    assert record["peak_bytes"] == [1024, 2048]
    told = record["explanation"]
    assert told["first"].items() >= {"stage": "gradient", "step": 1, "rank": 0, "name": "head.weight"}.items()
    names = ["module", "parameter", "where", "offset", "values", "ulps", "also"]
    assert {name: told[name] for name in names} == {name: samples.EXPLANATION["first"][name] for name in names}
    assert told["collectives"] == samples.EXPLANATION["collectives"]
    assert made.table["reasons"][1].startswith("first, gradient of head.weight")


def test_a_record_has_what_a_check_found():
    """Factor, signature and distances by module, with those of the tensor that diverges first."""
    case = samples.whole_case()
    (distance,) = case["distances"]
    own = {
        "model": "my:model", "mesh": {"dp": 2, "tp": 2}, "data": ["dp"], "factor": 0.5, "signature": "S1",
        "lines": ["every gradient is exactly 0.5000 x the reference's"], "axes": ["clipping"], "compared": 48,
        "distances": [distance | {"name": "", "module": "", "sharded_ulps": 1.5}, distance | {"module": "head0"}],
        "notes": ["outputs that are sums still to be made (2)"],
    }  # fmt: skip
    (record,) = page(samples.run(case | {"own": own})).records.values()
    of_inputs = ["gradient", 1, "", 1.5, 1, 12.0, ""]
    distances = {"distances": [of_inputs, ["gradient", 1, "head0.weight", 4e6, 1, 12.0, "head0"]]}
    assert record["own"] == record["own"] | own | distances
    (plain,) = page(samples.run(samples.whole_case())).records.values()
    assert "own" not in plain


def test_verdicts_are_digits_in_the_order_of_the_cases():
    verdicts = {"a": Verdict.PASS, "b": Verdict.CRASH, "d": Verdict.HARNESS_ERROR}
    cases = [samples.case(id=id_, verdict=verdict) for id_, verdict in verdicts.items()]
    table = page(samples.run(*cases, samples.case(id="c", implementation="other"))).table
    assert table["cases"] == ["a", "b", "c", "d"]
    assert column(table, "reference")["verdicts"] == "81.0"
    assert column(table, "other")["verdicts"] == "..8."


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"verdict": "pass", "missing": ["unused"]}, ""),
        ({"verdict": "unsupported", "missing": ["streams", "2 GPUs"]}, "streams, 2 GPUs"),
        ({"verdict": "expected-fail", "expected": "fail: known (F-1)", "failure": {"text": "x"}}, "fail: known (F-1)"),
        ({"verdict": "unexpected-pass", "expected": "fail: known (F-1)"}, "fail: known (F-1)"),
        ({"verdict": "fail", "failure": {"text": "at\nValueError: no"}}, "ValueError: no"),
    ],
)
def test_the_reason_of_a_verdict(changes, reason):
    table = page(samples.run(samples.case(**changes))).table
    assert table["reasons"][table["columns"][0]["reasons"][0]] == reason


def test_requirements_have_the_order_and_the_text_of_the_contract():
    names = ["STATE-1", "OURS-2", "AUTOGRAD-2, AUTOGRAD-1", "OURS-1", "AUTOGRAD-999", ""]
    table = page(samples.run(*(samples.case(id=f"case {i}", requirement=name) for i, name in enumerate(names)))).table
    ids = ["AUTOGRAD-1", "AUTOGRAD-2", "AUTOGRAD-999", "STATE-1", "OURS-2", "OURS-1", ""]
    assert [id_ for id_, _, _ in table["requirements"]] == ids
    assert table["requirements"][0][2].startswith("A forward output that the loss ignores")
    assert [chapter for chapter, _ in table["chapters"]] == ["AUTOGRAD", "STATE", "OURS", ""]
    assert table["chapters"][0][1] == "backward through whatever a forward returned"
    assert dict(zip(table["cases"], table["checks"], strict=True))["case 2"] == [0, 1]


def test_many_cases_are_in_several_chunks_that_each_know_their_first():
    text = "x" * 2000
    cases = [samples.case(id=f"case {i:04}", verdict="fail", failure={"text": f"{i} {text}"}) for i in range(600)]
    made = page(samples.run(*cases))
    assert len(made.table["chunks"]) > 2
    texts = {id_: record["failure"]["text"].split()[0] for (id_, _), record in made.records.items()}
    assert texts == {f"case {i:04}": str(i) for i in range(600)}


def test_what_ran_again_has_its_earlier_verdicts():
    made = page(samples.journal(samples.case(verdict="hang"), samples.case(attempt=2)))
    (record,) = made.records.values()
    assert (record["attempt"], record["earlier"]) == (2, ["hang"])
    assert "1 attempts were repeated" in made.text


def test_an_incomplete_run_says_so():
    data = samples.journal(samples.case(id="a"), selected={"reference": ["a", "b"]}, reason="SIGTERM")
    assert re.search(r"INCOMPLETE:\s*SIGTERM; 1 selected cases have no record", page(data).text)


def test_a_run_without_cases():
    made = page(samples.run(torch="2.13.0", device="cpu"))
    assert (made.table["cases"], made.table["columns"], made.records) == ([], [], {})
    assert "0 cases" in made.text


# Several runs


def test_columns_of_an_implementation_are_beside_each_other():
    old = run_of(samples.case(), samples.case(implementation="other"), torch="2.11.0", implementations={})
    new = run_of(samples.case(verdict="fail", failure={"text": "x"}), torch="2.13.0", implementations={})
    table = page(old, new).table
    assert [(one["implementation"], one["run"], one["verdicts"]) for one in table["columns"]] == [
        ("reference", 0, "8"), ("reference", 1, "2"), ("other", 0, "8")
    ]  # fmt: skip
    assert table["runs"] == ["CUDA, torch 2.11.0", "CUDA, torch 2.13.0"]


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ({}, {"device": "cpu"}, ["CUDA, torch 2.11.0", "CPU, torch 2.11.0"]),
        ({}, {"torch": "2.11.0+cpu"}, ["CUDA, torch 2.11.0, build cu130", "CUDA, torch 2.11.0, build cpu"]),
        ({}, {"accelerators": [{"name": "Y"}]}, ["CUDA, torch 2.11.0, 4 x GPU X", "CUDA, torch 2.11.0, 1 x Y"]),
        ({}, {"python": "3.13"}, ["CUDA, torch 2.11.0, run0", "CUDA, torch 2.11.0, run1"]),
        ({"device": "", "torch": ""}, {}, ["unknown device", "CUDA, torch 2.11.0"]),
    ],
)
def test_labels_tell_runs_apart(first, second, expected):
    assert page(run_of(samples.case(), **first), run_of(samples.case(), **second)).table["runs"] == expected


def test_labels_of_files_with_one_name_are_numbered():
    runs = [run_of(samples.case(), python=str(i)) for i in range(2)]
    labels = page(*runs, names=["a/run.json", "b/run.json"]).table["runs"]
    assert labels == ["CUDA, torch 2.11.0, run 1", "CUDA, torch 2.11.0, run 2"]


def test_efforts_tell_runs_apart():
    runs = [run_of(samples.case(), python=str(i)) for i in range(2)]
    runs[1]["effort"] = {"name": "quick", "deselected": {}}
    labels = page(*runs).table["runs"]
    assert labels == ["CUDA, torch 2.11.0, effort full", "CUDA, torch 2.11.0, effort quick"]


# Texts of run files are no markup


HOSTILE = (
    "</script><script>alert(1)</script><!--<script>&lt;</style></title>{{ 7 * 7 }}{% raw %}"
    "\"'><img src=x onerror=alert(1)>\u2028\x00]]>"
)


def full_of(text):
    """A run with the same text wherever a run file can have one."""
    record = samples.whole_case() | {"missing": ["x"], "spent": {"init": 1.0}, "shortened": ["x"], "reproduce": "x"}
    own = {"model": "x", "mesh": {"init": 1}, "data": ["x"], "signature": "x", "lines": ["x"], "axes": ["x"]}
    record["own"] = own | {"compared": 1, "distances": [record["distances"][0] | {"module": "x"}], "notes": ["x"]}
    run = samples.journal(record | {"losses": {"init": [1.0]}, "seeds": {"init": 1}}, reason="x")
    run["left_out"] = [{"id": "x", "implementation": "x", "reason": "x"}]
    run["merged"] = [{name: run[name] for name in ("run_id", "environment", "end")} | {"file": "x"}]
    run["effort"] = {"name": "x", "deselected": {}}
    filled = told(run, text, names=("reference", "reshard", "init"))
    filled["cases"][0]["verdict"] = "fail"
    filled["effort"]["name"] = "quick"  # one of three
    filled["selected"][text].append("other")
    return filled


def test_hostile_texts_change_no_element_and_no_script():
    plain, hostile = (page(full_of(text), names=[text], title=text) for text in ("plain", HOSTILE))
    assert hostile.elements == plain.elements
    assert hostile.scripts["script"] == plain.scripts["script"]
    assert hostile.scripts.keys() == plain.scripts.keys()
    assert "{{ 7 * 7 }}" in hostile.text, "it is shown as it is"


def test_hostile_texts_arrive_whole():
    made = page(full_of(HOSTILE), names=[HOSTILE], title=HOSTILE)
    ((id_, _),) = made.records
    assert id_ == HOSTILE
    (record,) = made.records.values()
    assert record["failure"]["text"] == HOSTILE
    assert record["collectives"] == [{"ranks": [0, 1], "trace": [HOSTILE]}]


def test_numbers_that_json_lacks():
    nan = float("nan")
    made = page(samples.run(samples.case(parameters={"scale": [nan, {"x": float("-inf")}]})))
    (record,) = made.records.values()
    assert record["parameters"] == {"scale": ["nan", {"x": "-inf"}]}


def test_the_policy_allows_the_two_scripts_of_the_page_alone():
    made = page(samples.run(samples.case()))
    policy = next(value for name, value in made.attributes if name == "content" and "script-src" in value)
    allowed = {assets.content_hash(made.scripts["script"]), assets.content_hash(made.unpacked("plotting"))}
    assert set(re.findall(r"'(sha256-[^']+)'", policy)) == allowed
    rest = re.sub(r" *'sha256-[^']+'", "", policy)
    told = "style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"
    assert rest == f"default-src 'none'; script-src; {told}"


def test_the_page_refers_to_nothing_outside_of_it():
    made = page(samples.run(samples.case()))
    assert [value for name, value in made.attributes if name in ("src", "href")] == ["#main"]
    assert not re.search(r"url\(|@import", made.scripts["style"])


def test_the_script_makes_no_markup_of_texts():
    """Each of these would; elements are made by `el` alone, whose children are text."""
    forbidden = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|createContextualFragment|\beval\(|new Function"
    assert re.findall(forbidden, assets.script()) == []


# Whole


def test_every_file_of_the_page_is_in_it():
    folder = ROOT / "reports/page"
    assert {path.stem for path in (folder / "script").iterdir()} == set(assets.SCRIPTS + assets.PLAN_SCRIPTS)
    assert {path.stem for path in (folder / "style").iterdir()} == set(assets.STYLES)


def test_files_of_the_page_are_short():
    files = [path for name in ("script", "style", "templates") for path in (ROOT / "reports/page" / name).iterdir()]
    assert {path.name: count for path in files if (count := len(path.read_text().splitlines())) > 300} == {}


def test_the_same_runs_make_the_same_page():
    data = run_of(samples.whole_case())
    assert page(data).html == page(data).html


def test_a_published_run_stays_small():
    """Beside the plotting library; its run file, compressed but not in base64, has 154 bytes for each record."""
    (path,) = (ROOT / "reports/published").glob("h200-x2-references-*.json.gz")
    run = load_run(path)
    html = render([Source(str(path), run)], title="references")
    rest = len(html) - len(assets.packed(assets.plotting_library()))
    assert len(Page(html).records) == len(run.cases) > 3000
    assert rest / len(run.cases) < 160


# `shardproof page`, as a user starts it


def command(*arguments, without=""):
    """Run the command line in a process of its own, perhaps as if a package were not installed."""
    script = "import sys; from shardproof.__main__ import main\n"
    script += f"sys.modules[{without!r}] = None\n" if without else ""
    script += "code = main(); print('torch' in sys.modules, file=sys.stderr) if code == 0 else None; sys.exit(code)"
    words = [sys.executable, "-c", script, "page", *map(str, arguments)]
    return subprocess.run(words, cwd=ROOT, capture_output=True, text=True)


@pytest.fixture
def run(tmp_path):
    path = tmp_path / "run.json"
    path.write_text(json.dumps(samples.journal(samples.case(verdict="fail", failure=samples.whole_case()["failure"]))))
    return path


def test_it_writes_one_file_and_says_where(tmp_path, run):
    folder = tmp_path / "a" / "b"
    done = command(run, "-o", folder, "--title", "Ours & theirs")
    assert done.returncode == 0, done.stderr
    assert [path.name for path in folder.iterdir()] == ["index.html"]
    size = (folder / "index.html").stat().st_size
    assert done.stdout == f"{folder}/index.html: 1 run, 1 record, {size / 1e6:.1f} MB\n"
    assert done.stderr == "False\n", "torch is not loaded"
    text = (folder / "index.html").read_text()
    assert text.startswith("<!DOCTYPE html>") and "<title>Ours &amp; theirs</title>" in text


def test_several_runs_and_a_journal(tmp_path, run):
    other = tmp_path / "other.json.partial"
    other.write_text(json.dumps(samples.journal(samples.case(), reason="SIGTERM") | {"run_id": "f" * 32}))
    done = command(run, other, "-o", tmp_path / "out")
    assert (done.returncode, done.stdout.split(": ")[1].split(", ")[:2]) == (0, ["2 runs", "2 records"])


@pytest.mark.parametrize("package", ["jinja2", "plotly"])
def test_without_its_extra_it_says_what_to_install(tmp_path, run, package):
    done = command(run, "-o", tmp_path / "out", without=package)
    assert (done.returncode, done.stdout) == (2, "")
    told = "the page needs packages that are not installed; install them with: pip install 'jinja2>=3.1' 'plotly>=6'"
    assert done.stderr == f"shardproof: {told} ({package} is missing)\n"
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("content", [None, "{", '{"schema_version": 3}'], ids=["missing", "no JSON", "version"])
def test_bad_input_is_one_line_and_writes_nothing(tmp_path, run, content):
    path = tmp_path / "bad.json"
    if content is not None:
        path.write_text(content)
    done = command(run, path, "-o", tmp_path / "out")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"shardproof: {path}: ") and done.stderr.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_a_run_given_twice_is_refused(tmp_path, run):
    copy = tmp_path / "copy.json"
    copy.write_bytes(run.read_bytes())
    done = command(run, copy, "-o", tmp_path / "out")
    assert (done.returncode, done.stderr) == (2, f"shardproof: {run} and {copy} are of the same run: give it once\n")


def test_a_page_that_cannot_be_written_is_one_line(tmp_path, run):
    (tmp_path / "file").touch()
    done = command(run, "-o", tmp_path / "file")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"shardproof: {tmp_path}/file: Not a directory\n"


def test_texts_that_are_no_unicode_do_not_stop_it(tmp_path):
    path = tmp_path / "run.json"
    data = samples.journal(samples.case(id="\ud800"))
    data["environment"]["torch"] = "\ud800"
    path.write_text(json.dumps(data))
    done = command(path, "-o", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    assert r"\ud800" in (tmp_path / "out/index.html").read_bytes().decode()
