"""What an installed shardproof does without a clone, and what it leaves alone; and the same for a clone on the path."""

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile

import pytest

from shardproof import contract, pages
from tests.installations import FOLDERS, ROOT, build, copy_of_the_sources, install, run

pytestmark = pytest.mark.sampled


def sources(folder):
    """The folder's files as git would see them, as paths in a wheel."""
    prefix = "" if folder == "fsdp_impl" else "shardproof/"
    files = [path for path in (ROOT / folder).rglob("*") if path.is_file()]
    kinds = (".css", ".html", ".js", ".py", ".svg", ".toml", ".tsv", ".typed")
    return {f"{prefix}{path.relative_to(ROOT)}" for path in files if path.suffix in kinds}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel, built from a copy of the sources."""
    copy = copy_of_the_sources(tmp_path_factory.mktemp("sources"))
    # A further implementation's known failures.
    (copy / "suites/expectations/sample.toml").touch()
    return build(copy, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """A folder that holds what the wheel installs."""
    site = tmp_path_factory.mktemp("site")
    install(wheel, site)
    return site


@pytest.fixture(params=["wheel", "clone"])
def path(request):
    """Where shardproof is imported from."""
    return request.getfixturevalue("installed") if request.param == "wheel" else ROOT


ADAPTER = """
from shardproof.harness.adapters.reference import ReferenceAdapter
class {name}(ReferenceAdapter):
    name = "theirs"
"""
NEIGHBOUR = {
    "harness/__init__.py": "NAME = 'their harness'\n",
    "suites/__init__.py": "NAME = 'their suites'\n",
    "suites/test_training.py": "def test_single_unit_of_theirs():\n    raise AssertionError('theirs ran')\n",
    "reports/__init__.py": "NAME = 'their reports'\n",
    "conftest.py": """
def pytest_addoption(parser):
    for name in ("--device", "--impl", "--world"):
        parser.addoption(name)
""",
    "test_own.py": """
import sys
import harness, reports

def test_own(request):
    assert (harness.NAME, reports.NAME) == ("their harness", "their reports")
    assert request.config.getoption("--device") == "tpu"
    assert not [name for name in sys.modules if name.startswith("shardproof")]

def test_that_fails():
    raise AssertionError("as it should")
