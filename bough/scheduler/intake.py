"""Takes requests in: everything that can be known to be wrong with one is found here, before it costs anything.

A refused request gets its terminal message like any other; nothing that was sent in is dropped without a word.
"""

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Sequence

import msgspec
import numpy as np

from bough.core.errors import CONTEXT_LENGTH_EXCEEDED, RequestError
from bough.core.finish import FinishLength, FinishReason, FinishStop
from bough.core.media import MEDIA_ID
from bough.core.plan import IntArray, Limits, LogprobSpec
from bough.core.pooling import OF_TOKENS, Pooling
from bough.core.sampling_params import SamplingParams
from bough.core.settings import SchedulerSettings
from bough.messages.outputs import Open
from bough.messages.requests import Abort, Generate
from bough.scheduler.adapters import Adapters
from bough.scheduler.control import means
from bough.scheduler.media import Media
from bough.scheduler.request import Request

SHOWN_IDS = 8  # of those that a warning is about
AS_SENT = ("handle", "seed", "priority", "stream", "adapter", "thinking", "bad_words", "media")  # fields of a request
MOST_ABORTS = 2**12  # that are remembered: more than come while a request's media are prepared
PROMPT_TAIL = 8  # tokens before the output that the detokenizer may need to spell the first one


class Intake:
    def __init__(
        self,
        limits: Limits,
        settings: SchedulerSettings,
        eos_ids: Sequence[int],
        load_processor: Callable[[str], object] | None = None,
        adapters: Adapters | None = None,
        media: Media | None = None,
    ) -> None:
        """`load_processor` unpacks a custom logit processor or says why it cannot be; None: they are not allowed."""
        self._limits = limits
        self._load_processor = load_processor
        self._adapters, self._media = adapters or Adapters(), media or Media(limits, 0)
        self._pool_tokens = limits.pages[0] * limits.page_size
        self._truncate = settings.allow_auto_truncate
        self.max_queued = settings.max_queued_requests  # how many may wait; None: any number
        self._gives = {each for each, name in OF_TOKENS.items() if getattr(settings, f"enable_{name}")}
        self._eos_ids = frozenset(eos_ids)
        self._arrivals = itertools.count()
        self.aborts: deque[Abort] = deque(maxlen=MOST_ABORTS)  # of clients: what they mean may be still to come

    def request(self, message: Generate, queued: int, now: float) -> Request:
        """The request, ready to wait; or a `RequestError` that says why not."""
        aborts = self.aborts if message.media is not None and message.made_at else ()
        if any(message.made_at <= abort.made_at and means(abort, message) for abort in aborts):
            raise RequestError("The request was aborted.", status_code=499, err_type="AbortError")
        if self.max_queued is not None and queued >= self.max_queued:
            raise RequestError(
                f"The request queue is full ({queued} waiting, --max-queued-requests {self.max_queued}); "
                "try again later.",
                status_code=429,
                err_type="QueueFullError",
            )
        tokens = np.frombuffer(message.input_ids, dtype=np.int32)
        self._check_prompt(tokens)
        namespace = self._media.namespace(message, tokens)
        spec = message.logprobs
        sampling, warnings = self._without_unknown_stops(message.sampling)
        self._check_ids("logit_bias", sampling.logit_bias)
        self._check_ids("token_ids_logprob", () if spec is None else spec.ids)
        if (marks := message.thinking) is not None:
            self._check_ids("thinking", (*marks.start, *marks.end, *marks.cut))
        longest = min(self._limits.context_length, self._pool_tokens)
        room_for = longest - (sampling.max_new_tokens > 0)
        if len(tokens) > room_for:
            if not self._truncate or message.media is not None:
                raise RequestError(self._too_long(len(tokens)), field="input_ids", code=CONTEXT_LENGTH_EXCEEDED)
            end = tokens[-1:] if self._limits.vectors is not None else tokens[:0]  # which tokenizers mark texts with
            tokens = np.concatenate([tokens[: room_for - len(end)], end])
            warnings += (f"The prompt is too long; only its first {room_for} tokens are read (--allow-auto-truncate).",)
        stop_ids = frozenset(sampling.stop_token_ids) | (frozenset() if sampling.ignore_eos else self._eos_ids)
        if sampling.min_new_tokens and stop_ids.issuperset(range(self._limits.vocab_size)):
            raise RequestError(
                "stop_token_ids holds every token, and min_new_tokens forbids those at first: none is left to choose.",
                field="stop_token_ids",
            )
        output = self._output(message, stop_ids)
        no_more = len(tokens) - 1
        if spec is not None and spec.start >= len(tokens):
            raise RequestError(
                f"logprob_start_len ({spec.start}) must be smaller than the prompt's {len(tokens)} tokens.",
                field="logprob_start_len",
            )
        return Request(
            **{name: getattr(message, name) for name in AS_SENT},
            tokens=np.concatenate([tokens, output]) if len(output) else tokens,
            prompt_len=len(tokens),
            sampling=sampling,
            max_new=min(sampling.max_new_tokens, longest - len(tokens)) if self._limits.vectors is None else 0,
            stop_ids=stop_ids,
            namespace=self._adapters.namespace(message.adapter, namespace),
            logprobs=None if spec is None else LogprobSpec(spec.top, spec.ids),
            arrival=next(self._arrivals),
            since=now,
            arrived=now,
            names=frozenset({message.rid, *message.names}),
            logprob_next=no_more if spec is None or spec.start < 0 else spec.start,
            logprob_end=no_more,
            processor=self._processor(message.custom_logit_processor),
            warnings=warnings,
            pooling=self._pooling(message),
        )

    def _output(self, message: Generate, stop_ids: frozenset[int]) -> IntArray:
        """What a resumed request has generated already; nothing for any other."""
        output = np.frombuffer(message.output_ids, dtype=np.int32)
        if not len(output):
            return output
        self._check_ids("resume.output_ids", (int(output.min()), int(output.max())))
        for token in stop_ids.intersection(output[:-1].tolist()):
            raise RequestError(
                f"resume.output_ids goes on behind token {token}, which ends this answer; give what was generated.",
                field="resume.output_ids",
            )
        return output

    def _processor(self, text: str | None) -> str | None:
        """A custom logit processor that can be run."""
        if text is not None and self._load_processor is None:
            raise RequestError(
                "custom_logit_processor brings code, which this engine does not run; start it with "
                "--enable-custom-logit-processor (a server: and --api-key) if you trust all its clients.",
                field="custom_logit_processor",
            )
        if text is not None and self._load_processor is not None:
            self._load_processor(text)
        return text

    def _pooling(self, message: Generate) -> Pooling | None:
        """What the request wants of a model that gives vectors; raises where it wants tokens of that, or a vector of
        one that gives tokens."""
        wanted, vectors = message.pooling, self._limits.vectors
        field = None if wanted is None else OF_TOKENS.get(wanted)
        if field is not None and (wanted not in self._gives or message.bootstrap is not None):
            text = f"was started with --enable-{field.replace('_', '-')} and computes the prompt itself"
            raise RequestError(f"{field} needs an engine that {text}.", field=field)
        if self._limits.speech is not None and message.media is None:
            raise RequestError("This model writes down recordings alone (/v1/audio/transcriptions).", field="model")
        if (wanted is None or field) and vectors is not None:
            gives = "scores of labels (/v1/classify, /v1/rerank)" if vectors.labels else "vectors (/v1/embeddings)"
            raise RequestError(f"This model gives {gives}; it does not generate text.", field="model")
        if wanted is None or vectors is None:
            aligns = wanted is not None and wanted.mode == "align" and self._limits.speech is not None
            if wanted is not None and not field and not aligns:
                text = "This model generates text; serve an embedding model, or start the engine with --is-embedding."
                raise RequestError(text, field="model")
            return wanted
        if wanted.dimensions is not None and not 1 <= wanted.dimensions <= (0 if vectors.labels else vectors.size):
            allowed = "is for vectors; this model scores labels" if vectors.labels else f"may be 1 to {vectors.size}"
            raise RequestError(f"dimensions {allowed}; got {wanted.dimensions}.", field="dimensions")
        return msgspec.structs.replace(wanted, mode=wanted.mode or vectors.mode)

    def _check_prompt(self, tokens: IntArray) -> None:
        if not len(tokens):
            raise RequestError("The prompt is empty; give at least one token.", field="input_ids")
        if (highest := int(tokens.max())) >= MEDIA_ID:
            highest = int(tokens.max(initial=0, where=tokens < MEDIA_ID))
        self._check_ids("input_ids", (int(tokens.min(initial=0)), highest))

    def _without_unknown_stops(self, sampling: SamplingParams) -> tuple[SamplingParams, tuple[str, ...]]:
        """A stop token that the model does not have cannot be generated, so it changes nothing."""
        last = self._limits.vocab_size - 1
        known = tuple(token for token in sampling.stop_token_ids if 0 <= token <= last)
        if len(known) == len(sampling.stop_token_ids):
            return sampling, ()
        unknown = [token for token in sampling.stop_token_ids if not 0 <= token <= last]
        shown = ", ".join(map(str, unknown[:SHOWN_IDS])) + (", ..." if len(unknown) > SHOWN_IDS else "")
        warning = f"stop_token_ids: {shown} is ignored, being outside the vocabulary (0 to {last})."
        return msgspec.structs.replace(sampling, stop_token_ids=known), (warning,)

    def _check_ids(self, field: str, ids: Iterable[int]) -> None:
        """Refuses ids that the model does not know: it could neither read them nor ever choose them."""
        last = self._limits.vocab_size - 1
        for token in ids:
            if not 0 <= token <= last:
                raise RequestError(f"{field}: token id {token} is outside the vocabulary (0 to {last}).", field=field)

    def _too_long(self, length: int) -> str:
        limits = self._limits
        if self._pool_tokens < limits.context_length:
            return (
                f"Input length ({length} tokens) exceeds the maximum allowed length: at most "
                f"{self._pool_tokens - 1} fit the KV cache of {self._pool_tokens} tokens. Shorten the prompt, or start "
                "the engine with a larger --max-total-tokens or --mem-fraction-static."
            )
        if limits.vectors is not None:
            return (
                f"The text of {length} tokens is longer than the {limits.context_length} that this model reads; "
                "shorten it, or start the engine with --allow-auto-truncate."
            )
        return (
            f"The prompt of {length} tokens is longer than the model's context length of {limits.context_length} "
            "tokens allows: one must be left for the answer. Shorten the prompt or start the engine with a larger "
            "--context-length."
        )


def opening(request: Request) -> Open:
    """What the detokenizer must know of a request that was just taken. Its prompt may be a part of what was sent."""
    prompt, output = request.tokens[: request.prompt_len], request.tokens[request.prompt_len :]
    tail = prompt[-PROMPT_TAIL:]
    return Open(
        request.handle,
        request.sampling,
        tail[tail < MEDIA_ID].tobytes(),
        request.stream,
        output.tobytes(),
        ending_of(output, request),
    )


def ending_of(output: IntArray, request: Request) -> FinishReason | None:
    """Why a resumed request is over with what it has generated already, if it is."""
    if not len(output):
        return None
    if int(output[-1]) in request.stop_ids:
        return FinishStop(int(output[-1]))
    return FinishLength(len(output)) if len(output) >= request.max_new else None
