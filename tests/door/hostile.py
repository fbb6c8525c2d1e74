"""Foreign files that are nearly right, drawn from the schemas, and the commands that read them."""

import contextlib
import copy
import dataclasses
import functools
import io
import json
import re
import shutil
import time
import types
import typing
from collections.abc import Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import pytest

from shardproof import planfile, runfile
from shardproof.__main__ import main
from shardproof.commands import INTERNAL
from shardproof.jsonfiles import Number
from shardproof.reports import results
from shardproof.runfile import digest_of, fingerprint
from tests.reports import samples
from tests.reports.test_record import EXPLAINED

st: Any = pytest.importorskip("hypothesis.strategies")

HOSTILE = (
    "x\x1b]0;owned\x07",
    "a\n::error::owned",
    "::error file=x::owned",
    "a b ::set-output name=x::owned",
    "\r\x1b[2Kpass",
    "##vso[task.setvariable variable=x]y",
    " ##[error]owned",
    "section_start:1:x\r\x1b[0Kowned",
    "\u202eflipped",
    "\ud800",
    "\u2028::error::owned",
    "\x7f\x00",
    "'",
    '"',
    "a'b\"c",
    "`",
    "```\n# owned",
    "|",
    "<script>",
    "%0A::error::owned",
    "/../..",
    ".",
    "-",
    "",
    "a" * 3000,
    "1" * 3000,
    "é" * 300,
    "[" * 300,
    "F-1",
    "2.13.0",
    "9" * 30,
)
"""Strings that a terminal, a CI, a page or a parser may take for something else."""

NAMES = ("reference", "torch.fully_shard", "suites/test_autograd.py::test_unused[w2]", "b", "cpu", "w", "quick")

INTEGERS = st.sampled_from([0, 1, 2, 3, -1, 7, 10**9, 2**31, 2**53, 2**63 - 1, 2**63, 2**64, -(2**70), 10**400])
NUMBERS = (
    st.sampled_from([0, 1, -1, 0.5, 1e-300, 1e308, -1e308, "nan", "inf", "-inf", 5e-324, 2**70, 10**400]) | st.floats()
)
TEXTS = st.sampled_from(NAMES + HOSTILE) | st.text(max_size=12)
WILD = st.recursive(
    st.none() | st.booleans() | INTEGERS | NUMBERS | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=6,
)


def of(hint: Any) -> Any:
    """Draw JSON values that a field of this type could have."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint == Number:
        return NUMBERS
    if origin is Annotated:
        return of(arguments[0])
    if origin in (types.UnionType, typing.Union):
        return st.none() | of(arguments[0])
    if origin is Sequence:
        return st.lists(of(arguments[0]), max_size=3)
    if origin is Mapping:
        return st.dictionaries(TEXTS, of(arguments[1]), max_size=3)
    if dataclasses.is_dataclass(hint):
        hints = typing.get_type_hints(hint, include_extras=True)
        return st.fixed_dictionaries({one.name: st.deferred(lambda one=one: of(hints[one.name]))
                                      for one in dataclasses.fields(hint)})  # fmt: skip
    if isinstance(hint, type) and issubclass(hint, Enum):
        return st.sampled_from([one.value for one in hint])
    return {str: TEXTS, int: INTEGERS, float: NUMBERS, bool: st.booleans(), Any: WILD}[hint]


def places(hint: Any, value: Any, path: tuple[Any, ...] = ()) -> list[tuple[tuple[Any, ...], Any]]:
    """Return the paths of all values in a file, with their types by the schema."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated or origin in (types.UnionType, typing.Union):
        return places(arguments[0], value, path)
    found = [(path, hint)] if path else []
    if isinstance(value, list):
        inner = arguments[0] if origin is Sequence else Any
        return found + [one for i, part in enumerate(value) for one in places(inner, part, (*path, i))]
    if isinstance(value, dict):
        hints = typing.get_type_hints(hint, include_extras=True) if dataclasses.is_dataclass(hint) else {}
        inner = arguments[1] if origin is Mapping else Any
        return found + [one for key, part in value.items() for one in places(hints.get(key, inner), part, (*path, key))]
    return found


