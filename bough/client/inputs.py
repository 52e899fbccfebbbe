"""From a caller's arguments to requests. Everything that can be wrong with their form is found here.

Pure apart from the tokenizer, and safe to call from any thread.
"""

import contextlib
import inspect
import secrets
import time
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import is_not
from typing import Any

import msgspec
import numpy as np

from bough.client.embeds import embedded
from bough.client.token_rules import banned_words, with_rules
from bough.core.errors import RequestError
from bough.core.media import MediaPrompt, MediaSource
from bough.core.plan import IntArray
from bough.core.pooling import OF_TOKENS, Pooling
from bough.core.sampling_params import INT32_MAX, INT64_MAX, MAX_LOGPROBS, SamplingParams, require_few, require_name
from bough.core.seeds import derive_seed
from bough.core.stop_patterns import MAX_PATTERN_CHARS, check_patterns
from bough.messages.requests import Bootstrap, LogprobRequest, SessionParams, Thinking
from bough.multimodal.sources import read_columns
from bough.tokenizer.tokenizer import Keep, Tokenizer


@dataclass(frozen=True, slots=True)
class Resumption:
    """`output_ids` may be empty: then the stream has begun and brought no token yet."""

    output_ids: IntArray
    seed: int | None = None  # None: that of the request


class Prompt(msgspec.Struct, frozen=True):  # made in a tenth of a frozen dataclass's time
    rid: str
    names: frozenset[str]  # ids that mean this request: its own, and that of the call or the samples it is part of
    ids: IntArray
    sampling: SamplingParams
    seed: int
    namespace: str
    priority: int
    logprobs: LogprobRequest | None
    logprob_texts: bool  # logprob entries carry the tokens' text
    show_ids: bool  # the answer carries the prompt's token ids
    resumption: Resumption | None = None  # its stream broke elsewhere and goes on here
    thinking: Thinking | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()  # of several tokens each; single ones are in the logit bias
    custom_logit_processor: str | None = None  # the user's own code over its logits
    warnings: tuple[str, ...] = ()  # what of the request has no effect; the answer says so
    dp_rank: int | None = None  # the replica that the caller chose
    pooling: Pooling | None = None  # the answer is a vector
    bootstrap: Bootstrap | None = None  # the engine that computes the prompt
    adapter: str = ""  # by its name
    sources: tuple[MediaSource, ...] = ()  # whose placeholders stand in the ids
    media: MediaPrompt | None = None  # what came of them
    plain_ids: IntArray | None = None  # the ids with the model's own placeholders in the place of media
    held: tuple[object, ...] = ()  # what keeps the media's files
    session: SessionParams | None = None  # whose earlier tokens the engine puts before the ids
    experts_start: int = 0  # the first token whose experts are told
    made_at: float = msgspec.field(default_factory=time.monotonic)

    @property
    def shown_ids(self) -> IntArray:
        return self.ids if self.plain_ids is None else self.plain_ids


@dataclass(frozen=True, slots=True)
class ThinkingMarks:
    """How a model's thinking is marked in its text. `begun`: the prompt has opened it. With a `budget`, `cut` is
    inserted after so many tokens."""

    start: str
    end: str
    cut: str
    begun: bool = False
    budget: int | None = None


PLAIN_TYPES = (int, float, str, bool, type(None))
PART_TOKENS = 16_384  # of prompts that are read and sent at once: as much as fills a step


@dataclass(frozen=True, slots=True)
class Inputs:
    """All prompts of one call. `batched`: the caller gave a list, or n > 1, and gets a list back. Calls that are not
    `watched` are neither logged nor traced; those that are not `metered` do not count in the metrics."""

    prompts: tuple[Prompt, ...]
    batched: bool
    watched: bool = True
    metered: bool = True
    rest: Iterable[Prompt] = ()  # behind these; read once, as they are sent, and without media

    def parts(self) -> Iterator[tuple[Sequence[Prompt], bool]]:
        """The prompts and those of the rest as they are read, and whether more follow."""
        part, tokens = list(self.prompts), 0
        for prompt in self.rest:
            if tokens >= PART_TOKENS:
                yield part, True
                part, tokens = [], 0
            part.append(prompt)
            tokens += len(prompt.ids)
        yield part, False


