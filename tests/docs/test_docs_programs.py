"""Programs and calls of the pages that a new user follows are run as they stand, on the default model."""

from __future__ import annotations

import json
import runpy
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pydantic
import pytest

import bough
from tests.docs.test_docs_code import of, whole_lines
from tests.system.serving import Server, running

ADDRESS = "http://127.0.0.1:30000"  # on the pages
PAGES = ("README", "docs/quickstart", "docs/server", "docs/lang", "docs/structured-output", "docs/tools-and-reasoning")
MESSAGES = [{"role": "user", "content": "What is the weather in Oslo?"}]
# Of a checkpoint that is not here; tests/system/test_serve_weights.py has one.
ELSEWHERE = ("/update_weights_from_disk",)

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    # Some ask for an answer of any length: the context bounds it.
    with running(
        "--tool-call-parser", "hermes", "--reasoning-parser", "qwen3", "--context-length", "512", "--random-seed", "1"
    ) as started:
        yield started


@pytest.fixture(scope="module")
def around(server: Server) -> Iterator[dict[str, Any]]:
    """What a page's sentences have, and its programs do not repeat."""
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
    names = {"openai": openai, "pydantic": pydantic, "httpx": httpx, "url": server.url, "client": client}
    with bough.Engine(context_length=512, random_seed=1) as engine:
        yield names | {"engine": engine, "messages": MESSAGES, "text": "<think>Hm.</think>Yes."}


@pytest.mark.parametrize("page", PAGES)
def test_the_programs_of_a_page_run(
    page: str, server: Server, around: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # some write files
    names = dict(around)
    programs = [block.text for block in of("python") if block.page == f"{page}.md"]
    assert programs
    for number, program in enumerate(programs):
        file = tmp_path / f"block_{number}.py"
        file.write_text(program.replace(ADDRESS, server.url))
        live = {"engine": around["engine"]}  # a page's own has been closed by its `with`
        names |= runpy.run_path(str(file), names | live)


def calls(page: str) -> list[str]:
    lines = [line for block in of("sh") if block.page == f"{page}.md" for line in whole_lines(block.text)]
    return [line for line in lines if line.startswith("curl ") and not any(route in line for route in ELSEWHERE)]


@pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl")
@pytest.mark.parametrize("page", [page for page in PAGES if calls(page)])
def test_the_calls_of_a_page_are_answered(page: str, server: Server) -> None:
    for line in calls(page):
        assert ADDRESS in line
        command = line.replace("curl", "curl --silent --show-error --fail-with-body", 1).replace(ADDRESS, server.url)
        done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
        assert done.returncode == 0, f"{line}{done.stdout}{done.stderr}"
        assert all(json.loads(answer) for answer in done.stdout.splitlines())  # a stream of Ollama's has one to a line
