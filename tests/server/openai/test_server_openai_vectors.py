"""Vectors and scores end to end, over a scripted engine: shapes of answers, OpenAI's own client, and refusals."""

from __future__ import annotations

import asyncio
import base64
import math
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import numpy as np
import openai
import pytest

from bough.core.finish import FinishAbort, FinishStop
from bough.core.pooling import Pooling
from bough.messages.outputs import Delta, Started
from bough.messages.requests import Generate
from bough.server.context import ServerContext
from tests.fakes.scripted_engine import logprob_run
from tests.server.native_engine import NativeEngine, open_server

SIZE = 8


def vector_of(ids: list[int]) -> np.ndarray:
    return np.array([sum(ids) / (i + 1) for i in range(SIZE)], dtype=np.float32)


class VectorEngine(NativeEngine):
    """A vector is made of the sum of a text's tokens; with labels, their scores are its first numbers."""

    def __init__(self, *labels: str, embeds: bool = True) -> None:
        super().__init__(lambda message: [1])
        self._labels, self._embeds = list(labels), embeds

    def context(self, **settings: Any) -> ServerContext:
        made = super().context(**settings)
        made.model.limits.update(is_embedding=self._embeds, labels=self._labels)
        return made

    def _answer(self, message: Generate) -> None:
        ids = np.frombuffer(message.input_ids, np.int32).tolist()
        started = Started(message.handle, len(ids), 0, 0.0)
        if self._embeds and message.pooling is None:
            refusal = FinishAbort("This model gives vectors (/v1/embeddings); it does not generate text.")
            self._later([Delta(message.handle, "", b"", finish=refusal)])
        elif message.pooling is not None:
            vector = vector_of(ids)[: len(self._labels) or message.pooling.dimensions]
            self._later([Delta(message.handle, "", b"", started, finish=FinishStop(None), vector=vector.tobytes())])
        else:
            assert message.logprobs is not None
            run = logprob_run([1])
            scores = np.array([-sum(ids) / 1000 / (1 + label) for label in message.logprobs.ids], dtype=np.float32)
            run = type(run)(run.tokens, run.logprobs, 0, b"", b"", scores.tobytes())
            one = np.array([1], dtype=np.int32).tobytes()
            self._later([Delta(message.handle, "x", one, started, [run], FinishStop(None))])


def serve(engine: VectorEngine, use: Callable[[httpx.AsyncClient], Awaitable[None]], **settings: Any) -> None:
    async def run() -> None:
        async with open_server(engine, **settings) as http:
            await use(http)

    asyncio.run(run())


async def post(http: httpx.AsyncClient, path: str, status: int = 200, **body: Any) -> Any:
    answer = await http.post(path, json=body)
    assert answer.status_code == status, answer.text
    return answer.json()


def test_openais_client_gets_the_vectors_of_texts_and_token_ids() -> None:
    async def use(http: httpx.AsyncClient) -> None:
        client = openai.AsyncOpenAI(base_url="http://localhost/v1", api_key="x", http_client=http, max_retries=0)
        for given in ("ab", ["ab", "c"], [97, 98], [[97, 98], [99]]):
            answer = await client.embeddings.create(model="tiny", input=given)  # type: ignore[arg-type]  # as base64
            plain = await client.embeddings.create(model="tiny", input=given, encoding_format="float")  # type: ignore[arg-type]
            expected = [vector_of([97, 98]), vector_of([99])][: len(answer.data)]
            for each in (answer, plain):
                assert [item.index for item in each.data] == list(range(len(expected)))
                assert np.allclose([item.embedding for item in each.data], expected)
            assert answer.usage.prompt_tokens == answer.usage.total_tokens == (3 if len(expected) > 1 else 2)
        short = await client.embeddings.create(model="tiny", input="ab", dimensions=3)
        assert len(short.data[0].embedding) == 3

    engine = VectorEngine()
    serve(engine, use)
    assert engine.requests[-1].pooling == Pooling(dimensions=3) and engine.requests[-1].sampling.max_new_tokens == 0


def test_base64_is_little_endian_float32() -> None:
    async def use(http: httpx.AsyncClient) -> None:
        answer = await post(http, "/v1/embeddings", input="ab", encoding_format="base64")
        found = np.frombuffer(base64.b64decode(answer["data"][0]["embedding"]), dtype="<f4")
        assert np.array_equal(found, vector_of([97, 98]))
        assert answer["object"] == "list" and answer["data"][0]["object"] == "embedding"

    serve(VectorEngine(), use)


def test_ten_thousand_texts_in_one_request() -> None:
    async def use(http: httpx.AsyncClient) -> None:
        answer = await post(http, "/v1/embeddings", input=["a" * (1 + i % 7) for i in range(10_000)])
        assert len(answer["data"]) == 10_000
        assert answer["data"][6]["embedding"][0] == 7 * 97

    serve(VectorEngine(), use)


def test_sglangs_encode_and_classify() -> None:
    async def use(http: httpx.AsyncClient) -> None:
        one = await post(http, "/encode", text="ab")
        assert one["embedding"][0] == 195 and one["meta_info"]["prompt_tokens"] == 2
        assert (await post(http, "/encode", text=["ab"]))[0]["embedding"] == one["embedding"]
        many = await post(http, "/classify", input_ids=[[1], [2, 3]])
        assert [each["embedding"][0] for each in many] == [1, 5]
        assert "exactly one" in (await post(http, "/encode", 400))["error"]["message"]
        assert (await post(http, "/encode", 400, text=[]))["error"]["param"] == "text"

    serve(VectorEngine(), use)


