"""The result of one attempt: a whole response, an open stream, or a failure.

A 200 with something else than was asked for is a failure. Plain-text errors get their protocol's shape.
"""

import re
from typing import Any

import msgspec

from bough.gateway.call import Call
from bough.gateway.headers import NOT_DOWNSTREAM, passing
from bough.gateway.peek import ResponseFields, read_response_fields
from bough.gateway.upstream_response import UpstreamResponse
from bough.gateway.worker import Lease
from bough.server.endpoint import encode_json
from bough.server.errors import Failure, HttpError, shape_of

JSON = b"application/json"
STREAM_TYPES = (b"text/event-stream", b"application/x-ndjson")
EVENT_BEGINNINGS = (b"data:", b"event:", b"id:", b"retry:", b":", b"\n", b"\r\n", b"{")
LONGEST_BEGINNING = max(map(len, EVENT_BEGINNINGS))
# Answers of these are JSON, whatever the worker is; anything else that comes with a 200 is garbage.
JSON_PATHS = frozenset(
    {"/generate", "/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses"}
    | {"/v1/embeddings", "/v1/rerank", "/v1/score", "/v1/classify"}
    | {"/v1/tokenize", "/v1/detokenize", "/v1/messages/count_tokens"}
)
BUSY_STATUSES = frozenset({408, 429})
NOT_IMPLEMENTED = 501  # by the worker's kind, not by its condition: it would say the same again
INFO_PATHS = frozenset({"/server_info", "/get_server_info", "/model_info", "/get_model_info"})
# What clients with a key learn of a worker: the model, its limits and the load, as SGLang's clients read them. Other
# settings, paths and addresses are the operator's.
TENANT_FIELDS = {
    "served_model_name", "is_generation", "is_embedding", "weight_version", "architecture", "architectures",
    "model_type", "context_length", "vocab_size", "max_total_num_tokens", "max_running_requests", "max_req_input_len",
    "version", "has_chat_template", "preferred_sampling_params", "tool_call_parser", "reasoning_parser", "tp_size",
    "dp_size", "has_image_understanding", "has_audio_understanding", "dp_rank", "last_gen_throughput",
    "avg_spec_accept_length", "num_running_reqs", "num_waiting_reqs", "num_used_tokens",
    "effective_max_running_requests_per_dp",
}  # fmt: skip
MODEL_PATHS = ("model_path", "tokenizer_path")
HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
SHORTEST_SECRET = 8  # characters
LONGEST_QUOTE = 500  # characters of a worker's plain text that go into an error


class Response(msgspec.Struct, frozen=True):
    status: int
    headers: list[tuple[bytes, bytes]]
    body: bytes
    fields: ResponseFields | None = None  # what the gateway reads in it


class OpenStream(msgspec.Struct, frozen=True, eq=False):
    """A response in progress; its owner must close the response and end the lease."""

    lease: Lease
    response: UpstreamResponse
    headers: list[tuple[bytes, bytes]]
    first: bytes  # what has come of it

    def abandon(self) -> None:
        """The worker sees the connection close and aborts the request."""
        self.response.close()
        self.lease.abandon()


class AttemptFailedError(Exception):
    def __init__(self, reason: str, status: int, response: Response | None = None, *, moved: bool = False) -> None:
        super().__init__(reason)
        self.reason = reason
        self.status = status
        self.moved = moved  # called back from a worker that is gone: goes on elsewhere at once
        self._response = response

    @property
    def answered(self) -> bool:
        """Whether it is the worker's own error."""
        return self._response is not None

    @property
    def error_words(self) -> tuple[object, ...]:
        """The worker's own words for it: where `type` is OpenAI's, the engine's is in `code`."""
        fields = None if self._response is None else read_response_fields(self._response.body)
        error = fields.error if fields is not None and isinstance(fields.error, dict) else {}
        return error.get("type"), error.get("code")

    @property
    def blames_worker(self) -> bool:
        """A busy worker works, and so does one that lacks a feature. A 503 that is not its own is the gateway's."""
        ours = self.status == 503 and not self.answered
        return not (self.moved or ours or self.status in BUSY_STATUSES or self.status == NOT_IMPLEMENTED)

    @property
    def gave_up(self) -> bool:
        """A 503 to a request that the worker had taken: one that it cannot take says when to try again."""
        headers = () if self._response is None else self._response.headers
        return self.answered and self.status == 503 and all(name.lower() != b"retry-after" for name, _ in headers)

    def final_response(self) -> Response:
        """The worker's own error, or ours, which is raised."""
        if self._response is not None:
            return self._response
        kind = {503: "ServiceUnavailableError", 504: "GatewayTimeoutError"}.get(self.status, "BadGatewayError")
        raise HttpError(self.status, f"No worker answered: {self.reason}.", kind)


