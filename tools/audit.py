"""`python -m tools.audit`: known vulnerabilities of what is installed in this environment, from the package registry.

The registry's JSON pages have a list of advisories for each release, the same that pip-audit reads. Some mirrors have
only the page of the newest release; what is older than that there is named as not audited. Exit code 1 if a
vulnerability is known, 2 if nothing could be looked up.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import distributions
from typing import Any

import httpx
from packaging.utils import canonicalize_name

AT_ONCE = 8
TIMEOUT_S = 30.0
OWN = "bough"


@dataclass(frozen=True)
class Finding:
    """What the registry knows of one release; `advisories` is None where it has no page of it."""

    name: str
    version: str
    advisories: tuple[str, ...] | None


def installed() -> Iterator[tuple[str, str]]:
    names = {canonicalize_name(found.metadata["Name"]): found.version for found in distributions()}
    return ((name, version) for name, version in sorted(names.items()) if name != OWN)


def look_up(client: httpx.Client, name: str, version: str) -> Finding:
    public = version.partition("+")[0]  # a build of one's own, such as torch's +cpu, has no page
    page = client.get(f"{name}/{public}/json")
    if page.status_code == 404:
        page = client.get(f"{name}/json")
        if page.status_code == 404 or page.json()["info"]["version"] != public:
            return Finding(name, version, None)
    page.raise_for_status()
    return Finding(name, version, tuple(_described(each) for each in page.json()["vulnerabilities"] if _holds(each)))


def _holds(advisory: dict[str, Any]) -> bool:
    return not advisory.get("withdrawn")


def _described(advisory: dict[str, Any]) -> str:
    names = ", ".join([advisory["id"], *advisory.get("aliases", ())])
    fixed = " or ".join(advisory.get("fixed_in") or ["no release yet"])
    return f"{names}; fixed in {fixed}"


def default_registry() -> str:
    from pip._internal.models.index import PyPI  # pip's own, so that no address is written here

    return PyPI.pypi_url


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.audit", description=__doc__)
    parser.add_argument("--registry", help="where JSON pages are: URL/NAME/VERSION/json (default: pip's own registry)")
    registry = parser.parse_args(arguments).registry or default_registry()
    with httpx.Client(base_url=registry, timeout=TIMEOUT_S, follow_redirects=True) as client:
        try:
            with ThreadPoolExecutor(AT_ONCE) as pool:
                found = list(pool.map(lambda release: look_up(client, *release), installed()))
        except httpx.HTTPError as error:
            print(f"audit: the registry cannot be asked: {type(error).__name__} {error}", file=sys.stderr)
            return 2
    unknown = [each for each in found if each.advisories is None]
    bad = [each for each in found if each.advisories]
    for each in bad:
        for advisory in each.advisories or ():
            print(f"{each.name} {each.version}: {advisory}")
    print(
        f"{len(found) - len(unknown)} of {len(found)} releases were looked up; {len(bad)} have known vulnerabilities."
    )
    if unknown:
        print("Not audited: " + ", ".join(f"{each.name} {each.version}" for each in unknown))
    return 1 if bad else 2 if len(unknown) == len(found) else 0


if __name__ == "__main__":
    sys.exit(main())
