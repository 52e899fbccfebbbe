"""Vectors and scores: /v1/embeddings, /v1/classify, /v1/rerank, /v1/score, and SGLang's /encode and /classify."""

import base64
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from bough.client.outputs import RequestOutput
from bough.client.vectors import Vectors, sigmoid, softmax
from bough.core.errors import RequestError
from bough.core.sampling_params import require_few
from bough.server.bodies import UNSUPPORTED, refuse_unsupported, unsupported
from bough.server.context import MAX_VECTORS_PER_CALL, ServerContext, offload
from bough.server.endpoint import OPENAI, Endpoint, encode_json
from bough.server.errors import set_field_names
from bough.server.openai.completions import text_or_ids
from bough.server.openai.objects import Usage
from bough.server.openai.requests import Identity
from bough.server.openai.writing import usage_of
from bough.server.streaming import while_connected

MAX_PAIRED = 1 << 26  # characters of a query, as often as it is read


class VectorFields(msgspec.Struct, kw_only=True):
    """Of texts and what is made of them. The last three change vectors in ways that this engine does not have."""

    dimensions: int | None = None
    priority: int | None = None
    lora_path: Annotated[Any, UNSUPPORTED] = None
    embed_overrides: Annotated[Any, UNSUPPORTED] = None
    truncate_prompt_tokens: Annotated[int | None, unsupported(None)] = None


class TextsRequest(VectorFields, kw_only=True):
    """POST /v1/embeddings and /v1/classify."""

    input: str | list[str | int | list[int]]
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    user: str | None = None
    rid: str | None = None


class RerankRequest(msgspec.Struct, kw_only=True):
    """POST /v1/rerank, as Cohere and Jina have it."""

    query: str
    documents: list[str | dict[str, Any]]  # a text, or an object with one
    model: str | None = None
    top_n: int | None = None
    return_documents: bool | None = None
    instruct: str | None = None  # for Qwen3-Reranker


class ScoreRequest(msgspec.Struct, kw_only=True):
    """POST /v1/score."""

    query: str | list[int]
    items: str | list[str | list[int]]
    label_token_ids: list[int]
    apply_softmax: bool = False
    item_first: bool = False
    model: str | None = None


class EncodeBody(VectorFields, kw_only=True):
    """POST /encode and /classify."""

    text: str | list[str] | None = None
    input_ids: list[int | list[int]] | None = None
    rid: str | list[str] | None = None
    input_embeds: Annotated[Any, UNSUPPORTED] = None
    image_data: Annotated[Any, UNSUPPORTED] = None
    video_data: Annotated[Any, UNSUPPORTED] = None
    audio_data: Annotated[Any, UNSUPPORTED] = None
    positional_embed_overrides: Annotated[Any, UNSUPPORTED] = None


class Embedding(msgspec.Struct, kw_only=True):
    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str  # base64 of little-endian float32


class Embeddings(msgspec.Struct, kw_only=True):
    """The answer of /v1/embeddings."""

    object: Literal["list"] = "list"
    data: list[Embedding]
    model: str
    usage: Usage


def vector_routes(context: ServerContext) -> list[Endpoint]:
    routes = VectorRoutes(context)
    answers: dict[str, Any] = {**OPENAI, "answer": dict[str, Any]}
    native: dict[str, Any] = {"methods": ("POST", "PUT"), "body": EncodeBody, "answer": dict[str, Any] | list[Any]}
    return [
        Endpoint("/v1/embeddings", routes.embed, "Texts to vectors", body=TextsRequest, answer=Embeddings, **OPENAI),
        Endpoint("/v1/classify", routes.classify, "Texts to labels", body=TextsRequest, **answers),
        Endpoint("/v1/rerank", routes.rerank, "How well documents answer a query", body=RerankRequest, **answers),
        Endpoint("/rerank", routes.rerank, "Same as /v1/rerank", body=RerankRequest, **answers),
        Endpoint("/v1/score", routes.score, "How likely tokens follow", body=ScoreRequest, **answers),
        Endpoint("/encode", routes.encode, "One text or several to vectors", **native),
        Endpoint("/classify", routes.encode, "One text or several to the scores of labels, or a reward", **native),
    ]


