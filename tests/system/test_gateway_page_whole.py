"""What the page of a gateway reads of engines that the gateway has launched: an answer's timeline, a node's text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.multimodal.checkpoints import SPECS, write_model
from tests.system.gateways import running_gateway
from tests.system.serving import PATIENCE_S
from tests.system.test_serve_media import FLAGS, TEMPLATE

KEYS = ("--api-key", "user", "--admin-api-key", "root")


@pytest.mark.slow
def test_an_answers_timeline_and_a_nodes_text_come_from_the_engine_that_has_them(tmp_path: Path) -> None:
    write_model(tmp_path, "llava")
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE.replace("PLACE", SPECS["llava"].place))
    with running_gateway("--launch", "1", "--processes", "2", *KEYS, "--", str(tmp_path), *FLAGS) as gateway:
        root, user = ({"authorization": f"Bearer {key}"} for key in ("root", "user"))

        def read(path: str) -> Any:
            reply = httpx.get(gateway.url + path, headers=root, timeout=PATIENCE_S)
            assert reply.status_code == 200, reply.text
            return reply.json()

        assert gateway.line == f"The gateway is served at {gateway.url} (its page: {gateway.url}/ui)\n"
        gateway.wait_for(1, headers=root)
        body = {"messages": [{"role": "user", "content": "Which trees grow here?"}], "max_tokens": 4}
        chat = f"{gateway.url}/v1/chat/completions"
        answer = httpx.post(chat, json=body, headers=user, timeout=PATIENCE_S).json()
        (worker,) = read("/workers")["workers"]
        (replica,) = read(f"/ui/timeline/{worker['id']}/1e15/{answer['id']}")["replicas"]
        assert replica["found"] is not None and replica["requests"] == replica["steps"] == []
        (replica,) = read(f"/ui/timeline/{worker['id']}/0/{answer['id']}")["replicas"]
        (request,) = (each for each in replica["requests"] if each["id"] == replica["found"])
        assert request["output"] == 4 and {"prefill", "decode"} <= {name for name, _, _ in request["stages"]}
        (replica,) = read(f"/ui/timeline/{worker['id']}/0/unknown")["replicas"]
        assert replica["found"] is None

        event = httpx.get(f"{gateway.url}/ui/tree/{worker['id']}", headers=root, timeout=PATIENCE_S).text
        (tree,) = json.loads(event.removeprefix("data: "))["replicas"]
        node = f"{tree['created'][0]}-0"
        assert "Which trees grow here?" in read(f"/ui/tree/{worker['id']}/text/{node}")["text"]
        for path in (f"/ui/timeline/{worker['id']}/0/{answer['id']}", f"/ui/tree/{worker['id']}/text/1-0"):
            assert httpx.get(gateway.url + path, headers=user).status_code == 401, "other clients' texts"
