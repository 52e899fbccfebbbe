"""Workers that fail in every way, and requests that do not."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from aiohttp import web

from bough.server.errors import Failure, shape_of
from tests.fakes.gateways import Desk, desk, until
from tests.fakes.workers import FakeWorker, text_of, tokens_of, workers


async def many(d: Desk, count: int = 40, streams: bool = True) -> None:
    """Whole answers and streams, some at once; all must be right."""

    async def one(number: int) -> None:
        prompt = f"p{number}"
        expected = text_of(tokens_of(prompt, 6))
        if streams and number % 2:
            assert said(await d.stream({"prompt": prompt, "max_tokens": 6})) == expected
        else:
            status, answer = await d.post("/v1/completions", {"prompt": prompt, "max_tokens": 6})
            assert status == 200, answer
            assert answer["choices"][0]["text"] == expected

    gate = asyncio.Semaphore(8)

    async def gated(number: int) -> None:
        async with gate:
            await one(number)

    await asyncio.gather(*(gated(number) for number in range(count)))


def events(raw: bytes) -> list[Any]:
    lines = [line[6:] for line in raw.split(b"\n") if line.startswith(b"data: ") and line != b"data: [DONE]"]
    return [json.loads(line) for line in lines]


def said(raw: bytes) -> str:
    return "".join(event["text"] for event in events(raw))


@pytest.mark.parametrize("mode", ["garbage", "error", "plain_error", "busy"])
def test_a_worker_that_answers_wrongly_costs_no_request(mode: str) -> None:
    async def main() -> None:
        async with workers(FakeWorker(), FakeWorker(mode=mode), FakeWorker()) as fakes, desk(*fakes) as d:
            await many(d)
            wrong = next(w for w in d.gateway.registry if w.url == fakes[1].url)
            assert wrong.breaker.state(0.0).name == ("CLOSED" if mode == "busy" else "OPEN")

    asyncio.run(main())


def test_a_black_hole_is_noticed_and_its_requests_move() -> None:
    async def main() -> None:
        async with workers(FakeWorker(), FakeWorker(), FakeWorker()) as fakes, desk(*fakes) as d:
            await many(d, 10)
            fakes[1].mode = "black_hole"
            await many(d, 20)
            await until(lambda: len(d.gateway.registry.available(None)) == 2)
            fakes[1].mode = "ok"
            await until(lambda: len(d.gateway.registry.available(None)) == 3)
            await many(d, 10)

    asyncio.run(main())


def test_a_slow_worker_is_given_up_after_the_time_for_an_attempt() -> None:
    async def main() -> None:
        slow = FakeWorker(mode="slow")
        async with workers(FakeWorker(), slow) as fakes, desk(*fakes, attempt_timeout_secs=0.1) as d:
            await many(d, 10)
            await until(lambda: slow.aborted == len(slow.requests) > 0)

    asyncio.run(main())


def test_a_hedge_takes_the_first_answer_and_drops_the_other() -> None:
    async def main() -> None:
        slow = FakeWorker(mode="slow")
        async with workers(FakeWorker(), slow) as fakes, desk(*fakes, hedge_after_secs=0.02) as d:
            await many(d, 10)
            await until(lambda: slow.aborted == len(slow.requests) > 0)
            await until(lambda: sum(w.load for w in d.gateway.registry) == 0)

    asyncio.run(main())


def test_a_worker_that_comes_and_goes_costs_no_request() -> None:
    async def main() -> None:
        flapping = FakeWorker(pause_s=0.002)
        async with workers(FakeWorker(pause_s=0.002), flapping) as fakes, desk(*fakes) as d:
            port = flapping.port

            async def flap() -> None:
                while True:
                    await asyncio.sleep(0.1)
                    await flapping.stop()
                    await asyncio.sleep(0.1)
                    await flapping.start(port)

            task = asyncio.create_task(flap())
            try:
                for _ in range(10):
                    await many(d, 20)
            finally:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

    asyncio.run(main())


def test_a_dead_worker_leaves_the_rotation_and_comes_back() -> None:
    async def main() -> None:
        async with workers(FakeWorker(), FakeWorker()) as fakes, desk(*fakes, health_check_interval_secs=60.0) as d:
            await fakes[0].stop()
            await many(d, 6)
            await until(lambda: len(d.gateway.registry.available(None)) == 1)
            await fakes[0].start(fakes[0].port)
            await until(lambda: len(d.gateway.registry.available(None)) == 2)
            await many(d, 6)

    asyncio.run(main())


@pytest.mark.parametrize("path", ["/generate", "/v1/completions", "/v1/chat/completions", "/v1/messages"])
def test_a_stream_whose_worker_dies_goes_on_elsewhere(path: str) -> None:
    async def main() -> None:
        dying = [FakeWorker(die_after=n) for n in (0, 1, 3)]
        async with workers(FakeWorker(), *dying) as fakes, desk(*fakes) as d:
            for number in range(12):
                raw = await d.stream({"prompt": f"p{number}", "max_tokens": 8}, path)
                assert said(raw) == text_of(tokens_of(f"p{number}", 8))
                assert raw.endswith(b"data: [DONE]\n\n") and b": ids" not in raw and b": seed" not in raw
                assert len({(event["id"], event["created"]) for event in events(raw)}) == 1
            resumed = [body["resume"] for fake in fakes for _, _, body in fake.requests if "resume" in body]
            assert resumed and all(resume["seed"] == 7 for resume in resumed)

    asyncio.run(main())


def test_a_foreign_stream_that_breaks_ends_with_a_clear_error() -> None:
    async def main() -> None:
        foreign = [FakeWorker(resumes=False, die_after=2) for _ in range(2)]
        async with workers(*foreign) as fakes, desk(*fakes) as d:
            raw = await d.stream({"prompt": "x", "max_tokens": 8})
            assert "lost" in events(raw)[-1]["error"]["message"] and len(events(raw)) == 3
            raw = await d.stream({"prompt": "x", "max_tokens": 8}, "/v1/messages")
            assert b"event: error\ndata: " in raw and events(raw)[-1]["type"] == "error"

    asyncio.run(main())


def test_a_foreign_stream_that_breaks_before_its_first_event_is_retried() -> None:
    async def main() -> None:
        async with (
            workers(FakeWorker(resumes=False, die_after=0), FakeWorker(resumes=False)) as fakes,
            desk(*fakes) as d,
        ):
            for _ in range(4):
                assert said(await d.stream({"prompt": "x", "max_tokens": 3})) == text_of(tokens_of("x", 3))

    asyncio.run(main())


def test_when_all_workers_fail_the_last_error_is_told_and_retries_are_counted() -> None:
    async def main() -> None:
        bad = [FakeWorker(mode="garbage") for _ in range(2)]
        async with workers(*bad) as fakes, desk(*fakes, retry_max_retries=3) as d:
            assert (await d.post("/v1/completions", {"prompt": "x"}))[0] == 502
            assert sum(len(fake.requests) for fake in fakes) == 4

    asyncio.run(main())


def test_a_request_that_two_workers_answer_with_the_same_error_is_to_blame() -> None:
    async def main() -> None:
        bad = [FakeWorker(mode="error") for _ in range(3)]
        async with workers(*bad) as fakes, desk(*fakes, cb_failure_threshold=1) as d:
            for tries in (2, 4, 6):
                status, answer = await d.post("/v1/completions", {"prompt": "x"})
                assert status == 500 and answer["error"]["message"] == "boom"
                assert sum(len(fake.requests) for fake in fakes) == tries
            assert {w.breaker.state(0.0).name for w in d.gateway.registry} == {"CLOSED"}
            for fake in fakes[1:]:
                fake.mode = "ok"
            await many(d, 6)
            states = {w.url: w.breaker.state(0.0).name for w in d.gateway.registry}
            assert states[fakes[0].url] == "OPEN"  # the others answer what it does not

    asyncio.run(main())


@pytest.mark.parametrize(
    ("path", "stream"), [("/v1/completions", True), ("/v1/completions", False), ("/generate", False)]
)
def test_a_request_that_ends_two_workers_is_not_tried_on_a_third(path: str, stream: bool) -> None:
    async def main() -> None:
        deadly = [DeadlyWorker() for _ in range(3)]
        async with workers(*deadly) as fakes, desk(*fakes) as d:
            status, answer = await d.post(path, {"prompt": "poison", "stream": stream})
            assert status == 500 and "third worker" in answer["error"]["message"]
            assert answer["error"].get("retryable", False) is False  # OpenAI's errors do not have it
            assert sorted(len(fake.requests) for fake in fakes) == [0, 1, 1]
            assert (await d.post("/v1/completions", {"prompt": "x"}))[0] == 200

    asyncio.run(main())


def test_a_request_that_ends_two_workers_at_one_token_is_not_tried_on_a_third() -> None:
    """The second one continues after the tokens of the first, and ends before another."""

    async def main() -> None:
        deadly = [DeadlyWorker() for _ in range(3)]
        async with workers(*deadly) as fakes, desk(*fakes) as d:
            raw = await d.stream({"prompt": "late poison", "max_tokens": 8})
            assert "third worker" in events(raw)[-1]["error"]["message"]
            assert "".join(event["text"] for event in events(raw)[:-1]) == text_of(tokens_of("late poison", 2))
            assert sorted(len(fake.requests) for fake in fakes) == [0, 1, 1]
            assert said(await d.stream({"prompt": "x", "max_tokens": 3})) == text_of(tokens_of("x", 3))

    asyncio.run(main())


class DeadlyWorker(FakeWorker):
    """Ends with a request whose prompt is `poison`, or at the third token of one with `late poison`."""

    async def _work(self, request: web.Request, path: str, body: dict[str, Any]) -> web.StreamResponse:
        if body.get("prompt") == "poison":
            await self.break_off(request)
        if body.get("prompt") == "late poison":
            self.die_after = 2 - len((body.get("resume") or {}).get("output_ids", ()))
        return await super()._work(request, path, body)

    async def break_off(self, request: web.Request, response: web.StreamResponse | None = None) -> None:
        self._ending = asyncio.create_task(self.stop())
        await asyncio.sleep(3600)


@pytest.mark.parametrize(
    ("path", "stream", "tokens"),
    [
        ("/v1/completions", False, 0),
        ("/v1/completions", True, 0),
        ("/v1/completions", True, 2),
        ("/generate", False, 0),
        ("/v1/messages", False, 0),
        ("/v1/messages", True, 2),
    ],
)
def test_a_request_that_two_engines_die_of_is_not_tried_on_a_third(path: str, stream: bool, tokens: int) -> None:
    """A server whose engine has died lives on for a moment and says so: with a 503, or with an event of a stream."""

    async def main() -> None:
        async with workers(*(DyingEngine(tokens) for _ in range(3))) as fakes, desk(*fakes) as d:
            body = {"prompt": "poison", "max_tokens": 8}
            if tokens:
                raw = await d.stream(body, path)
                assert "third worker" in events(raw)[-1]["error"]["message"]
                assert "".join(event["text"] for event in events(raw)[:-1]) == text_of(tokens_of("poison", tokens))
            else:
                status, answer = await d.post(path, {**body, "stream": stream})
                assert status == 500 and "third worker" in answer["error"]["message"]
            assert sorted(len(fake.requests) for fake in fakes) == [0, 1, 1]
            assert (await d.post("/v1/completions", {"prompt": "x"}))[0] == 200

    asyncio.run(main())


def test_a_request_that_no_worker_has_room_for_is_tried_on_all() -> None:
    async def main() -> None:
        async with workers(*(FullWorker() for _ in range(3))) as fakes, desk(*fakes, retry_max_retries=4) as d:
            assert (await d.post("/v1/completions", {"prompt": "x"}))[0] == 503
            assert sum(len(fake.requests) for fake in fakes) == 5

    asyncio.run(main())


DEAD = Failure(503, "The engine has ended.", "EngineDeadError")


class DyingEngine(FakeWorker):
    """Its engine dies of a request whose prompt is `poison`, in a stream after some tokens."""

    def __init__(self, tokens: int) -> None:
        super().__init__()
        self._tokens = tokens
        self._dead = False

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        if self._dead:
            return web.json_response(shape_of(request.path)(DEAD), status=503, headers={"Retry-After": "1"})
        return await super()._answer(request)

    async def _work(self, request: web.Request, path: str, body: dict[str, Any]) -> web.StreamResponse:
        if body.get("prompt") == "poison" and not self._tokens:
            self._dead = True
            return web.json_response(shape_of(path)(DEAD), status=503)
        if body.get("prompt") == "poison":
            self.die_after = self._tokens - len((body.get("resume") or {}).get("output_ids", ()))
        return await super()._work(request, path, body)

    async def break_off(self, request: web.Request, response: web.StreamResponse | None = None) -> None:
        assert response is not None
        self._dead = True
        name = "event: error\n" if request.path == "/v1/messages" else ""
        await response.write(f"{name}data: {json.dumps(shape_of(request.path)(DEAD))}\n\n".encode())


class FullWorker(FakeWorker):
    async def _work(self, request: web.Request, path: str, body: dict[str, Any]) -> web.StreamResponse:
        return web.json_response({"error": {"message": "full"}}, status=503)


def test_a_retry_storm_is_ended_by_the_budget() -> None:
    async def main() -> None:
        bad = FakeWorker(mode="busy")
        settings: dict[str, Any] = {"retry_max_retries": 100, "retry_budget_ratio": 0.0, "retry_max_backoff_ms": 0.0}
        async with workers(bad) as fakes, desk(*fakes, **settings) as d:
            statuses = await asyncio.gather(*(d.post("/v1/completions", {"prompt": "x"}) for _ in range(20)))
            assert {status for status, _ in statuses} == {429}
            assert len(bad.requests) < 20 * 20

    asyncio.run(main())


@pytest.mark.parametrize(
    ("whole", "path"), [(True, "/v1/completions"), (False, "/v1/completions"), (False, "/generate")]
)
def test_a_stream_that_ends_with_its_connection_must_have_an_end_of_its_own(whole: bool, path: str) -> None:
    async def old_server(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """HTTP/1.0, without lengths."""
        head = await reader.readuntil(b"\r\n\r\n")
        if head.startswith(b"POST"):
            events = b'data: {"text": "a"}\n\n' + (b"data: [DONE]\n\n" if whole else b"")
            writer.write(b"HTTP/1.0 200 OK\r\ncontent-type: text/event-stream\r\n\r\n" + events)
        else:
            writer.write(b'HTTP/1.0 200 OK\r\n\r\n{"data": [{"id": "old"}]}')
        await writer.drain()
        writer.close()

    async def main() -> None:
        server = await asyncio.start_server(old_server, "127.0.0.1", 0)
        async with server, desk() as d:
            d.gateway.registry.add(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
            await until(lambda: d.gateway.registry.available("old"))
            raw = await d.stream({"prompt": "x"}, path)
            assert ("error" not in events(raw)[-1]) == whole and raw.startswith(b'data: {"text": "a"}\n\n')

    asyncio.run(main())


def test_all_kinds_of_misbehaviour_at_once_cost_no_request() -> None:
    async def main() -> None:
        good, garbage, hole, slow, flapping = fakes = [FakeWorker(pause_s=0.002) for _ in range(5)]
        async with workers(*fakes), desk(*fakes, attempt_timeout_secs=0.5) as d:
            port = flapping.port
            garbage.mode, hole.mode, slow.pause_s = "garbage", "black_hole", 0.1

            async def flap() -> None:
                while True:
                    await asyncio.sleep(0.15)
                    await flapping.stop()
                    await asyncio.sleep(0.15)
                    await flapping.start(port)

            task = asyncio.create_task(flap())
            try:
                for _ in range(3):
                    await many(d, 24)
            finally:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
            states = {worker.url: worker for worker in d.gateway.registry}
            assert states[garbage.url].breaker.state(0.0).name == "OPEN"
            assert not states[hole.url].in_rotation and states[good.url].in_rotation

    asyncio.run(main())
