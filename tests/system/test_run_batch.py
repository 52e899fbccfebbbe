"""`bough run-batch` starts a server of its own, and ends it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_a_file_of_requests_is_answered_by_the_default_model(tmp_path: Path) -> None:
    chat = {"messages": [{"role": "user", "content": "Say hello."}], "max_tokens": 8, "temperature": 0}
    lines = [
        {"custom_id": f"chat-{i}", "method": "POST", "url": "/v1/chat/completions", "body": chat} for i in range(3)
    ]
    text = {"prompt": "The capital of France is", "max_tokens": 0}
    lines.append({"custom_id": "bad", "method": "POST", "url": "/v1/completions", "body": text | {"temperature": -1}})
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    words = [sys.executable, "-m", "bough.cli.main", "run-batch", "-i", "in.jsonl", "-o", "out.jsonl"]
    ran = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert ran.returncode == 1, ran.stderr
    found = {line["custom_id"]: line["response"] for line in map(json.loads, (tmp_path / "out.jsonl").open())}
    assert found.pop("bad")["status_code"] == 400
    contents = {response["body"]["choices"][0]["message"]["content"] for response in found.values()}
    assert len(found) == 3 and len(contents) == 1 and contents != {""}
