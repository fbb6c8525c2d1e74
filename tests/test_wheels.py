"""The script that fetches wheels for a host without network: what it asks for, what it leaves out, what it refuses."""

import importlib.util
import sys
import zipfile

import pytest
from packaging.requirements import Requirement

from tests.installations import ROOT

specification = importlib.util.spec_from_file_location("benchmarks_wheels", ROOT / "benchmarks/wheels.py")
wheels = importlib.util.module_from_spec(specification)
sys.modules[specification.name] = wheels
specification.loader.exec_module(wheels)

HOST = wheels.Target("3.12", "manylinux_2_28_x86_64")


class Index:
    """Stands for pip: makes an empty wheel of the newest version that meets a requirement."""

    def __init__(self, folder, packages):
        self.folder, self.packages, self.fetched = folder, packages, []

    def __call__(self, requirement):
        versions = self.packages[requirement.name]
        version = max(requirement.specifier.filter(versions))
        path = self.folder / f"{requirement.name}-{version}-py3-none-any.whl"
        lines = "".join(f"Requires-Dist: {one}\n" for one in versions[version])
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr(f"{requirement.name}-{version}.dist-info/METADATA", f"Name: {requirement.name}\n{lines}\n")
        self.fetched.append(path.name)
        return path


def fetched(tmp_path, packages, *names, **options):
    result = wheels.fetch_all(map(Requirement, names), HOST, Index(tmp_path, packages), **options)
    assert {path.name for path in tmp_path.iterdir()} == {path.name for path in result.wheels.values()}
    return sorted(path.name.split("-py3")[0] for path in tmp_path.iterdir()), result.of_host


def test_what_is_required_is_fetched_but_torch(tmp_path):
    packages = {"peer": {"1.0": ["torch>=2", "helper", "nvidia-nccl-cu13", "sympy"]}, "helper": {"2.0": []}}
    found, of_host = fetched(tmp_path, packages, "peer")
    assert found == ["helper-2.0", "peer-1.0"]
    of_peer = "peer-1.0-py3-none-any.whl"
    assert of_host == [("torch>=2", of_peer), ("nvidia-nccl-cu13", of_peer), ("sympy", of_peer)]


def test_markers_are_those_of_the_host(tmp_path):
    marked = ['old; python_version < "3.12"', 'other; sys_platform == "win32"', 'new; python_version >= "3.12"']
    packages = {"peer": {"1.0": [*marked, 'more; extra == "all"']}, "new": {"1.0": []}, "more": {"1.0": []}}
    (tmp_path / "plain").mkdir()
    (tmp_path / "extra").mkdir()
    assert fetched(tmp_path / "plain", packages, "peer")[0] == ["new-1.0", "peer-1.0"]
    assert fetched(tmp_path / "extra", packages, "peer[all]")[0] == ["more-1.0", "new-1.0", "peer-1.0"]


def test_each_package_has_one_version_that_meets_all(tmp_path):
    packages = {"one": {"1.0": ["shared"]}, "two": {"1.0": ["shared<2"]}, "shared": {"1.5": [], "2.0": []}}
    assert fetched(tmp_path, packages, "one", "two")[0] == ["one-1.0", "shared-1.5", "two-1.0"]


def test_what_the_host_has_is_left_out(tmp_path):
    packages = {"peer": {"1.0": ["numpy"]}}
    assert fetched(tmp_path, packages, "peer", without=["NumPy"]) == (
        ["peer-1.0"],
        [("numpy", "peer-1.0-py3-none-any.whl")],
    )


def test_extras_are_those_of_the_project():
    assert [str(one) for one in wheels.requirements(["megatron", "einops<1"])] == ["megatron-fsdp==0.6.1", "einops<1"]
    core = {one.name for one in wheels.requirements(["core"])}
    assert "torch" not in core and {"expecttest", "pytest-xdist"} <= core


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["torch==2.11.0"], "'torch==2.11.0': the host's own torch and CUDA are never replaced; leave it out"),
        (["triton"], "'triton': the host's own torch and CUDA are never replaced; leave it out"),
        (["no such name"], "'no such name' is no requirement, and the extras are core, lint, "),
        (["core", "--python", "three"], "--python three: expected two numbers, such as 3.12"),
    ],
)
def test_what_is_refused(tmp_path, arguments, message):
    with pytest.raises(SystemExit, match=r"^wheels: ") as refused:
        wheels.main([str(tmp_path / "wheels"), *arguments])
    assert message in str(refused.value) and "\n" not in str(refused.value)


def test_a_folder_with_anything_in_it_is_refused(tmp_path):
    (tmp_path / "pytest-1.0-py3-none-any.whl").touch()
    with pytest.raises(SystemExit, match="is not empty"):
        wheels.main([str(tmp_path), "core"])


def test_platforms_are_those_of_the_host_and_older_ones():
    platforms = HOST.platforms()
    assert platforms[0] == "manylinux_2_28_x86_64" and "manylinux2014_x86_64" in platforms
    assert wheels.Target("3.12", "manylinux2014_aarch64").environment()["platform_machine"] == "aarch64"


@pytest.mark.nightly
def test_a_small_package_from_the_network(tmp_path, capsys):
    wheels.main([str(tmp_path / "wheels"), "einops"])
    assert [path.name.split("-")[0] for path in (tmp_path / "wheels").glob("*.whl")] == ["einops"]
    assert "pip install --no-index --no-deps --target /tmp/site" in capsys.readouterr().out
