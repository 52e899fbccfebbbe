"""The TypeScript client: its types are those of the server's routes, its own tests pass against real processes, and its
package holds what it should."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from bough.gateway.launching import free_ports
from bough.version import __version__
from tests.system.gateways import running_gateway
from tests.system.serving import running
from tools.openapi import document

FOLDER = Path(__file__).parents[2] / "clients" / "typescript"
PATIENCE_S = 300
COMPILER = FOLDER / "node_modules" / ".bin" / "tsc"
with_npm = pytest.mark.skipif(
    shutil.which("npm") is None or not COMPILER.exists(),
    reason="npm, or what the client is built with, is not there; `make client-tools` installs the latter",
)


def call(*words: str, **variables: str) -> str:
    environ = os.environ | variables
    done = subprocess.run(words, cwd=FOLDER, capture_output=True, text=True, timeout=PATIENCE_S, env=environ)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_types_are_those_of_the_servers_routes() -> None:
    first = (FOLDER / "src" / "schema.d.ts").read_text().partition("\n")[0]
    assert document()["info"]["x-fingerprint"] in first, "the routes have changed: run `make client`"


@pytest.mark.slow
@with_npm
def test_the_types_are_as_they_were_generated(tmp_path: Path) -> None:
    given = tmp_path / "openapi.json"
    given.write_text(json.dumps(document()))
    with given.open() as stdin:
        subprocess.run(["node", "generate.mjs", tmp_path / "schema.d.ts"], cwd=FOLDER, stdin=stdin, check=True)
    assert (tmp_path / "schema.d.ts").read_text() == (FOLDER / "src" / "schema.d.ts").read_text(), "run `make client`"


@pytest.mark.slow
@with_npm
def test_its_own_tests_pass_against_real_processes() -> None:
    (grpc_port,) = free_ports(1)
    flags = ("--api-key", "user-key", "--admin-api-key", "admin-key", "--grpc-port", str(grpc_port))
    with (
        running("--max-total-tokens", "20000") as model,
        running("all-MiniLM-L6-v2") as vectors,
        running_gateway("--worker-urls", model.url, *flags) as gateway,
    ):
        addresses = {"BOUGH_URL": model.url, "BOUGH_VECTORS_URL": vectors.url, "BOUGH_GATEWAY_URL": gateway.url}
        said = call("npm", "test", **addresses, BOUGH_GRPC_ADDRESS=f"127.0.0.1:{grpc_port}")
    assert "# fail 0" in said and "# skipped 0" in said, said


# What the program of the README has of Node, whose types are not the client's to bring.
NODE = """declare const process: { env: Record<string, string>; stdout: { write(text: string): void } };
"""
USE = """
import { Bough, type ChatChunk } from "bough-client";
import type { paths } from "bough-client/schema";
const pieces: AsyncIterable<ChatChunk> = new Bough().streamChat({ messages: [] });
const path: keyof paths = "/generate";
// @ts-expect-error: the field is a number
new Bough().chat({ messages: [], temperature: "hot" });
export { path, pieces };
"""


@pytest.mark.slow
@with_npm
def test_the_package_holds_the_client_alone_and_serves_its_users(tmp_path: Path) -> None:
    (packed,) = json.loads(call("npm", "pack", "--dry-run", "--json"))
    modules = {source.name.partition(".")[0] for source in (FOLDER / "src").iterdir()} - {"schema"}
    built = {f"dist/{module}.{end}" for module in modules for end in ("js", "d.ts")}
    assert {f["path"] for f in packed["files"]} == built | {"dist/schema.d.ts", "LICENSE", "README.md", "package.json"}
    assert packed["version"] == __version__
    installed = tmp_path / "node_modules" / "bough-client"
    for file in packed["files"]:
        (installed / file["path"]).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(FOLDER / file["path"], installed / file["path"])
    (tmp_path / "use.mts").write_text(USE)
    (told,) = re.findall(r"```ts\n(.*?)```", (FOLDER / "README.md").read_text(), re.DOTALL)
    (tmp_path / "readme.mts").write_text(NODE + told)
    flags = ("--strict", "--module", "nodenext", "--target", "es2022", "--lib", "es2022,dom")
    call(str(COMPILER), *flags, str(tmp_path / "use.mts"), str(tmp_path / "readme.mts"))
    said = subprocess.check_output(
        ["node", "-e", "import('bough-client').then(m => console.log(typeof m.Bough))"], cwd=tmp_path, text=True
    )
    assert said == "function\n"
