"""`bough run-batch`: answers a file of requests in OpenAI's batch format, on a server of its own or a running one.

Each answer is written as it comes, so a run that was interrupted goes on where it stopped: requests whose answers stand
in the output file are not sent again, except those that failed for the server's sake.
"""

import asyncio
import contextlib
import json
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import httpx
from tqdm import tqdm

from bough.cli.commands import Parser
from bough.cli.flags import add_engine_flags, given_settings
from bough.core.errors import BoughError, SettingsError
from bough.core.setting_checks import require_counts
from bough.gateway.registry import normal_url

ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings")
PATIENCE_S = 60.0  # for the first answer of a server that may be busy


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """One line of the input."""

    custom_id: str
    url: str
    body: dict[str, Any]


def run(argv: Sequence[str]) -> int:
    """0: every request has its answer; 1: some failed. Everything in the input is checked before a model is loaded."""
    parsed = _parser().parse(argv)
    settings = given_settings(parsed)
    if parsed.input_file is None or parsed.output_file is None:
        raise SettingsError("Give both files: `bough run-batch -i requests.jsonl -o answers.jsonl`.")
    require_counts(parsed, ("max_concurrency",))
    url = None if parsed.url is None else normal_url(parsed.url)
    if url is not None and given_settings(parsed, environ={}):
        raise SettingsError("--url names a server that runs; its engine flags are its own. Leave them out.")
    requests = read_requests(Path(parsed.input_file))
    if Path(parsed.output_file).resolve() == Path(parsed.input_file).resolve():
        raise SettingsError("-i and -o name the same file; the answers need one of their own.")
    answered = keep_answers(Path(parsed.output_file))
    left = [request for request in requests if request.custom_id not in answered]
    if len(left) < len(requests):
        print(f"{len(requests) - len(left)} of {len(requests)} requests were answered before; going on with the rest.")
    failed = sum(answered.get(request.custom_id, 200) != 200 for request in requests)
    if left:
        with _server(url, settings) as url, Path(parsed.output_file).open("a", encoding="utf-8") as output:
            failed += asyncio.run(_answer_all(url, parsed.key, left, parsed.max_concurrency, output))
    print(f"{len(requests) - failed} of {len(requests)} requests answered: {parsed.output_file}")
    if failed:
        print(f"{failed} failed; their lines say why. The same command again repeats those that the server failed.")
    return 1 if failed else 0


def _parser() -> Parser:
    about = "Answers a file of requests in OpenAI's batch format; the same command again resumes."
    parser = Parser(program="bough run-batch", usage="-i IN.jsonl -o OUT.jsonl", about=about)
    parser.add_argument("-i", "--input-file", metavar="IN.jsonl", help="a request on each line")
    parser.add_argument("-o", "--output-file", metavar="OUT.jsonl", help="one answer per line, in order of completion")
    parser.add_flags()
    add_engine_flags(parser)
    return parser


@contextlib.contextmanager
def _server(url: str | None, settings: dict[str, Any]) -> Iterator[str]:
    if url is not None:
        try:
            httpx.get(f"{url}/v1/models", timeout=PATIENCE_S)  # any answer will do
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise BoughError(f"No server answers at {url}: {error}. Give the address of one that runs.") from None
        yield url
        return
    from bough.launch.owned_server import OwnedServer

    with contextlib.closing(OwnedServer(settings)) as server:
        yield server.url


def read_requests(path: Path) -> list[BatchRequest]:
    try:
        # By no other sign that ends lines of text: JSON may hold those.
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"Cannot read {path}: {error}.") from None
    requests: dict[str, BatchRequest] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        request = _read_line(line, f"{path}, line {number}")
        if request.custom_id in requests:
            text = f"{path}, line {number}: custom_id {request.custom_id!r} stands on an earlier line, too."
            raise SettingsError(text)
        requests[request.custom_id] = request
    if not requests:
        raise SettingsError(f"{path} has no requests; put one on each line, in OpenAI's batch format.")
    return list(requests.values())


