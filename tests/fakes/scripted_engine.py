"""An engine for tests of protocols: every request is answered at once with tokens from a script, in any pieces.

Tokens are bytes, so half characters are easy to make; the chat template is ChatML.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from bough.client.handle import EngineClient, RequestWatcher
from bough.client.inputs import InputReader, Prompt
from bough.client.outputs import RequestOutput, UpdateQueue
from bough.client.replicas import Replicas
from bough.core.finish import FinishAbort, FinishReason, FinishStop
from bough.core.settings import Settings
from bough.messages.outputs import Delta, Deltas, LogprobRun, Started
from bough.messages.requests import Abort, Generate
from bough.server.context import ServerContext
from bough.server.model_info import ModelInfo
from bough.tokenizer.chat_template import ChatTemplate
from bough.tokenizer.incremental import BYTE_OF_CHAR
from bough.tokenizer.tokenizer import Tokenizer

IM_START, IM_END = 256, 257
MEMORY = {"weight": 2.5, "kvcache": 3.5, "token_capacity": 100}
EMPTY = FinishAbort("The prompt is empty; give at least one token.", field="input_ids")
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if mood %}({{ mood }}){% endif %}{% endif %}"
)


def byte_level_tokenizer() -> Tokenizer:
    """Token i is byte i; 256 and 257 are ChatML's marks."""
    backend = tokenizers.Tokenizer(models.BPE(vocab=dict(BYTE_OF_CHAR), merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    return Tokenizer(backend, eos_ids=(IM_END,), chat_template=ChatTemplate(CHATML))


def logprob_run(ids: Sequence[int], top: int = 0, named: Sequence[int] = ()) -> LogprobRun:
    """Token i has logprob -i/8, also where a request names it; the likeliest others are its successors."""
    n = len(ids)
    tops = np.array([[(token + k) % 256 for k in range(top)] for token in ids], dtype=np.int32).reshape(n, top)
    return LogprobRun(
        np.array(ids, dtype=np.int32).tobytes(),
        (np.array(ids, dtype=np.float32) / -8).tobytes(),
        top,
        (tops.astype(np.float32) / -8).tobytes(),
        tops.tobytes(),
        (np.tile(np.array(named, dtype=np.float32), (n, 1)) / -8).tobytes(),
    )


def deltas_of(
    tokenizer: Tokenizer,
    handle: int,
    prompt: Prompt | None,
    ids: Sequence[int],
    cuts: Sequence[int] = (),
    finish: FinishReason | None = None,
    warnings: tuple[str, ...] = (),
) -> list[Delta]:
    """The deltas of an answer, cut behind the given numbers of tokens."""
    finish = finish or FinishStop(IM_END)
    wanted = None if prompt is None else prompt.logprobs
    decoder = tokenizer.decoder((), True)
    bounds = [0, *sorted({cut for cut in cuts if 0 < cut < len(ids)}), len(ids)]
    deltas = []
    for start, end in itertools.pairwise(bounds):
        last, new = end == len(ids), list(ids[start:end])
        text = decoder.push(new) + (decoder.flush() if last else "")
        started = None
        if start == 0:
            given = [] if prompt is None else prompt.ids.tolist()
            asked = wanted is not None and wanted.start >= 0
            run = logprob_run(given[1:], wanted.top, wanted.ids) if wanted is not None and asked else None
            started = Started(handle, len(given), min(1, len(given)), 0.0, run, warnings=warnings)
        runs = [] if wanted is None or not new else [logprob_run(new, wanted.top, wanted.ids)]
        raw = np.array(new, dtype=np.int32).tobytes()
        deltas.append(Delta(handle, text, raw, started, runs, finish if last else None))
    return deltas


def fresh_answer(tokenizer: Tokenizer, prompt: Prompt, index: int = 0) -> RequestOutput:
    return RequestOutput(index + 1, index, prompt, tokenizer, UpdateQueue())


class ScriptedEngine:
    """Plays the scheduler. `script` gives the tokens for a request, or the reason why it ends without any; requests
    for which it gives None stay open until they are aborted."""

    def __init__(self, script: Callable[[Generate], Sequence[int] | FinishReason | None]) -> None:
        self.script = script
        self.sent: list[Any] = []
        self.cuts: Sequence[int] | None = None  # of streams, behind so many tokens; None: behind each
        self.warnings: tuple[str, ...] = ()  # what of the requests' grammars is not enforced
        self.tokenizer = byte_level_tokenizer()
        self.watchers: list[RequestWatcher] = []
        self.client = EngineClient(Replicas([self]), self.tokenizer, watchers=self.watchers)
        self.reader = InputReader(self.tokenizer, {}, random_seed=7)

    def send(self, *messages: Any) -> None:
        self.sent += messages
        for message in messages:
            match message:
                case Generate():
                    self._answer(message)
                case Abort():
                    for request in self.requests:
                        if _means(message, request):
                            end = FinishAbort("aborted", 499, "AbortError")
                            self._later([Delta(request.handle, "", b"", finish=end)])

    def context(self, **settings: Any) -> ServerContext:
        path, limits = "/models/tiny", {"startup_time": {"load_weight": 1.5}, "memory_usage": MEMORY}
        limits["max_running_requests"] = 10
        model = ModelInfo("tiny", path, path, "LlamaForCausalLM", 512, 258, 1_700_000_000, limits, [limits, limits])
        return ServerContext(self.client, self.reader, self.tokenizer, model, Settings.from_flat(settings))

    @property
    def requests(self) -> list[Generate]:
        return [message for message in self.sent if isinstance(message, Generate)]

    def prompt_text(self, request: Generate) -> str:
        return self.tokenizer.decode(np.frombuffer(request.input_ids, np.int32).tolist(), skip_special_tokens=False)

    def _answer(self, message: Generate) -> None:
        play = self.script(message) if message.input_ids else EMPTY
        if play is None:
            return
        if isinstance(play, FinishReason):
            self._later([Delta(message.handle, "", b"", finish=play)])
            return
        if message.output_ids:  # of a stream that broke elsewhere: the script goes on behind them
            told = np.frombuffer(message.output_ids, np.int32).tolist()
            replay = Delta(message.handle, self.tokenizer.decoder((), True).push(told), message.output_ids)
            asyncio.get_running_loop().call_soon(self.client.receive, Deltas([], [replay]))
            play = play[len(told) :]
        prompt = _prompt_of(message)
        cuts = (range(1, len(play)) if self.cuts is None else self.cuts) if message.stream else ()
        self._later(deltas_of(self.tokenizer, message.handle, prompt, play, cuts, warnings=self.warnings))

    def _later(self, deltas: Sequence[Delta]) -> None:
        """One delta each turn of the loop."""
        if not deltas:
            return

        def deliver() -> None:
            self.client.receive(Deltas([deltas[0]]))
            self._later(deltas[1:])

        asyncio.get_running_loop().call_soon(deliver)


def _means(abort: Abort, request: Generate) -> bool:
    if abort.handle is not None:
        return abort.handle == request.handle
    return abort.name is None or abort.name in (request.rid, *request.names)


def _prompt_of(message: Generate) -> Prompt:
    ids = np.frombuffer(message.input_ids, np.int32)
    return Prompt(
        rid=message.rid,
        names=frozenset(),
        ids=ids,
        sampling=message.sampling,
        seed=message.seed,
        namespace=message.namespace,
        priority=message.priority,
        logprobs=message.logprobs,
        logprob_texts=False,
        show_ids=False,
    )
