"""Vectors and scores: /v1/embeddings, /v1/classify, /v1/rerank, /v1/score, and SGLang's /encode and /classify."""

from __future__ import annotations

import base64
from typing import Any, Literal

import msgspec
import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from bough.client.outputs import RequestOutput
from bough.client.vectors import Vectors, softmax
from bough.core.errors import RequestError
from bough.server.context import ServerContext, offload
from bough.server.endpoint import OPENAI, Endpoint, encode_json
from bough.server.errors import set_field_names
from bough.server.openai.completions import text_or_ids
from bough.server.openai.objects import Usage
from bough.server.openai.requests import Identity
from bough.server.openai.writing import usage_of
from bough.server.streaming import while_connected

Texts = str | list[str | int | list[int]]


class EmbeddingRequest(msgspec.Struct, kw_only=True):
    """POST /v1/embeddings."""

    input: Texts
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    user: str | None = None
    rid: str | None = None
    priority: int | None = None


class ClassifyRequest(msgspec.Struct, kw_only=True):
    """POST /v1/classify."""

    input: Texts
    model: str | None = None
    user: str | None = None
    rid: str | None = None
    priority: int | None = None


class RerankRequest(msgspec.Struct, kw_only=True):
    """POST /v1/rerank, as Cohere and Jina have it."""

    query: str
    documents: list[str | dict[str, Any]]  # a text, or an object with one
    model: str | None = None
    top_n: int | None = None
    return_documents: bool | None = None
    instruct: str | None = None  # for Qwen3-Reranker
    rid: str | None = None


class ScoreRequest(msgspec.Struct, kw_only=True):
    """POST /v1/score."""

    query: str | list[int]
    items: str | list[str | list[int]]
    label_token_ids: list[int]
    apply_softmax: bool = False
    item_first: bool = False
    model: str | None = None


class EncodeBody(msgspec.Struct, kw_only=True):
    """POST /encode and /classify."""

    text: str | list[str] | None = None
    input_ids: list[int | list[int]] | None = None
    dimensions: int | None = None
    rid: str | list[str] | None = None
    priority: int | None = None


class EmbeddingItem(msgspec.Struct):
    index: int
    embedding: list[float] | str  # base64 is of little-endian float32
    object: Literal["embedding"] = "embedding"


class Embeddings(msgspec.Struct):
    data: list[EmbeddingItem]
    model: str
    usage: Usage
    object: Literal["list"] = "list"


class ClassifiedItem(msgspec.Struct):
    index: int
    label: str
    probs: list[float]
    num_classes: int


class Classified(msgspec.Struct):
    id: str
    created: int
    model: str
    data: list[ClassifiedItem]
    usage: Usage
    object: Literal["list"] = "list"


class Ranked(msgspec.Struct, omit_defaults=True):
    index: int
    relevance_score: float
    document: dict[str, Any] | None = None


class Reranked(msgspec.Struct):
    id: str
    model: str
    results: list[Ranked]
    usage: Usage


class Scored(msgspec.Struct):
    scores: list[list[float]]
    model: str
    usage: Usage
    object: Literal["scoring"] = "scoring"


class Encoded(msgspec.Struct):
    embedding: list[float]
    meta_info: dict[str, Any]


def vector_routes(context: ServerContext) -> list[Endpoint]:
    routes = VectorRoutes(context)
    ranks: dict[str, Any] = {**OPENAI, "body": RerankRequest, "answer": Reranked}
    native: dict[str, Any] = {"methods": ("POST", "PUT"), "body": EncodeBody, "answer": Encoded | list[Encoded]}
    return [
        Endpoint(
            "/v1/embeddings", routes.embed, "Texts to vectors", body=EmbeddingRequest, answer=Embeddings, **OPENAI
        ),
        Endpoint("/v1/classify", routes.classify, "Texts to labels", body=ClassifyRequest, answer=Classified, **OPENAI),
        Endpoint("/v1/rerank", routes.rerank, "Documents by how well they answer a query", **ranks),
        Endpoint("/rerank", routes.rerank, "Same as /v1/rerank", **ranks),
        Endpoint("/v1/score", routes.score, "How likely tokens follow", body=ScoreRequest, answer=Scored, **OPENAI),
        Endpoint("/encode", routes.encode, "One text or several to vectors", **native),
        Endpoint("/classify", routes.encode, "One text or several to the scores of labels or a reward", **native),
    ]


