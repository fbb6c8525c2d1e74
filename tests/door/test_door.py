"""The door: no file is read beside it, each bound is kept, and nothing foreign is printed as it is."""

import ast
import gzip
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from shardproof import door
from shardproof.door import BadFile, printable
from shardproof.reports import results
from shardproof.runfile import load_run
from tests.door import hostile
from tests.errors import error_of
from tests.reports import samples

ROOT = Path(__file__).parents[2]

# No reader beside the door -----------------------------------------------------------------------

#: What reads a file or makes objects of bytes, by the module, or of any object.
READERS = {
    "json": {"load", "loads"}, "tomllib": {"load", "loads"}, "pickle": {"load", "loads", "Unpickler"},
    "marshal": {"load", "loads"}, "gzip": {"open", "decompress", "GzipFile"}, "bz2": {"open", "decompress"},
    "lzma": {"open", "decompress"}, "zlib": {"decompress", "decompressobj"}, "torch": {"load", "from_file"},
    "numpy": {"load", "fromfile", "memmap"}, "mmap": {"mmap"}, "zipfile": {"ZipFile"},
    "os": {"open", "fdopen"}, "io": {"open"},
    "": {"open", "read_text", "read_bytes", "safe_open", "load_file", "literal_eval"},
}  # fmt: skip

#: How often files of the package read something else than a foreign file, by what they read.
NOT_FOREIGN: dict[str, dict[str, int]] = {
    "this package, torch, a clone's findings and adapters, which are executed too, and the pages that it makes": {
        "harness/adapters/capability.py": 1,
        "harness/adapters/registry.py": 1,
        "harness/plugin/changed.py": 2,
        "harness/plugin/origin.py": 4,
        "harness/worlds/loop.py": 3,
        "reports/page/assets.py": 1,
        "shardproof/bug_report.py": 2,
        "shardproof/commands/run.py": 1,
        "shardproof/contract.py": 6,
        "shardproof/extras.py": 2,
        "shardproof/findings.py": 2,
        "shardproof/pages.py": 1,
        "shardproof/renamed.py": 1,
        "shardproof/torch_versions.py": 1,
    },
    "what the processes of one run write for each other, in a directory of their own": {
        "harness/adapters/deepspeed_stages.py": 1,
        "harness/adapters/olmo_core.py": 1,
        "harness/collectives/board.py": 2,
        "harness/parity/exchange.py": 2,
        "harness/parity/rank_state.py": 1,
        "harness/plugin/state.py": 3,
        "harness/plugin/resuming.py": 2,
        "harness/reproducing/program.py": 2,
        "harness/reproducing/shrinking.py": 2,
        "harness/training/exchange.py": 1,
        "harness/training/trained_model.py": 1,
        "harness/worlds/flight_recorder.py": 5,
        "harness/worlds/forkserver.py": 2,
        "harness/worlds/lease.py": 2,
        "harness/worlds/rank_process.py": 1,
        "harness/worlds/scratch.py": 2,
        "harness/worlds/torchrun/meeting.py": 4,
        "shardproof/commands/reproduce.py": 2,
    },
    "the user's own command line and environment": {
        "harness/training/switches.py": 1,
        "harness/training/request.py": 1,
        "shardproof/commands/check.py": 1,
    },
    "pipes, and the kernel's files": {"harness/training/reference.py": 4, "harness/worlds/waiting.py": 1},
    "what it writes": {"harness/plugin/journal.py": 1, "shardproof/__main__.py": 1, "shardproof/folders.py": 10},
}


