"""The files of findings/: each can be read, is named where it matters, and is run and judged by the command."""

import ast
import functools
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from expecttest import assert_expected_inline

from shardproof import bug_report
from shardproof.commands import findings as command
from shardproof.findings import FindingError, load, markdown, read
from shardproof.harness.adapters.registry import BUILT_IN
from tests.errors import error_of
from tests.harness.inner import python

ROOT = Path(__file__).parents[1]
FINDINGS = load()
HEADER = '# implementations = ["torch.fsdp"]'


def test_the_pages_are_up_to_date():
    python("docs/make.py", "--check", "findings", "unreported", code=0)


def test_headers_name_what_there_is():
    contract = set(re.findall(r"^\| ([A-Z]+-\d+) \|", (ROOT / "docs/contract.md").read_text(), flags=re.MULTILINE))
    for one in FINDINGS:
        assert set(one.implementations) <= {*BUILT_IN, "torch", "torchft"}, one.id
        assert set(one.requirements) <= contract, one.id


def test_each_finding_is_named_where_it_matters_or_says_why_not():
    """By an expectation, by an adapter or another part of the harness, by a case, an example or a document."""
    written = {"findings.md", "matrix.md", "unreported.md"}  # by programs, and name all or those of old runs
    folders = [ROOT / name for name in ("suites", "harness", "examples", "docs", "shardproof/testing")]
    places = [path for folder in folders for path in folder.rglob("*") if path.suffix in (".py", ".toml", ".md")]
    texts = [path.read_text() for path in places if path.name not in written]
    named = {f"F-{int(number)}" for text in texts for number in re.findall(r"\bF-?(\d+)\b", text)}
    assert {one.id for one in FINDINGS} - named == {one.id for one in FINDINGS if one.unlisted is not None}


@pytest.mark.parametrize("finding", FINDINGS, ids=[one.id for one in FINDINGS])
def test_a_reproducer_needs_torch_and_what_its_header_names(finding):
    imported = set()
    for node in ast.walk(ast.parse(finding.path.read_text())):
        if isinstance(node, ast.Import):
            imported |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add(node.module.partition(".")[0])
    packages = {re.match(r"[a-z-]+", one)[0].replace("-", "_") for one in finding.packages}
    assert imported - sys.stdlib_module_names - {"torch"} == packages


# Reports


def test_each_of_the_page_has_a_severity():
    page = (ROOT / "docs/unreported.md").read_text()
    listed = set(re.findall(r"^\| \[(F-\d+)\]", page, flags=re.MULTILINE))
    mine = [one for one in FINDINGS if "torch.fully_shard" in one.implementations]
    mine = [one for one in mine if one.is_there and not one.is_known_upstream]
    assert {one.id for one in mine} == listed and all(one.severity for one in mine)


REPORTED = [one for one in FINDINGS if one.right is not None]


@pytest.mark.parametrize("finding", REPORTED, ids=[one.id for one in REPORTED])
def test_a_report_has_nothing_of_ours(finding):
    said = f"{finding.title}\n{finding.paragraph}\n{finding.right}\n{finding.program}"
    ours = r"shardproof|suites|reproducer|\bSeen by\b|\b[A-Z]{4,}-\d+\b|\bF-?\d+\b|the reference\b"
    assert not re.search(ours, said), re.search(ours, said)
    bug_report.check(finding)
    report = ROOT / "findings/reports" / f"{finding.path.stem}.md"
    if report.exists():
        text = report.read_text()
        assert finding.is_there and f"```python\n{finding.program}```" in text
        assert f"# {finding.title}\n\n{finding.paragraph}\n" in text and f"\nExpected: {finding.right}\n" in text
        (printed,) = re.findall(r"## It prints\n\n```\n(.*?)\n```", text, flags=re.DOTALL)
        # A run's last lines: "(exit code 1)" there.
        assert re.search(
            finding.shows, printed.replace("(it does not end: time limit)", "time limit"), flags=re.MULTILINE
        )