class VectorRoutes:
    def __init__(self, context: ServerContext) -> None:
        self._vectors = Vectors(context.client, context.read_inputs, context.tokenizer, context.model.limits)
        self._model = context.model.name

    async def embed(self, request: Request, body: EmbeddingRequest) -> Response:
        if self._vectors.labels:
            raise RequestError("This model scores labels; use /v1/classify or /v1/rerank.", field="model")
        answers = await self._encode(request, body.input, body.rid, body.priority, body.dimensions)

        def shown(answer: RequestOutput) -> list[float] | str:
            if body.encoding_format == "base64":
                return base64.b64encode(answer.vector.astype("<f4").tobytes()).decode()
            return answer.vector.tolist()

        return await self._written(
            answers,
            lambda: Embeddings([EmbeddingItem(a.index, shown(a)) for a in answers], self._model, usage_of(answers)),
        )

    async def classify(self, request: Request, body: ClassifyRequest) -> Response:
        labels = self._vectors.labels
        if not labels:
            raise RequestError("This model has no labels; serve a sequence classifier.", field="model")
        identity = Identity.make("classify-", body.rid, self._model)
        answers = await self._encode(request, body.input, body.rid, body.priority)

        def item(answer: RequestOutput) -> ClassifiedItem:
            logits = answer.vector.astype(np.float64)
            probs = softmax(logits) if len(logits) > 1 else 1 / (1 + np.exp(-logits))
            return ClassifiedItem(answer.index, labels[int(logits.argmax())], probs.tolist(), len(labels))

        items = list(map(item, answers))
        whole = Classified(identity.id, identity.created, self._model, items, usage_of(answers))
        return await self._written(answers, lambda: whole)

    async def rerank(self, request: Request, body: RerankRequest) -> Response:
        texts = [each if isinstance(each, str) else each.get("text") for each in body.documents]
        if any(not isinstance(text, str) for text in texts):
            raise RequestError("documents must be texts, or objects with a text.", field="documents")
        if body.top_n is not None and body.top_n < 1:
            raise RequestError(f"top_n must be at least 1, got {body.top_n}.", field="top_n")
        set_field_names({"input_ids": "documents"})
        ranking = self._vectors.rerank(body.query, [str(text) for text in texts], body.instruct)
        scores, answers = await while_connected(request, ranking)
        results = [
            Ranked(i, float(scores[i]), {"text": texts[i]} if body.return_documents else None)
            for i in np.argsort(-scores, kind="stable").tolist()[: body.top_n]
        ]
        identity = Identity.make("rerank-", body.rid, self._model)
        return await self._written(answers, lambda: Reranked(identity.id, self._model, results, usage_of(answers)))

    async def score(self, request: Request, body: ScoreRequest) -> Response:
        set_field_names({"token_ids_logprob": "label_token_ids", "input_ids": "items"})
        options: dict[str, Any] = {"apply_softmax": body.apply_softmax, "item_first": body.item_first}
        scoring = self._vectors.score(body.query, body.items, body.label_token_ids, **options)
        scores, answers = await while_connected(request, scoring)
        return await self._written(answers, lambda: Scored(scores.tolist(), self._model, usage_of(answers)))

    async def encode(self, request: Request, body: EncodeBody) -> Response:
        if (body.text is None) == (body.input_ids is None):
            raise RequestError("Give exactly one of text and input_ids.", field="text")
        given = {"prompt": body.text, "input_ids": body.input_ids, "rid": body.rid, "priority": body.priority}
        answers = await while_connected(request, self._vectors.encode(dimensions=body.dimensions, **given))
        many = isinstance(body.text, list) or (body.input_ids is not None and isinstance(body.input_ids[0], list))
        return await self._written(answers, lambda: [a.to_dict() for a in answers] if many else answers[0].to_dict())

    async def _encode(
        self, request: Request, given: Texts, rid: str | None, priority: int | None, dimensions: int | None = None
    ) -> list[RequestOutput]:
        set_field_names({"prompt": "input", "input_ids": "input"})
        encoding = self._vectors.encode(
            dimensions=dimensions, rid=rid, priority=priority, **text_or_ids(given, "input")
        )
        return await while_connected(request, encoding)

    async def _written(self, answers: list[RequestOutput], make: Any) -> Response:
        """Millions of numbers take seconds to write: in a thread."""
        size = sum(answer.vector.size for answer in answers)
        return Response(await offload(size, lambda: encode_json(make())), media_type="application/json")
