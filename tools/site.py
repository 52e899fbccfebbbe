"""MkDocs' hook: pages that are made of the code or lie outside docs/, and links that work there and in the repository.

Settings and endpoints are read from what the programs themselves read, so these pages cannot be wrong for long.
"""

from __future__ import annotations

import dataclasses
import itertools
import posixpath
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from bough.cli.flags import ENVIRONMENT_PREFIX
from bough.cli.gateway import ENVIRONMENT_PREFIX as GATEWAY_PREFIX
from bough.core.gateway_settings import GatewaySettings, gateway_fields
from bough.core.setting_checks import help_of
from bough.core.settings import ALIASES, GROUPS, all_fields
from bough.gateway.app import NATIVE_PATHS, PREFIXES
from bough.gateway.core import Gateway
from bough.gateway.management import Management
from tools.code_pages import commands_page, default_cell, errors_page
from tools.openapi import document

ROOT = Path(__file__).parents[1]
# Pages of the repository that the site has too, and where.
PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "clients/typescript/README.md": "typescript-client.md",
    **{str(path.relative_to(ROOT)): f"examples/{path.parent.name}.md" for path in ROOT.glob("examples/*/README.md")},
}
# Variables that are no settings.
OTHER_VARIABLES = {
    "BOUGH_HOME": "the folder with fetched models, packed weights and traces; `~/.cache/bough` when left out",
    "BOUGH_HICACHE_FILE_BACKEND_STORAGE_DIR": "where the `file` back end of [stores](stores.md) keeps pages",
    "BOUGH_CLUSTER_KEY": "the secret that [the hosts of one engine](scaling.md#several-hosts) share",
}
# Of the gateway, behind its prefix: flags that may be given repeatedly, and its file.
GATEWAY_VARIABLES = {
    "API_KEY": "a key that opens the gateway's API: `--api-key`",
    "WORKER_URLS": "`--worker-urls`, with spaces or commas between them",
    "SELECTOR": "`--selector`, with spaces or commas between the labels",
    "CONFIG": "`--config`: its [file](gateway.md#configuration-file)",
}
TITLES = {"lora": "LoRA settings", "unbuilt": "Settings of SGLang that are accepted at their default only"}  # of groups
KEYS = {"open": "none", "api": "the API's", "admin": "for management"}
TYPED = {"type", "anyOf", "$ref", "enum", "const"}  # of a schema that says what a value is
LINK = re.compile(r"\[([^\]]*)\]\(([^)\s]+)\)")


# ---- pages made of the code


def settings_page() -> str:
    lines = ["# Flags and environment variables", "", "This page is made of the code."]
    lines += ["Flags win over variables, those over the file of `--config`, which has the same names without dashes."]
    for group, pairs in itertools.groupby(all_fields(), key=lambda pair: pair[0]):
        lines += _settings_table(
            TITLES.get(group, f"{group.capitalize()} settings"), GROUPS[group], [f for _, f in pairs]
        )
    lines += _settings_table("The gateway", GatewaySettings, gateway_fields(), GATEWAY_PREFIX)
    lines += [
        "",
        "Lists (`--worker-urls`, `--api-key` and the like) are among [its command's flags](commands.md#bough-gateway).",
    ]
    lines += ["", "## Other variables", "", "| variable | |", "|---|---|"]
    lines += [f"| `{name}` | {about} |" for name, about in OTHER_VARIABLES.items()]
    lines += [f"| `{GATEWAY_PREFIX}{name}` | {about} |" for name, about in GATEWAY_VARIABLES.items()]
    lines += ["| `AIP_PREDICT_ROUTE` | the path of Vertex AI's route; `/vertex_generate` when left out |"]
    return "\n".join(lines) + "\n"


def _settings_table(
    title: str, group: type[Any], fields: Iterable[dataclasses.Field[Any]], prefix: str = ENVIRONMENT_PREFIX
) -> list[str]:
    about = " ".join((group.__doc__ or "").split())
    return [
        *("", f"## {title}", "", about, "", "| flag | variable | default | |", "|---|---|---|---|"),
        *(_setting_row(f, prefix) for f in fields),
    ]


def _setting_row(f: dataclasses.Field[Any], prefix: str) -> str:
    names = [f.name, *(alias for alias, name in ALIASES.items() if name == f.name)]
    flags = ", ".join(f"`--{name.replace('_', '-')}`" for name in names)
    choices = f.metadata["choices"]
    about = help_of(f) + (f": {', '.join(f'`{each}`' for each in choices)}" if choices else "")
    return f"| {flags} | `{prefix}{f.name.upper()}` | {default_cell(f.default)} | {_cell(about)} |"


def endpoints_page() -> str:
    described = document()
    schemas = described["components"]["schemas"]
    operations = [
        (operation["tags"][0], method, path, operation)
        for path, methods in described["paths"].items()
        for method, operation in methods.items()
    ]
    lines = [
        "# Endpoints",
        "",
        "This page is made of the code. A running server has the same, with all types, at `/docs` and",
    ]
    lines += [
        "`/openapi.json`; [the guide](server.md) says how the routes behave, which need a key, and what is refused."
    ]
    for tag, found in itertools.groupby(sorted(operations, key=lambda each: each[0]), key=lambda each: each[0]):
        lines += ["", f"## {tag.capitalize()}"]
        for _, method, path, operation in found:
            lines += ["", f"### {method.upper()} {path}", "", operation["summary"] + ".", ""]
            lines += _queries(operation) + _body(operation, schemas) + _answers(operation)
    return "\n".join([*lines, *_of_gateway()]) + "\n"


