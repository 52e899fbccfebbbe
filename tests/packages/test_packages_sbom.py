"""The bill of materials: all that is required is in it, once, and every reference leads to a part."""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path

import pytest

from tools.sbom import PAGE, bill, closure

REQUIRED = ("starlette", "torch", "numpy", "jinja2", "markupsafe")  # the last by way of another


@pytest.fixture(scope="module", autouse=True)
def installed() -> None:
    try:
        version("bough")
    except ModuleNotFoundError:
        pytest.skip("bough is on the path but not installed")


def test_it_has_every_requirement_with_its_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000000")
    made = bill()
    parts = {part["name"]: part for part in made["components"]}
    assert all(parts[name]["version"] == version(name) for name in REQUIRED)
    assert parts["numpy"]["purl"] == f"pkg:pypi/numpy@{version('numpy')}" and parts["starlette"]["licenses"]
    assert made["metadata"]["component"]["name"] == "bough" and "bough" not in parts and "pytest" not in parts
    assert made["metadata"]["timestamp"] == "2023-11-14T22:13:20Z" and made == bill()


def test_every_reference_leads_to_a_part() -> None:
    made = bill()
    references = [made["metadata"]["component"]["bom-ref"], *(part["bom-ref"] for part in made["components"])]
    assert len(set(references)) == len(references)
    assert sorted(each["ref"] for each in made["dependencies"]) == sorted(references)
    assert {other for each in made["dependencies"] for other in each["dependsOn"]} <= set(references)


def test_what_the_page_holds_is_in_it() -> None:
    made = bill()
    bundled = {part["name"]: part for part in made["components"] if part["purl"].startswith("pkg:npm/")}
    wanted = json.loads((PAGE / "package.json").read_text())["dependencies"]
    assert bundled.keys() == wanted.keys() == {"marked", "preact"} and bundled["preact"]["licenses"]
    own = made["metadata"]["component"]["bom-ref"]
    (needs,) = (each["dependsOn"] for each in made["dependencies"] if each["ref"] == own)
    assert {part["bom-ref"] for part in bundled.values()} < set(needs)


def test_an_extra_brings_what_it_requires() -> None:
    without, with_extra = closure("bough", ())[0], closure("bough", ("grpc",))[0]
    assert "grpcio" in with_extra and "grpcio" not in without


def test_the_makefile_makes_one() -> None:
    assert "-m tools.sbom" in (Path(__file__).parents[2] / "Makefile").read_text()