@st.composite
def near(draw: Any, schema: Any, honest: Any) -> Any:
    """Draw a file that differs from an honest one in some places: by its schema, wildly, by a key, or by a lack."""
    data = copy.deepcopy(honest)
    for _ in range(draw(st.integers(1, 3))):
        path, hint = draw(st.sampled_from(places(schema, data)))
        *above, last = path
        parent = data
        for part in above:
            parent = parent[part]
        how = draw(st.sampled_from(("schema", "schema", "schema", "wild", "key", "lack", "twice")))
        if how == "schema":
            parent[last] = draw(of(hint))
        elif how == "wild":
            parent[last] = draw(WILD)
        elif how == "lack":
            del parent[last]
        elif isinstance(parent, list):
            parent.insert(last, copy.deepcopy(parent[last]))
        elif how == "key":
            parent[draw(TEXTS)] = parent.pop(last)
        if not data:
            break
    return data


def run_file() -> dict[str, Any]:
    """An honest run file with all fields."""
    more = {
        "explanation": copy.deepcopy(EXPLAINED),
        "hosts": ["a", "b"],
        "examples": 0,
        "peak_bytes": [1, 2],
        "reproduce": "pytest x",
    }
    known = {"source": "x.toml entry 1", "case": "b", "link": "L", "torch": ">=2.11"}
    skipped = samples.case(id="c", verdict="unsupported", missing=["x", "y"])
    again = [samples.case(id="d", verdict="fail", failure={"text": "Error: x\n  y"}), samples.case(id="d", attempt=2)]
    known_one = samples.case(id="b", verdict="unexpected-pass", known_failure=known)
    whole = samples.journal(samples.whole_case() | more, known_one, skipped, *again)
    whole["unasked"], whole["effort"] = {"reference": {"INIT-8": "4 ranks"}}, {"name": "quick", "deselected": {}}
    whole["left_out"] = [{"id": "e", "implementation": "reference", "reason": "on a whim"}]
    return whole


def plan_file() -> dict[str, Any]:
    """An honest plan file."""
    phase = {"name": "forward", "at_peak": {"parameters": 8, "x": 1}, "most": {"parameters": 8}}
    traffic = {"group": "dp", "ranks": 2, "kind": "all_gather", "dtype": "float32", "count": 1, "nbytes": 8,
               "sent": 4.0, "across": 0.5}  # fmt: skip
    formula = {"quantity": "q", "unit": "B", "text": "a + b", "value": 1.0, "simulated": 1}
    world = {
        "mesh": [{"name": "dp", "size": 2}],
        "hosts": 1,
        "phases": [phase],
        "traffic": [traffic],
        "formulas": [formula],
    }
    return {"plan_version": 1, "model": "m", "about": "", "numel": 8, "units": {"root": 1},
            "implementation": "reference", "version": "", "settings": {"batch": "1"}, "rank": 0, "node_size": 8,
            "worlds": [world, world], "kinds": {"parameters": "p", "x": "y"}, "assumptions": ["a"]}  # fmt: skip


def summary_file() -> dict[str, Any]:
    """An honest summary, as `submit` makes it."""
    return {
        "run_id": "a" * 32, "digest": "", "contract": "2027.1", "hardware": "cpu-2", "accelerators": {}, "cpu_count": 2,
        "nccl": None, "torch": "2.13.0", "torch_git_version": "", "shardproof": "0.1.0", "shardproof_commit": "",
        "suites": "", "effort": "full", "started": "2027-01-02T03:04:05+00:00", "profiles_of": "2027.1",
        "implementations": {"reference": {"version": "", "score": "1/1", "profiles": {"core": "1/2"},
                                          "verdicts": {"pass": 1}, "failed": {}}},
    }  # fmt: skip


def signed(data: Any) -> Any:
    """A run file with the digest of its records, if they are any."""
    cases = data.get("cases") if isinstance(data, dict) else None
    if isinstance(cases, list):
        with contextlib.suppress(ValueError, TypeError):
            return data | {"digest": digest_of(map(fingerprint, cases))}
    return data


def call(*arguments: object, codes: Sequence[int]) -> str:
    """Run a command in this process, check how it ends and what it prints, and return that."""
    out, err, started = io.StringIO(), io.StringIO(), time.process_time()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main([*map(str, arguments)])
    seconds = time.process_time() - started
    assert INTERNAL not in err.getvalue(), err.getvalue()
    assert code in codes, f"{arguments[0]} ended with {code}, which is none of {codes}: {err.getvalue()}"
    assert seconds < 10, f"{arguments[0]} took {seconds:.0f} s"
    if code == 2:
        assert err.getvalue().count("\n") == 1, err.getvalue()
        assert err.getvalue().startswith("shardproof: ") and len(err.getvalue()) < 1200
    check_printed(out.getvalue() + err.getvalue(), is_github="github" in arguments)
    return out.getvalue() + err.getvalue()