LOGPROBS = ("return_logprob", "logprob_start_len", "top_logprobs_num")
# Arguments that many prompts may have a list of, one for each.
OF_PROMPTS = (
    *LOGPROBS, "sampling_params", "extra_key", "cache_salt", "pooling", "lora_path", "custom_logit_processor",
    "return_hidden_states", "return_routed_experts", "routed_experts_start_len", "session_params",
)  # fmt: skip


class InputReader:
    """Knows the tokenizer, the model's sampling defaults and the seed for requests without one."""

    def __init__(
        self, tokenizer: Tokenizer | None, sampling_defaults: Mapping[str, Any], random_seed: int | None
    ) -> None:
        self._tokenizer = tokenizer
        self._defaults = sampling_defaults
        self._random_seed = random_seed

    def read(
        self,
        *,
        prompt: str | Sequence[str] | None = None,
        input_ids: Sequence[int] | Sequence[Sequence[int]] | None = None,
        input_embeds: Sequence[Any] | None = None,
        sampling_params: Mapping[str, Any] | Sequence[Mapping[str, Any]] | SamplingParams | None = None,
        rid: str | Sequence[str] | None = None,
        return_logprob: bool | Sequence[bool] | None = None,
        logprob_start_len: int | Sequence[int] | None = None,
        top_logprobs_num: int | Sequence[int] | None = None,
        token_ids_logprob: Sequence[int] | Sequence[Sequence[int]] | None = None,
        return_text_in_logprobs: bool = False,
        return_prompt_token_ids: bool = False,
        priority: int | None = None,
        extra_key: str | Sequence[str] | None = None,
        cache_salt: str | Sequence[str] | None = None,
        resumption: Resumption | None = None,
        custom_logit_processor: str | Sequence[str | None] | None = None,
        thinking: ThinkingMarks | None = None,
        bad_words: Sequence[str] = (),
        allowed_token_ids: Sequence[int] | None = None,
        truncate_prompt_tokens: int | None = None,
        pooling: Pooling | Sequence[Pooling] | None = None,
        routed_dp_rank: int | None = None,
        data_parallel_rank: int | None = None,
        bootstrap_host: str | Sequence[str] | None = None,
        bootstrap_port: int | Sequence[int | None] | None = None,
        bootstrap_room: int | Sequence[int] | None = None,
        lora_path: str | Sequence[str | None] | None = None,
        image_data: Any = None,
        video_data: Any = None,
        audio_data: Any = None,
        media: Sequence[MediaSource] = (),
        return_hidden_states: bool | Sequence[bool] | None = None,
        return_routed_experts: bool | Sequence[bool] | None = None,
        routed_experts_start_len: int | Sequence[int] | None = None,
        session_params: Mapping[str, Any] | SessionParams | Sequence[Any] | None = None,
        warnings: Sequence[str] = (),
        limit: int | None = None,
        in_parts: bool = False,
    ) -> Inputs:
        """`limit` is the most requests (prompts, times their samples) that this call may make. What the answer must
        match holds for what comes after the `thinking`. `media` are those of a single prompt, in its order. `in_parts`
        leaves prompts unread as `rest`, so that the first can be computed meanwhile."""
        given = locals()
        if input_embeds is None:
            _check_count(prompt, input_ids, limit)
            raw, many = self._token_ids(prompt, input_ids, "beginning" if truncate_prompt_tokens is None else "end")
            bodies: Iterable[dict[str, Any]] = ({"ids": token_array(each)} for each in raw)
        else:
            if prompt is not None or input_ids is not None:
                raise RequestError("Give exactly one of prompt (text), input_ids and input_embeds.", field="prompt")
            many = _is_nested(input_embeds) and all(map(_is_nested, input_embeds))
            raw = input_embeds if many else [input_embeds]
            bodies = map(embedded, raw)
        count = len(raw)
        nested_ids = _is_nested(token_ids_logprob)
        if nested_ids and not many:
            problem = "token_ids_logprob is a list of lists, which is for many prompts"
            raise RequestError(f"{problem}; give one prompt a list of token ids.", field="token_ids_logprob")
        columns = {name: _column(given[name], count, many, name) for name in OF_PROMPTS} | {
            "rid": _rids(rid, count, many),
            "ids": _column(token_ids_logprob, count, many and nested_ids, "token_ids_logprob", shared=not nested_ids),
            "bootstrap": _bootstraps(bootstrap_host, bootstrap_port, bootstrap_room, count, many),
            "sources": read_columns({"image": image_data, "video": video_data, "audio": audio_data}, count, many),
        }
        if priority is not None and not (_is_int(priority) and -INT64_MAX - 1 <= priority <= INT64_MAX):
            text = f"priority must be a 64-bit whole number (-2**63 to 2**63 - 1), got {priority!r}."
            raise RequestError(text, field="priority")
        dp_rank = data_parallel_rank if routed_dp_rank is None else routed_dp_rank
        if dp_rank is not None and not _is_int(dp_rank):
            raise RequestError(f"routed_dp_rank must be a whole number, got {dp_rank!r}.", field="routed_dp_rank")
        samplings = self._samplings(columns["sampling_params"])
        banned, banned_runs = banned_words(bad_words, self._tokenizer)
        if banned or allowed_token_ids is not None:
            samplings = [with_rules(sampling, banned, allowed_token_ids) for sampling in samplings]
        if truncate_prompt_tokens is not None:
            if not 1 <= truncate_prompt_tokens <= INT32_MAX:
                text = "truncate_prompt_tokens must be -1 (what the context leaves for the prompt) or at least 1."
                raise RequestError(text, field="truncate_prompt_tokens")
            bodies = ({**each, "ids": each["ids"][-truncate_prompt_tokens:]} for each in bodies)
        marks = None if thinking is None else self._marks(thinking)
        if limit is not None and sum(sampling.n for sampling in samplings) > limit:
            raise _too_many(f"{count} prompts with n samples each", limit, "n" if count == 1 else _field(input_ids))
        if resumption is not None and (many or samplings[0].n > 1):
            raise RequestError("resume goes on with one answer; give one prompt and leave n at 1.", field="resume")
        asked = list(zip(*(columns[name] for name in (*LOGPROBS, "ids")), strict=True))

        def read_each() -> Iterator[Prompt]:
            for i, (sampling, body) in enumerate(zip(samplings, bodies, strict=True)):
                if not i or any(map(is_not, asked[i], asked[i - 1])):  # else they are shared
                    logprobs = _logprob_request(*asked[i])
                session = _session(columns["session_params"][i], logprobs)
                if session is not None and session.rid is not None and self._tokenizer is not None:
                    begun = body["ids"][:1] == self._tokenizer.bos_id  # what goes on behind others needs no beginning
                    body["ids"] = body["ids"][int(begun.any()) :]
                brings = [each for each, name in OF_TOKENS.items() if columns[name][i]]
                if len(brings) > 1:
                    text = "return_hidden_states and return_routed_experts cannot be had at once; ask for one of them."
                    raise RequestError(text, field="return_routed_experts")
                start = columns["routed_experts_start_len"][i] or 0
                if not _is_int(start) or not 0 <= start <= (len(body["ids"]) if session is None else INT32_MAX):
                    text = f"routed_experts_start_len must be 0 to the number of the prompt's tokens, got {start!r}."
                    raise RequestError(text, field="routed_experts_start_len")
                namespace = _namespace(*(columns[name][i] for name in ("extra_key", "cache_salt", "lora_path")))
                seed = self._seed(sampling, resumption)
                base_rid = columns["rid"][i] or secrets.token_hex(16)
                shared = {base_rid, rid} if isinstance(rid, str) else {base_rid}
                for sample in range(sampling.n):
                    own = base_rid if sampling.n == 1 else f"{base_rid}-{sample}"
                    yield Prompt(
                        rid=own,
                        names=frozenset({own, *shared}),
                        **body,
                        sampling=sampling,
                        seed=derive_seed(seed, sample),
                        namespace=namespace,
                        priority=int(priority or 0),
                        logprobs=logprobs,
                        logprob_texts=return_text_in_logprobs,
                        show_ids=return_prompt_token_ids,
                        resumption=resumption,
                        thinking=marks,
                        bad_words=banned_runs,
                        custom_logit_processor=_processor(columns["custom_logit_processor"][i]),
                        warnings=tuple(warnings),
                        dp_rank=dp_rank,
                        pooling=brings[0] if brings else columns["pooling"][i],
                        bootstrap=_of_sample(columns["bootstrap"][i], sample),
                        adapter=columns["lora_path"][i] or "",
                        sources=(*columns["sources"][i], *media),
                        session=session,
                        experts_start=start,
                    )

        batched = many or samplings[0].n > 1
        if in_parts and not media and not any(columns["sources"]):
            return Inputs((), batched, rest=read_each())
        return Inputs(tuple(read_each()), batched)

    def _samplings(self, column: Sequence[Any]) -> list[SamplingParams]:
        samplings: list[SamplingParams] = []
        patterns: set[str] = set()
        for i, given in enumerate(column):
            if i and (given is column[i - 1] or _alike(given, column[i - 1])):
                samplings.append(samplings[-1])
                continue
            sampling = SamplingParams.parse(given, self._defaults)
            self._require_text_for(sampling)
            patterns.update(sampling.stop_regex)
            if sum(map(len, patterns)) > MAX_PATTERN_CHARS:  # before more of them are compiled
                break
            samplings.append(sampling)
        check_patterns(patterns)
        return samplings

    def _marks(self, thinking: ThinkingMarks) -> Thinking:
        if self._tokenizer is None:
            text = "This engine has no tokenizer (--skip-tokenizer-init), so it cannot tell thinking apart."
            raise RequestError(text)
        texts = [thinking.start, thinking.end, thinking.cut]
        start, end, cut = (tuple(ids) for ids in self._tokenizer.encode_batch(texts, add_special_tokens=False))
        return Thinking(start, end, cut, thinking.begun, thinking.budget)

    def _require_text_for(self, sampling: SamplingParams) -> None:
        for name in ("stop", "stop_regex"):
            if self._tokenizer is None and getattr(sampling, name):
                problem = f"{name} is searched in text, and this engine has no tokenizer (--skip-tokenizer-init)"
                raise RequestError(f"{problem}; use stop_token_ids.", field=name)

    def _seed(self, sampling: SamplingParams, resumption: Resumption | None) -> int:
        if resumption is not None and resumption.seed is not None:
            return resumption.seed
        if sampling.sampling_seed is not None:
            return sampling.sampling_seed
        return secrets.randbits(63) if self._random_seed is None else self._random_seed

    def _token_ids(self, prompt: Any, input_ids: Any, keep: Keep) -> tuple[Sequence[Any], bool]:
        if (prompt is None) == (input_ids is None):
            raise RequestError("Give exactly one of prompt (text) and input_ids.", field="prompt")
        if prompt is not None:
            many = _is_list(prompt)
            texts = list(prompt) if many else [prompt]
            if any(not isinstance(text, str) for text in texts):
                raise RequestError("prompt must be a string or a list of strings.", field="prompt")
            if self._tokenizer is None:
                problem = "This engine has no tokenizer (--skip-tokenizer-init); give token ids."
                raise RequestError(problem, field="prompt")
            raw: Sequence[Any] = list(map(token_array, self._tokenizer.encode_each(texts, keep=keep)))
        else:
            if not _is_list(input_ids):
                raise RequestError("input_ids must be a list of token ids, or a list of such lists.", field="input_ids")
            many = len(input_ids) > 0 and _is_list(input_ids[0])
            raw = input_ids if many else [input_ids]
        if not len(raw):
            raise RequestError("The list of prompts is empty.", field=_field(input_ids))
        return raw, many


