"""SGLang's frontend language and ours side by side, LiteLLM as a back end, and a server of one's own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import bough as sgl
from tests.fakes.vendor_server import Reply, vendor
from tests.lang.test_lang_vendors import openai_reply
from tests.system.foreign import HERE, PATIENCE_S, PYTHON, require, what_it_saw

ROOT = Path(__file__).parents[2]


def what_ours_saw(python: str | Path, program: str, *words: str) -> dict[str, Any]:
    """Runs a program with this project on its path."""
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [python, HERE / f"{program}.py", *words], capture_output=True, text=True, timeout=PATIENCE_S, env=environ
    )
    assert done.returncode == 0, done.stderr
    seen: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return seen


@pytest.mark.slow
def test_a_program_of_sglang_writes_the_same_after_changing_one_import(model_url: str) -> None:
    require("sglang")
    theirs = what_it_saw("lang_programs", model_url)
    ours = what_ours_saw(sys.executable, "lang_programs", model_url, "bough")
    for name, seen in theirs.items():
        assert ours[name] == seen, name


@pytest.mark.slow
def test_litellm_is_a_back_end() -> None:
    require("litellm")

    def reply(path: str, body: dict[str, Any]) -> Reply:
        if body.get("top_p") == 5.0:
            return (400, {"error": {"message": "top_p is too high", "type": "invalid_request_error"}})
        return openai_reply(path, body)

    with vendor(reply) as server:
        seen = what_ours_saw(PYTHON, "lang_litellm", server.url)
    assert seen["answer"] == seen["streamed"] == "Paris" and seen["usage"] == [5, 2]
    assert "top_p is too high" in seen["refused"]
    first = server.bodies[0]
    assert first["messages"][0] == {"role": "system", "content": "Be brief."} and first["stop"] == ["\n"]
    assert first["response_format"]["json_schema"]["schema"] == {"type": "object"}


@pytest.mark.slow
def test_a_runtime_is_a_server_that_ends_with_its_owner(tiny_model: Path) -> None:
    settings = {"load_format": "dummy", "skip_tokenizer_init": True, "max_total_tokens": 4096, "cpu_threads": 1}
    with sgl.Runtime(model_path=str(tiny_model), **settings) as runtime:
        info = sgl.get_server_info(runtime)
        assert info["model_path"] == str(tiny_model) and runtime.url.startswith("http://127.0.0.1:")
        assert sgl.flush_cache(runtime)
    with pytest.raises(sgl.EngineDeadError, match="cannot be reached"):
        sgl.RuntimeEndpoint(runtime.url)
    with pytest.raises(sgl.EngineDeadError, match="nowhere"):
        sgl.Runtime(model_path="/nowhere")
