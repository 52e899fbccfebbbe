"""A list of what an installation of Bough is made of: CycloneDX 1.6 as JSON, from the distributions that are installed.

`python -m tools.sbom [EXTRA …]` prints it: Bough, all that it requires here, and what they require in turn; and what
the page of /ui holds of npm's packages, from the versions that it was built with. The time is `SOURCE_DATE_EPOCH` where
that is set, so that the same environment gives the same bytes.
"""

from __future__ import annotations

import datetime
import json
import os
import sys
from collections.abc import Iterable
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

CLASSIFIER = "License :: OSI Approved :: "
PAGE = Path(__file__).parents[1] / "clients" / "ui"


def required(found: Distribution, extras: Iterable[str]) -> list[Requirement]:
    """What a distribution requires on this machine, with some of its extras."""
    wanted = [{"extra": extra} for extra in ("", *extras)]
    needs = [Requirement(text) for text in found.requires or ()]
    return [need for need in needs if need.marker is None or any(need.marker.evaluate(each) for each in wanted)]


def closure(name: str, extras: Iterable[str]) -> tuple[dict[str, Distribution], dict[str, list[str]]]:
    """All distributions by name, and what each depends on. What is not installed is optional, or was left out."""
    there: dict[str, Distribution] = {}
    needs: dict[str, set[str]] = {}
    seen: set[tuple[str, str]] = set()
    todo = [(canonicalize_name(name), extra) for extra in ("", *extras)]
    while todo:
        each, extra = todo.pop()
        if (each, extra) in seen:
            continue
        seen.add((each, extra))
        try:
            there.setdefault(each, distribution(each))
        except PackageNotFoundError:
            continue
        for need in required(there[each], (extra,) if extra else ()):
            other = canonicalize_name(need.name)
            needs.setdefault(each, set()).add(other)
            todo += [(other, more) for more in ("", *need.extras)]
    return there, {each: sorted(others & there.keys()) for each, others in needs.items()}


def component(found: Distribution) -> dict[str, Any]:
    name, about = canonicalize_name(found.metadata["Name"]), found.metadata
    purl = f"pkg:pypi/{name}@{found.version}"
    made: dict[str, Any] = {"type": "library", "bom-ref": purl, "name": name, "version": found.version, "purl": purl}
    if expression := about.get("License-Expression"):
        made["licenses"] = [{"expression": expression}]
    elif names := [c.removeprefix(CLASSIFIER) for c in about.get_all("Classifier") or () if c.startswith(CLASSIFIER)]:
        made["licenses"] = [{"license": {"name": each}} for each in names]
    elif (said := about.get("License")) and len(said.splitlines()) == 1:  # some put all of its text there
        made["licenses"] = [{"license": {"name": said}}]
    return made


def page_parts() -> dict[str, dict[str, Any]]:
    """What is built into the page's script."""
    locked = json.loads((PAGE / "package-lock.json").read_text())["packages"]
    made = {}
    for name in sorted(locked[""]["dependencies"]):
        version, licence = (locked[f"node_modules/{name}"][field] for field in ("version", "license"))
        purl = f"pkg:npm/{name}@{version}"
        part = {"type": "library", "bom-ref": purl, "name": name, "version": version, "purl": purl}
        made[f"npm {name}"] = {**part, "licenses": [{"expression": licence}]}
    return made


def bill(name: str = "bough", extras: Iterable[str] = ()) -> dict[str, Any]:
    there, needs = closure(name, extras)
    if name not in there:
        raise SystemExit(f"{name} is not installed in this environment; `make install` installs it.")
    page = page_parts() if name == "bough" else {}
    parts = {each: component(found) for each, found in sorted(there.items())} | page
    needs[name] = [*needs.get(name, ()), *page]
    when = datetime.datetime.fromtimestamp(int(os.environ.get("SOURCE_DATE_EPOCH", "0")) or _now(), datetime.UTC)
    return {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {
            "timestamp": when.strftime("%Y-%m-%dT%H:%M:%SZ"),
            "component": {**parts[name], "type": "application"},
        },
        "components": [part for each, part in parts.items() if each != name],
        "dependencies": [
            {"ref": part["bom-ref"], "dependsOn": [parts[other]["bom-ref"] for other in needs.get(each, ())]}
            for each, part in parts.items()
        ],
    }


def _now() -> float:
    return datetime.datetime.now(datetime.UTC).timestamp()


if __name__ == "__main__":
    print(json.dumps(bill(extras=sys.argv[1:]), indent=1))
