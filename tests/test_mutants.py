"""Mutants of what is tested: the rules, the draw, how one is planted, and what calls make of the results."""

import dataclasses
import gzip
import importlib
import importlib.metadata
import json
import pathlib
import sys
import textwrap
import types
from typing import Any

import pytest

from planted import coverage
from planted.mutants import __main__ as mutants
from planted.mutants import gate, plant, rules, tries
from planted.mutants.rules import Mutant, Source
from shardproof.harness.plugin import changed
from shardproof.harness.worlds import instruments

GROUP = "torch.distributed.fsdp._fully_shard._fsdp_param_group"


def _edits(text: str, rule: str = "") -> list[tuple[str, str]]:
    """The old and new texts of all mutants of a rule of the function ``f``."""
    source = Source(textwrap.dedent(text).encode())
    return [(one.old, one.new) for one in rules.mutants_of(source, "m", "f") if rule in ("", one.rule)]


@pytest.mark.parametrize(
    ("rule", "body", "expected"),
    [
        ("condition", "if a: pass", [("a", "(not (a))")]),
        ("condition", "while not a: pass", [("not a", "(a)")]),
        ("condition", "if a and b: pass", [("a and b", "(not (a and b))"), ("a", "(not (a))"), ("b", "(not (b))")]),
        ("condition", "return a == b", [("a == b", "(not (a == b))")]),
        ("condition", "return [x for x in a if x]", [("x", "(not (x))")]),
        ("bound", "a(b < c)", [(" < ", " <= ")]),
        ("bound", "a((b) >= 0)", [(") >= ", ") > "), ("0", "1")]),
        ("bound", "a = b[1:-1]", [("1", "2"), ("-1", "0")]),
        ("bound", "a = b[0]", [("0", "1")]),
        ("bound", "a = b - 1", [("b - 1", "b")]),
        ("bound", "a = max(b, c)", [("max", "min")]),
        ("bound", "a = range(b)", [("b", "(b) - 1")]),
        ("statement", "a.b = c", [("a.b = c", "pass")]),
        ("statement", "a = b", []),
        ("statement", "raise ValueError(a if b else c[0])", [("raise ValueError(a if b else c[0])", "pass")]),
        ("argument", "a(b, c=1)", [(", c=1", "")]),
        ("argument", "a(b=1, c=1)", [("b=1, ", ""), (", c=1", "")]),
        ("argument", "a(b=1)", [("b=1", "")]),
        ("dtype", "a = b.to(b.dtype)", [("b.to(b.dtype)", "b")]),
        ("dtype", "a = b.to(device)", []),
        ("dtype", "a = b.new_empty(c, dtype=d)", [(", dtype=d", "")]),
        ("dtype", "a = _cast_fp_tensor(d, b)", [("_cast_fp_tensor(d, b)", "b")]),
        ("dtype", "a = cast(list[str], b)", []),
        ("dtype", "_broadcast_tensors(a, b)", []),
        ("argument", "a = zip(b, c, strict=True)", []),
        ("groups", "a(shard_group, other_mesh.mesh)", [
            ("shard_group, other_mesh.mesh", "other_mesh.mesh, shard_group")
        ]),
        ("groups", "self.shard_pg = self.replicate_pg", [("replicate_pg", "shard_pg")]),
        ("groups", "a = self.shard_pg", []),  # the module has no other
    ],
)  # fmt: skip
def test_a_rule(rule: str, body: str, expected: list[tuple[str, str]]) -> None:
    assert _edits(f"def f(a, b):\n    {body}\n", rule) == expected


def test_defaults() -> None:
    assert _edits("def f(a, b=True, *, c=1, d=None): return a", "default") == [("True", "False"), ("1", "2")]


@pytest.mark.parametrize(
    ("calls", "expected"),
    [
        ("self._f(1)", [("True", "False")]),
        ("self._f(1, b=2)", []),
        ("self._f(1, 2)", []),
        ("_f(1, 2)", [("True", "False")]),  # of the object and a
        ("self._f(*c)", []),
        ("", []),
    ],
)
def test_defaults_of_a_private_function_are_those_of_calls_that_leave_them_out(
    calls: str, expected: list[tuple[str, str]]
) -> None:
    source = Source(f"def _f(self, a, b=True): return a\n{calls}".encode())
    assert [(one.old, one.new) for one in rules.mutants_of(source, "m", "_f")] == expected