def calls_that_read(source):
    """The lines of a source with a call that may read a file."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        called, modes = node.func, [one.value for one in (*node.args, *(one.value for one in node.keywords))
                                    if isinstance(one, ast.Constant)]  # fmt: skip
        name = called.id if isinstance(called, ast.Name) else getattr(called, "attr", "")
        of = called.value.id if isinstance(called, ast.Attribute) and isinstance(called.value, ast.Name) else ""
        writes = any(re.fullmatch("[wax]b?", one) for one in modes if isinstance(one, str))
        if name in READERS.get(of, set()) | READERS[""] and not writes:
            yield node.lineno


def readers():
    """The files of the package with such calls, and how many there are."""
    found = {}
    for folder in ("shardproof", "harness", "reports", "fsdp_impl"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            if lines := [*calls_that_read(path.read_text())]:
                found[str(path.relative_to(ROOT))] = lines
    return found


def test_foreign_files_are_read_by_the_door_alone():
    found = readers()
    known = {name: count for counts in NOT_FOREIGN.values() for name, count in counts.items()}
    assert found.pop("shardproof/door.py")
    others = {name: lines for name, lines in found.items() if len(lines) != known.get(name)}
    assert not others, "read a foreign file by shardproof.door, or say in NOT_FOREIGN what is read"
    assert known.keys() == found.keys(), "NOT_FOREIGN has a file that reads nothing"


@pytest.mark.parametrize(
    "call",
    [
        "json.load(f)",
        "tomllib.loads(t)",
        "gzip.open(p)",
        "open(p)",
        "p.read_text()",
        "safe_open(p)",
        "p.open('rb')",
        "mmap.mmap(n, 0)",
    ],
)
def test_a_reader_beside_the_door_is_seen(call):
    assert [*calls_that_read(f"def read():\n    return {call}\n")] == [2]


# Bounds --------------------------------------------------------------------------------------------

HUGE = [
    ("[" * 65 + "]" * 65, "lists and objects more than 64 deep"),
    (json.dumps("a" * (door.MOST_STRING + 1)), "a string of more than 1 MiB of text"),
    ("[" + "[]," * (door.MOST_VALUES // 2 + 9) + "1]", f"more than {door.MOST_VALUES} values"),
    ("[" + '"",' * (door.MOST_VALUES + 9) + "1]", f"more than {door.MOST_VALUES} values"),
    ('{"a": "\\"' + '\\"' * 30000, "not a JSON file: Unterminated string starting at: line 1 column 7 (char 6)"),
    ('{"a": ' + "9" * 5000 + "}", "not a JSON file: Exceeds the limit (4300 digits) for integer string conversion"),
    ('{"schema_version": ' + "9" * 30 + "}", f"schema_version: {'9' * 30} has more than 64 bits"),
]


@pytest.mark.parametrize(("text", "message"), HUGE, ids=range(len(HUGE)))
@pytest.mark.parametrize("pack", [bytes, gzip.compress], ids=["plain", "packed"])
def test_a_file_beyond_a_bound_is_refused_before_it_takes_memory(tmp_path, text, message, pack):
    path, started = tmp_path / "run.json", time.process_time()
    path.write_bytes(pack(text.encode()))
    assert error_of(load_run, path, kind=BadFile).startswith(f"{path}: {message}")
    assert time.process_time() - started < 5


def test_the_largest_published_run_fits_with_a_margin():
    path = max((ROOT / "reports/published").glob("*.json.gz"), key=lambda one: one.stat().st_size)
    text = gzip.decompress(path.read_bytes())
    assert 3 * len(text) < door.MOST_BYTES
    assert 2 * sum(map(text.count, b",:[{")) < 4 * door.MOST_VALUES
    door._check_size(text * 2)


def test_lines_are_read_one_by_one_and_bounded(tmp_path, monkeypatch):
    path = tmp_path / "events.jsonl"
    path.write_text('{"a": 1}\n' * 3 + "[" * 80 + "]" * 80 + "\n")
    read = door.lines(path, lambda data: data, may_be_cut=False)
    assert next(read) == {"a": 1}, "before the rest is read"
    monkeypatch.setattr(door, "MOST_OF_A_LINE", 100)
    assert error_of(list, read, kind=BadFile) == f"{path}: line 4: more than 100 bytes of text"
    monkeypatch.setattr(door, "MOST_LINES", 2)
    of_three = door.lines(path, lambda data: data, may_be_cut=False)
    assert error_of(list, of_three, kind=BadFile) == f"{path}: line 3: the file has more than 2 lines"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a = " + "[" * 5000, "lists and tables are nested too deeply"),
        ("a." * 100_000 + "a = 1", "a key of more than 64 parts"),
        ("a = 1\n" + "#" * (1 << 20), "more than 1 MiB of text"),
        ("a = 2027-13-45", "not a TOML file: "),
        ("a = " + "1" * 5000, "not a TOML file: Exceeds the limit"),
    ],
)
def test_bad_toml_is_one_line(tmp_path, text, message):
    path = tmp_path / "x.toml"
    path.write_text(text)
    assert error_of(door.toml, path, kind=BadFile).startswith(f"{path}: {message}")


@pytest.mark.parametrize(
    "read", [door.toml, door.size_of, load_run, lambda path: list(door.lines(path, print, may_be_cut=True))]
)
def test_what_is_no_regular_file_is_not_waited_for(tmp_path, read):
    os.mkfifo(tmp_path / "x")
    assert error_of(read, tmp_path / "x", kind=BadFile) == f"{tmp_path / 'x'}: not a regular file"


@pytest.mark.parametrize("text", ["a" * 60_000, "/" * 60_000, "a/" * 30_000, "1" * 60_000, "1." * 30_000, " " * 60_000])
def test_no_expression_reads_a_long_text_again_and_again(tmp_path, text):
    """Each on every string of a run file that a command looks at."""
    data = hostile.run_file()
    data["cases"][0] |= {"nodeid": text, "failure": data["cases"][0]["failure"] | {"text": text, "name": text}}
    data["cases"][0]["collectives"] = [{"ranks": [0], "trace": [text]}]
    data["environment"]["torch_git_version"] = data["environment"]["platform"] = text
    path = tmp_path / "run.json"
    path.write_text(json.dumps(data))
    started = time.process_time()
    for number in (0, 5):
        hostile.read_run_file(path, tmp_path, number)
    with pytest.raises(BadFile):
        results.summary_of(path, without_digest=True)
    assert time.process_time() - started < 10


def test_a_piece_of_a_file_is_a_copy_within_it(tmp_path):
    path = tmp_path / "x"
    content = bytes(range(256)) * (1 << 13)
    path.write_bytes(content)
    assert door.size_of(path) == len(content)
    for start, size in ((0, 0), (5, 3), (4097, (1 << 20) + 7), (0, len(content))):
        found = door.piece(path, start, size)
        assert bytes(found) == content[start : start + size]
        found[:1] = b"y"[:size]
    assert path.read_bytes() == content
    for start, size in ((-1, 3), (len(content), 1), (3, 1 << 60), (3, -1)):
        assert "it is cut off: bytes " in error_of(door.piece, path, start, size, kind=BadFile)


def test_json_with_two_values_of_one_name_is_refused_where_it_matters():
    assert door.parse_json(b'{"a": 1, "a": 2}') == {"a": 2}
    assert error_of(door.parse_json, b'[{"a": 1, "a": 2}]', once=True) == "an object has two values of one name"


# Printing --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("::error::x", r"\::error::x"),
        ("a  ::error::x", r"a  \::error::x"),
        ("tests/x.py::test[a::b]", "tests/x.py::test[a::b]"),
        ("##vso[task]", r"#\#vso[task]"),
        ("a ##[error]b ### c", r"a #\#[error]b ### c"),
        ("a\x1b[31m\r\n\u2028\u202e\x7f\ud800b", r"a\x1b[31m\r\n\u2028\u202e\x7f\ud800b"),
        ("größer 東京", "größer 東京"),
    ],
)
def test_what_is_printed_is_text_and_nothing_else(text, shown):
    assert printable(text) == shown == printable(shown)


@pytest.mark.parametrize("number", range(len(hostile.HOSTILE)))
def test_no_string_of_a_run_file_is_printed_as_it_is(tmp_path, monkeypatch, number):
    """In each place where an honest file has a text of its own, and in the keys, before and after what it has."""
    monkeypatch.setenv("NO_COLOR", "1")
    text, data = hostile.HOSTILE[number], hostile.run_file()
    for path, hint in hostile.places(hostile.runfile.Run, data):
        if hint is str and path != ("effort", "name"):
            at(data, path[:-1])[path[-1]] = f"{text}{at(data, path)}{text}"
    named = data["environment"], data
    for of, name in zip(named, ("implementations", "selected"), strict=True):
        of[name] = {f"{text}{key}{text}": one for key, one in of[name].items()}
    (tmp_path / "x").write_text(json.dumps(data))
    hostile.call("report", tmp_path / "x", "--cases", "--full", codes=(0,))
    hostile.read_run_file(tmp_path / "x", tmp_path, number % 8)  # those after it make a page
    data["cases"][0]["seeds"] = {text: text}
    (tmp_path / "x").write_text(json.dumps(data))
    hostile.call("report", tmp_path / "x", codes=(2,))


@pytest.mark.nightly
@pytest.mark.parametrize("text", hostile.HOSTILE, ids=range(len(hostile.HOSTILE)))
def test_each_string_of_a_run_file_by_itself(tmp_path, monkeypatch, text):
    monkeypatch.setenv("NO_COLOR", "1")
    for path, _ in hostile.places(hostile.runfile.Run, hostile.run_file()):
        data = hostile.run_file()
        if isinstance(at(data, path), str):
            at(data, path[:-1])[path[-1]] = text
            (tmp_path / "x").write_text(json.dumps(data))
            for number in range(10):
                hostile.read_run_file(tmp_path / "x", tmp_path, number)


def at(data, path):
    for part in path:
        data = data[part]
    return data


@pytest.mark.parametrize("name", ["a\n::error::x", "\x1b[31mx", "::error::x", "##vso[x]", "-\n::error::x"])
def test_no_name_of_a_file_is_printed_as_it_is(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    Path(name).write_text("{")
    for command in ("report", "expectations"):
        if name.startswith("-"):
            with pytest.raises(SystemExit):
                hostile.call(command, name, codes=())
            continue
        hostile.call(command, name, codes=(2,))
    if not name.startswith("-"):
        hostile.call("gate", name, name, codes=(2,))
        hostile.call("merge", name, "-o", "out.json", codes=(2,))
        hostile.call("compare", name, name, codes=(2,))
        hostile.call("gate", name, name, "--accept", name, codes=(2,))


def test_a_draft_stays_toml(tmp_path):
    text = 'x\n[[expect]]\n# ##vso[y] \x7f \ud800 "'
    data = samples.journal(samples.case(id=text, implementation=text, verdict="fail", failure={"text": text}))
    data["environment"] |= {"torch": text, "implementations": {text: {}}}
    (tmp_path / "x").write_text(json.dumps(data))
    drafted = hostile.call("expectations", tmp_path / "x", codes=(0,))
    parsed = door.parse_toml(drafted)
    assert parsed["implementation"] == text.replace("\ud800", r"\ud800") and len(parsed["expect"]) == 1


# Inputs that broke something ---------------------------------------------------------------------------


def changed(*place, to):
    def change(data):
        at(data, place[:-1])[place[-1]] = to
        return data

    return change


BROKE = [
    changed("cases", 1, "known_failure", "source", to=""),
    changed("environment", "torch", to="1" * 3000 + ".0"),
    changed("cases", 0, "collectives", 0, "trace", 0, to=f"forward all_gather float32 {'9' * 5000} B"),
    changed("cases", 0, "seconds", to="nan"),
    changed("cases", 0, "seconds", to=1e400),
    changed("end", "seconds", to="inf"),
    changed("cases", 1, "expected", to="F-" + "1" * 5000),
    changed("cases", 0, "peak_bytes", to=[10**400]),
    changed("effort", "name", to="x"),
]


@pytest.mark.parametrize("change", BROKE, ids=range(len(BROKE)))
def test_a_run_file_that_ended_a_command_in_a_traceback(tmp_path, change):
    (tmp_path / "x").write_text(json.dumps(change(hostile.run_file())))
    for number in (0, 2, 6, 7):
        hostile.read_run_file(tmp_path / "x", tmp_path, number)


FORGED = [
    changed("started", to=5), changed("implementations", "reference", "score", to=[1]), changed("digest", to={}),
    changed("implementations", "reference", "score", to="1"),
    changed("implementations", "reference", "profiles", to=[5]),
    changed("contract", to="9" * 5000), changed("torch", to=["x"]), changed("profile", to={"a": 1}),
]  # fmt: skip


@pytest.mark.parametrize("change", FORGED, ids=range(len(FORGED)))
def test_a_forged_summary_is_refused_in_one_line(tmp_path, change):
    pytest.importorskip("jinja2")
    hostile.read_summary(change(hostile.summary_file()), tmp_path)
    path = tmp_path / "x.json"
    path.write_text(json.dumps(change(hostile.summary_file())))
    assert error_of(door.load, path, results._checked_summary, kind=BadFile).startswith(f"{path}: ")


@pytest.mark.sampled
@pytest.mark.parametrize("many", [b"{}," * 20_000_000, b'"",' * 8_000_000], ids=["objects", "strings"])
def test_a_small_file_takes_little_memory(tmp_path, many):
    """In a process that may have 1 GB of addresses, for all bounds at once."""
    path = tmp_path / "x.json.gz"
    text = b'{"schema_version": 2, "run_id": "%s", "x": [%s[]]}' % (b"a" * 32, many)
    path.write_bytes(gzip.compress(text, compresslevel=1))
    limit = "import resource, sys; resource.setrlimit(resource.RLIMIT_AS, (1 << 30,) * 2)"
    limited = f"{limit}; from shardproof.__main__ import main; sys.exit(main(sys.argv[1:]))"
    for command in (["report"], ["gate", str(path)], ["expectations"], ["merge", "-o", str(tmp_path / "y")]):
        words = [sys.executable, "-c", limited, *command, str(path)]
        done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 2 and re.fullmatch(r"shardproof: \S+: more than .*\n", done.stderr), done.stderr
