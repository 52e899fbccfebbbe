"""Asks the engine to write down a recording, window by window, several at a time, and puts the answers together.

A greedy answer that repeats itself, or that the model itself finds unlikely, is sampled again at a higher temperature.
Where an answer ends before its window does, the rest is a window of its own.
"""

import asyncio
import contextlib
import hashlib
import itertools
import math
import zlib
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from typing import Annotated, Any, Literal

import msgspec
import numpy as np

from bough.client.handle import EngineClient
from bough.client.inputs import Inputs
from bough.client.outputs import RequestOutput
from bough.core import speech as tokens
from bough.core.errors import RequestError
from bough.core.files import shared_file
from bough.core.finish import FinishAbort
from bough.core.media import Feature, MediaItem, MediaPrompt
from bough.core.pooling import Pooling
from bough.core.speech import SAMPLE_RATE, TIME_SAMPLES, SpeechConfig
from bough.speech.sound import BLOCK, FloatArray, Window, features
from bough.speech.words import Word, first_positions, words_of
from bough.tokenizer.tokenizer import Tokenizer

AT_ONCE = 8  # windows of a recording that are with the engine
STEPS = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)  # temperatures that are tried one after the other
REPEATS, UNLIKELY, SILENT = 2.4, -1.0, 0.6  # as OpenAI has them: compression, mean logprob, probability
REST_S = 1.0  # more voice than this behind an answer's end is a window of its own
QUEUE_FULL, FULL_S = 429, 1.0  # what the first request of a recording ends with, and how long others wait


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """What a client wants of a recording."""

    language: str = ""  # empty: it is found out
    prompt: str = ""  # taken as said before
    temperature: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.0
    stream: bool = False  # texts are given as they come, so none is tried again, and none has times
    response_format: Literal["json", "text", "srt", "verbose_json", "vtt"] = "json"
    timestamp_granularities: tuple[Literal["segment", "word"], ...] = ()
    translate: bool = False


class Segment(msgspec.Struct, frozen=True, kw_only=True):
    """As OpenAI shows it. Times are in seconds."""

    id: int = 0
    seek: int = 0  # where its window begins, in hundredths of a second
    start: float
    end: float
    text: str
    tokens: list[int]
    temperature: float = 0.0
    avg_logprob: float = 0.0  # of all tokens of its window
    compression_ratio: float = 1.0  # the same: text that repeats itself has a large one
    no_speech_prob: float = 0.0
    words: list[Word] | msgspec.UnsetType = msgspec.UNSET


def split(tokens: Sequence[int], speech: SpeechConfig, length: int) -> list[tuple[int, int, list[int]]]:
    """The texts between the times in what was written of a window of so many samples: where they begin and end."""
    found, start, text = list[tuple[int, int, list[int]]](), 0, list[int]()
    for token in tokens:
        if token < speech.end:
            text.append(token)
        elif token >= speech.timestamps:
            time = min((token - speech.timestamps) * TIME_SAMPLES, length)
            if text:
                found.append((start, max(start, time), text))
            start, text = time, []
    return [*found, (start, length, text)] if text else found


