"""Vectors and scores, for servers and engines alike: from texts to requests, and from their answers to numbers.

Three kinds of models score a text: classifiers, whose answer is a number for each label; cross-encoders, which are
classifiers of pairs; and models that generate, by how likely they go on with chosen tokens.
"""

import asyncio
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, chain, groupby
from typing import Any

import numpy as np
import numpy.typing as npt

from bough.client.handle import EngineClient, raise_if_refused
from bough.client.inputs import Inputs, Prompt
from bough.client.outputs import RequestOutput
from bough.core.errors import RequestError
from bough.core.pooling import Pooling
from bough.tokenizer.tokenizer import Tokenizer

Read = Callable[..., Awaitable[Inputs]]
Floats = npt.NDArray[np.float64]
Scored = tuple[Floats, list[RequestOutput]]
# What Qwen3-Reranker was trained to answer with yes or no.
JUDGE = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
JUDGED = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
MARKS = ("<|im_start|>", "<think>")
STEPS_AHEAD = 3  # that a call's prompts fill: enough that the engine never waits for the next ones


class Vectors:
    """`read` is a reader's; `limits` are what the engine announced of itself."""

    def __init__(
        self, client: EngineClient, read: Read, tokenizer: Tokenizer | None, limits: Mapping[str, Any]
    ) -> None:
        self._client, self._read, self._tokenizer = client, read, tokenizer
        self.labels: list[str] = limits.get("labels", [])
        self._embeds: bool = limits.get("is_embedding", False)
        self._step_tokens: int = limits.get("chunked_prefill_size", sys.maxsize)

    async def encode(self, *, dimensions: int | None = None, **given: Any) -> list[RequestOutput]:
        """`given` is a prompt or several, as text or as token ids, and a reader's other arguments."""
        given.setdefault("pooling", Pooling(dimensions=dimensions))
        return await self._answers(await self._read(sampling_params={"max_new_tokens": 0}, **given))

    async def encoded(self, **given: Any) -> Any:
        """The same as SGLang shows it: an object for one prompt, a list for several."""
        answers, prompt = await self.encode(**given), given.get("prompt")
        first = given["input_ids"][0] if prompt is None else prompt
        return answers[0].to_dict() if isinstance(first, str | int) else [answer.to_dict() for answer in answers]

    async def rerank(
        self, query: str, documents: Sequence[str], instruction: str | None = None, **given: Any
    ) -> Scored:
        """How well each document answers the query, from 0 to 1. `given` are a reader's other arguments."""
        if not documents:
            raise RequestError("documents is empty; give at least one.", field="documents")
        tokenizer = self._require_tokenizer()
        if len(self.labels) == 1:
            pairs = await asyncio.to_thread(tokenizer.encode_pairs, [(query, document) for document in documents])
            pooling = [Pooling(second=second) for _, second in pairs]
            answers = await self.encode(input_ids=[ids for ids, _ in pairs], pooling=pooling, **given)
            return sigmoid(np.array([answer.vector[0] for answer in answers], dtype=np.float64)), answers
        if self._embeds or any(tokenizer.backend.token_to_id(mark) is None for mark in MARKS):
            raise RequestError("This model does not rerank; serve a cross-encoder or Qwen3-Reranker.", field="model")
        asked = f"{JUDGE}<Instruct>: {instruction or INSTRUCTION}\n<Query>: {query}\n<Document>: "
        yes, no = (tokenizer.encode(word, add_special_tokens=False)[0] for word in ("yes", "no"))
        texts = [f"{asked}{document}{JUDGED}" for document in documents]
        ids = await asyncio.to_thread(tokenizer.encode_batch, texts, False)
        scores, answers = await self._next_tokens(ids, [yes, no], given)
        return softmax(scores)[:, 0], answers

    async def score(
        self,
        query: str | Sequence[int],
        items: str | Sequence[str | Sequence[int]],
        label_token_ids: Sequence[int],
        *,
        apply_softmax: bool = False,
        item_first: bool = False,
        **given: Any,
    ) -> Scored:
        """How likely the model goes on with each of the labels behind the query and an item."""
        if self._embeds:
            raise RequestError("This model gives vectors, not the likelihood of tokens; see /v1/rerank.", field="model")
        if not label_token_ids:
            raise RequestError("label_token_ids is empty; name the tokens to score.", field="label_token_ids")
        listed = [items] if isinstance(items, str) else list(items)
        if not listed or any(isinstance(item, str) != isinstance(query, str) for item in listed):
            text = "query and items must be texts, or both token ids; give an item at least."
            raise RequestError(text, field="items")
        pairs: Any = [(item, query) if item_first else (query, item) for item in listed]
        if isinstance(query, str):
            ids = await asyncio.to_thread(self._require_tokenizer().encode_batch, ["".join(pair) for pair in pairs])
        else:
            ids = [[*first, *second] for first, second in pairs]
        scores, answers = await self._next_tokens(ids, list(label_token_ids), given)
        return softmax(scores) if apply_softmax else np.exp(scores), answers

    async def _next_tokens(self, ids: list[list[int]], labels: list[int], given: dict[str, Any]) -> Scored:
        """The logprobs of some tokens behind each prompt. [prompts, labels]"""
        wanted = {"return_logprob": True, "token_ids_logprob": labels, **given}
        sampling = {"max_new_tokens": 1, "temperature": 0.0}
        answers = await self._answers(await self._read(input_ids=ids, sampling_params=sampling, **wanted))
        found = [answer.output_logprobs.chosen[0] or [] for answer in answers]
        return np.array([[-np.inf if x is None else x for x, _, _ in each] for each in found]), answers

    async def _answers(self, inputs: Inputs) -> list[RequestOutput]:
        """Many prompts go to the engine a few steps' worth at a time, so that other requests need not wait for all."""
        turns = asyncio.Semaphore(STEPS_AHEAD * self._client.replica_count)

        async def answered(prompts: tuple[Prompt, ...]) -> list[RequestOutput]:
            async with turns:
                answers = await self._client.answers(replace(inputs, prompts=prompts))
            for answer in answers:
                raise_if_refused(answer)
            return answers

        ends = zip(accumulate(len(prompt.ids) for prompt in inputs.prompts), inputs.prompts, strict=True)
        steps = groupby(ends, key=lambda each: each[0] // self._step_tokens)
        tasks = [asyncio.create_task(answered(tuple(prompt for _, prompt in step))) for _, step in steps]
        try:
            answers = list(chain(*await asyncio.gather(*tasks)))
        finally:
            for task in tasks:
                task.cancel()
        for index, answer in enumerate(answers):
            answer.index = index
        return answers

    def _require_tokenizer(self) -> Tokenizer:
        if self._tokenizer is None:
            raise RequestError("This engine has no tokenizer (--skip-tokenizer-init); give token ids.")
        return self._tokenizer


def softmax(logits: Floats) -> Floats:
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    shares: Floats = weights / weights.sum(axis=-1, keepdims=True)
    return shares


def sigmoid(logits: Floats) -> Floats:
    shares: Floats = 1 / (1 + np.exp(-logits))
    return shares