def test_what_vectors_cannot_be_made_of_is_refused_by_name() -> None:
    async def use(http: httpx.AsyncClient) -> None:
        asked = {"lora_path": "a", "image_data": "a.png", "input_embeds": [[1.0]], "truncate_prompt_tokens": 8}
        for name, value in asked.items():
            for path in ("/encode", "/classify"):
                error = (await post(http, path, 400, **{"text": "ab", name: value}))["error"]
                assert error["param"] == name and "not supported" in error["message"]
        for name in ("lora_path", "truncate_prompt_tokens"):
            error = (await post(http, "/v1/embeddings", 400, **{"input": "ab", name: asked[name]}))["error"]
            assert error["param"] == name and "not supported" in error["message"]
        nothing = dict.fromkeys(asked)
        assert await post(http, "/encode", text="ab", **nothing, sampling_params={}, is_cross_encoder_request=False)
        await post(http, "/v1/embeddings", input="ab", lora_path=None)

    serve(VectorEngine(), use)


def test_classify_names_labels_and_their_shares() -> None:
    async def use(http: httpx.AsyncClient) -> None:
        answer = await post(http, "/v1/classify", input=[[1], [2]])
        first = answer["data"][0]
        assert (first["label"], first["num_classes"]) == ("yes", 2)
        assert first["probs"] == pytest.approx([1 / (1 + math.exp(-0.5)), 1 / (1 + math.exp(0.5))])
        refused = await post(http, "/v1/embeddings", 400, input="a")
        assert "scores labels" in refused["error"]["message"]

    serve(VectorEngine("yes", "no"), use)


def test_rerank_orders_documents_and_shows_them_if_asked() -> None:
    async def use(http: httpx.AsyncClient) -> None:
        documents = ["\x01", {"text": "\x03"}, "\x02"]
        answer = await post(http, "/v1/rerank", query="\x01", documents=documents)
        assert [each["index"] for each in answer["results"]] == [1, 2, 0]
        assert answer["results"][0]["relevance_score"] == pytest.approx(1 / (1 + math.exp(-4)))
        assert "document" not in answer["results"][0]
        best = await post(http, "/rerank", query="\x01", documents=documents, top_n=1, return_documents=True)
        assert [each["document"] for each in best["results"]] == [{"text": "\x03"}]
        for wrong in ({"documents": []}, {"documents": [{"no": 1}]}, {"documents": ["a"], "top_n": 0}):
            await post(http, "/v1/rerank", 400, query="a", **wrong)

    serve(VectorEngine("relevant"), use)


def test_score_is_the_likelihood_of_labels_behind_query_and_item() -> None:
    engine = VectorEngine(embeds=False)

    async def use(http: httpx.AsyncClient) -> None:
        answer = await post(http, "/v1/score", query="ab", items=["c", "d"], label_token_ids=[0, 1])
        assert answer["scores"][0] == pytest.approx([math.exp(-0.294), math.exp(-0.147)], rel=1e-5)
        assert [engine.prompt_text(request) for request in engine.requests] == ["abc", "abd"]
        shares = await post(
            http, "/v1/score", query=[97], items=[[98]], label_token_ids=[0, 1], apply_softmax=True, item_first=True
        )
        assert sum(shares["scores"][0]) == pytest.approx(1.0)
        assert engine.prompt_text(engine.requests[-1]) == "ba"
        mixed = await post(http, "/v1/score", 400, query="a", items=[[98]], label_token_ids=[0])
        assert "texts, or both token ids" in mixed["error"]["message"]
        outside = await post(http, "/v1/score", 400, query="a", items=["b"], label_token_ids=[999])
        assert "outside the vocabulary" in outside["error"]["message"]

    serve(engine, use)


def test_models_are_asked_only_for_what_they_give() -> None:
    async def use(http: httpx.AsyncClient) -> None:
        chat = {"messages": [{"role": "user", "content": "a"}]}
        for path, body in (("/v1/completions", {"prompt": "a"}), ("/v1/chat/completions", chat)):
            assert "does not generate text" in (await post(http, path, 400, **body))["error"]["message"]
        for path, body in (
            ("/v1/score", {"items": ["b"], "label_token_ids": [1]}),
            ("/v1/rerank", {"documents": ["b"]}),
        ):
            await post(http, path, 400, query="a", **body)
        assert "no labels" in (await post(http, "/v1/classify", 400, input="a"))["error"]["message"]
        assert (await http.get("/health_generate")).status_code == 200
        info = (await http.get("/model_info")).json()
        assert info["is_generation"] is False

    serve(VectorEngine(), use)


def test_qwens_reranker_is_asked_for_yes_or_no() -> None:
    engine = VectorEngine(embeds=False)
    engine.tokenizer.backend.add_special_tokens(["<think>"])

    async def use(http: httpx.AsyncClient) -> None:
        answer = await post(http, "/v1/rerank", query="Q", documents=["D", "DD"], instruct="I")
        (prompt, longer), (yes, no) = [engine.prompt_text(each) for each in engine.requests], b"yn"
        assert prompt.startswith("<|im_start|>system\nJudge whether") and longer == prompt.replace(": D<", ": DD<")
        assert "<Instruct>: I\n<Query>: Q\n<Document>: D<|im_end|>" in prompt and prompt.endswith("</think>\n\n")
        logprobs = engine.requests[0].logprobs
        assert logprobs is not None and logprobs.ids == (yes, no)
        total = int(np.frombuffer(engine.requests[0].input_ids, np.int32).sum()) / 1000
        scores = {each["index"]: each["relevance_score"] for each in answer["results"]}
        assert scores[0] == pytest.approx(1 / (1 + math.exp(total / (1 + yes) - total / (1 + no))), rel=1e-5)

    serve(engine, use)