class Transcriber:
    def __init__(
        self, client: EngineClient, read: Callable[..., Awaitable[Inputs]], tokenizer: Tokenizer, speech: SpeechConfig
    ) -> None:
        self._client, self._read, self._tokenizer, self._speech = client, read, tokenizer, speech
        self.language, self.samples, self._begun = "", 0, False  # of the recording whose pieces have all come

    async def pieces(
        self, recording: AsyncGenerator[Window | int, None], task: Task
    ) -> AsyncGenerator[str | Segment, None]:
        """The segments in their order and, with `stream`, before those of each window its text as it comes. `recording`
        is what `windows_of` finds."""
        turns, number, more = asyncio.Semaphore(AT_ONCE), 0, True
        begun = deque[tuple[asyncio.Queue[str | None], asyncio.Task[list[Segment]]]]()

        async def work(window: Window, task: Task, queue: asyncio.Queue[str | None]) -> list[Segment]:
            try:
                async with turns:
                    return await self._window(window, task, queue.put_nowait)
            finally:
                queue.put_nowait(None)

        try:
            while more or begun:
                if more and len(begun) < 2 * AT_ONCE:
                    found = await anext(recording, None)
                    if isinstance(found, int):
                        self.samples = found
                        continue
                    task = msgspec.structs.replace(task, language=task.language or await self._language_of(found))
                    self.language, more = task.language, found is not None
                    if found is not None:
                        queue = asyncio.Queue[str | None]()
                        begun.append((queue, asyncio.ensure_future(work(found, task, queue))))
                    continue
                queue, working = begun[0]
                while (text := await queue.get()) is not None:
                    yield text
                for segment in await working:
                    yield msgspec.structs.replace(segment, id=number)
                    number += 1
                begun.popleft()
        finally:
            await recording.aclose()
            for _, working in begun:
                working.cancel()
            await asyncio.gather(*(working for _, working in begun), return_exceptions=True)

    async def _language_of(self, window: Window | None) -> str:
        if self._speech.english_only:
            return "en"
        sound, names = np.frombuffer(window.samples if window else b"", np.float32), self._languages()
        heard = await asyncio.to_thread(features, sound, self._speech)
        found = (await self._ask(heard, [self._speech.start], _asked(0.0, [*names], 1))).output_logprobs.chosen[0] or []
        return names[max(found, key=lambda entry: -math.inf if entry[0] is None else entry[0])[1]]

    def _languages(self) -> dict[int, str]:
        """The model's languages by their tokens, which stand between the start and what to do."""
        ids = range(self._speech.start + 1, self._speech.timestamps + tokens.TRANSLATE)
        return {token: self._tokenizer.decode([token], skip_special_tokens=False).strip("<|>") for token in ids}

    def _prompt(self, task: Task) -> list[int]:
        """What the decoder begins with: what was said before, and what it shall do."""
        ids, first = [self._speech.start], self._speech.timestamps
        if not self._speech.english_only:
            languages = {name: token for token, name in self._languages().items()}
            if task.language not in languages:
                known = ", ".join(sorted(languages))
                raise RequestError(f"language {task.language!r} is not known; known are {known}.", field="language")
            ids += [languages[task.language], first + (tokens.TRANSLATE if task.translate else tokens.TRANSCRIBE)]
        if task.stream:
            ids.append(first + tokens.WITHOUT_TIMES)
        said = self._tokenizer.encode(" " + task.prompt.strip(), add_special_tokens=False)[-223:]
        return [first + tokens.SAID_BEFORE, *said, *ids] if task.prompt.strip() else ids

    async def _window(self, window: Window, task: Task, emit: Callable[[str], None]) -> list[Segment]:
        found, sound = list[Segment](), np.frombuffer(window.samples, np.float32)
        span = slice(window.start, window.start + len(sound))
        prompt, silence = self._prompt(task), [self._speech.timestamps + tokens.NO_SPEECH]
        while True:
            heard = await asyncio.to_thread(features, sound, self._speech)
            for temperature in (task.temperature,) if task.stream or task.temperature else STEPS:
                answer = await self._ask(heard, prompt, _asked(temperature, silence), emit if task.stream else None)
                mean, silent = _mean_logprob(answer), _silence(answer)
                text = self._tokenizer.decode([id for id in answer.ids if id < self._speech.end]).encode()
                ratio = len(text) / len(zlib.compress(text)) if text else 1.0
                nothing = silent > SILENT and mean < UNLIKELY
                if nothing or (ratio <= REPEATS and mean >= UNLIKELY):
                    break
            spoken = [] if nothing else split(answer.ids, self._speech, span.stop - span.start)
            aligns = spoken and "word" in task.timestamp_granularities
            times = await self._times(heard, prompt, answer.ids, span) if aligns else None
            found += [
                Segment(
                    seek=span.start * 100 // SAMPLE_RATE, start=round((span.start + start) / SAMPLE_RATE, 3),
                    end=round((span.start + end) / SAMPLE_RATE, 3), text=self._tokenizer.decode(ids), tokens=ids,
                    temperature=temperature, avg_logprob=mean, compression_ratio=ratio, no_speech_prob=silent,
                    words=msgspec.UNSET if times is None else self._words(ids, times, task.language),
                )
                for start, end, ids in spoken
            ]  # fmt: skip
            said = spoken[-1][1] if spoken else 0
            span, sound = slice(span.start + said, span.stop), sound[said:]
            rest = window.voiced[(span.start - window.start) // BLOCK : (span.stop - window.start) // BLOCK]
            if not said or sum(rest) * BLOCK / SAMPLE_RATE < REST_S:
                return found

    async def _times(
        self, heard: FloatArray, prompt: list[int], written: Sequence[int], span: slice
    ) -> Iterator[tuple[float, float]]:
        """Where each token of the text begins and ends in the recording: the decoder reads it once more."""
        positions = max(1, (span.stop - span.start) // TIME_SAMPLES)
        said = [token for token in written if token != self._speech.end]
        wanted = Pooling("align", dimensions=positions, second=len(prompt))
        answer = await self._ask(heard, [*prompt, *said], {"pooling": wanted, "sampling_params": {"max_new_tokens": 0}})
        first = await asyncio.to_thread(first_positions, answer.vector.reshape(-1, positions))
        # While a token is read, the decoder looks for the next one: it begins where the one before it was read.
        ends = np.round((span.start + first * TIME_SAMPLES) / SAMPLE_RATE, 3).tolist()
        spans = zip([round(span.start / SAMPLE_RATE, 3), *ends], ends, said, strict=False)
        return ((start, end) for start, end, token in spans if token < self._speech.end)

    def _words(self, ids: list[int], times: Iterator[tuple[float, float]], language: str) -> list[Word]:
        """Those of a segment, whose tokens' times come next."""
        own = list(itertools.islice(times, len(ids)))
        words = words_of(ids, self._tokenizer.decode, language)
        return [Word(text.strip(), own[places[0]][0], own[places[-1]][1]) for text, places in words]

    async def _ask(
        self, heard: FloatArray, prompt: list[int], asked: dict[str, Any], emit: Callable[[str], None] | None = None
    ) -> RequestOutput:
        """The engine's answer to one window; logprobs are those from the start token on."""
        inputs = await self._read(input_ids=prompt, logprob_start_len=prompt.index(self._speech.start), **asked)
        first, self._begun = not self._begun, True
        with shared_file(heard.nbytes) as file:
            await asyncio.to_thread(heard.tofile, file)
            digest = hashlib.blake2b(heard.tobytes(), digest_size=16).digest()
            feature = Feature("input_features", heard.dtype.str, heard.shape, 0)
            media = MediaPrompt((MediaItem("audio", digest, (), (feature,), file),))
            # All that the decoder computes depends on what it hears, so nothing is shared but by the same sound.
            hearing = Inputs((msgspec.structs.replace(inputs.prompts[0], media=media, namespace=digest.hex()),), True)
            while True:
                held = ""  # while the model doubts that anybody speaks, which is decided at the end
                async with contextlib.aclosing(self._client.pieces(hearing, stream=emit is not None)) as pieces:
                    async for piece in pieces:
                        held += piece.text
                        likely = piece.finish is not None and _mean_logprob(piece.answer) >= UNLIKELY
                        if emit is not None and held and (likely or _silence(piece.answer) <= SILENT):
                            emit(held)
                            held = ""
                if not isinstance(piece.finish, FinishAbort):
                    return piece.answer
                if first or piece.finish.status_code != QUEUE_FULL:
                    raise piece.finish.to_error()  # half a text must not pass for all of it
                await asyncio.sleep(FULL_S)


def _mean_logprob(answer: RequestOutput) -> float:
    scores = [entry[0] for entry in answer.output_logprobs.tokens if entry[0] is not None]
    return sum(scores) / max(1, len(scores))


def _silence(answer: RequestOutput) -> float:
    """How likely nobody speaks, as the model says behind its start."""
    chosen = [*answer.input_logprobs.chosen, *answer.output_logprobs.chosen][1]
    return math.exp(chosen[0][0]) if chosen and chosen[0][0] is not None else 0.0


def _asked(warmth: float, scored: list[int], most: int = 224) -> dict[str, Any]:
    """For at most so many tokens, and the logprobs of those `scored` in the place of each."""
    sampling = {"temperature": warmth, "max_new_tokens": most}
    return {"return_logprob": True, "token_ids_logprob": scored, "sampling_params": sampling}