# What a call may ask for, by name: protocols pass on those of their fields that are among these.
READ_FIELDS = frozenset(inspect.signature(InputReader.read).parameters)


def _check_count(prompt: Any, input_ids: Any, limit: int | None) -> None:
    given = prompt if input_ids is None else input_ids
    listed = _is_list(given) and len(given) > 0 and (isinstance(given[0], str) or _is_list(given[0]))
    if limit is not None and listed and len(given) > limit:
        raise _too_many(f"{len(given)} prompts", limit, _field(input_ids))


def _too_many(what: str, limit: int, field: str) -> RequestError:
    text = f"{what} make more than {limit} requests, which is the most that one call may ask for; send several."
    return RequestError(text, field=field)


def _field(input_ids: Any) -> str:
    return "prompt" if input_ids is None else "input_ids"


def token_array(ids: Any, name: str = "input_ids") -> IntArray:
    """Token ids as one array; `name` is the field that is to blame where they are none."""
    if not _is_list(ids):
        raise RequestError(f"{name} must be a list of token ids, or a list of such lists.", field=name)
    # Prompts are checked as a whole; checking ids one by one takes longer than a GPU needs to compute them. Of lists,
    # an `array` of unsigned numbers is made in a third of numpy's time, one of signed numbers hardly faster.
    if type(ids) is list and ids and type(ids[0]) is int:
        with contextlib.suppress(TypeError, OverflowError):
            numbers: IntArray = np.frombuffer(array("I", ids), dtype=np.int32)
            if numbers.min() >= 0:
                return numbers
    with contextlib.suppress(ValueError):  # a list inside the list
        numbers = np.asarray(ids, dtype=None if len(ids) else np.int32)
        if numbers.ndim == 1 and numbers.dtype.kind == "i" and ((numbers >= -1) & (numbers <= INT32_MAX)).all():
            return numbers.astype(np.int32)
    if wrong := [x for x in ids if not _is_int(x)]:
        raise RequestError(f"{name} must hold whole numbers, got {wrong[0]!r}.", field=name)
    out = next(x for x in ids if not -1 <= x <= INT32_MAX)
    raise RequestError(f"Token id {out} is outside the vocabulary.", field=name)


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence | np.ndarray) and not isinstance(value, str | bytes)


