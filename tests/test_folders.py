"""A user's files are written in one module: through no link, outside of no folder, all of them or none."""

import ast
import contextlib
import errno
import json
import os
import shutil
import signal
from pathlib import Path
from xml.etree import ElementTree

import pytest

from shardproof import folders
from shardproof.__main__ import main
from shardproof.harness.plugin.journal import Journal
from shardproof.reports.results import place_of
from shardproof.runfile import Environment, load_run
from tests.errors import error_of
from tests.reports import samples

ROOT = Path(__file__).parents[1]


def content(folder):
    """All that is in a folder, by path; of a link where it leads."""
    paths = sorted(folder.rglob("*")) if folder.exists() else []
    return {
        str(path.relative_to(folder)): path.readlink() if path.is_symlink() else path.is_file() and path.read_bytes()
        for path in paths
    }


# Links, and paths that leave the folder


LINKS = {
    "a file": ("one.txt", lambda folder, outside: (folder / "one.txt").symlink_to(outside / "file")),
    "a file that is not there": ("one.txt", lambda folder, outside: (folder / "one.txt").symlink_to(outside / "new")),
    "its folder": ("sub", lambda folder, outside: (folder / "sub").symlink_to(outside)),
    "a folder above": ("sub", lambda folder, outside: (folder / "sub").symlink_to("..")),
    "a folder in the folder": ("sub", lambda folder, outside: (folder / "sub").symlink_to(".")),
}


@pytest.mark.parametrize("case", LINKS)
def test_nothing_is_written_through_a_link(tmp_path, case):
    folder, outside = tmp_path / "folder", tmp_path / "outside"
    folder.mkdir()
    outside.mkdir()
    (outside / "file").write_text("mine")
    name, link = LINKS[case]
    link(folder, outside)
    before = content(tmp_path)
    told = error_of(folders.write, folder, {"a.txt": "a", "one.txt": "1", "sub/two.txt": "2"}, kind=folders.NotWritten)
    assert told == f"{folder}/{name}: it is a symbolic link, and nothing is written through one: delete it"
    assert content(tmp_path) == before


@pytest.mark.parametrize("path", ["../x", "/tmp/x", "sub/../../x", "", ".", "..", "a\0b"])
def test_nothing_is_written_outside_of_the_folder(tmp_path, path):
    folder = tmp_path / "folder"
    told = error_of(folders.write, folder, {"a.txt": "a", path: "x"}, kind=folders.NotWritten)
    assert "it is not in the folder" in told
    assert content(tmp_path) == {}, "also the folder is not made"


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo], ids=["folder", "pipe"])
def test_what_is_no_regular_file_is_not_replaced(tmp_path, make):
    make(tmp_path / "one")
    told = error_of(folders.write, tmp_path, {"one": "1"}, kind=folders.NotWritten)
    assert told == f"{tmp_path}/one: it is not a regular file"


def test_what_is_deleted_is_a_file_in_the_folder(tmp_path):
    folder, outside = tmp_path / "folder", tmp_path / "outside"
    for one in (folder / "sub", outside, folder / "badges"):
        one.mkdir(parents=True)
        (one / "x.svg").touch()
    (folder / "link").symlink_to(outside)
    (folder / "x.svg").symlink_to(outside / "x.svg")
    names = ["link/x.svg", "../outside/x.svg", f"{outside}/x.svg", "x.svg", "sub", "none", "none/x", "badges/x.svg"]
    folders.write(folder, {"index": ""}, deletes=names)
    assert (outside / "x.svg").exists() and (folder / "x.svg").is_symlink() and (folder / "sub/x.svg").exists()
    assert not (folder / "badges/x.svg").exists()


def test_a_named_file_is_where_its_links_lead(tmp_path):
    (tmp_path / "runs").mkdir()
    (tmp_path / "latest").symlink_to("runs/7")
    assert folders.write_file(tmp_path / "latest", "7") == ""
    assert (tmp_path / "latest").is_symlink() and (tmp_path / "runs/7").read_text() == "7"
    (tmp_path / "round").symlink_to("round")
    assert error_of(folders.write_file, tmp_path / "round", "", kind=folders.NotWritten).startswith(f"{tmp_path}/round")


