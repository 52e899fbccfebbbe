"""The versions that tests run with fit together, also with the build of torch that brings CUDA."""

from __future__ import annotations

import json
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
LINES = (ROOT / "constraints.txt").read_text().splitlines()
PINS = {canonicalize_name(pin.name): pin for pin in map(Requirement, (line for line in LINES if "==" in line))}
# What the build of torch with CUDA asks for; the one for CPUs alone, which may be installed here, does not say.
OF_CUDA = {"2.13.0": "triton==3.7.1"}


def version_of(name: str) -> str:
    (specifier,) = PINS[canonicalize_name(name)].specifier
    return specifier.version


def asked_by(name: str) -> list[Requirement]:
    """What the installed release requires here, without its extras."""
    try:
        asked = [Requirement(line) for line in requires(name) or []]
    except PackageNotFoundError:
        pytest.skip(f"{name} is not installed")
    return [each for each in asked if each.marker is None or each.marker.evaluate({"extra": ""})]


@pytest.mark.parametrize("name", sorted(PINS))
def test_a_pinned_package_takes_the_other_pins(name: str) -> None:
    for asked in asked_by(name):
        pin = canonicalize_name(asked.name)
        assert pin not in PINS or asked.specifier.contains(version_of(pin), prereleases=True), (
            f"{name} asks for {asked}"
        )


def test_the_build_of_torch_with_cuda_takes_them_too() -> None:
    asked = Requirement(OF_CUDA[version_of("torch")])  # a new torch: look at what its build with CUDA asks for
    assert asked.specifier.contains(version_of(asked.name))


@pytest.mark.parametrize("folder", ["typescript", "ui"])
def test_a_lock_file_of_npm_has_every_package_that_one_of_it_asks_for(folder: str) -> None:
    """Else `npm ci` refuses it, also where the missing ones are for other machines."""
    packages = json.loads((ROOT / "clients" / folder / "package-lock.json").read_text())["packages"]
    locked = {path.rpartition("node_modules/")[2]: each for path, each in packages.items()}
    kinds = ("dependencies", "devDependencies", "optionalDependencies")
    asked = {name for each in packages.values() for kind in kinds for name in each.get(kind, ())}
    assert asked and asked <= locked.keys()
    assert [name for name in asked if "integrity" not in locked[name]] == []