def _is_nested(value: Any) -> bool:
    """Whether it is a list with one list for each prompt; null stands for one."""
    return _is_list(value) and len(value) > 0 and all(x is None or _is_list(x) for x in value)


def _alike(given: Any, before: Any) -> bool:
    """Whether two mappings of plain values are read alike; 1, 1.0 and True are equal, and not all of them are right."""
    same = type(given) is dict and given == before
    return same and all(type(before[name]) is type(value) in PLAIN_TYPES for name, value in given.items())


def _is_int(value: Any) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _rids(given: Any, count: int, many: bool) -> list[str | None]:
    """One id per prompt, or None where one is to be drawn. A single id for many prompts gets their numbers."""
    rids = _column(given, count, many, "rid")
    for rid in rids:
        if rid is not None and not isinstance(rid, str):
            raise RequestError(f"rid must be a string, got {rid!r}.", field="rid")
        require_name(rid or "", "rid")
    return [f"{given}-{i}" for i in range(count)] if many and isinstance(given, str) else rids


def _column(value: Any, count: int, many: bool, name: str, *, shared: bool = False) -> list[Any]:
    """One value per prompt: a list is taken as it is, a single value holds for all."""
    if not shared and isinstance(value, list | tuple):
        if not many and count == 1 and len(value) == 1:
            return list(value)
        if len(value) != count or not many:
            raise RequestError(f"{name} has {len(value)} entries for {count} prompts.", field=name)
        return list(value)
    return [value] * count