def test_a_file_keeps_its_permissions_and_its_other_names(tmp_path):
    one, other = tmp_path / "one", tmp_path / "other"
    one.write_text("old")
    one.chmod(0o640)
    other.hardlink_to(one)
    folders.write(tmp_path, {"one": "new"})
    assert (one.read_text(), one.stat().st_mode & 0o777, other.read_text()) == ("new", 0o640, "old")


def test_what_a_killed_command_left_is_removed_and_what_another_one_writes_stays(tmp_path):
    def within(file):
        file.write(b"one")
        folders.write(tmp_path, {"two": "2"})

    left = tmp_path / ".shardproof-left"
    left.mkdir()
    (left / "0").write_text("half")
    folders.write(tmp_path, {"one": within})
    assert content(tmp_path) == {"one": b"one", "two": b"2"}


# A kill, a full disk and a folder that is read-only, at each write of each command


def summary(name, number=1, **changes):
    results = {name: {"version": "1", "score": "1/1", "profiles": {}, "verdicts": {"pass": 1}, "failed": {}}}
    return {
        "run_id": str(number) * 32, "digest": "", "contract": "2026.12", "hardware": "cpu-8", "torch": "2.13.0",
        "shardproof": "0.1", "shardproof_commit": "", "started": "2026-11-20", "implementations": results,
    } | changes  # fmt: skip


def repository(folder, *summaries):
    for one in summaries:
        path = folder / place_of(one)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(one))


def submit(folder):
    return main(["submit", "--to", str(folder / "results")])


def page(folder):
    return main(["page", str(folder / "run.json"), "-o", str(folder / "page")])


def merge(folder):
    return main(["merge", str(folder / "run.json"), "-o", str(folder / "all.json.gz")])


def run(folder):
    """What a run does with its file; the plugin prints the error, and the exit code is 4 at the start, else 7."""
    try:
        journal = Journal(folder / "all.json.gz")
    except ValueError as error:
        os.write(2, f"{error}\n".encode())
        return 4
    journal.describe(Environment(python="3", torch="2", platform="x", device="cpu", implementations={}))
    ids = [f"s.py::test_{number}[w2]" for number in range(2)]
    journal.select({"reference": ids})
    for one in ids:
        journal.add(samples.whole_case() | {"id": one})
    if journal.finish(reason="", exit_code=0):
        return 0
    os.write(2, f"{journal.error}\n".encode())
    return 7


COMMANDS = {"submit": (submit, 2), "page": (page, 2), "merge": (merge, 2), "run": (run, 7)}

#: What changes a folder.
WRITES = ("open", "mkdir", "write", "pwrite", "link", "rename", "replace", "fsync", "unlink", "rmdir", "fchmod")


def is_harmless(name, arguments):
    """Whether a call only opens a file to read it, or prints a message."""
    is_reading = name == "open" and not arguments[1] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
    return is_reading or (name == "write" and arguments[0] == 2)


class Failing:
    """Fails at the n-th change of a folder, and those after it, or kills the process there."""

    def __init__(self, monkeypatch, at, how):
        self.count, self.at, self.how = 0, at, how
        for name in WRITES:
            monkeypatch.setattr(os, name, self.around(name, getattr(os, name)))

    def around(self, name, function):
        def failing(*arguments, **options):
            if is_harmless(name, arguments):
                return function(*arguments, **options)
            number, self.count = self.count, self.count + 1
            if self.at is not None and number == self.at and self.how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            # A full disk gives back the space of what is deleted; a disk that fails once works again.
            space = name in ("open", "mkdir", "write", "pwrite", "link", "fsync")
            is_failing = number >= self.at if self.how == "full" and space else number == self.at
            if self.at is not None and self.how != "kill" and is_failing and (space or self.how != "full"):
                raise OSError(
                    {"full": errno.ENOSPC, "read-only": errno.EROFS, "broken": errno.EIO}[self.how], "it fails"
                )
            return function(*arguments, **options)

        return failing