class VectorRoutes:
    def __init__(self, context: ServerContext) -> None:
        self._vectors = Vectors(context.client, context.read_inputs, context.tokenizer, context.model.limits)
        self._named, self._adapter_of = context.shown_name, context.adapter_of

    async def embed(self, request: Request, body: TextsRequest) -> Response:
        if self._vectors.labels:
            raise RequestError("This model scores labels; use /v1/classify or /v1/rerank.", field="model")

        def shown(answer: RequestOutput) -> Embedding:
            raw, listed = answer.vector.astype("<f4").tobytes(), body.encoding_format != "base64"
            vector = answer.vector.tolist() if listed else base64.b64encode(raw).decode()
            return Embedding(index=answer.index, embedding=vector)

        return await self._written(body, await self._texts(request, body), lambda items: {"data": [*map(shown, items)]})

    async def classify(self, request: Request, body: TextsRequest) -> Response:
        labels = self._vectors.labels
        if not labels:
            raise RequestError("This model has no labels; serve a sequence classifier.", field="model")

        def shown(answer: RequestOutput) -> dict[str, Any]:
            scores = answer.vector.astype(np.float64)
            shares = (softmax if len(labels) > 1 else sigmoid)(scores).tolist()
            label = {"label": labels[int(scores.argmax())], "probs": shares, "num_classes": len(labels)}
            return {"index": answer.index, **label}

        identity = Identity.make("classify-", body.rid, self._named(body.model))
        common, answers = {"id": identity.id, "created": identity.created}, await self._texts(request, body)
        return await self._written(body, answers, lambda items: {**common, "data": list(map(shown, items))})

    async def rerank(self, request: Request, body: RerankRequest) -> Response:
        texts = [each if isinstance(each, str) else str(each.get("text") or "") for each in body.documents]
        if "" in texts:
            raise RequestError("documents must be texts, or objects with a text, and not empty.", field="documents")
        if body.top_n is not None and body.top_n < 1:
            raise RequestError(f"top_n must be at least 1, got {body.top_n}.", field="top_n")
        _check_pairs(body.query, texts, "documents")
        set_field_names({"input_ids": "documents", "lora_path": "model"})
        ranking = self._vectors.rerank(body.query, texts, body.instruct, lora_path=self._adapter_of(body.model))
        scores, answers = await while_connected(request, ranking)
        results = [
            {"index": i, "relevance_score": float(scores[i])}
            | ({"document": {"text": texts[i]}} if body.return_documents else {})
            for i in np.argsort(-scores, kind="stable").tolist()[: body.top_n]
        ]
        common = {"id": Identity.make("rerank-", None, self._named(body.model)).id, "results": results}
        return await self._written(body, answers, lambda items: common)

    async def score(self, request: Request, body: ScoreRequest) -> Response:
        set_field_names({"token_ids_logprob": "label_token_ids", "input_ids": "items", "lora_path": "model"})
        _check_pairs(body.query, body.items, "items")
        options: dict[str, Any] = {"apply_softmax": body.apply_softmax, "item_first": body.item_first}
        options["lora_path"] = self._adapter_of(body.model)
        scoring = self._vectors.score(body.query, body.items, body.label_token_ids, **options)
        scores, answers = await while_connected(request, scoring)
        return await self._written(body, answers, lambda items: {"object": "scoring", "scores": scores.tolist()})

    async def encode(self, request: Request, body: EncodeBody) -> Response:
        refuse_unsupported(body)
        if (body.text is None) == (body.input_ids is None):
            raise RequestError("Give exactly one of text and input_ids.", field="text")
        set_field_names({"prompt": "text"})
        given = {"prompt": body.text, "input_ids": body.input_ids, "rid": body.rid, "priority": body.priority}
        shown = await while_connected(request, self._vectors.encoded(dimensions=body.dimensions, **given))
        return Response(await offload(1 << 20, lambda: encode_json(shown)), media_type="application/json")

    async def _texts(self, request: Request, body: TextsRequest) -> list[RequestOutput]:
        refuse_unsupported(body)
        set_field_names({"prompt": "input", "input_ids": "input"})
        given = {**text_or_ids(body.input, "input"), "rid": body.rid, "priority": body.priority}
        return await while_connected(request, self._vectors.encode(dimensions=body.dimensions, **given))

    async def _written(self, body: Any, answers: list[RequestOutput], show: Callable[[list[Any]], Any]) -> Response:
        """Millions of numbers take seconds to write: in a thread."""
        common = {"object": "list", "model": self._named(body.model), "usage": usage_of(answers)}
        size = sum(answer.vector.size for answer in answers)
        return Response(await offload(size, lambda: encode_json(common | show(answers))), media_type="application/json")


def _check_pairs(query: Sequence[Any], items: Sequence[Any], field: str) -> None:
    """Each item is read with the whole query before it."""
    count = 1 if isinstance(items, str) else len(items)
    require_few(range(count), field, MAX_VECTORS_PER_CALL)
    if count * len(query) > MAX_PAIRED:
        text = f"query has {len(query)} characters or ids and is read with each of {count} {field}"
        raise RequestError(f"{text}; at most {MAX_PAIRED} are read in all.", field="query")