def test_reports_are_of_findings():
    assert {path.stem for path in (ROOT / "findings/reports").iterdir()} <= {one.path.stem for one in REPORTED}


# Reading


def write(folder, name="F001.py", header=HEADER, code="print('wrong')", docstring='"""It is wrong\n\nAlways.\n"""'):
    path = folder / name
    path.write_text(f"{docstring}\n\n# /// finding\n{header}\n# ///\n\n{code}\n")
    return path


def test_what_a_header_says_of_a_version(tmp_path):
    header = f"""{HEADER}
# fixed_in = "2.15"
# reproduces = ["torch 2.12.1 cpu 2026-11-25", "torch 2.14.1 cuda 2026-11-25"]
# does_not_reproduce = ["torch 2.13.0 cpu 2026-11-25"]"""
    finding = read(write(tmp_path, header=header))
    claims = {"2.11.0": None, "2.12.1+cpu": True, "2.13.0": False, "2.14.1": True, "2.15.0.dev1": False}
    assert {version: finding.claim(version) for version in claims} == claims
    assert finding.state == "mended in torch 2.15"
    late = f'{HEADER}\n# since = "2.15"\n# reproduces = ["torch 2.15.0 cpu 2026-11-25"]'
    finding = read(write(tmp_path, header=late))
    assert (finding.claim("2.14.1"), finding.claim("2.16.0")) == (False, True)
    assert finding.state == "reproduces with torch 2.15.0"


def test_threads_have_links():
    assert markdown("https://github.com/a/b/pull/7") == "[a/b#7](https://github.com/a/b/pull/7)"
    thread = "https://github.com/a/b/issues/7 open: x: y"
    assert markdown(thread) == "[a/b#7](https://github.com/a/b/issues/7), open: x: y"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": "F1.py"}, "F1.py: the name of a finding is like F002.py"),
        ({"header": "# gpus = 1"}, "F001.py: implementations is missing"),
        ({"header": f"{HEADER}\n# gpu = 1"}, "F001.py: unknown field 'gpu'"),
        ({"header": f"{HEADER}\n# gpus = true"}, "F001.py: gpus = True should be a number of GPUs"),
        ({"header": f'{HEADER}\n# shows = "("'}, "F001.py: shows: missing ), unterminated subpattern at position 0"),
        ({"header": f"{HEADER}\n# since = 2.15"}, r"F001.py: since = 2.15 should match \d+\.\d+"),
        ({"header": f'{HEADER}\n# packages = "x"'}, "F001.py: packages = 'x' should be a list of strings"),
        ({"header": f'{HEADER}\n# requirements = ["X"]'}, r"F001.py: requirements: 'X' should match [A-Z]+-\d+"),
        ({"header": "# x"}, "F001.py: Expected '=' after a key in a key/value pair (at end of document)"),
        ({"header": f"{HEADER}\n# ///\n# /// finding\n{HEADER}"}, "F001.py: has 2 headers"),
        ({"header": f"{HEADER}\ngpus = 1"}, "F001.py: has 0 headers"),
        ({"docstring": '"""No text."""'}, "F001.py: the docstring is a title in one line, an empty line, and a text"),
        ({"code": ""}, "F001.py: by_hand is missing: a finding without a reproducer says why"),
        ({"code": "print("}, "F001.py: '(' was never closed"),
    ],
)
def test_a_file_that_cannot_be_read(tmp_path, changes, message):
    assert error_of(read, write(tmp_path, **changes), kind=FindingError).startswith(message)


# The command


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Run the command with the findings of tmp_path, in a process with torch 2.13.0 and no GPU."""
    monkeypatch.setattr(command, "load", functools.partial(load, tmp_path))
    monkeypatch.setattr(command, "_version", {"torch": "2.13.0+cpu", "there": "1.5"}.get)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)

    def run(*arguments):
        code = command.findings(arguments)
        captured = capsys.readouterr()
        return code, captured.out + captured.err

    return run


KNOWN = f'{HEADER}\n# reproduces = ["torch 2.13.0 cpu 2026-11-25"]\n# shows = "^wrong$"'


def test_the_index(tmp_path, run):
    write(tmp_path, header=KNOWN)
    write(tmp_path, "F002.py", header=f'{HEADER}\n# by_hand = "has no reproducer"', code="")
    code, printed = run()
    assert code == 0
    assert_expected_inline(
        printed,
        """\