@pytest.fixture
def made(tmp_path, monkeypatch):
    """A folder with what the commands read, and what an earlier one has written."""
    monkeypatch.setattr("shardproof.reports.page.render", lambda *_, **__: "<html>new</html>")
    folder = tmp_path / "folder"
    (folder / "page").mkdir(parents=True)
    (folder / "page/index.html").write_text("old")
    (folder / "all.json.gz").write_bytes(b"old")
    (folder / "run.json").write_text(json.dumps(samples.journal(samples.case())))
    repository(folder / "results", summary("gone"))
    assert submit(folder) == 0
    shutil.rmtree(folder / "results/runs")
    repository(folder / "results", summary("reference"), summary("other", 2))
    return folder


def forked(command, folder):
    """Run a command in a process of its own; its exit code, or the signal that ended it, below 0."""
    if not (pid := os.fork()):
        code = 99
        with contextlib.suppress(BaseException):
            code = command(folder)
        os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def count_of_writes(command, folder, monkeypatch):
    with monkeypatch.context() as patch:
        counting = Failing(patch, None, "")
        assert command(folder) == 0
        return counting.count


def known(folder):
    """What a user reads in a folder; of run files, whose times and ids differ, that they are complete."""
    found = {key: value for key, value in content(folder).items() if key not in hidden(folder) and value is not False}
    for key, value in found.items():
        if key.endswith(".gz") and value != b"old":
            found[key] = [case.id for case in load_run(folder / key).cases]
    return {key: value for key, value in found.items() if not key.endswith(".partial")}


def hidden(folder):
    """What is beside the files of a folder, while they are written."""
    return [key for key in content(folder) if any(part.startswith(".shardproof-") for part in Path(key).parts)]


@pytest.mark.parametrize("how", ["kill", "full", "broken"])
@pytest.mark.parametrize("name", [pytest.param("submit", marks=pytest.mark.nightly), *[*COMMANDS][1:]])
def test_a_command_that_fails_at_any_write_leaves_nothing_half_written(made, tmp_path, monkeypatch, capfd, name, how):
    command, code = COMMANDS[name]
    start = tmp_path / "start"
    shutil.copytree(made, start)
    old, count = known(made), count_of_writes(command, made, monkeypatch)
    new = known(made)
    assert count >= 5 and new != old
    for at in range(count):
        shutil.rmtree(made)
        shutil.copytree(start, made)
        capfd.readouterr()
        with monkeypatch.context() as patch:
            Failing(patch, at, how)
            ended = forked(command, made) if how == "kill" else command(made)
        error = capfd.readouterr().err
        found = known(made)
        where = f"write {at} of {count}"
        if how == "kill":
            assert ended == -signal.SIGKILL, where
            wrong = [key for key, value in found.items() if value not in (old.get(key), new.get(key))]
            assert not wrong, f"{where}: half written"
            assert not [key for key in old if key not in found and key in new], f"{where}: lost"
        elif ended == 0:  # what failed has removed what is beside the files
            assert found == new, where
        else:
            assert ended == code or (name == "run" and ended == 4), where
            assert error.count("\n") == 1 and "it fails" in error, (where, error)
            assert found == old, where
        assert forked(command, made) == 0, f"{where}: the next command does not mend what this one left"
        assert known(made) == new and not hidden(made), where


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_in_a_read_only_folder_says_so(made, monkeypatch, capfd, name):
    command, code = COMMANDS[name]
    old = known(made)
    capfd.readouterr()
    with monkeypatch.context() as patch:
        for write in WRITES:
            patch.setattr(os, write, read_only(write, getattr(os, write)))
        assert command(made) == (4 if name == "run" else code)
    assert known(made) == old and not hidden(made)
    error = capfd.readouterr().err
    assert error.count("\n") == 1 and "Read-only file system" in error


def read_only(name, function):
    def refusing(*arguments, **options):
        if is_harmless(name, arguments):
            return function(*arguments, **options)
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    return refusing


def test_a_disk_that_is_full_in_the_middle_of_a_file_is_as_one_that_is_full_before(tmp_path):
    (tmp_path / "one").write_text("old")

    def half(file):
        file.write(b"half")
        file.flush()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    told = error_of(folders.write, tmp_path, {"two": "2", "one": half}, kind=folders.NotWritten)
    assert told == f"{tmp_path}/one: No space left on device"
    assert content(tmp_path) == {"one": b"old"}


# Names