def _of_gateway() -> list[str]:
    passed_on = ", ".join(f"`{path}`" for path in (*(f"{prefix}…" for prefix in PREFIXES), *sorted(NATIVE_PATHS)))
    lines = ["", "## The gateway", "", f"It passes on to its workers: {passed_on}. It answers these itself;"]
    lines += ["[its page](gateway.md#workers) says what each takes and gives.", "", "| route | key |", "|---|---|"]
    return lines + [f"| `{method} {path}` | {KEYS[access]} |" for method, path, access in gateway_routes()]


def gateway_routes() -> list[tuple[str, str, str]]:
    """The gateway's own: method, path and key."""
    # Parts of patterns, as a page writes them.
    one = "([^/]+)"
    named = {f"{one}/{one}/{one}": "{id}/{since}/{rid}", f"{one}/{one}": "{id}/{since}", f"text/{one}": "text/{node}"}
    named |= {one: "{id}", "(.+)": "{model}", "((?:/[^/]*)?)": ""}
    routes = []
    for pattern, methods in Management(Gateway(GatewaySettings()))._routes:
        path = pattern.pattern
        for part, name in named.items():
            path = path.replace(part, name)
        routes += [(method, path, access) for method, (_, access) in methods.items()]
    return routes


def _queries(operation: dict[str, Any]) -> list[str]:
    given = [each for each in operation.get("parameters", ()) if each["in"] == "query"]
    if not given:
        return []
    rows = [f"| `{each['name']}` | {_type(each['schema'])} | {_cell(each['description'])} |" for each in given]
    return ["| in the query | type | |", "|---|---|---|", *rows, ""]


def _body(operation: dict[str, Any], schemas: dict[str, Any]) -> list[str]:
    content = operation.get("requestBody", {}).get("content", {})
    media = next(iter(content), "")
    schema = content.get(media, {}).get("schema", {})
    name = schema.get("$ref", "").rpartition("/")[2]
    fields = schemas.get(name, schema).get("properties", {})
    if not fields:
        return []
    required = schemas.get(name, schema).get("required", ())
    typed = {field: kind for field, kind in fields.items() if kind.keys() & TYPED}
    rows = [f"| `{field}` | {_type(kind)} | {'yes' if field in required else ''} |" for field, kind in typed.items()]
    others = ", ".join(f"`{field}`" for field in fields if field not in typed)
    idle = [f"Known from other engines, and refused or without effect here: {others}.", ""] if others else []
    kind = "body" if media == "application/json" else f"form (`{media}`)"
    return [f"| field of the {kind} | type | needed |", "|---|---|---|", *rows, "", *idle]


def _answers(operation: dict[str, Any]) -> list[str]:
    content = operation["responses"]["200"]["content"].items()
    return ["Answer: " + ", ".join(f"`{media}` ({_type(each['schema'])})" for media, each in content)]


def _type(schema: dict[str, Any]) -> str:
    if "$ref" in schema:
        return str(schema["$ref"]).rpartition("/")[2].rpartition(".")[2]
    if "anyOf" in schema:
        kinds = [_type(each) for each in schema["anyOf"] if each.get("type") != "null"]
        return " or ".join(dict.fromkeys(kinds)) or "null"
    if "enum" in schema or "const" in schema:
        return ", ".join(f"`{each}`" for each in schema.get("enum", [schema.get("const")]))
    if schema.get("type") == "array":
        return f"list of {_type(schema.get('items', {}))}"
    return str(schema.get("type", "anything"))


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


GENERATED = {
    "settings.md": settings_page,
    "commands.md": commands_page,
    "endpoints.md": endpoints_page,
    "errors.md": errors_page,
}


# ---- links


def relinked(text: str, source: str, page: str) -> str:
    """Links of a file of the repository as its page of the site has them. What is no page of the site becomes text."""

    def changed(found: re.Match[str]) -> str:
        words, target = found.groups()
        if target.startswith(("#", "http:", "https:", "mailto:")):
            return found[0]
        path, _, anchor = target.partition("#")
        place = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
        there = PAGES.get(place) or (place.removeprefix("docs/") if place.startswith("docs/") else None)
        if there is None:
            if not (ROOT / place).exists():
                raise FileNotFoundError(f"{source} links to {target}, which is not there.")
            return words if "`" in words else f"{words} (`{place}`)"
        relative = posixpath.relpath(there, posixpath.dirname(page) or ".")
        return f"[{words}]({relative}{'#' * bool(anchor)}{anchor})"

    return LINK.sub(changed, text)


# ---- MkDocs calls these


def on_files(files: Any, config: Any) -> Any:
    from mkdocs.structure.files import File

    for page, make in GENERATED.items():
        files.append(File.generated(config, page, content=make()))
    for source, page in PAGES.items():
        files.append(File.generated(config, page, content=relinked((ROOT / source).read_text(), source, page)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    if page.file.src_uri in {*PAGES.values(), *GENERATED}:
        return markdown
    return relinked(markdown, f"docs/{page.file.src_uri}", page.file.src_uri)