""",
}


@pytest.fixture
def neighbour(tmp_path):
    """A project with packages and options that have the names of ours."""
    for name, text in NEIGHBOUR.items():
        file = tmp_path / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
    return tmp_path


def test_the_wheel_holds_every_source_and_no_test(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
        scripts = next(name for name in archive.namelist() if name.endswith("entry_points.txt"))
        assert archive.read(scripts).decode() == "[console_scripts]\nshardproof = shardproof.__main__:console\n"
    # The links to other folders are followed by `sources` of those.
    rooms = ("", "commands", "own", "testing", "trainers")
    own = [path for room in rooms for path in (ROOT / "shardproof" / room).iterdir()]
    extra = {path.relative_to(ROOT).as_posix() for path in own if path.is_file()}
    extra |= {"shardproof/commit.txt", "shardproof/contract.md", "shardproof/suites/expectations/sample.toml"}
    extra |= {f"shardproof/pages/{name}" for name in pages.names()}
    assert names == extra.union(*map(sources, FOLDERS))


def commits(archive):
    """The commits that an archive has, by the names of the files."""
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as opened:
            return {name: opened.read(name).decode() for name in opened.namelist() if name.endswith("commit.txt")}
    with tarfile.open(archive) as opened:
        names = [name for name in opened.getnames() if name.endswith("commit.txt")]
        return {name: opened.extractfile(name).read().decode() for name in names}


def test_a_wheel_and_an_sdist_know_the_commit_of_the_clone(tmp_path_factory):
    """And so does the wheel that is built from the sdist; the clone itself stays as it was."""
    # Not tmp_path, in which every run file is validated: the clone has the published ones.
    folder = tmp_path_factory.mktemp("clone-and-builds")
    clone = folder / "clone"
    clone.mkdir()
    copy_of_the_sources(clone)
    shutil.copy(ROOT / ".gitignore", clone)
    author = ["-c", "user.name=x", "-c", "user.email=x@y"]
    for command in (["init", "-q"], ["add", "."], [*author, "commit", "-q", "-m", "x"]):
        subprocess.run(["git", *command], cwd=clone, check=True)
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=clone, capture_output=True, text=True).stdout
    wheel, sdist = build(clone, folder / "wheel"), build(clone, folder / "sdist", "sdist")
    assert commits(wheel) == {"shardproof/commit.txt": head}
    name = sdist.name.removesuffix(".tar.gz")
    assert commits(sdist) == {f"{name}/shardproof/commit.txt": head}
    status = subprocess.run(["git", "status", "--porcelain"], cwd=clone, capture_output=True, text=True)
    assert status.stdout == ""
    with tarfile.open(sdist) as opened:
        opened.extractall(folder / "unpacked", filter="data")
    again = build(folder / "unpacked" / name, folder / "again")
    assert commits(again) == {"shardproof/commit.txt": head}
    with zipfile.ZipFile(wheel) as one, zipfile.ZipFile(again) as other:
        assert sorted(one.namelist()) == sorted(other.namelist())


def test_a_wheel_and_an_sdist_have_the_pages_that_were_made(tmp_path_factory):
    """Also the wheel of the sdist has them; links that lead out of the package are texts."""
    folder = tmp_path_factory.mktemp("made")
    (folder / "clone/out/docs").mkdir(parents=True)
    clone = copy_of_the_sources(folder / "clone")
    made = run("-c", "from shardproof import contract; print(contract.digest())", cwd=clone, path=clone, code=0).stdout
    pages = {"sources.txt": made, "features.md": "[one](../../docs/contract.md), [two](crossed.md)\n"}
    for name, text in pages.items():
        (clone / "out/docs" / name).write_text(text)
    sdist = build(clone, folder / "sdist", "sdist")
    with tarfile.open(sdist) as opened:
        opened.extractall(folder / "unpacked", filter="data")
    unpacked = folder / "unpacked" / sdist.name.removesuffix(".tar.gz")
    for wheel in (build(clone, folder / "wheel"), build(unpacked, folder / "again")):
        with zipfile.ZipFile(wheel) as archive:
            names = {name for name in archive.namelist() if name.startswith("shardproof/docs/")}
            assert names == {f"shardproof/docs/{name}" for name in pages}
            assert archive.read("shardproof/docs/features.md").decode() == "one, [two](crossed.md)\n"
            assert archive.read("shardproof/contract.md").decode() == (ROOT / "docs/contract.md").read_text()


def test_a_wheel_of_sources_without_git_does_not_know_its_commit(wheel):
    assert commits(wheel) == {"shardproof/commit.txt": "unknown\n"}


def test_the_suites_of_a_wheel_and_of_a_clone_have_one_hash(wheel, tmp_path):
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    (tmp_path / "site/shardproof/suites/expectations/sample.toml").unlink()
    script = "from shardproof.harness.plugin import origin, packaged; "
    script += "print(origin.hash_of(packaged.files()))"
    hashes = {run("-c", script, cwd=tmp_path, path=path).stdout for path in (tmp_path / "site", ROOT)}
    assert len(hashes) == 1 and len(hashes.pop().strip()) == 12


def test_other_runs_of_pytest_do_not_notice(neighbour, path):
    done = run("-m", "pytest", "--device", "tpu", "--impl", "x", "-p", "no:cacheprovider", cwd=neighbour, path=path)
    assert done.returncode == 1
    assert "shardproof" not in done.stdout.replace(str(path), "") + done.stderr
    assert "FAILED test_own.py::test_that_fails - AssertionError: as it should" in done.stdout
    assert "2 failed, 1 passed" in done.stdout, "their own failures, and nothing else"


def test_the_suites_run_beside_a_neighbour(neighbour, path):
    """Their conftest, options and packages take no part, and files are written where the command was given."""
    before = {file.relative_to(neighbour) for file in neighbour.rglob("*")}
    options = ["--impl", "reference", "--device", "cpu", "--world", "2", "--report", "out/run.json"]
    # pytest-benchmark, where it is installed, makes a folder in any run.
    options += ["-p", "no:benchmark"]
    done = run("-m", "shardproof", "run", "-k", "test_single_unit", *options, cwd=neighbour, path=path, code=0)
    assert "reference: 3 pass" in done.stdout
    new = {file.relative_to(neighbour).parts[0] for file in neighbour.rglob("*")} - {file.parts[0] for file in before}
    assert new == {"out", ".pytest_cache"}
    shown = run("-m", "shardproof", "report", "--cases", "out/run.json", cwd=neighbour, path=path)
    assert "\nsuites/test_training.py::test_single_unit[w2-16x15-15x8]  TRAINING-1   pass\n" in shown.stdout


def test_a_node_id_is_one_of_the_packaged_suites(neighbour, path):
    case = "suites/test_training.py::test_single_unit"
    done = run("-m", "shardproof", "run", case, "--impl", "reference", "--collect-only", "-q", cwd=neighbour, path=path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{case}[reference-w2-16x15-15x8]" in done.stdout.splitlines()


def test_nightly_cases_wait_for_their_night(neighbour, path):
    listed = ["-m", "shardproof", "run", "suites/test_compiled.py", "--impl", "reference", "--collect-only", "-q"]
    usual = run(*listed, cwd=neighbour, path=path).stdout
    nightly = run(*listed, "-m", "nightly", cwd=neighbour, path=path).stdout
    assert "-inductor-" in nightly and "-inductor-" not in usual
    assert not set(usual.splitlines()) & {line for line in nightly.splitlines() if "::" in line}


def test_adapters_of_the_current_directory_are_found(neighbour, path):
    (neighbour / "mine.py").write_text(ADAPTER.format(name="Mine"))
    script = f"import sys; sys.path[0] = {str(path)!r}; from shardproof.__main__ import main; sys.exit(main())"
    options = ["--impl", "mine:Mine", "--device", "cpu", "--world", "2"]
    done = run("-c", script, "run", "-k", "test_single_unit", *options, cwd=neighbour, path=path, code=0)
    assert "mine:Mine: 3 pass" in done.stdout


def test_a_failure_is_reproduced_from_another_directory(neighbour, path):
    (neighbour / "wrong.py").write_text(
        f"{ADAPTER.format(name='Wrong')}    def backward(self, loss): loss.mul(2).backward()\n"
    )
    options = ["-k", "16x15-15x8", "--impl", "wrong:Wrong", "--device", "cpu", "--world", "2"]
    case = "suites/test_training.py::test_single_unit"
    done = run("-m", "shardproof", "run", case, *options, cwd=neighbour, path=path)
    (line,) = {line for line in done.stdout.splitlines() if line.startswith("reproduce: ")}
    line = line.removeprefix("reproduce: ")
    assert f" -m shardproof run '{case}[wrong:Wrong-w2-16x15-15x8]' --impl wrong:Wrong --device cpu)" in line
    again = subprocess.run(["bash", "-c", line], cwd="/", capture_output=True, text=True, timeout=240)
    assert again.returncode == 1 and "1 failed" in again.stdout, again.stdout + again.stderr
    assert "gradient of " in again.stdout and f"\nreproduce: {line}\n" in again.stdout, "it reproduces itself"


def test_commands_that_do_not_exist(tmp_path, path):
    done = run("-m", "shardproof", "summary", cwd=tmp_path, path=path)
    assert (done.returncode, done.stdout) == (2, "")
    known = (
        "run, report, page, gate, expectations, findings, merge, submit, doctor, record, compare, state, check, "
        "reproduce, plan, implementations, explain or torch-names"
    )
    assert done.stderr == f"shardproof: 'summary' is not a command; use {known}\n"
    done = run("-m", "shardproof", "report", "none.json", cwd=tmp_path, path=path)
    assert (done.returncode, done.stderr) == (2, "shardproof: none.json: No such file or directory\n")
    done = run("-m", "shardproof", "--help", cwd=tmp_path, path=path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("usage: shardproof COMMAND")


def test_findings_are_in_a_clone_alone(tmp_path, path):
    done = run("-m", "shardproof", "findings", "F-2", cwd=tmp_path, path=path)
    if path == ROOT:
        assert done.returncode == 0 and "clip_grad_norm_" in done.stdout, done.stderr
    else:
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
        assert "they are in a clone of shardproof" in done.stderr


@pytest.mark.parametrize(
    ("command", "needs"),
    [("run", "torch and pytest"), ("plan", "torch"), ("implementations", "torch"), ("torch-names", "torch")],
)
def test_commands_without_torch(tmp_path, path, command, needs):
    # -S leaves out the folder in which packages are installed.
    bare = [sys.executable, "-S", "-m", "shardproof", command]
    environment = os.environ | {"PYTHONPATH": str(path)}
    done = subprocess.run(bare, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (2, "")
    names = needs.replace(" and ", " ")
    assert done.stderr == f"shardproof {command} needs {needs}; `pip install {names}` brings what is missing\n"


def test_runs_are_read_without_torch(tmp_path, path):
    """The contract, too, is read of its page, and of a closed version the items are known."""
    published = sorted((ROOT / "reports/published").glob("cpu-torch-2.1[45]-*.json.gz"))
    commands = (
        ["report", "--profiles", published[0]],
        ["gate", *published, "--allow", "torch"],
        ["merge", *published, "--output", tmp_path / "merged.json"],
    )
    for command in commands:
        bare = [sys.executable, "-S", "-m", "shardproof", *map(str, command)]
        environment = os.environ | {"PYTHONPATH": str(path)}
        done = subprocess.run(bare, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
        assert (done.stderr, bool(done.stdout)) == ("", True), done.stderr
    script = "from shardproof import contract; print(contract.version(), len(contract.items('2026.12')))"
    done = subprocess.run(
        [sys.executable, "-S", "-c", script], env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.stdout == f"{contract.version()} 2870\n", done.stderr
