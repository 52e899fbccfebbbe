"""Asks the engine to write down a recording, window by window, several at a time, and puts the answers together.

A greedy answer that repeats itself, or that the model itself finds unlikely, is sampled again at a higher temperature.
Where an answer ends before its window does, the rest is a window of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
import math
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

import msgspec

from bough.client.handle import EngineClient
from bough.client.inputs import Inputs
from bough.client.outputs import RequestOutput
from bough.core.errors import RequestError
from bough.core.media import Feature, MediaItem, MediaPrompt
from bough.core.shared_files import shared_file
from bough.core.speech import SAMPLE_RATE, SpeechConfig
from bough.speech.sound import FloatArray, features
from bough.speech.text import Segment, compression, seconds, split
from bough.speech.windows import Loudness
from bough.tokenizer.tokenizer import Tokenizer

Read = Callable[..., Awaitable[Inputs]]
AT_ONCE = 8  # windows of a recording that are with the engine
STEPS = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)  # temperatures that are tried one after the other
REPEATS, UNLIKELY, NO_SPEECH = 2.4, -1.0, 0.6  # as OpenAI has them: compression, mean logprob, probability
REST_S = 1.0  # more voice than this behind an answer's end is a window of its own
ENGLISH = "en"


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """What a client wants of a recording."""

    language: str | None = None
    prompt: str = ""
    temperature: float = 0.0
    timed: bool = True
    stream: bool = False  # texts are given as they come, so none is tried again
    translate: bool = False


class Transcriber:
    def __init__(self, client: EngineClient, read: Read, tokenizer: Tokenizer, speech: SpeechConfig) -> None:
        self._client, self._read, self._tokenizer, self._speech = client, read, tokenizer, speech

    async def pieces(self, sound: FloatArray, task: Task) -> AsyncGenerator[str | Segment, None]:
        """The segments in their order and, with `stream`, before those of each window its text as it comes."""
        loudness = await asyncio.to_thread(Loudness, sound)
        spans = loudness.windows(self._speech)
        turns = asyncio.Semaphore(AT_ONCE)
        queues = [asyncio.Queue[str | None]() for _ in spans]

        async def work(span: slice, queue: asyncio.Queue[str | None]) -> list[Segment]:
            try:
                async with turns:
                    return await self._window(sound, loudness, span, task, queue.put_nowait)
            finally:
                queue.put_nowait(None)

        tasks = [asyncio.ensure_future(work(*each)) for each in zip(spans, queues, strict=True)]
        try:
            for queue, working in zip(queues, tasks, strict=True):
                while (text := await queue.get()) is not None:
                    yield text
                for segment in await working:
                    yield segment
        finally:
            for working in tasks:
                working.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def language(self, sound: FloatArray) -> str:
        """That of the first window of a recording."""
        if self._speech.english_only:
            return ENGLISH
        loudness, tokens = await asyncio.to_thread(Loudness, sound), self._languages()
        first = next(iter(loudness.windows(self._speech)), slice(0, 0))
        answer = await self._ask(sound[first], [self._speech.start], 0.0, [*tokens], most=1)
        scores = answer.output_logprobs.chosen[0] or []
        return tokens[max(scores, key=lambda entry: -math.inf if entry[0] is None else entry[0])[1]]

    def _languages(self) -> dict[int, str]:
        """The model's languages by their tokens, which stand between the start and what to do."""
        ids = range(self._speech.start + 1, min(self._id("<|translate|>"), self._id("<|transcribe|>")))
        return {token: self._tokenizer.decode([token], skip_special_tokens=False).strip("<|>") for token in ids}

    def _id(self, *names: str) -> int:
        found = next(
            (token for name in names if (token := self._tokenizer.backend.token_to_id(name)) is not None), None
        )
        if found is None:
            raise RequestError(f"The model's tokenizer has no token {names[0]}; it is no Whisper's.", field="model")
        return found

    def _prompt(self, task: Task) -> list[int]:
        """What the decoder begins with: a text that it takes as said before, and what it shall do."""
        ids, room = [self._speech.start], 223
        if not self._speech.english_only:
            by_name = {name: token for token, name in self._languages().items()}
            if task.language not in by_name:
                known = ", ".join(sorted(by_name))
                raise RequestError(f"language {task.language!r} is not known; known are {known}.", field="language")
            ids += [by_name[task.language], self._id("<|translate|>" if task.translate else "<|transcribe|>")]
        if not task.timed:
            ids.append(self._speech.without_times)
        if task.prompt.strip():
            said = self._tokenizer.encode(" " + task.prompt.strip(), add_special_tokens=False)
            ids = [self._id("<|startofprev|>"), *said[-room:], *ids]
        return ids

    async def _window(
        self, sound: FloatArray, loudness: Loudness, span: slice, task: Task, emit: Callable[[str], None]
    ) -> list[Segment]:
        found: list[Segment] = []
        prompt, silence = self._prompt(task), self._id("<|nospeech|>", "<|nocaptions|>")
        while True:
            part, length = sound[span], span.stop - span.start
            for temperature in (task.temperature,) if task.stream or task.temperature else STEPS:
                answer = await self._ask(part, prompt, temperature, [silence], emit=emit if task.stream else None)
                scores = [entry[0] for entry in answer.output_logprobs.tokens if entry[0] is not None]
                mean = sum(scores) / max(1, len(scores))
                text = self._tokenizer.decode([token for token in answer.ids if token < self._speech.end])
                chosen = [*answer.input_logprobs.chosen, *answer.output_logprobs.chosen][1] or [(None, 0, None)]
                silent = math.exp(chosen[0][0]) if chosen[0][0] is not None else 0.0
                nothing, ratio = silent > NO_SPEECH and mean < UNLIKELY, compression(text)
                if nothing or (ratio <= REPEATS and mean >= UNLIKELY):
                    break
            spoken = [] if nothing else split(answer.ids, self._speech, length)
            for each in spoken:
                segment = Segment(
                    seek=span.start * 100 // SAMPLE_RATE,
                    start=seconds(span.start + each.start),
                    end=seconds(span.start + each.end),
                    text=self._tokenizer.decode(each.tokens),
                    tokens=each.tokens,
                    no_speech_prob=silent,
                    temperature=temperature,
                    avg_logprob=mean,
                    compression_ratio=ratio,
                )
                found.append(segment)
            heard = spoken[-1].end if spoken else length
            rest = slice(span.start + heard, span.stop)
            if heard == 0 or loudness.voiced_seconds(rest) < REST_S:
                return found
            span = rest

    async def _ask(
        self,
        sound: FloatArray,
        prompt: list[int],
        temperature: float,
        scored: list[int],
        most: int = 224,
        emit: Callable[[str], None] | None = None,
    ) -> RequestOutput:
        """The engine's answer to one window, with the logprobs of the tokens `scored` from the start token on."""
        heard = await asyncio.to_thread(features, sound, self._speech)
        sampling = {"temperature": temperature, "max_new_tokens": most}
        start = prompt.index(self._speech.start)
        asked: dict[str, Any] = {"return_logprob": True, "logprob_start_len": start, "token_ids_logprob": scored}
        inputs = await self._read(input_ids=prompt, sampling_params=sampling, **asked)
        with contextlib.ExitStack() as held:
            file = held.enter_context(shared_file(heard.nbytes))
            await asyncio.to_thread(heard.tofile, file)
            digest = hashlib.blake2b(heard.tobytes(), digest_size=16).digest()
            feature = Feature("input_features", heard.dtype.str, heard.shape, 0)
            media = MediaPrompt((MediaItem("audio", digest, (), (feature,), file),))
            # All that the decoder computes depends on what it hears, so nothing is shared but by the same sound.
            heard_prompts = tuple(
                dataclasses.replace(each, media=media, namespace=f"{digest.hex()}{each.namespace}")
                for each in inputs.prompts
            )
            pieces = self._client.pieces(dataclasses.replace(inputs, prompts=heard_prompts), stream=emit is not None)
            async with contextlib.aclosing(pieces):
                async for piece in pieces:
                    if emit is not None and piece.text:
                        emit(piece.text)
        return piece.answer