def _bootstraps(host: Any, port: Any, room: Any, count: int, many: bool) -> list[Bootstrap | None]:
    """One place for each prompt; a single room for many prompts is that of the first, and the others follow."""
    named = {"bootstrap_host": host, "bootstrap_port": port, "bootstrap_room": room}
    hosts, ports, rooms = (_column(value, count, many, name) for name, value in named.items())
    if many and _is_int(room):
        rooms = [room + i for i in range(count)]
    for each in hosts:
        require_name(each or "", "bootstrap_host")
    for name, given, most in (("bootstrap_port", ports, 65535), ("bootstrap_room", rooms, INT64_MAX)):
        if any(x is not None and not (_is_int(x) and 0 <= x <= most) for x in given):
            raise RequestError(f"{name} must be a whole number from 0 to {most}.", field=name)
    places = zip(hosts, ports, rooms, strict=True)
    return [Bootstrap(h or "", p or 8998, r) if h or r is not None else None for h, p, r in places]


def _of_sample(place: Bootstrap | None, sample: int) -> Bootstrap | None:
    """Each of several samples has a room of its own; both engines find it."""
    if place is None or place.room is None or not sample:
        return place
    return Bootstrap(place.host, place.port, derive_seed(place.room, sample))


def _logprob_request(wanted: Any, start: Any, top: Any, ids: Any) -> LogprobRequest | None:
    """Which logprobs the caller gets; the fields are checked even where none are wanted."""
    start, top = -1 if start is None else start, top or 0
    if not _is_int(start) or not -1 <= start <= INT32_MAX:
        text = f"logprob_start_len must be -1 (output only) or a prompt position, got {start!r}."
        raise RequestError(text, field="logprob_start_len")
    if not _is_int(top) or not 0 <= top <= MAX_LOGPROBS:
        text = f"top_logprobs_num must be between 0 and {MAX_LOGPROBS}, got {top!r}."
        raise RequestError(text, field="top_logprobs_num")
    chosen = () if ids is None else tuple(ids) if _is_list(ids) else (ids,)
    require_few(chosen, "token_ids_logprob", MAX_LOGPROBS)  # before each is looked at
    if any(not _is_int(x) or not 0 <= x <= INT32_MAX for x in chosen):
        text = f"token_ids_logprob must be a list of token ids (0 to {INT32_MAX})."
        raise RequestError(text, field="token_ids_logprob")
    return LogprobRequest(int(start), int(top), tuple(int(x) for x in chosen)) if wanted else None