def test_functions_of_assertions_are_left_alone() -> None:
    text = """
    def f(self):
        self._check(1)
        _refuse(self)
        self.check(1)

    def _check(self, a):
        assert a
        self._also(a)

    def _also(self, a):
        _p_assert(a, "text")

    def _refuse(self):
        raise ValueError(self)

    def check(self, a):
        assert a
    """
    assert [one for one, _ in _edits(text, "statement")] == ["_refuse(self)", "self.check(1)"]


def test_what_is_left_alone() -> None:
    text = '''
    @decorated(a[0])
    def f(a: b[0]) -> c[0]:
        """A docstring."""
        x: d[0] = a
        logger.warning("%s", a[0])
        self._logger.info(a[0])
        warnings.warn(a[0])
        assert a[0], b[0]
        if a < 1:
            raise AssertionError("text")
        if TYPE_CHECKING:
            a.b()
        text = f"{a[0]}"

        def inner():
            a.b()
    '''
    assert _edits(text) == []
    assert _edits("class f:\n    pass") == []
    assert rules.mutants_of(Source(b"def __repr__(self): return self.a[0]"), "m", "__repr__") == []


def test_equal_edits_have_ids_of_their_own() -> None:
    one, other = rules.mutants_of(Source(b"def f(a):\n    a.b()\n    a.b()\n"), "m", "f")
    assert (one.old, one.line, one.nth, other.line, other.nth) == ("a.b()", 2, 0, 3, 1)
    assert one.id != other.id
    assert dataclasses.replace(one, line=9, start=0).id == one.id


def test_branches_with_a_reason_are_left_out() -> None:
    text = textwrap.dedent("""
    def f(a):
        if is_cuda:
            a.b()
        else:
            a.c()
        if a is None:
            return 1
        a.d()
    """)
    reasons = [
        coverage.Reason("gpu", "w", ("m:f",), ("if is_cuda",), ("a.b()",)),
        coverage.Reason("dead", "w", ("m:f",), ("if a is None",), ("a.d()",)),
    ]
    found = rules.mutants_of(Source(text.encode()), "m", "f", reasons)
    assert [one.old for one in found if one.rule == "statement"] == ["a.c()"]


def _of(place: str, *names: str) -> list[Mutant]:
    return [Mutant(place, name[0], number, 0, name, "") for number, name in enumerate(names)]


def test_the_draw_is_even_and_stable() -> None:
    found = {"m:f": _of("m:f", "a1", "a2", "a3", "b1"), "m:g": _of("m:g", "a1")}
    drawn = [*rules.in_order(found, 1)]
    assert sorted(one.place for one in drawn[:2]) == ["m:f", "m:g"]
    of_f = [one for one in drawn if one.place == "m:f"]
    assert len(drawn) == 5 and sorted(one.rule for one in of_f[:2]) == ["a", "b"]
    assert of_f == [*rules.in_order({"m:f": found["m:f"]}, 1)]
    orders = {tuple(one.old for one in rules.in_order({"m:f": found["m:f"]}, seed)) for seed in range(20)}
    assert len(orders) > 4


MODULE = '''
import functools

def wrapping(function):
    @functools.wraps(function)
    def inner(*args, **options):
        return function(*args, **options)
    return inner

class Base:
    def method(self):
        return 1

class Middle(Base):
    def method(self):
        value = super().method()
        return value + 1

    @property
    def size(self):
        return len("ab") + 1

    @staticmethod
    @wrapping
    def made(a, *, b=False):
        """Return its arguments."""
        return a, b

def outer():
    def inner(a):
        if a:
            return 1
        return 2
    return inner

def doubling(function):
    @functools.wraps(function)
    def inner(value):
        if value:
            return 2 * function(value)
        return 0
    return inner

@doubling
def doubled(value):
    return value
'''