NAMES = ["x" * 300, "Ж" * 100, "%" * 200, "a\x01b", "a\nb", ".hidden", "..", ".", "a/b", "../../x", "a\ud800b", "a\x7f",
         "\u202eabc", "￾", "<b>&", ""]  # fmt: skip


@pytest.mark.parametrize("name", NAMES, ids=ascii)
def test_any_name_makes_a_badge_that_is_xml(tmp_path, name):
    folder = tmp_path / "results"
    repository(folder, summary(name), summary("reference", 2))
    assert submit(tmp_path) == 0
    rows = json.loads((folder / "index.json").read_text())
    badges = sorted(path.name for path in (folder / "badges").iterdir())
    assert sorted(row["badge"] for row in rows) == [f"badges/{one}" for one in badges] and len(badges) == 2
    for badge in badges:
        assert len(badge.encode()) <= 255 and badge.isascii() and badge.isprintable() and badge[0] != "."
        ElementTree.fromstring((folder / "badges" / badge).read_bytes())
    assert submit(tmp_path) == 0, "also the next time"


def test_names_of_other_texts_differ():
    texts = [*NAMES, "x" * 301, "x" * 299 + "y", "Ж" * 101, "%2Ehidden"]
    names = [folders.name_of(text, ending=".svg") for text in texts]
    assert len({*names}) == len(names) and folders.name_of("torch.fsdp-cpu-8", ending=".svg") == "torch.fsdp-cpu-8.svg"


def test_submit_deletes_what_its_own_index_names(tmp_path):
    folder = tmp_path / "results"
    repository(folder, summary("gone"))
    assert submit(tmp_path) == 0
    shutil.rmtree(folder / "runs")
    repository(folder, summary("reference"))
    (folder / "badges/own.svg").touch()
    (folder / "notes.txt").touch()
    rows = json.loads((folder / "index.json").read_text())
    forged = [{"badge": name} for name in ("notes.txt", "badges/../notes.txt", "../x", "badges/sub/x.svg", 7)]
    (folder / "index.json").write_text(json.dumps([*rows, *forged, None]))
    assert submit(tmp_path) == 0
    assert sorted(path.name for path in (folder / "badges").iterdir()) == ["own.svg", "reference-cpu-8.svg"]
    assert (folder / "notes.txt").exists()


# No other writer


#: Functions outside of ``folders`` that change files, and why they may: which files these are.
OTHERS = {
    ("harness/adapters/olmo_core.py", "consolidated"): "a temporary folder",
    ("harness/plugin/journal.py", "_append"): "the run file, in which a record is as soon as its case has ended",
    ("harness/plugin/journal.py", "_open"): "the run file: no link is followed",
    ("harness/plugin/journal.py", "_write_at"): "the run file",
    ("harness/plugin/journal.py", "finish"): "the run file, renamed when it is complete",
    ("harness/plugin/state.py", "finish_journal"): "a folder of scratch",
    ("harness/plugin/state.py", "select"): "a folder of scratch",
    ("harness/plugin/resuming.py", "__init__"): "the journal of an earlier attempt, beside that of this one",
    ("harness/plugin/resuming.py", "close"): "the note of running cases next to the run file",
    ("harness/plugin/resuming.py", "forget"): "the journal of an earlier attempt",
    ("harness/training/checking.py", "_remove"): "a temporary folder",
    ("harness/training/recording.py", "_attach_to"): "the folder that make_new has made, of a module that was no model",
    ("harness/training/recording.py", "write_values"): "values, in the folder that make_new has made",
    ("harness/training/starting.py", "check"): "a temporary folder",
    ("harness/training/trained_model.py", "save"): "a temporary folder, or that of --keep, which may have no links",
    ("harness/training/trials.py", "run"): "a temporary folder",
    ("harness/reproducing/shrinking.py", "_run"): "a temporary folder",
    ("harness/reproducing/shrinking.py", "tried"): "a temporary folder",
    ("harness/reproducing/tape.py", "recorded"): "the temporary folder of reproduce",
    ("shardproof/__main__.py", "console"): "",
    ("shardproof/commands/check.py", "_save_and_resume"): "a temporary folder",
    ("shardproof/commands/check.py", "check"): "a temporary folder",
    ("shardproof/commands/findings.py", "_output"): "a temporary folder",
    ("shardproof/commands/findings.py", "_report"): "a temporary folder",
    ("shardproof/commands/reproduce.py", "_recorded"): "a temporary folder",
    ("shardproof/commands/reproduce.py", "_run"): "a temporary folder",
}


