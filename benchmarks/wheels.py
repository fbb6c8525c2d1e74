"""Fills a folder with the wheels that a GPU host without network needs beside its own torch.

Usage: ``python -m benchmarks wheels FOLDER [NAME ...]``. A name is an extra of shardproof, ``core`` for what shardproof
itself needs, or a requirement such as ``einops>=0.8``; without names it is ``core tests``. What they require is fetched
too, one version of each package, the one of the constraints files where they have it; torch and what comes with it is
not. A package that has no wheel is built here from its source, which must give a pure wheel. Printed are the commands
for the host.
"""

from __future__ import annotations

import argparse
import dataclasses
import email.parser
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from collections.abc import Callable, Iterable, Iterator, Sequence

from packaging.markers import default_environment
from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name, parse_wheel_filename

ROOT = pathlib.Path(__file__).resolve().parents[1]
CONSTRAINTS = sorted(ROOT.glob("constraints*.txt"))

#: torch and the packages that come with its build for CUDA.
OF_TORCH = re.compile(r"(py)?torch(-triton)?|torch(vision|audio)|triton|(nvidia|cuda)-.*")
#: What torch itself requires, so that the host has it.
WITH_TORCH = frozenset(
    {"filelock", "fsspec", "jinja2", "markupsafe", "mpmath", "networkx", "setuptools", "sympy", "typing-extensions"}
)

Fetch = Callable[[Requirement], pathlib.Path]
"""Takes a requirement without marker and returns the path of a wheel in the folder."""


@dataclasses.dataclass(frozen=True)
class Target:
    """The host.

    Attributes:
        python: the version of its Python, such as "3.12".
        platform: the newest platform of wheels that it takes, such as "manylinux_2_28_x86_64".
    """

    python: str
    platform: str

    def environment(self) -> dict[str, str]:
        """Return what markers of requirements are evaluated with."""
        machine = re.sub(r"^[a-z]+(_\d+_\d+|\d+)_", "", self.platform)
        known = {key: str(value) for key, value in default_environment().items()}
        return known | {
            "python_version": self.python,
            "python_full_version": f"{self.python}.0",
            "platform_machine": machine,
            "sys_platform": "linux",
            "platform_system": "Linux",
            "os_name": "posix",
            "extra": "",
        }

    def platforms(self) -> list[str]:
        """Return the platforms of wheels that it takes: that of the host and older ones."""
        newest = re.fullmatch(r"manylinux_2_(\d+)_(.*)", self.platform)
        if newest is None:
            return [self.platform]
        minor, machine = int(newest[1]), newest[2]
        old = {17: "manylinux2014", 12: "manylinux2010", 5: "manylinux1"}
        found = [f"manylinux_2_{one}_{machine}" for one in range(minor, 4, -1)]
        return [*found, *(f"{name}_{machine}" for least, name in old.items() if least <= minor)]


class Refused(ValueError):
    """What was asked for cannot be had; one line."""


@dataclasses.dataclass
class Fetched:
    """What came of it.

    Attributes:
        wheels: by the name of the package, the path of its wheel.
        of_host: the requirements that the host has to meet, with the name of the package that has each.
    """

    wheels: dict[str, pathlib.Path]
    of_host: list[tuple[str, str]]


def requirements(names: Sequence[str], project: pathlib.Path = ROOT / "pyproject.toml") -> list[Requirement]:
    """Return the requirements that the names stand for.

    Args:
        names: extras, "core" or requirements.
        project: the file with the extras.

    Raises:
        Refused: a name is neither, or stands for torch.
    """
    table = tomllib.loads(project.read_text())["project"]
    extras: dict[str, list[str]] = table["optional-dependencies"]
    found: list[Requirement] = []
    for name in names:
        if name == "core":
            found += [one for one in map(Requirement, table["dependencies"]) if not _is_of_torch(one.name)]
            continue
        if name in extras:
            found += map(Requirement, extras[name])
            continue
        try:
            requirement = Requirement(name)
        except InvalidRequirement as error:
            raise Refused(f"{name!r} is no requirement, and the extras are core, {', '.join(extras)}") from error
        if _is_of_torch(requirement.name):
            raise Refused(f"{name!r}: the host's own torch and CUDA are never replaced; leave it out")
        found.append(requirement)
    return found


def fetch_all(wanted: Iterable[Requirement], target: Target, fetch: Fetch, *, without: Iterable[str] = ()) -> Fetched:
    """Fetch the wheels of the requirements and of all that they require.

    Args:
        wanted: the requirements to begin with.
        target: the host.
        fetch: gets one wheel.
        without: the names of packages that the host has.

    Raises:
        Refused: no version of a package meets all requirements.
    """
    on_host = WITH_TORCH | {canonicalize_name(name) for name in without}
    environment = target.environment()
    result = Fetched({}, [])
    asked: dict[str, Requirement] = {}
    queue = [("you", one) for one in wanted]
    while queue:
        owner, one = queue.pop(0)
        if one.marker is not None and not one.marker.evaluate(environment):
            continue
        name = canonicalize_name(one.name)
        if _is_of_torch(name) or name in on_host:
            result.of_host.append((f"{name}{one.specifier}", owner))
            continue
        before = asked.get(name)
        both = one if before is None else _both(before, one)
        if before is not None and both.extras == before.extras and _meets(result.wheels[name], both.specifier):
            asked[name] = both
            continue
        if before is not None and not _meets(result.wheels[name], both.specifier):
            result.wheels.pop(name).unlink()
        asked[name] = both
        path = result.wheels[name] = result.wheels.get(name) or fetch(_plain(both))
        queue += [(path.name, required) for required in _required_by(path, both.extras, environment)]
    kept = {"you", *(path.name for path in result.wheels.values())}
    result.of_host = [(required, owner) for required, owner in result.of_host if owner in kept]
    return result