id   implementation  state                         title
F-1  torch.fsdp      reproduces with torch 2.13.0  It is wrong
F-2  torch.fsdp      the reproducer was not run    It is wrong
""",
    )


def test_results_and_what_differs(tmp_path, run):
    write(tmp_path, "F001.py", KNOWN)
    write(tmp_path, "F002.py", KNOWN, "print('right')")
    write(tmp_path, "F003.py", KNOWN, "raise SystemExit('something else')")
    write(tmp_path, "F004.py", HEADER)
    write(tmp_path, "F005.py", f'{HEADER}\n# by_hand = "takes luck"')
    write(tmp_path, "F006.py", f'{KNOWN}\n# packages = ["there==1.4", "absent==1.0"]\n# gpus = 2')
    write(tmp_path, "F007.py", f'{KNOWN}\n# packages = ["there>=1.4"]\n# gpus = 2')
    write(tmp_path, "F008.py", f'{KNOWN}\n# arguments = ["wrong"]', "import sys; print(sys.argv[1])")
    code, printed = run("--run", "-n", "4")
    *lines, counts, differs = printed.splitlines()
    assert code == 1
    assert sorted(lines) == [
        "F-1    reproduces",
        "F-2    does not reproduce",
        "F-3    cannot judge: exit code 1, after 'something else'",
        "F-4    cannot judge: its header does not say what shows the defect; it ended with exit code 0",
        "F-5    not run: takes luck",
        "F-6    not run: needs there==1.4 (here is 1.5) and absent==1.0",
        "F-7    not run: needs 2 GPUs (here is 0)",
        "F-8    reproduces",
    ]
    assert counts.startswith("torch 2.13.0+cpu: ") and "2 reproduces" in counts
    assert differs == "differs: F-2    does not reproduce; its header says that it reproduces"


PLACE = "torch.nn.utils.clip_grad:clip_grad_norm_"
REPORTABLE = f"""{KNOWN}\n# right = "`right`"\n# places = ["{PLACE}"]"""


def test_a_report(tmp_path, run):
    """What it prints is what the program printed, as pasted: without its header, in a file of its own."""
    code = "import os, sys\nprint('[W1201 x.cpp:1] of torch', file=sys.stderr)\nprint('wrong')\nprint(__file__)"
    write(tmp_path, header=f'{REPORTABLE}\n# related = ["https://github.com/a/b/pull/7 open: x"]', code=code)
    report = tmp_path / "new/report.md"
    assert run("--report", "F-1", "-o", str(report)) == (
        0, f"F-1    reproduces, as pasted; {report}: 4 lines of program (made the folder {report.parent})\n",
    )  # fmt: skip
    said = re.sub(r"line \d+|torch 2\.13.*, Python [\d.]+, \w+ \w+", "...", report.read_text())
    assert_expected_inline(
        said,
        """\
# It is wrong

Always.

## Program

`python repro.py`, on a CPU

```python
import os, sys
print('[W1201 x.cpp:1] of torch', file=sys.stderr)
print('wrong')
print(__file__)
```

## It prints

```
wrong
repro.py
```

Expected: `right`

## Suspected place (lines of the torch below)

- `torch/nn/utils/clip_grad.py`, ...: `clip_grad_norm_`

## Versions

.... Seen with 2.13.0 cpu.

## Related

- [a/b#7](https://github.com/a/b/pull/7), open: x
""",
    )