#: Rooms whose modules have only files of the processes of a run: directories of scratch, locks, keys.
OF_A_RUN = ("harness/worlds/", "harness/parity/exchange.py", "harness/collectives/board.py")

_OF_OS = {"mkdir", "makedirs", "replace", "rename", "renames", "unlink", "remove", "rmdir", "link", "symlink", "chmod",
          "truncate", "ftruncate", "mkfifo", "mknod", "write", "pwrite"}  # fmt: skip
_OF_PATHS = {"write_text", "write_bytes", "mkdir", "touch", "unlink", "rmdir", "rename", "symlink_to", "hardlink_to",
             "chmod"}  # fmt: skip
_OF_MODULES = {"shutil": None, "tempfile": None, "torch": {"save"}, "os": _OF_OS}
_OF_NAMES = {"save_file", "mkdtemp", "mkstemp", "copyfile", "copytree", "rmtree", "move"}
_READING = {"which", "get_terminal_size", "gettempdir", "disk_usage"}


def _writes(call):
    """Whether a call may change files, by its name alone."""
    function = call.func
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    owner = getattr(getattr(function, "value", None), "id", "") if isinstance(function, ast.Attribute) else ""
    if name in _READING:
        return False
    if owner in _OF_MODULES:
        names = _OF_MODULES[owner]
        flags = {one.attr for one in ast.walk(call) if isinstance(one, ast.Attribute)}
        return names is None or name in names or (name == "open" and bool(flags & {"O_CREAT", "O_WRONLY", "O_RDWR"}))
    if name in ("open", "ZipFile", "GzipFile"):
        given = [
            one.value for one in [*call.args, *(key.value for key in call.keywords)] if isinstance(one, ast.Constant)
        ]
        return any(isinstance(one, str) and set(one) & set("wax+") and len(one) <= 3 for one in given)
    is_path = name in _OF_PATHS or (name == "replace" and len(call.args) == 1 and not call.keywords and owner != "")
    return is_path or name in _OF_NAMES


def _writers(text):
    """Yield the functions of a module in which files may change."""

    def visit(node, function):
        for child in ast.iter_child_nodes(node):
            inner = child.name if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)) else function
            if isinstance(child, ast.Call) and _writes(child):
                yield inner
            yield from visit(child, inner)

    yield from visit(ast.parse(text), "")


def test_no_other_module_writes_a_users_files():
    found = set()
    for room in ("shardproof", "reports", "harness"):
        for path in sorted((ROOT / room).rglob("*.py")):
            name = str(path.relative_to(ROOT))
            if name.startswith(OF_A_RUN) or name == "shardproof/folders.py" or path.is_symlink():
                continue
            found |= {(name, function) for function in _writers(path.read_text(encoding="utf-8"))}
    others = {one for one in found if one not in OTHERS}
    assert not others, f"write these through shardproof/folders.py, or say here why not: {sorted(others)}"
    assert not OTHERS.keys() - found, "these write nothing any more"


@pytest.mark.parametrize(
    "line",
    [
        "open(path, 'w')", "open(path, mode='ab')", "path.open('x')", "path.write_text('')", "path.write_bytes(b'')",
        "os.open(path, os.O_WRONLY)", "os.replace(a, b)", "path.replace(b)", "path.rename(b)", "path.unlink()",
        "shutil.rmtree(path)", "shutil.copy(a, b)", "torch.save(a, b)", "save_file(a, b)", "path.mkdir()",
        "os.makedirs(a)", "path.symlink_to(a)", "tempfile.mkdtemp()", "zipfile.ZipFile(path, 'w')",
    ],
)  # fmt: skip
def test_a_new_writer_is_seen(line):
    assert list(_writers(f"def new():\n    {line}\n")) == ["new"]


@pytest.mark.parametrize("line", ["open(path)", "path.open('rb')", "text.replace('a', 'b')", "os.open(p, os.O_RDONLY)"])
def test_what_reads_is_no_writer(line):
    assert not list(_writers(f"def new():\n    {line}\n"))