def _read_line(line: str, where: str) -> BatchRequest:
    try:
        given = json.loads(line)
    except json.JSONDecodeError as error:
        raise SettingsError(f"{where} is not JSON: {error}.") from None
    if not isinstance(given, dict) or not isinstance(given.get("body"), dict):
        raise SettingsError(f'{where} must be an object with "custom_id", "method", "url" and "body".')
    custom_id, url = given.get("custom_id"), given.get("url")
    if not isinstance(custom_id, str) or not custom_id:
        raise SettingsError(f'{where} needs a "custom_id": a text of its own, by which its answer is found.')
    if given.get("method", "POST") != "POST":
        raise SettingsError(f'{where}: "method" must be "POST".')
    if url not in ENDPOINTS:
        raise SettingsError(f'{where}: "url" must be one of {", ".join(ENDPOINTS)}, not {url!r}.')
    if given["body"].get("stream"):
        raise SettingsError(f'{where}: a batch has whole answers; leave "stream" out of the body.')
    return BatchRequest(custom_id, url, given["body"])


def keep_answers(path: Path) -> dict[str, int]:
    """The requests that an output file answers, with the statuses. Other lines are removed from it: what the server
    failed, and the half line that a killed run leaves. A file with anything else is somebody's, and stays as it is."""
    if not path.exists():
        return {}
    kept: dict[str, tuple[int, str]] = {}
    *lines, half = path.read_text(encoding="utf-8", errors="replace").split("\n")
    for line in (*lines, half):
        try:
            answer = json.loads(line)
            status = answer["response"]["status_code"] if answer["response"] else 0
            custom_id = answer["custom_id"]
        except (json.JSONDecodeError, KeyError, TypeError):
            if line is half or not line.strip():
                continue
            raise SettingsError(f"{path} has lines that are no answers of a batch; name another file.") from None
        if 0 < status < 500 and status != 429:
            kept[custom_id] = status, line
    fresh = path.with_name(path.name + ".part")
    fresh.write_text("".join(f"{line}\n" for _, line in kept.values()), encoding="utf-8")
    fresh.replace(path)
    return {custom_id: status for custom_id, (status, _) in kept.items()}


async def _answer_all(
    url: str, api_key: str | None, requests: Sequence[BatchRequest], concurrency: int, output: TextIO
) -> int:
    """How many failed."""
    failed, waiting = 0, iter(requests)
    headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
    limits = httpx.Limits(max_connections=concurrency)
    with tqdm(total=len(requests), unit="request") as bar:
        async with httpx.AsyncClient(base_url=url, headers=headers, limits=limits, timeout=None) as client:

            async def work() -> None:
                nonlocal failed
                for request in waiting:
                    answer = await _answer(client, request)
                    output.write(json.dumps(answer, ensure_ascii=False) + "\n")
                    output.flush()
                    failed += answer["response"] is None or answer["response"]["status_code"] != 200
                    bar.update()

            async with asyncio.TaskGroup() as tasks:
                for _ in range(min(concurrency, len(requests))):
                    tasks.create_task(work())
    return failed


async def _answer(client: httpx.AsyncClient, request: BatchRequest) -> dict[str, Any]:
    response: dict[str, Any] | None = None
    error: dict[str, str] | None = None
    try:
        answer = await client.post(request.url, json=request.body)
        try:
            body = answer.json()
        except json.JSONDecodeError:
            body = {"error": {"message": answer.text}}
        request_id = answer.headers.get("x-request-id") or body.get("id", "")
        response = {"status_code": answer.status_code, "request_id": request_id, "body": body}
    except httpx.HTTPError as failure:
        error = {"code": "server_unreachable", "message": str(failure) or type(failure).__name__}
    return {"id": f"batch_req_{uuid.uuid4().hex}", "custom_id": request.custom_id, "response": response, "error": error}