#: How this project's own lines for GitHub begin; nothing foreign is in such a beginning.
_OWN = re.compile(r"::(error|notice)( file=[^:,]*,| )title=[^:,]*::")


def check_printed(text: str, *, is_github: bool = False) -> None:
    """No terminal and no CI takes a line for anything but text."""
    for line in text.split("\n"):
        assert line.isprintable(), f"a control character: {line!r}"
        assert (is_github and _OWN.match(line)) or not line.lstrip().startswith("::"), f"a command: {line!r}"
        assert not re.search(r"##\w*\[", line), f"a command: {line!r}"


def read_run_file(path: Path, folder: Path, number: int | None = None) -> None:
    """Let commands read a run file that may be wrong: all of them, or two by a number."""
    other = folder / "honest.json"
    other.write_text(json.dumps(run_file() | {"run_id": "f" * 32}))
    allowed = [word for name in ("device", "torch", "effort") for word in ("--allow", name)]
    gates = [("gate", *pair, "--format", form, "--time-ratio", "1.1", *allowed)
             for pair in ((other, path), (path, other)) for form in ("text", "markdown", "github")]  # fmt: skip
    answers = [
        ("report", path, "--cases", "--full"), ("report", path), ("report", path, other),
        ("report", "--profiles", path), *gates, ("gate", other, path),
        ("expectations", "--check", path, other), ("expectations", "--check", path),
    ]  # fmt: skip
    others = [("merge", path, other, "-o", folder / "merged.json"), ("expectations", path),
              ("merge", other, path, "-o", folder / "merged.json.gz"),
              ("page", path, other, "-o", folder / "page"), ("page", path, "-o", folder / "page"),
              ("submit", path, "--to", folder / "results", "--without-digest")]  # fmt: skip
    chosen = [((0, 1, 2), one) for one in answers]
    chosen += [((0, 2), one) for one in others]
    for codes, one in chosen if number is None else [chosen[(2 * number + i) % len(chosen)] for i in (0, 1)]:
        call(*one, codes=codes)
        shutil.rmtree(folder / "results", ignore_errors=True)


def read_plan(path: Path, folder: Path) -> None:
    """Let the page read a plan file that may be wrong."""
    call("page", path, "-o", folder / "page", codes=(0, 2))
    call("report", path, codes=(2,))


def read_summary(data: Any, folder: Path) -> None:
    """Let `submit` read a repository with a summary that may be wrong, in the place that it gives itself."""
    shutil.rmtree(folder / "results", ignore_errors=True)
    place = "runs/2027.1/cpu-2/torch-2.13.0/aaaaaaaaaaaa.json"
    with contextlib.suppress(Exception):
        place = results.place_of(data)
    path, honest = folder / "results" / place, summary_file() | {"run_id": "b" * 32}
    is_name = "\0" not in place and place.encode(errors="ignore").decode() == place and len(place) <= 200
    if not is_name or not path.resolve().is_relative_to(folder.resolve()):
        path = folder / "results/runs/aaaaaaaaaaaa.json"
    for where, content in ((path, data), (folder / "results" / results.place_of(honest), honest)):
        where.parent.mkdir(parents=True, exist_ok=True)
        where.write_text(json.dumps(content))
    call("submit", "--to", folder / "results", codes=(0, 2))


SCHEMAS = {
    "run": (runfile.Run, run_file),
    "plan": (planfile.Plan, plan_file),
    "summary": (results.Summary, summary_file),
}
"""By the kind of a file its schema, and an honest file."""


# Recordings -----------------------------------------------------------------------------------


@functools.cache
def _texts_of(folder: Path) -> list[str]:
    lines = (folder / "rank00000/events.jsonl").read_text().splitlines()
    return [(folder / "recording.json").read_text(), *lines]


def recording_lines(folder: Path) -> list[dict[str, Any]]:
    """The values of an honest recording: its head, then the lines of its rank."""
    return [json.loads(text) for text in _texts_of(folder)]


def schema_of(line: Any) -> Any:
    """The schema of a line of a recording."""
    from shardproof.harness.training import recording

    kinds = {"stage": recording.EventLine, "end": recording.EndLine, "layout": recording.LayoutLine,
             "groups": recording.RankLine}  # fmt: skip
    return next((kind for name, kind in kinds.items() if name in line), recording.Head)