@pytest.mark.parametrize(
    ("header", "code", "expected", "message"),
    [
        (REPORTABLE, "print('right')", 1, "F-1    does not reproduce; no report of it"),
        (f"{REPORTABLE}\n# gpus = 2", "print('wrong')", 1, "F-1    not run: needs 2 GPUs (here is 0); no report of it"),
        (f'{REPORTABLE}\n# fixed_in = "2.14"', "print('wrong')", 2, "F-1 is fixed in torch 2.14: there is nothing to"),
        (KNOWN, "print('wrong')", 2, "F001.py: a report needs the fields shows, right and places; right is missing"),
        (REPORTABLE, "print('wrong')\n\n" * 31, 2, "F001.py: its program has 31 lines, and one of a report at most 30"),
        (REPORTABLE.replace(":clip", ":clap"), "print('wrong')", 2, "F001.py: the installed torch has no torch.nn.ut"),
    ],
)
def test_a_finding_that_cannot_be_reported(tmp_path, run, header, code, expected, message):
    write(tmp_path, header=header, code=code)
    ended, printed = run("--report", "F-1", "-o", str(tmp_path / "report.md"))
    assert (ended, printed.count("\n")) == (expected, 1) and message in printed
    assert not (tmp_path / "report.md").exists()


@pytest.mark.parametrize("more", [[], ["-o", "x", "F-2"], ["-o", "x", "--run"]])
def test_a_report_is_of_one_finding(run, more):
    with pytest.raises(SystemExit) as exit:
        run("--report", "F-1", *more)
    assert exit.value.code == 2


def test_a_reproducer_that_does_not_end(tmp_path, run):
    """Its ranks, which would go on, are ended with it."""
    forever = "while True: time.sleep(1)"
    child = f"subprocess.Popen([sys.executable, '-c', 'import time\\n{forever}'])"
    code = f"import subprocess, sys, time\n{child}\n{forever}"
    write(tmp_path, "F001.py", KNOWN.replace("^wrong$", "^time limit$"), code)
    write(tmp_path, "F002.py", KNOWN, code)
    code, printed = run("--run", "--seconds", "1")
    assert code == 1
    assert printed.splitlines()[:2] == ["F-1    reproduces", "F-2    cannot judge: time limit, after 'no output'"]


def test_what_runs_ends_with_the_command(tmp_path):
    """SIGTERM, as Ctrl-C, ends the reproducer that runs and starts none of those that wait."""
    for name in ("F001.py", "F002.py"):
        noted = tmp_path / f"{name}.pid"
        code = f"import os, pathlib, signal\npathlib.Path({str(noted)!r}).write_text(str(os.getpid()))\nsignal.pause()"
        write(tmp_path, name, KNOWN, code)
    script = (
        "import functools, pathlib, shardproof.commands.findings as command, shardproof.findings as findings; "
        f"command.load = functools.partial(findings.load, pathlib.Path({str(tmp_path)!r})); command.findings(['--run'])"
    )
    running = subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, stderr=subprocess.DEVNULL)
    noted = tmp_path / "F001.py.pid"
    while not (noted.exists() and noted.read_text()):
        assert running.poll() is None
        time.sleep(0.05)
    running.terminate()
    assert running.wait(60) != 0
    with pytest.raises(ProcessLookupError):
        os.kill(int(noted.read_text()), 0)
    assert not (tmp_path / "F002.py.pid").exists()


def test_what_is_as_known_ends_with_zero(tmp_path, run):
    write(tmp_path, "F001.py", KNOWN)
    assert run("--run", "F-1") == (0, "F-1    reproduces\ntorch 2.13.0+cpu: 1 reproduces\n")


@pytest.mark.parametrize("options", [[], ["--run"]])
def test_bad_input_is_one_line(tmp_path, run, options):
    code, printed = run(*options)
    assert (code, printed.count("\n")) == (2, 1)
    assert "has no findings: they are in a clone of shardproof, not in what pip installs" in printed
    write(tmp_path)
    assert run(*options, "F-9") == (2, "shardproof: there is no finding 'F-9'; `shardproof findings` lists them\n")
    write(tmp_path, header="# gpus = 1")
    assert run(*options) == (2, "shardproof: F001.py: implementations is missing\n")
