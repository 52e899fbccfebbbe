"""The site: every page is in its navigation, links lead somewhere, and the generated pages have all that there is."""

from __future__ import annotations

import ast
import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from bough.cli.flags import OTHER_VARIABLES
from bough.cli.gateway import _parser, settings_from
from bough.core.settings import all_fields
from bough.version import __version__
from tools import site
from tools.code_pages import ERRORS, MEANINGS, PACKAGE

CONFIG = (site.ROOT / "mkdocs.yml").read_text()


def pages_of(nav: Any) -> list[str]:
    if isinstance(nav, str):
        return [nav]
    parts = nav.values() if isinstance(nav, dict) else nav
    return [page for part in parts for page in pages_of(part)]


def test_the_navigation_has_every_page_once() -> None:
    docs = site.ROOT / "docs"
    written = {str(path.relative_to(docs)) for path in docs.rglob("*.md")}
    named = pages_of(yaml.safe_load(CONFIG)["nav"])
    there = written | {*site.PAGES.values(), *site.GENERATED}
    left_out = sorted(there - set(named))
    assert not left_out, "these pages are not in the navigation of mkdocs.yml"
    assert sorted(named) == sorted(there), "mkdocs.yml names these twice, or they are not there"


def test_links_that_leave_the_docs_become_pages_or_text_and_never_lead_nowhere() -> None:
    told = "[a](server.md#keys) [b](../CONTRIBUTING.md) [c](../examples/rl/train.py) [d](https://e.example) [e](#f)"
    made = site.relinked(told, "docs/x.md", "x.md")
    assert made == (
        "[a](server.md#keys) [b](contributing.md) c (`examples/rl/train.py`) [d](https://e.example) [e](#f)"
    )
    assert site.relinked("[a](../cpu.md)", "docs/notes/x.md", "notes/x.md") == "[a](../cpu.md)"
    assert site.relinked("[a](docs/cpu.md)", "README.md", "index.md") == "[a](cpu.md)"
    with pytest.raises(FileNotFoundError, match="nowhere"):
        site.relinked("[a](../nowhere.md)", "docs/x.md", "x.md")


@pytest.mark.parametrize("source", [*site.PAGES, *(f"docs/{path.name}" for path in (site.ROOT / "docs").glob("*.md"))])
def test_every_link_of_a_page_leads_to_a_file(source: str) -> None:
    text = (site.ROOT / source).read_text()
    site.relinked(text, source, source)  # raises for what is not in the repository
    inside = [target for _, target in site.LINK.findall(text) if "://" not in target and not target.startswith("#")]
    missing = [t for t in inside if not (site.ROOT / source).parent.joinpath(t.partition("#")[0]).exists()]
    assert not missing


def test_the_generated_pages_have_every_setting_and_every_route() -> None:
    settings, endpoints = site.settings_page(), site.endpoints_page()
    assert not [f.name for _, f in all_fields() if f"`BOUGH_{f.name.upper()}`" not in settings]
    for name, default in (("PAGE_SIZE", "`1`"), ("NODE_RANK", "`0`"), ("STRICT_FIELDS", "off"), ("UDS", "")):
        assert f"| `BOUGH_{name}` | {default} |" in settings, "numbers are not switches"
    assert "`BOUGH_GATEWAY_POLICY`" in settings and site.OTHER_VARIABLES.keys() == OTHER_VARIABLES
    routes = site.document()["paths"]
    assert not [f"{m} {p}" for p, ms in routes.items() for m in ms if f"### {m.upper()} {p}\n" not in endpoints]
    assert "| `messages` | list of object |" in endpoints
    recordings = endpoints.partition("### POST /v1/audio/transcriptions\n")[2].partition("\n### ")[0]
    assert "| field of the form (`multipart/form-data`) |" in recordings and "| `file` | string | yes |" in recordings
    told = re.findall(r"^\| `(\w+)` \|", (site.ROOT / "docs" / "audio.md").read_text(), re.MULTILINE)
    assert set(told) == set(re.findall(r"^\| `(\w+)` \|", recordings, re.MULTILINE))
    queries = [each["name"] for ms in routes.values() for each in ms.get("get", {}).get("parameters", ())]
    assert not [name for name in queries if f"| `{name}` |" not in endpoints and f"{{{name}}}" not in endpoints]


def test_the_gateways_own_routes_and_variables_are_on_the_pages() -> None:
    endpoints, told, variables = site.endpoints_page(), (site.ROOT / "docs" / "gateway.md").read_text(), set()
    routes = site.gateway_routes()
    assert ("POST", "/workers/{id}/drain", "admin") in routes and ("GET", "/ui", "open") in routes
    assert not [f"{method} {path}" for method, path, _ in routes if f"| `{method} {path}` |" not in endpoints]
    assert not [path for _, path, _ in routes if f" {path}`" not in told and f"`{path}`" not in told]

    class Asked(dict[str, str]):
        def get(self, name: str, default: Any = None) -> Any:
            variables.add(name)
            return default

    settings_from(_parser().parse([]), environ=Asked())
    page = site.settings_page()
    assert len(variables) > 40 and not [name for name in variables if f"`{name}`" not in page]


def test_every_sentence_that_is_raised_is_on_the_page_of_errors() -> None:
    page = site.errors_page()
    raised = 0
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or getattr(node.func, "id", "") not in ERRORS:
                continue
            said = node.args[ERRORS[node.func.id] :][:1]  # type: ignore[attr-defined]
            if said and isinstance(said[0], ast.Constant) and len(said[0].value) > 20:
                raised += 1
                assert " ".join(said[0].value.split()) in page, path
    assert raised > 100 and len(re.findall("^- `", page, re.MULTILINE)) > 700
    assert "- `Port … on … is in use; choose another with --port, or end what listens there.`" in page
    assert "- `Web pages of … may not call this server. " in page, "also what is put together"
    assert "- `The body is not valid JSON: ….`" in page and "`There is no worker …; GET /workers lists them.`" in page
    assert MEANINGS.keys() == ERRORS.keys()


def test_the_page_of_commands_has_each_with_its_own_flags() -> None:
    page = site.commands_page()
    for words in [("serve",), ("gateway", "roll"), ("bench", "serving"), ("store",), ("models",)]:
        assert f"\n## bough {' '.join(words)}\n" in page
    for flag in ("--worker-urls", "--prefill", "--replace", "--dataset-name", "--interval-s"):
        assert f"| `{flag}`" in page
    assert "`--mem-fraction-static`" not in page, "the engine's flags are on the page of settings"
    parts = {part.partition("\n")[0]: part for part in page.split("\n## bough ")[1:]}
    own = {"gateway": "--api-key", "store": "--uds", "replay": "--api-key", "bench serving": "--port"}
    assert not [name for name, flag in own.items() if f"| `{flag}` |" not in parts[name]]
    engines = {name for name, part in parts.items() if "(settings.md) too" in part}
    assert {"serve", "chat", "bench offline"} <= engines and not engines & own.keys()
    assert "| `--seed` | `0` |" in parts["bench offline"] and "| `--workload` | `random` |" in parts["bench offline"]


def test_the_changelog_speaks_of_this_version_first() -> None:
    first = re.search(r"^## (\S+)", (site.ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert first is not None and first[1] == __version__


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("material") is None, reason="mkdocs-material is not there (bough[docs])")
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(words, cwd=site.ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    html = "".join(path.read_text() for path in (tmp_path / "site").rglob("*.html"))
    assert not re.findall(r'(?:src|rel="stylesheet" href)="https?://', html)  # no calls to other hosts