def _processor(given: Any) -> str | None:
    if given is not None and not isinstance(given, str):
        text = "custom_logit_processor must be the text that CustomLogitProcessor.to_str() made."
        raise RequestError(text, field="custom_logit_processor")
    return given or None


def _session(given: Any, logprobs: LogprobRequest | None) -> SessionParams | None:
    if given is None:
        return None
    try:
        session = msgspec.convert(given, SessionParams)
    except msgspec.ValidationError as error:
        raise RequestError(f"session_params: {error}.", field="session_params") from None
    for name in (session.id, session.rid):
        require_name(name or "", "session_params")
    if session == SessionParams():
        return None
    if session.rid is not None and logprobs is not None and logprobs.start >= 0:
        text = "Behind a request of a session there are logprobs of the output alone; leave logprob_start_len at -1."
        raise RequestError(text, field="logprob_start_len")
    return session


def _namespace(extra_key: Any, cache_salt: Any, adapter: Any) -> str:
    """Requests share prefixes only within one namespace. The separator keeps ("a", "b") and ("ab", "") apart. What an
    adapter adds to it the scheduler knows."""
    for name, value in (("extra_key", extra_key), ("cache_salt", cache_salt), ("lora_path", adapter)):
        if value is not None and not isinstance(value, str):
            raise RequestError(f"{name} must be a string, got {value!r}.", field=name)
        if value:
            require_name(value, name)
    return "" if not extra_key and not cache_salt else f"{extra_key or ''}\0{cache_salt or ''}"