async def read_response(call: Call, lease: Lease, response: UpstreamResponse) -> Response | OpenStream:
    """Reads until the response is whole or, for a stream, until its first bytes."""
    key, status, path, named = lease.worker.api_key, response.status, call.path, response.named
    headers = passing(response.headers, named, NOT_DOWNSTREAM)
    if key is not None:
        headers = [(name, scrubbed(value, key)) for name, value in headers]
    if status == 200 and named.get(b"content-type") != JSON and response.content_type in STREAM_TYPES:
        first = await response.read_some()
        while len(first) < LONGEST_BEGINNING and b"\n" not in first and (more := await response.read_some()):
            first += more
        if not first.startswith(EVENT_BEGINNINGS):
            raise AttemptFailedError("the worker's stream is not made of events", 502)
        return OpenStream(lease, response, headers, first)
    if (body := response.whole()) is None:
        body = await response.read()
    if status == 200 and call.method != "HEAD":
        fields = None
        if path in JSON_PATHS and b"content-encoding" not in named:
            fields = read_response_fields(body)
            if fields is None:
                raise AttemptFailedError("the worker's answer is not JSON", 502)
        elif path in INFO_PATHS:
            body = _info(body, call.tenant)
        return Response(200, headers, body if key is None else scrubbed(body, key), fields)
    if status in (401, 403):
        raise AttemptFailedError("the worker refuses the gateway's key (--worker-api-key)", 502)
    answer = _error_response(call, lease, status, headers, body)
    if status in BUSY_STATUSES or status >= 500:
        raise AttemptFailedError(f"the worker answered {status}", status, answer)
    return answer


def _error_response(call: Call, lease: Lease, status: int, headers: list[tuple[bytes, bytes]], body: bytes) -> Response:
    """A worker's error as JSON, without the worker's key."""
    key = lease.worker.api_key
    if key is not None:
        body = body.replace(key.encode(), b"***")
    encoded = any(name == b"content-encoding" for name, _ in headers)
    if status < 400 or encoded or read_response_fields(body) is not None:
        return Response(status, headers, body)
    text = body.decode("utf-8", "replace").strip()[:LONGEST_QUOTE] or f"The worker answered {status}."
    kept = [(name, value) for name, value in headers if name != b"content-type"]
    shaped = encode_json(shape_of(call.path)(Failure(status, text, "WorkerError")))
    return Response(status, [*kept, (b"content-type", JSON)], shaped)


def scrubbed(data: bytes, key: str | None) -> bytes:
    """Without the worker's key. A short key could be any word, so it is removed only where it follows `Bearer`."""
    return data if key is None else data.replace(secret_of(key), b"***")


def secret_of(key: str) -> bytes:
    return (key if len(key) >= SHORTEST_SECRET else f"Bearer {key}").encode()


def _info(body: bytes, tenant: bool) -> bytes:
    """What a worker says of itself, without keys; for a tenant less."""
    try:
        info = msgspec.json.decode(body, type=dict[str, Any])
    except (msgspec.MsgspecError, UnicodeDecodeError):
        if tenant:
            raise AttemptFailedError("the worker's answer is not JSON", 502) from None
        return body
    if not tenant:
        kept = {name: value for name, value in info.items() if not name.endswith("api_key")}
        return body if len(kept) == len(info) else encode_json(kept)
    shown = {name: value for name, value in info.items() if name in TENANT_FIELDS}
    if isinstance(template := info.get("chat_template"), dict):  # else it names a file
        shown["chat_template"] = template
    for name in MODEL_PATHS:  # clients read the model's name there, so a file's path gives way to that
        if isinstance(path := info.get(name), str):
            file = path.rstrip("/").rpartition("/")[2]
            shown[name] = path if HUB_NAME.fullmatch(path) else info.get("served_model_name") or file
    if isinstance(states := info.get("internal_states"), list):
        known = (state for state in states if isinstance(state, dict))
        shown["internal_states"] = [{name: state[name] for name in TENANT_FIELDS & state.keys()} for state in known]
    return encode_json(shown)
