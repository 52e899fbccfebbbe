"""`bough replay`: sends the requests of a crash dump (`--crash-dump-folder`) to a running server, at their old pace."""

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx

from bough.cli.commands import Parser
from bough.core.errors import SettingsError
from bough.gateway.registry import normal_url

ERRORS = (b'data: {"error"', b"event: error", b"event: response.failed", b'{"error"')  # in streams that have begun


def run(argv: Sequence[str]) -> int:
    """0: every request was answered; 1: some failed."""
    parser = Parser(program="bough replay", usage="FILE", about="Sends the requests of a crash dump again.")
    parser.add_argument("file", metavar="FILE", help="a crash_dump_….jsonl")
    parser.add_flags()
    parsed = parser.parse(argv)
    requests = [r for r in read_dump(Path(parsed.file)) if not (parsed.unfinished and r["finished"])]
    failed = asyncio.run(_send_all(requests, normal_url(parsed.url), parsed.api_key, parsed.speed))
    print(f"{len(requests) - failed} of {len(requests)} requests answered.")
    return 1 if failed else 0


def read_dump(path: Path) -> list[dict[str, Any]]:
    try:
        # As bytes: a prompt may hold characters that end a line of text.
        requests = [json.loads(line) for line in path.read_bytes().split(b"\n") if line.strip()]
    except (OSError, ValueError) as error:
        raise SettingsError(f"Cannot read {path}: {error}.") from None
    for number, request in enumerate(requests, 1):
        if not isinstance(request, dict) or not {"time", "path", "finished", "body"} <= request.keys():
            raise SettingsError(f"{path}, line {number} is not of a crash dump (--crash-dump-folder).")
    return requests


async def _send_all(requests: Sequence[dict[str, Any]], url: str, key: str | None, speed: float) -> int:
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, headers=headers, timeout=None, limits=limits) as client:

        async def send(number: int, request: dict[str, Any]) -> bool:
            await asyncio.sleep(max(0.0, (request["time"] - requests[0]["time"]) / speed) if speed > 0 else 0.0)
            try:
                answer = await client.post(request["path"], json=request["body"])
                broken = any(line.startswith(ERRORS) for line in answer.content.split(b"\n"))
                ok = answer.status_code == 200 and not broken
                result = f"{answer.status_code}{', with an error' if broken else ''}"
            except httpx.HTTPError as error:
                result, ok = str(error) or type(error).__name__, False
            print(f"{number} {request['path']}: {result}")
            return ok

        answered = await asyncio.gather(*(send(number, request) for number, request in enumerate(requests, 1)))
    return answered.count(False)
