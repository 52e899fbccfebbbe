"""Prefixes in files outlive a server."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import zmq

from bough.memory.tree.events import (
    DEVICE,
    DISK,
    END_OF_REPLAY,
    HOST,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVEventBatch,
)
from tests.storage.lmcache_server import lmcache_server
from tests.system.pairs import free_port
from tests.system.serving import PATIENCE_S, TINY, Server, running, until

pytestmark = pytest.mark.slow

GREEDY = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}
PROMPT = [7 * i % 120 + 2 for i in range(400)]


def ask(server: Server, prompt: list[int]) -> tuple[dict[str, Any], list[int], list[float]]:
    """Where its tokens came from, what was generated, and with which logprobs."""
    body = {"input_ids": prompt, "sampling_params": GREEDY, "return_logprob": True}
    answer = httpx.post(f"{server.url}/generate", json=body, timeout=PATIENCE_S).raise_for_status().json()
    meta = answer["meta_info"]
    return meta["cached_tokens_details"], answer["output_ids"], [each[0] for each in meta["output_token_logprobs"]]


def metric(server: Server, name: str) -> float:
    lines = httpx.get(f"{server.url}/metrics", timeout=PATIENCE_S).text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(f"bough:hicache_storage_{name}"))


def details(**tokens: int) -> dict[str, Any]:
    backend = "file" if tokens else None
    return {"device": 0, "host": 0, "storage": 0, "disk": 0, "store": 0, "storage_backend": backend, **tokens}


def test_a_restarted_server_answers_from_disk(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR", str(tmp_path / "kv"))
    storage = ("--enable-hierarchical-cache", "--hicache-storage-backend", "file", "--enable-metrics")
    flags = ("--model", str(tiny_model), *TINY, *storage, "--hicache-storage-prefetch-policy", "wait_complete")

    def runs() -> list[Path]:
        return [path for path in (tmp_path / "kv").iterdir() if not path.name.startswith(".")]

    with running(*flags) as first:
        computed = ask(first, PROMPT)
        assert computed[0] == details()
        until(runs, "a file")
    with running(*flags) as second:
        found = ask(second, PROMPT)
        assert found[0] == details(storage=256, disk=256)
        assert found[1] == computed[1] and found[2] == pytest.approx(computed[2], abs=1e-4)
        for run in runs():
            run.write_bytes(run.read_bytes()[:-1] + b"\x99")
        httpx.post(f"{second.url}/flush_cache", timeout=PATIENCE_S).raise_for_status()
        assert ask(second, PROMPT)[:2] == (details(), computed[1]) and metric(second, "corrupt_runs_total") == 1

        backend = f"{second.url}/hicache/storage-backend"
        assert httpx.get(backend, timeout=PATIENCE_S).json()["hicache_storage_backend"] == "file"
        httpx.post(f"{backend}/clear", timeout=PATIENCE_S).raise_for_status()
        assert not runs()


def test_subscribers_hear_what_is_on_disk(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR", str(tmp_path / "kv"))
    storage = ("--enable-hierarchical-cache", "--hicache-storage-backend", "file")
    endpoints = {name: f"ipc://{tmp_path}/{name}" for name in ("endpoint", "replay_endpoint")}
    flags = ("--model", str(tiny_model), *TINY, *storage, "--hicache-storage-prefetch-policy", "wait_complete")

    def held() -> dict[str | None, list[int]]:
        """The blocks of each tier, by all events so far."""
        blocks: dict[str | None, list[int]] = {}
        with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
            socket.connect(endpoints["replay_endpoint"])
            socket.send_multipart([b"", (0).to_bytes(8, "big")])
            while (frames := socket.recv_multipart())[1] != END_OF_REPLAY:
                for event in msgspec.msgpack.decode(frames[2], type=KVEventBatch).events:
                    match event:
                        case BlockStored():
                            blocks.setdefault(event.medium, []).extend(event.block_hashes)
                        case BlockRemoved():
                            blocks[event.medium] = [n for n in blocks[event.medium] if n not in event.block_hashes]
                        case AllBlocksCleared():
                            blocks[DEVICE] = []
        return blocks

    for restarted in (False, True):
        with running(*flags, "--kv-events-config", json.dumps(endpoints)) as server:
            assert DISK not in held()
            assert ask(server, PROMPT)[0] == (details(storage=256, disk=256) if restarted else details())
            until(lambda: DISK in held(), "the run's blocks")
            known = held()
            assert len(known[DISK]) == 256 and {*known[DISK]} <= {*known[DEVICE]} & {*known[HOST]}
            if restarted:
                next((tmp_path / "kv").glob("[!.]*")).unlink()
                httpx.post(f"{server.url}/flush_cache", timeout=PATIENCE_S).raise_for_status()
                assert not held()[HOST] and held()[DISK] == known[DISK], "the engine has not looked"
                httpx.post(f"{server.url}/hicache/storage-backend/clear", timeout=PATIENCE_S).raise_for_status()
                until(lambda: not held()[DISK], "that it is withdrawn")


def test_a_store_is_attached_to_a_server_that_runs_and_detached_under_load(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR", str(tmp_path / "kv"))
    prompts = [[number, *PROMPT] for number in range(2, 8)]

    def together(server: Server) -> list[Any]:
        with ThreadPoolExecutor(len(prompts)) as threads:
            return list(threads.map(lambda prompt: ask(server, prompt)[1], prompts))

    with running("--model", str(tiny_model), *TINY, "--enable-hierarchical-cache", "--enable-metrics") as server:
        backend = f"{server.url}/hicache/storage-backend"

        def call(method: str, **body: str) -> httpx.Response:
            return httpx.request(method, backend, json=body or None, timeout=PATIENCE_S)

        assert call("GET").json()["hicache_storage_backend"] is None
        computed = together(server)
        given = {"hicache_storage_backend": "file", "hicache_storage_prefetch_policy": "wait_complete"}
        assert call("PUT", **given, hicache_storage_backend_extra_config_json='{"max_bytes": 1000}').status_code == 400
        nobody = '{"url": "lm://127.0.0.1:1"}'
        answer = call("PUT", hicache_storage_backend="lmcache", hicache_storage_backend_extra_config_json=nobody)
        assert answer.status_code == 400 and "lmcache_server" in answer.text
        assert call("GET").json()["hicache_storage_backend"] is None
        call("PUT", **given).raise_for_status()
        assert call("GET").json() == {**given, "hicache_write_policy": "write_through"}
        assert call("PUT", hicache_storage_backend="redis").status_code == 400

        httpx.post(f"{server.url}/flush_cache", timeout=PATIENCE_S).raise_for_status()
        assert together(server) == computed
        until(lambda: metric(server, "written_tokens_total") == 256 * len(prompts), "runs in the store")
        httpx.post(f"{server.url}/flush_cache", timeout=PATIENCE_S).raise_for_status()
        found = ask(server, prompts[0])
        assert found[0] == details(storage=256, disk=256) and found[1] == computed[0]

        httpx.post(f"{server.url}/flush_cache", timeout=PATIENCE_S).raise_for_status()
        with ThreadPoolExecutor(1) as thread:
            load = thread.submit(together, server)
            call("DELETE").raise_for_status()
            assert load.result() == computed
        assert call("GET").json()["hicache_storage_backend"] is None
        httpx.post(f"{server.url}/flush_cache", timeout=PATIENCE_S).raise_for_status()
        assert ask(server, prompts[0])[0] == details() and len(list((tmp_path / "kv").glob("[!.]*"))) == len(prompts)


def test_a_restarted_server_answers_from_lmcaches_server(tiny_model: Path, tmp_path: Path) -> None:
    with lmcache_server(tmp_path) as url:
        storage = ("--hicache-storage-backend", "lmcache", "--hicache-storage-prefetch-policy", "wait_complete")
        options = ("--hicache-storage-backend-extra-config", json.dumps({"url": url}))
        flags = ("--model", str(tiny_model), *TINY, "--enable-hierarchical-cache", *storage, *options)
        with running(*flags, "--enable-metrics") as first:
            computed = ask(first, PROMPT)
            until(lambda: metric(first, "written_tokens_total") == 256, "a run in the store")
        with running(*flags, "--enable-metrics") as second:
            found = ask(second, PROMPT)
            assert found[0] == {**details(storage=256, store=256), "storage_backend": "lmcache"}
            assert found[1] == computed[1] and found[2] == pytest.approx(computed[2], abs=1e-4)
            answer = httpx.post(f"{second.url}/hicache/storage-backend/clear", timeout=PATIENCE_S)
            assert answer.status_code == 400 and "restart it" in answer.text
            assert metric(second, "failures_total") == 0


def test_a_pair_that_starts_again_answers_from_disk(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The prefill engine reads the prompt; what it has found goes to the decode engine."""
    monkeypatch.setenv("SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR", str(tmp_path / "kv"))
    port = str(free_port())
    flags = ("--model", str(tiny_model), *TINY, "--enable-hierarchical-cache", "--hicache-storage-backend", "file")
    flags += ("--hicache-storage-prefetch-policy", "wait_complete", "--disaggregation-bootstrap-port", port)
    decode = ("--disaggregation-mode", "decode", "--prefill-url", "http://127.0.0.1:1")
    answers = []
    for _ in range(2):
        with running(*flags, "--disaggregation-mode", "prefill"), running(*flags, *decode) as server:
            answers.append(ask(server, PROMPT))
            state = httpx.get(f"{server.url}/get_server_info", timeout=PATIENCE_S).json()["internal_states"][0]
            assert state["transfers"] == 1 and state["failed_transfers"] == 0
            until(lambda: any(not path.name.startswith(".") for path in (tmp_path / "kv").iterdir()), "a file")
    (before, *computed), (found, *again) = answers
    assert before == details() and found == details(storage=256, disk=256)
    assert again[0] == computed[0] and again[1] == pytest.approx(computed[1], abs=1e-4)
