"""Weights that are updated and memory that is released while a server, or an engine, goes on."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
import transformers
from safetensors.torch import load_file

from bough import Engine
from bough.core.errors import RequestError
from bough.rl import TrainerGroup, shared_tensors
from tests.fakes.checkpoints import write_checkpoint
from tests.system.serving import PATIENCE_S, TINY, load_of, running, until

FLAGS = (*TINY[2:], "--context-length", "500")  # but with the weights of its files
PROMPT = [5, 9, 17, 33, 2, 64, 90]
GREEDY = {"max_new_tokens": 12, "temperature": 0, "ignore_eos": True}
# A tiny model is quick: only many answers take long enough to be met running.
LONG = {"input_ids": [[3, 4 + number] for number in range(40)], "sampling_params": {**GREEDY, "max_new_tokens": 400}}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("checkpoints")
    made = {name: write_checkpoint(folder / name, seed) for seed, name in enumerate(("first", "second"))}
    return made | {"wide": write_checkpoint(folder / "wide", 3, intermediate_size=96)}


@pytest.fixture(scope="module")
def client(checkpoints: dict[str, Path]) -> Iterator[httpx.Client]:
    """Two HTTP processes: each must know what the other has changed."""
    flags = (*FLAGS, "--tokenizer-worker-num", "2", "--enable-memory-saver")
    with (
        running(str(checkpoints["first"]), *flags) as server,
        httpx.Client(base_url=server.url, timeout=PATIENCE_S) as http,
    ):
        yield http


@pytest.fixture(scope="module")
def second_tokens(checkpoints: dict[str, Path]) -> list[int]:
    """What an engine says that has started with the second checkpoint."""
    with Engine(checkpoints["second"], skip_tokenizer_init=True, max_total_tokens=4096, cpu_threads=1) as engine:
        return answer_of(engine.generate(input_ids=PROMPT, sampling_params=GREEDY))


def answer_of(output: dict[str, Any]) -> list[int]:
    ids: list[int] = output["output_ids"]
    return ids


def generated(client: httpx.Client) -> dict[str, Any]:
    reply = client.post("/generate", json={"input_ids": PROMPT, "sampling_params": GREEDY})
    assert reply.status_code == 200, reply.text
    output: dict[str, Any] = reply.json()
    return output


def update(client: httpx.Client, path: Path | str, **fields: Any) -> httpx.Response:
    return client.post("/update_weights_from_disk", json={"model_path": str(path), **fields})


def test_an_update_gives_the_new_weights_tokens(
    client: httpx.Client, checkpoints: dict[str, Path], second_tokens: list[int]
) -> None:
    before = answer_of(generated(client))
    assert before != second_tokens and generated(client)["meta_info"]["cached_tokens"] > 0
    reply = update(client, checkpoints["second"], weight_version="step-2")
    assert reply.status_code == 200 and reply.json()["success"] is True and reply.json()["num_paused_requests"] == 0
    output = generated(client)
    assert answer_of(output) == second_tokens and output["meta_info"]["cached_tokens"] == 0
    assert output["meta_info"]["weight_version"] == "step-2"
    for _ in range(6):  # a connection of its own each, to one process or the other
        info = httpx.get(f"{client.base_url}/get_model_info").json()
        assert (info["model_path"], info["weight_version"]) == (str(checkpoints["second"]), "step-2")
    assert update(client, checkpoints["first"]).status_code == 200
    assert answer_of(generated(client)) == before


def test_what_does_not_fit_is_refused_and_the_old_weights_serve_on(
    client: httpx.Client, checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    before = answer_of(generated(client))
    for path, reason in ((tmp_path / "none", "Unknown model"), (checkpoints["wide"], "intermediate_size is 96")):
        reply = update(client, path)
        assert reply.status_code == 400 and reply.json()["success"] is False and reason in reply.json()["message"]
    assert client.post("/update_weights_from_disk", json={}).status_code == 400
    assert answer_of(generated(client)) == before
    assert client.get("/get_model_info").json()["model_path"] == str(checkpoints["first"])


def test_running_requests_are_finished_or_aborted_first(
    client: httpx.Client, checkpoints: dict[str, Path], second_tokens: list[int]
) -> None:
    alone = [answer_of(output) for output in client.post("/generate", json=LONG).json()]
    for abort in (False, True):
        answers: list[dict[str, Any]] = []

        def ask(found: list[dict[str, Any]] = answers) -> None:
            found += httpx.post(f"{client.base_url}/generate", json=LONG, timeout=PATIENCE_S).json()

        asking = threading.Thread(target=ask)
        asking.start()
        until(lambda: load_of(str(client.base_url))["num_running_reqs"], "a running request")
        refused = client.post("/release_memory_occupation")
        assert refused.status_code == 400 and "requests run" in refused.json()["error"]["message"]
        assert update(client, checkpoints["second"], abort_all_requests=abort).status_code == 200
        assert answer_of(generated(client)) == second_tokens
        asking.join()
        ends = {output["meta_info"]["finish_reason"]["type"] for output in answers}
        assert "abort" in ends if abort else [answer_of(output) for output in answers] == alone
        assert update(client, checkpoints["first"]).status_code == 200


@pytest.mark.parametrize("tags", [None, ["weights"], ["kv_cache"]])
def test_the_same_tokens_come_after_memory_was_released(client: httpx.Client, tags: list[str] | None) -> None:
    before = answer_of(generated(client))
    assert client.post("/release_memory_occupation", json={"tags": tags}).json()["success"] is True
    refused = client.post("/generate", json={"input_ids": PROMPT})
    assert refused.status_code == 503 and "/resume_memory_occupation" in refused.json()["error"]["message"]
    assert client.get("/health_generate").status_code == 503 and client.get("/health").status_code == 200
    assert client.post("/resume_memory_occupation", json={"tags": tags}).json()["success"] is True
    output = generated(client)
    assert answer_of(output) == before
    assert (output["meta_info"]["cached_tokens"] > 0) == (tags == ["weights"])


@pytest.mark.slow
def test_tensors_are_taken_under_load(
    client: httpx.Client, checkpoints: dict[str, Path], second_tokens: list[int]
) -> None:
    """Every answer is that of the weights whose version it carries, and bytes that do not fit change nothing."""
    route, answers = "/update_weights_from_tensor", []
    wanted = {"first": answer_of(generated(client)), "second": second_tokens}
    client.post("/update_weight_version", json={"new_version": "first"}).raise_for_status()
    stop = threading.Event()

    def ask() -> None:
        while not stop.is_set():
            reply = httpx.post(
                f"{client.base_url}/generate", json={"input_ids": PROMPT, "sampling_params": GREEDY}, timeout=PATIENCE_S
            )
            answers.append(reply.json())

    asking = [threading.Thread(target=ask) for _ in range(4)]
    for thread in asking:
        thread.start()
    for version in ("second", "first", "second", "first"):
        content = (checkpoints[version] / "model.safetensors").read_bytes()
        enough = len(answers) + 4
        until(lambda enough=enough: len(answers) > enough, "answers between updates")
        headers = {"content-type": "application/octet-stream"}
        cut = client.post(route, content=content[: len(content) // 2], headers=headers)
        assert cut.status_code == 400 and "no whole safetensors" in cut.json()["message"]
        reply = client.post(route, content=content, headers=headers, params={"weight_version": version})
        assert reply.status_code == 200, reply.text
    stop.set()
    for thread in asking:
        thread.join()
    assert {answer["meta_info"]["weight_version"] for answer in answers} == {"first", "second"}
    assert all(answer_of(answer) == wanted[answer["meta_info"]["weight_version"]] for answer in answers)


def test_a_trainers_group_replaces_weights_under_load(
    client: httpx.Client, checkpoints: dict[str, Path], second_tokens: list[int]
) -> None:
    """Every answer is that of the weights whose version it carries, and tensors that do not fit change nothing."""
    wanted = {"first": answer_of(generated(client)), "second": second_tokens}
    client.post("/update_weight_version", json={"new_version": "first"}).raise_for_status()
    tensors = {name: load_file(checkpoints[name] / "model.safetensors") for name in wanted}
    answers: list[dict[str, Any]] = []
    stop = threading.Event()

    def ask_engine(route: str, fields: dict[str, Any]) -> dict[str, Any]:
        reply: dict[str, Any] = httpx.post(f"{client.base_url}/{route}", json=fields, timeout=PATIENCE_S).json()
        if "error" in reply:
            raise RequestError(reply["error"]["message"])
        return reply

    def ask() -> None:
        body = {"input_ids": PROMPT, "sampling_params": GREEDY}
        while not stop.is_set():
            answers.append(httpx.post(f"{client.base_url}/generate", json=body, timeout=PATIENCE_S).json())

    with pytest.raises(RequestError, match="world_size: expected int >= 2"):
        TrainerGroup(ask_engine, world_size=1)
    asking = [threading.Thread(target=ask) for _ in range(3)]
    for thread in asking:
        thread.start()
    try:
        with TrainerGroup(ask_engine) as group:
            for version in ("second", "first", "second", "first"):
                enough = len(answers) + 4
                until(lambda enough=enough: len(answers) > enough, "answers between updates")
                wide = {**tensors[version], "model.norm.weight": tensors[version]["model.norm.weight"].repeat(2)}
                with pytest.raises(RequestError, match=r"Tensor model.norm.weight has shape"):
                    group.update(wide, weight_version="wide")
                assert group.update(tensors[version], weight_version=version)["success"] is True
    finally:
        stop.set()
        for thread in asking:
            thread.join()
    assert {answer["meta_info"]["weight_version"] for answer in answers} == {"first", "second"}
    assert all(answer_of(answer) == wanted[answer["meta_info"]["weight_version"]] for answer in answers)
    gone = client.post("/update_weights_from_distributed", json={"names": [], "dtypes": [], "shapes": []})
    assert gone.status_code == 400 and "no group" in gone.json()["message"]


@pytest.mark.slow
def test_an_engine_takes_a_trainers_tensors(checkpoints: dict[str, Path], second_tokens: list[int]) -> None:
    theirs = transformers.AutoModelForCausalLM.from_pretrained(checkpoints["second"]).state_dict()
    wide = {"model.norm.weight": theirs["model.norm.weight"].repeat(2)}
    with Engine(checkpoints["first"], skip_tokenizer_init=True, max_total_tokens=4096, cpu_threads=1) as engine:
        before = answer_of(engine.generate(input_ids=PROMPT, sampling_params=GREEDY))
        assert not engine.update_weights_from_tensor(wide).success
        assert answer_of(engine.generate(input_ids=PROMPT, sampling_params=GREEDY)) == before
        success, message, paused = engine.update_weights_from_tensor(list(theirs.items()), weight_version="2")
        assert success and paused == 0, message
        output = engine.generate(input_ids=PROMPT, sampling_params=GREEDY)
        assert answer_of(output) == second_tokens and output["meta_info"]["weight_version"] == "2"
        with shared_tensors(theirs) as path:
            assert engine.update_weights_from_ipc([path]).success
        assert engine.update_weight_version("named").success
        assert engine.get_model_info()["weight_version"] == "named"
        with pytest.raises(RequestError, match="mode must be one of abort"):
            engine.pause_generation("stop")  # type: ignore[arg-type]
        engine.pause_generation("retract")
        assert engine.get_server_info()["internal_states"][0]["paused"]
        engine.continue_generation()
        assert not engine.get_server_info()["internal_states"][0]["paused"]
        ours = load_file(checkpoints["first"] / "model.safetensors")
        with TrainerGroup(lambda name, fields: getattr(engine, name)(**fields)) as group:
            assert not group.update(wide).success
            assert group.update(ours, weight_version="1").success
            assert answer_of(engine.generate(input_ids=PROMPT, sampling_params=GREEDY)) == before
            assert group.update(theirs).success
        for name, tensor in theirs.items():
            assert torch.equal(torch.tensor(engine.get_weights_by_name(name, 10**6)), tensor), name
        with pytest.raises(RequestError, match=r"no tensor 'model\.nothing'"):
            engine.get_weights_by_name("model.nothing")


def test_an_engine_of_the_default_model_does_the_same() -> None:
    with Engine(max_total_tokens=4096) as engine:
        path = engine.get_model_info()["model_path"]
        prompts = ["The capital of France is", "def main():"]
        before = [answer_of(output) for output in engine.generate(prompts, GREEDY)]
        engine.release_memory_occupation()
        with pytest.raises(RequestError, match="/resume_memory_occupation"):
            engine.generate("Hello", GREEDY)
        with pytest.raises(RequestError, match="tags must be among"):
            engine.resume_memory_occupation(["graphs"])
        engine.resume_memory_occupation(["weights"])
        success, message, paused = engine.update_weights_from_disk(path, weight_version="again")
        assert success and path in message and paused == 0
        engine.resume_memory_occupation(["kv_cache"])
        assert [answer_of(output) for output in engine.generate(prompts, GREEDY)] == before
        assert not engine.update_weights_from_disk("/nowhere").success
        assert engine.get_model_info()["weight_version"] == "again"
        assert [answer_of(output) for output in engine.generate(prompts, GREEDY)] == before