def _is_of_torch(name: str) -> bool:
    return OF_TORCH.fullmatch(canonicalize_name(name)) is not None


def _both(one: Requirement, other: Requirement) -> Requirement:
    both = Requirement(str(one))
    both.specifier, both.extras = one.specifier & other.specifier, one.extras | other.extras
    return both


def _plain(one: Requirement) -> Requirement:
    return Requirement(f"{one.name}{one.specifier}")


def _meets(wheel: pathlib.Path, specifier: SpecifierSet) -> bool:
    return specifier.contains(parse_wheel_filename(wheel.name)[1], prereleases=True)


def _required_by(wheel: pathlib.Path, extras: set[str], environment: dict[str, str]) -> Iterator[Requirement]:
    """The requirements in a wheel's metadata, those of its extras without their marker."""
    with zipfile.ZipFile(wheel) as archive:
        (metadata,) = (name for name in archive.namelist() if re.fullmatch(r"[^/]+\.dist-info/METADATA", name))
        text = archive.read(metadata).decode()
    for line in email.parser.Parser().parsestr(text).get_all("Requires-Dist", []):
        one = Requirement(line)
        chosen = one.marker is None or any(
            one.marker.evaluate(environment | {"extra": extra}) for extra in ("", *extras)
        )
        if chosen:
            one.marker = None
            yield one


class Pip:
    """Gets wheels by pip, and builds those of packages that have none.

    Args:
        folder: where the wheels go.
        target: the host.
    """

    def __init__(self, folder: pathlib.Path, target: Target) -> None:
        self._folder, self._target = folder, target

    def __call__(self, one: Requirement) -> pathlib.Path:
        """Return the path of the wheel.

        Raises:
            Refused: there is none, or its source does not build to a pure one.
        """
        with tempfile.TemporaryDirectory(dir=self._folder) as scratch:
            platforms = [f"--platform={platform}" for platform in self._target.platforms()]
            host = [f"--python-version={self._target.python}", "--implementation=cp", *platforms]
            said = self._pip("download", "--only-binary=:all:", *host, one, into=scratch)
            if not any(pathlib.Path(scratch).iterdir()):
                # A build is one for this machine, unless the wheel is pure.
                said += self._pip("wheel", one, into=scratch)
            wheels = [*pathlib.Path(scratch).iterdir()]
            if not wheels:
                raise Refused(f"{one}: no wheel for this host and none was built: {said.strip().splitlines()[-1]}")
            (wheel,) = wheels
            tags = parse_wheel_filename(wheel.name)[3]
            pure = any(tag.platform == "any" for tag in tags)
            if not pure and not {tag.platform for tag in tags} & set(self._target.platforms()):
                raise Refused(f"{one}: its source builds to {wheel.name}, which is no pure wheel")
            return wheel.rename(self._folder / wheel.name)

    def _pip(self, verb: str, *arguments: object, into: str) -> str:
        option = "--dest" if verb == "download" else "--wheel-dir"
        constraints = [word for path in CONSTRAINTS for word in ("--constraint", str(path))]
        command = [sys.executable, "-m", "pip", verb, "--quiet", "--no-deps", option, into, *constraints]
        # Neither looks for a compiler then.
        variables = {"DS_BUILD_OPS": "0", "BUILD_CUDA_EXTENSIONS": "0"}
        done = subprocess.run(
            [*command, *map(str, arguments)], env=os.environ | variables, capture_output=True, text=True
        )
        return done.stderr


def report(fetched: Fetched, folder: pathlib.Path) -> str:
    """Return what to do on the host, and what it must have."""
    lines = [f"{len(fetched.wheels)} wheels in {folder}. On the host, with the folder in its place:", ""]
    lines += [
        f"    pip install --no-index --no-deps --target /tmp/site {folder}/*.whl",
        "    export PYTHONPATH=/tmp/site",
    ]
    own: dict[str, list[str]] = {}
    for requirement, owner in fetched.of_host:
        own.setdefault(requirement, []).append(owner)
    if own:
        lines += ["", "What its own packages must meet:", ""]
        lines += [f"    {requirement}  ({', '.join(dict.fromkeys(owners))})" for requirement, owners in own.items()]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Fill the folder that the command line names."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks wheels", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=pathlib.Path, help="where the wheels go; made if missing, and to be empty")
    parser.add_argument("names", nargs="*", help="extras, core, or requirements; core tests without any")
    parser.add_argument("--python", default="3.12", help="the host's version of Python (%(default)s)")
    parser.add_argument("--platform", default="manylinux_2_28_x86_64", help="its platform of wheels (%(default)s)")
    parser.add_argument("--without", default="", help="packages that the host has, separated by commas, such as numpy")
    given = parser.parse_args(arguments)
    target = Target(given.python, given.platform)
    try:
        if not re.fullmatch(r"3\.\d+", given.python):
            raise Refused(f"--python {given.python}: expected two numbers, such as 3.12")
        wanted = requirements(given.names or ["core", "tests"])
        given.folder.mkdir(parents=True, exist_ok=True)
        if any(given.folder.iterdir()):
            raise Refused(f"{given.folder} is not empty: two versions of a package must not meet")
        without = filter(None, given.without.split(","))
        fetched = fetch_all(wanted, target, Pip(given.folder, target), without=without)
    except (Refused, OSError) as error:
        raise SystemExit(f"wheels: {error}") from error
    print(report(fetched, given.folder))


if __name__ == "__main__":
    main()