@pytest.fixture
def module(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    (tmp_path / "mutated_module.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "mutated_module", raising=False)
    return importlib.import_module("mutated_module")


def _plant(module: Any, name: str, rule: str, new: str | None = None) -> None:
    path = pathlib.Path(module.__file__)
    source = Source(path.read_bytes())
    one = next(one for one in rules.mutants_of(source, module.__name__, name) if one.rule == rule)
    one = one if new is None else dataclasses.replace(one, new=new)
    plant.plant(plant.compiled(source, rules.definitions(source)[name], one, path))


def test_a_mutant_is_there_wherever_the_function_is(module: Any) -> None:
    method, made, outer = module.Middle.method, module.Middle.made, module.outer
    _plant(module, "Middle.method", "bound")
    plant._reached[0] = False
    assert (method(module.Middle()), plant._reached) == (1, [True])
    _plant(module, "Middle.size", "bound")
    assert module.Middle().size == 2
    assert made(1) == (1, False)
    _plant(module, "Middle.made", "default")
    assert (made(1), made(1, b=False)) == ((1, True), (1, False))
    _plant(module, "outer.inner", "condition")
    plant._reached[0] = False
    inner = outer()
    assert plant._reached == [False]
    assert (inner(True), inner(False), plant._reached) == (2, 1, [True])


def test_a_mutant_is_there_in_what_a_decorator_has_made(module: Any) -> None:
    doubled = module.doubled
    assert doubled(3) == 6
    plant._reached[0] = False
    _plant(module, "doubling.inner", "condition")
    assert (doubled(3), plant._reached) == (0, [True])


def test_a_mutant_that_cannot_be_planted(module: Any) -> None:
    with pytest.raises(ValueError, match="it is no Python"):
        _plant(module, "Middle.method", "bound", new="(")
    source = Source(MODULE.encode())
    definition = rules.definitions(source)["Middle.method"]
    lost = Mutant("mutated_module:Middle.method", "x", 16, MODULE.index("super()"), "super().method()", "0")
    with pytest.raises(ValueError, match="variable of the surrounding scope"):
        plant.compiled(source, definition, lost, pathlib.Path("m.py"))
    with pytest.raises(ValueError, match=r"has no Middle\.method in line"):
        plant.compiled(source, definition, dataclasses.replace(lost, place="json:Middle.method"), pathlib.Path("m.py"))


def _line(one: Mutant, ran: int, **more: Any) -> dict[str, Any]:
    line = {"id": one.id, "group": "fsdp2", "torch": mutants.TORCH, **dataclasses.asdict(one), "effort": "standard"}
    line |= {"covering": 30}
    return line | {"ran": [f"item{number}" for number in range(ran)], "reached": ran - 1, "seconds": 1.0} | more


ONE, TWO, THREE = (Mutant(f"m:{name}", "bound", 3, 0, "0", "1") for name in ("f", "g", "h"))


def test_the_report(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(mutants, "MARKS", marks := tmp_path / "marks.toml")
    mutants.marks.cache_clear()
    row = '[[mutant]]\nkind = "equivalent"\nwhy = "nobody reads it"\nin = "m:{}"\nrule = "bound"\n'
    marks.write_text(row.format("h") + row.format("f"))
    lines = [_line(ONE, 3, found_by="item2"), _line(TWO, 20), _line(TWO, 10), _line(THREE, 0)]
    lines.insert(0, _line(ONE, 4, effort="quick"))
    lines.append({"unsound": "item9", "torch": mutants.TORCH, "verdict": "fail"})
    (file := tmp_path / "r.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines) + '{"id"')
    try:
        assert mutants.main(["report", str(file)]) == 0
    finally:
        mutants.marks.cache_clear()
    out = capsys.readouterr().out
    assert "fsdp2              3       1         1       1  50.0% of those not marked are found, 0.0% at quick" in out
    assert "33.3% are marked" in out
    assert "m:g\n  3: bound: `0` -> `1`; 30 of 30 items of standard ran, 28 came to it" in out
    assert "equivalent: nobody reads it" in out
    assert "A row of marks.toml covers a mutant that is found" in out
    assert "1 items do not pass without a mutant\n  item9" in out


@pytest.mark.parametrize(
    ("mark", "is_covered"),
    [
        ({}, True),
        ({"place": ("m",)}, True),
        ({"place": ("m:C.g", "m:C")}, True),
        ({"place": ("m:C.fg",)}, False),
        ({"rules": ("bound",)}, False),
        ({"old": ("a[0].wait(*)",)}, True),
        ({"old": ("a[0]",)}, False),
        ({"new": ("x", "p*")}, True),
    ],
)
def test_what_a_mark_covers(mark: dict[str, Any], is_covered: bool) -> None:
    given = {"place": ("m:C.f",), **mark}
    one = {"place": "m:C.f", "rule": "statement", "old": "a[0].wait(\n    b)", "new": "pass"}
    assert mutants.Mark("gpu", "w", **given).covers(one) is is_covered


def test_the_marks_are_read() -> None:
    mutants.marks.cache_clear()
    assert mutants.marks()


def test_a_mark_is_of_a_kind(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mutants, "MARKS", marks := tmp_path / "marks.toml")
    marks.write_text('[[mutant]]\nkind = "luck"\nwhy = "w"\nin = "m"\n')
    mutants.marks.cache_clear()
    with pytest.raises(ValueError, match="kind 'luck' of m is none of equivalent, gpu"):
        mutants.marks()


def test_a_later_call_goes_on(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, given = tmp_path / "r.jsonl", list[Any]()
    lines = [_line(ONE, 3, found_by="item2"), _line(TWO, 20)]  # of which 19 came to it
    file.write_text("".join(json.dumps(one) + "\n" for one in lines))
    monkeypatch.setattr(mutants, "chosen", lambda options: [("fsdp2", one) for one in (ONE, TWO, THREE)])
    monkeypatch.setattr(mutants, "_run", lambda options, todo, *_: given.extend(todo))
    mutants.main(["run", str(file), "--items", "19"])
    assert [fields["place"] for _, fields, _ in given] == ["m:h"]
    given.clear()
    mutants.main(["run", str(file), "--items", "25"])
    counts = [(fields["place"], len(before["ran"]), before["reached"]) for _, fields, before in given]
    assert counts == [("m:g", 20, 19), ("m:h", 0, 0)]


def test_efforts_add_up(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What quick finds need not run at standard; what standard finds runs at quick. No item runs at both."""
    file, given = tmp_path / "r.jsonl", list[Any]()
    lines = [_line(ONE, 3, found_by="item2", effort="quick"), _line(TWO, 3, found_by="item2"), _line(THREE, 4)]
    file.write_text("".join(json.dumps(one) + "\n" for one in lines))
    monkeypatch.setattr(mutants, "chosen", lambda options: [("fsdp2", one) for one in (ONE, TWO, THREE)])
    monkeypatch.setattr(mutants, "_run", lambda options, todo, *_: given.extend(todo))
    mutants.main(["run", str(file)])
    assert [fields["place"] for _, fields, _ in given] == ["m:h"]
    given.clear()
    mutants.main(["run", str(file), "--effort", "quick"])
    assert [(fields["place"], before["ran"], len(before["others"])) for _, fields, before in given] == [
        ("m:g", [], 3), ("m:h", [], 4)
    ]  # fmt: skip


def test_a_marked_mutant_does_not_run_until_its_mark_is_gone(tmp_path: pathlib.Path, monkeypatch: Any) -> None:
    file, given, marks = tmp_path / "r.jsonl", list[Any](), [mutants.Mark("gpu", "w", ("m:f",))]
    monkeypatch.setattr(mutants, "chosen", lambda options: [("fsdp2", ONE)])
    monkeypatch.setattr(mutants, "_run", lambda options, todo, *_: given.extend(todo))
    monkeypatch.setattr(mutants, "marks", lambda: marks)
    for _ in range(2):
        assert mutants.main(["run", str(file)]) == 0
        assert not given and [one["is_marked"] for one in mutants.read(file)] == [True]
    marks.clear()
    mutants.main(["run", str(file)])
    assert [fields["place"] for _, fields, _ in given] == ["m:f"]


@pytest.mark.parametrize(
    ("ran", "reached", "covering", "expected"),
    [(20, 20, 99, True), (59, 19, 99, False), (60, 0, 99, True), (30, 0, 30, True), (29, 19, 30, False)],
)
def test_enough_items(ran: int, reached: int, covering: int, expected: bool) -> None:
    assert tries.is_enough(ran, reached, items=20, covering=covering) is expected


def test_items_that_come_to_a_line(tmp_path: pathlib.Path) -> None:
    """Each process notes an arc once; both of its lines count, and the way out of a function is its first line."""
    for process, item in enumerate(["a", "b"]):
        line = {"item": item, "entered": {}, "arcs": {"m": [[-3, 4], [4, 5 + process]]}}
        (tmp_path / f"{process}.branches").write_text(json.dumps(line) + "\n")
    assert coverage.comers(tmp_path) == {"m": {3: ["a", "b"], 4: ["a", "b"], 5: ["a"], 6: ["b"]}}


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({"torch": "1.0", "lines": {}}, "it is of torch 1.0, and this is "),
        ({"torch": "1.0"}, "it is none (KeyError('lines')); python -m planted.coverage page makes lines.json.gz"),
        (None, "No such file or directory; python -m planted.coverage page makes lines.json.gz"),
    ],
    ids=["other torch", "other file", "no file"],
)
def test_lines_that_are_none(tmp_path: pathlib.Path, content: Any, said: str) -> None:
    path = tmp_path / "lines.json"
    if content is not None:
        path.write_text(json.dumps(content))
    with pytest.raises(ValueError) as raised:
        mutants.read_lines(path)
    assert str(raised.value).startswith(f"--lines {path}: {said}")


def test_lines_are_read(tmp_path: pathlib.Path) -> None:
    path = tmp_path / coverage.LINES
    content = {"torch": coverage.installed(), "lines": {"m": {4: ["a"]}}}
    path.write_bytes(gzip.compress(json.dumps(content).encode()))
    assert mutants.read_lines(path) == {"m": {"4": ["a"]}}


def test_groups_are_drawn_from_the_map() -> None:
    known = changed.read(changed.PACKED)
    for group, module in (("fsdp1", "_limiter_utils"), ("fsdp2", "_fully_shard._fsdp_common")):
        inside = f"torch.distributed.fsdp.{module}"
        drawn = mutants.drawn(mutants.GROUPS[group], known, count=3, seed=1, inside=inside)
        assert len({one.place for one in drawn}) == 3
        assert [name for name, one in mutants.GROUPS.items() if one.has(drawn[0].place)] == [group]
        assert mutants.drawn(mutants.GROUPS["helpers"], known, count=3, seed=1, inside=inside) == []


def test_a_map_onto_another(tmp_path: pathlib.Path) -> None:
    """An implementation that was not run again keeps its items, and each item its seconds."""
    version = importlib.metadata.version("torch").partition("+")[0]
    one, two = "a::t[one-w2-x]", "a::t[two-w2]"
    content = {"torch": version, "functions": ["m:f"], "items": {one: [0], two: [0]}, "tenths": [0, 15]}
    (path := tmp_path / "map.gz").write_bytes(gzip.compress(json.dumps(content).encode()))
    items = coverage.Items({"a::t[two-w4]": {"m:g"}}).onto(coverage.Items.read(path))
    assert items == coverage.Items({one: {"m:f"}, "a::t[two-w4]": {"m:g"}}, {two: 1.5})
    items.write(path)
    assert changed.read(path).called_by("two", "a::t[w4]") == {"m:g"}
    path.write_bytes(gzip.compress(json.dumps(content | {"torch": "2.0"}).encode()))
    with pytest.raises(ValueError, match=r"it is of torch 2\.0, and this is"):
        coverage.Items.read(path)


def test_what_items_take_comes_from_runs(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A case that was skipped took no time; an item without a time takes what others of its function take."""
    monkeypatch.setattr(coverage, "installed", lambda: "2.0")
    items = ["a::s[one-w2]", "a::t[one-w2-x]", "a::t[one-w2-y]", "a::t[one-w4-z]"]
    coverage.Items({item: {"m:f"} for item in items}).write(path := tmp_path / "map.gz")
    cases = [
        {"id": "a::t[w2-x]", "implementation": "one", "verdict": "pass", "seconds": 3.21},
        {"id": "a::t[w4-z]", "implementation": "one", "verdict": "fail", "seconds": 0.01},
        {"id": "a::s[w2]", "implementation": "one", "verdict": "unsupported", "seconds": 0.0},
        {"id": "a::t[w2]", "implementation": "other", "verdict": "pass", "seconds": 1.0},
    ]
    (report := tmp_path / "run.json").write_text(json.dumps({"cases": cases}))
    assert coverage.main(["time", str(path), str(report)]) == 0
    assert capsys.readouterr().out == "2 items have their seconds\n"
    known = changed.read(path)
    assert {**known.seconds} == {"one": {"a::t[w2-x]": 3.2, "a::t[w4-z]": 0.1}}
    seconds = [known.seconds_of("one", case) for case in ("a::s[w2]", "a::t[w2-x]", "a::t[w2-y]")]
    assert seconds == pytest.approx([1.0, 3.2, 1.65])
    with pytest.raises(SystemExit):
        coverage.main(["time", str(path), str(tmp_path / "none.json")])
    assert "none.json" in capsys.readouterr().err


def test_the_gate_is_asked(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each mutant that was found is planted in a run of its function; an item that never passes finds none."""
    name = "FSDPParamGroup.unshard"
    path = rules.path_of(GROUP)
    assert path is not None
    one, two, *_ = rules.mutants_of(rules.source_of(path), GROUP, name)
    lines = [_line(one, 1, found_by="item0"), _line(two, 1, found_by="item0"), _line(ONE, 3)]
    lines.append({"unsound": "s/test_a.py::test_b[x-w2]", "torch": mutants.TORCH, "verdict": "fail"})
    (file := tmp_path / "r.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    asked = list[list[str]]()

    def run(command: list[str], env: dict[str, str], **_: Any) -> Any:
        asked.append(command)
        assert pathlib.Path(env[instruments.FOLDER], plant.FILE).exists()
        failed = ["test_b[w2]", "test_c[w2]"][: len(asked)]  # the first run sees the item alone that never passes
        cases = [{"id": f"s/test_a.py::{one}", "implementation": "x", "verdict": "fail"} for one in failed]
        report = pathlib.Path(command[command.index("--report") + 1])
        # The second run ends with what it finds, and leaves its journal.
        report.with_name(report.name + ".partial" * (len(asked) > 1)).write_text(json.dumps({"cases": cases}))
        return types.SimpleNamespace(returncode=0, stdout="", stderr="")

    monkeypatch.setattr(gate.run.subprocess, "run", run)
    assert mutants.main(["gate", str(file), "--in", GROUP, "--seconds", "7"]) == 0
    assert all(f"{path}:{name}" in command and "7.0" in command for command in asked)
    out = capsys.readouterr().out
    assert out.count(": not found (1 items") == 1 and out.count(": found by test_c[x-w2] (2 items") == 1
    assert "1 of 2 are found in 7 s" in out
    with pytest.raises(SystemExit):
        mutants.main(["gate", str(file), "--jobs", "9999"])
    assert "--jobs 9999: each has two cores of its own, and there are" in capsys.readouterr().err


@pytest.mark.nightly
def test_two_mutants(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What changes nothing survives all items that run; what is wrong is found, and not by what runs after it."""
    name = "FSDPParamGroup.unshard"
    path = rules.path_of(GROUP)
    assert path is not None
    found = rules.mutants_of(rules.source_of(path), GROUP, name)
    same = next(dataclasses.replace(one, new=f"({one.old})") for one in found if one.rule == "condition")
    wrong = next(one for one in found if one.rule == "statement" and "foreach_all_gather(" in one.old)
    monkeypatch.setattr(mutants, "chosen", lambda options: [("fsdp2", one) for one in (same, wrong)])
    assert mutants.main(["run", str(tmp_path / "r"), "--items", "4", "--jobs", "1", "--deadline", "30"]) == 0
    known = mutants.results(mutants.read(tmp_path / "r"))
    assert (known[same.id].found_by, known[same.id].said()[:1], known[same.id].reached["standard"]) == ({}, "4", 4)
    assert known[wrong.id].found_by


def test_items_that_came_to_a_line_take_turns_with_others() -> None:
    a, b, c, d = (types.SimpleNamespace(nodeid=name) for name in "abcd")
    assert tries.alternating(["c", "d"], [a, b, c, d]) == [c, a, d, b]  # type: ignore[list-item]