@st.composite
def near_recording(draw: Any, honest: Path) -> list[Any]:
    """Draw a recording that differs from an honest one in some lines, or in what is alike in many."""
    lines: list[Any] = recording_lines(honest)
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, len(lines) - 1))
        if not isinstance(lines[at], dict):
            continue
        how = draw(st.sampled_from(("line", "line", "all", "all", "lack", "twice", "swap", "wild")))
        if how in ("line", "all"):
            schema = schema_of(lines[at])
            hints = typing.get_type_hints(schema, include_extras=True)
            names = [one.name for one in dataclasses.fields(schema)]
            name = draw(st.sampled_from(names))
            value = draw(st.one_of(of(hints[name]), of(hints[name]), of(hints[name]), WILD))
            stage = lines[at].get("stage") if draw(st.booleans()) else None
            for i, one in enumerate(lines):
                is_alike = isinstance(one, dict) and schema_of(one) is schema and stage in (None, one.get("stage"))
                if i == at or (how == "all" and is_alike):
                    lines[i] = one | {name: value}
        elif how == "lack":
            del lines[at]
        elif how == "twice":
            lines.insert(at, lines[at])
        elif how == "swap":
            other = draw(st.integers(0, len(lines) - 1))
            lines[at], lines[other] = lines[other], lines[at]
        else:
            lines[at] = draw(WILD)
        if not lines:
            break
    return lines


def write_recording(honest: Path, folder: Path, lines: Sequence[Any]) -> Path:
    """Write a recording of one rank from its values, with the honest one's tensors; returns its folder."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(honest, folder)
    (folder / "recording.json").write_text(json.dumps(lines[0] if lines else None))
    (folder / "rank00000/events.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines[1:]))
    return folder


def read_recording(honest: Path, folder: Path, number: int) -> None:
    """Let `compare` read a recording that may be wrong, as the reference, the run, or both and the noise."""
    pairs = [(honest, folder), (folder, honest), (folder, folder), (honest, honest, "--noise", folder)]
    more = ["--report", folder.parent / "compared.json"] if number % 3 == 0 else []
    more += ["--align", ("data", "0", "1")[number % 3]] if number % 8 > 3 else []
    call("compare", *pairs[number % len(pairs)], *more, codes=(0, 1, 2))


# TOML ------------------------------------------------------------------------------------------

TOMLS = {
    "accepted": '[[accept]]\nimplementation = "reference"\ncase = "b*"\nkind = "more bytes"\nreason = "so"\n',
    "expected": 'implementation = "reference"\n[[expect]]\ncases = ["s.py::t[*", "u"]\nverdict = "fail"\nreason = "r"\n'
    'link = "L"\ntorch = ">=2.11"\ndevice = "cpu"\nexpires = 2027-06-30\nraces = true\n',
}


#: Values of TOML that no field has.
_VALUES = (
    "[" * 2000, "[[]]", "{a=1}", "{" * 500, "a." * 3000 + "a", "2027-13-45", "1e999", "nan", "true",
    "1979-05-27T07:32:00",
)  # fmt: skip


@st.composite
def near_toml(draw: Any, honest: str) -> str:
    """Draw a file of TOML that differs from an honest one in some characters, values or keys."""
    text = honest
    for _ in range(draw(st.integers(1, 3))):
        strings = TEXTS.map(lambda one: json.dumps(one.encode(errors="ignore").decode()))
        value = draw(st.one_of(strings, INTEGERS.map(str), st.sampled_from(_VALUES), TEXTS))
        spots = [(m.start(), m.end()) for m in re.finditer(r'"[^"\n]*"|\w+|=|\n', text)] or [(0, 0)]
        start, end = draw(st.sampled_from(spots))
        text = text[:start] + value + text[end:]
    return text.encode(errors="replace").decode()


def read_toml(kind: str, text: str, folder: Path) -> None:
    """Let the gate or a run read a file of TOML that may be wrong."""
    path = folder / f"{kind}.toml"
    path.write_text(text, encoding="utf-8")
    if kind == "accepted":
        for name, run_id in (("base", "a"), ("head", "b")):
            (folder / f"{name}.json").write_text(json.dumps(run_file() | {"run_id": run_id * 32}))
        call("gate", folder / "base.json", folder / "head.json", "--accept", path, codes=(0, 1, 2))
        return
    from shardproof.door import BadFile
    from shardproof.harness.plugin import known_failures

    try:
        _, entries = known_failures.load_given(path)
    except BadFile as error:
        check_printed(str(error))
        assert len(str(error)) < 1200
    else:
        for one in entries:
            one.matches("s.py::t[w2]")
            check_printed(f"{one.reason} {one.link} {one.source}")
