"""Flat parameters of FSDP1: files of each rank's part are the parameters of the training, whatever its padding."""

import pytest

from shardproof.__main__ import main
from tests.harness.inner import torchrun


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    folder = tmp_path_factory.mktemp("flat")
    torchrun(2, "-m", "tests.harness.state_flat", folder)
    assert (folder / "original-files/rank1.pt").exists()
    return folder


def said(capsys, *arguments):
    main(["state", *map(str, arguments)])
    return capsys.readouterr().out.partition("\n\n")[2].strip()


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("a", "b", "told"),
    [
        ("flat", "original", "nothing differs"),
        ("original", "flat", "nothing differs"),
        ("flat", "flat-files", "nothing differs"),
        ("original", "flat-files", "nothing differs"),
        ("original", "original-files", "nothing differs"),
        ("flat", "original-files", "nothing differs"),
    ],
)
def test_flat_parameters_are_those_of_the_training(written, a, b, told, capsys):
    assert said(capsys, written / a, written / b) == told


@pytest.mark.nightly
def test_a_damaged_part_is_named_by_the_parameters_in_it(written, capsys):
    assert said(capsys, written / "flat", written / "damaged-files").splitlines() == [
        "model: 0.weight: rows 4 of 5 are zeros; rows 3 of 5 have other values",
        "model: 0.bias: is all zeros",
    ]
