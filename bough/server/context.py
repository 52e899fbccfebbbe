"""What every route is given: the engine's client, the tokenizer, and what is known of the model that is served.

Made once, when the engine is ready; routes keep nothing else between requests.
"""

import asyncio
import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeVar

import msgspec

from bough.client.handle import EngineClient
from bough.client.inputs import InputReader, Inputs, Prompt
from bough.core.errors import CONTEXT_LENGTH_EXCEEDED, RequestError
from bough.core.media import MediaSource
from bough.core.sampling_params import require_few
from bough.core.settings import Settings
from bough.observability.metrics import State
from bough.parsers import AnswerFormat
from bough.server.bodies import body_bytes, warnings_of_body
from bough.server.errors import add_field_names, in_client_names
from bough.server.messages import Message, check_size, read_media, text_of
from bough.server.model_info import ModelInfo
from bough.server.parsing import AnswerPlan
from bough.server.tracing import RecentRequests
from bough.server.watchdog import Watchdog
from bough.tokenizer.chat_template import template_defaults
from bough.tokenizer.tokenizer import Keep, TextBound, Tokenizer

T = TypeVar("T")
# What becomes of a limit of tokens that goes beyond the context: it is cut with a warning, or refused. "none": the
# client gave no limit, so the answer may have all that is left.
Overlong = Literal["cut", "refused", "none"]

# Characters (or ids) of prompts from which reading them takes long enough (about a millisecond) to be worth a thread of
# its own: the tokenizer releases the GIL, so other requests' tokens go out in the meantime.
LONG_TEXT = 10_000
LONG_BODY = 80_000  # the same of the bytes of a body whose fields are checked

# Prompts of one HTTP request, times their samples. Preparing each blocks the event loop for about ten
# microseconds; offline callers block only themselves and have no such limit.
MAX_REQUESTS_PER_CALL = 8192
MAX_VECTORS_PER_CALL = 65_536  # of which nothing is streamed

# Logprobs of the prompts of one HTTP request: they come all at once, and encoding a million as JSON blocks the
# event loop for about half a second. Those of outputs come token by token, of all answers at once.
MAX_PROMPT_LOGPROBS, MAX_OUTPUT_LOGPROBS = 1 << 21, 1 << 18

# Every prompt goes to the engine with all its parameters, those that it shares with others of its call among them.
MAX_SENT_BYTES = 1 << 26
ENTRY_BYTES = 64  # what an entry of a table counts: the scheduler looks at each

TEMPLATE_ARGUMENTS = ("messages", "tools", "add_generation_prompt", "continue_final_message")
STATE_TIMEOUT_S = 5.0  # half of the time that Prometheus gives a page: a stuck engine must not hide what else is known


class Rendered(NamedTuple):
    ids: list[int]
    text: str
    media: tuple[MediaSource, ...] = ()


@dataclass(frozen=True, slots=True)
class ServerContext:
    client: EngineClient
    reader: InputReader
    tokenizer: Tokenizer | None
    model: ModelInfo
    settings: Settings
    watchdog: Watchdog | None = None
    main_pid: int = field(default_factory=os.getpid)  # of the process that started all others
    recent: RecentRequests = field(default_factory=RecentRequests)

    def require_tokenizer(self, field: str | None = None) -> Tokenizer:
        if self.tokenizer is None:
            text = "This server has no tokenizer (--skip-tokenizer-init); send token ids to /generate."
            raise RequestError(text, field=field)
        return self.tokenizer

    def adapter_of(self, model: str | None) -> str | None:
        """The adapter that `model` names, by its own name or behind the model's, or `default`, and a colon."""
        bases = (self.model.name, "default")
        if not self.settings.lora.enable_lora or not model or model in bases:
            return None
        return next((model.removeprefix(f"{base}:") for base in bases if model.startswith(f"{base}:")), model)

    def shown_name(self, model: str | None) -> str:
        """What an answer calls its model: an adapter as the request has named it."""
        return self.model.name if self.adapter_of(model) is None else model or ""

    async def states(self) -> list[State]:
        """The states of the schedulers, which they send between two steps; those that do not answer are missing."""
        return await self.client.states(STATE_TIMEOUT_S)

    async def read_inputs(self, *, model: str | None = None, overlong: Overlong = "cut", **given: Any) -> Inputs:
        """`InputReader.read`, which tokenises, in a thread when there is much; then media are prepared. Where
        there are adapters, a `model` may be one."""
        if model and not given.get("lora_path"):
            given["lora_path"] = self.adapter_of(model)
            add_field_names({"lora_path": "model"})
        self._check_tables(given)
        if given.get("input_ids") is not None:
            given["input_ids"] = self._bounded_ids(given["input_ids"], given.get("truncate_prompt_tokens") is not None)
        if given.get("truncate_prompt_tokens") == -1:
            length, answer = self.model.context_length, given["sampling_params"]["max_new_tokens"]
            # What the answer leaves of the context; one that asks for all of it gets one token.
            given["truncate_prompt_tokens"] = length - (answer if answer < length else 1)
        size = 0 if given.get("prompt") is None else body_bytes.get()
        most = MAX_REQUESTS_PER_CALL if given.get("pooling") is None else MAX_VECTORS_PER_CALL
        limits: dict[str, Any] = {"limit": most, "warnings": warnings_of_body()}
        inputs = await self.client.prepared(await offload(size, lambda: self.reader.read(**given, **limits)))
        _check_logprobs(inputs)
        _check_shared(inputs)
        self._check_logprob_ids(inputs)
        return inputs if overlong == "none" else self._within_context(inputs, overlong)

    def _within_context(self, inputs: Inputs, overlong: Overlong) -> Inputs:
        """Looks for answers that may get longer than what their prompts leave of the context. A prompt that is too long
        itself is the engine's to refuse."""
        length = self.model.context_length

        def warned(prompt: Prompt) -> Prompt:
            asked, left = prompt.sampling.max_new_tokens, length - len(prompt.ids)
            if asked <= left or left <= 0:
                return prompt
            if overlong == "refused" and not self.settings.scheduler.allow_auto_truncate:
                text = (
                    f"Requested token count exceeds the model's maximum context length of {length} tokens: the prompt "
                    f"has {len(prompt.ids)}, and max_new_tokens asks for {asked} more. Lower max_new_tokens, shorten "
                    "the prompt, or start the server with --allow-auto-truncate."
                )
                raise RequestError(text, field="max_new_tokens", code=CONTEXT_LENGTH_EXCEEDED)
            warning = (
                f"max_new_tokens is {asked}, but the prompt leaves {left} tokens of the context; the answer ends there."
            )
            return msgspec.structs.replace(prompt, warnings=(*prompt.warnings, in_client_names(warning)))

        return dataclasses.replace(inputs, prompts=tuple(map(warned, inputs.prompts)))

    async def render(
        self,
        messages: Sequence[Message],
        *,
        field: str = "messages",
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        keep: Keep = "beginning",
    ) -> Rendered:
        """The prompt of a conversation, a long one in a thread. `tools` are in OpenAI's form; `variables` are the
        client's own for the template. `keep`: what is left of a prompt that is too long, if it may be cut."""
        if self.model.limits.get("is_embedding"):
            raise RequestError("This model gives vectors or scores; it does not generate text.", field="model")
        if self.model.limits.get("speech") is not None:
            raise RequestError("This model writes down recordings alone (/v1/audio/transcriptions).", field="model")
        tokenizer, given = self.require_tokenizer(field), variables or {}
        for name in TEMPLATE_ARGUMENTS:
            if name in given:
                message = f"chat_template_kwargs may not hold {name!r}; it is a field of the request."
                raise RequestError(message, field="chat_template_kwargs")
        size = check_size([messages, tools or ()], field) + check_size(given, "chat_template_kwargs")
        given = {**template_defaults(self.settings.model.default_chat_template_kwargs), **given}
        media = read_media(messages, self.client.media_kinds, field)
        prompted = not continue_final_message if add_generation_prompt is None else add_generation_prompt

        def work() -> Rendered:
            options = {"add_generation_prompt": prompted, "continue_final_message": continue_final_message}
            text = tokenizer.apply_chat_template(messages, tools=tools, **options, **given)
            return Rendered(tokenizer.encode(text, add_special_tokens=False, keep=keep), text, media)

        return await offload(size, work)

    async def plan_inputs(
        self,
        plan: AnswerPlan,
        prompt: Rendered,
        given: Mapping[str, Any],
        continued: str = "",
        budget: int | None = None,
    ) -> tuple[Inputs, AnswerFormat]:
        """The inputs of a rendered conversation, `given` being the reader's other arguments, and how its answers are
        parsed. `continued` is the text of the assistant's that they continue, `budget` the most tokens of thinking."""
        sampling = plan.sampling(given["sampling_params"])
        thinking = plan.marks(sampling, prompt.text, continued, budget)
        planned = {"input_ids": prompt.ids, "media": prompt.media, "sampling_params": sampling, "thinking": thinking}
        inputs = await self.read_inputs(**{**given, **planned})
        return inputs, plan.answers(prompt.text, continued)

    async def converse(
        self,
        plan: AnswerPlan,
        messages: Sequence[Message],
        given: Mapping[str, Any],
        *,
        continued: bool = False,
        budget: int | None = None,
        **how: Any,
    ) -> tuple[Inputs, AnswerFormat]:
        """`render` with the plan's tools, then `plan_inputs`. `continued`: the answer goes on with the last message."""
        how["keep"] = "beginning" if given.get("truncate_prompt_tokens") is None else "end"
        prompt = await self.render(messages, tools=plan.tools.shown, continue_final_message=continued, **how)
        text = text_of(messages[-1]["content"]) if continued else ""
        return await self.plan_inputs(plan, prompt, given, text, budget)

    def _check_logprob_ids(self, inputs: Inputs) -> None:
        """An id that the model does not have fails the whole call, not one prompt of a batch."""
        last = self.model.vocab_size - 1
        asked = {id(prompt.logprobs): prompt.logprobs for prompt in inputs.prompts}.values()
        for token in (token for spec in asked if spec is not None for token in spec.ids):
            if token > last:
                text = f"token_ids_logprob: token id {token} is outside the vocabulary (0 to {last})."
                raise RequestError(text, field="token_ids_logprob")

    def _check_tables(self, given: Mapping[str, Any]) -> None:
        """A table with more entries than there are tokens is wrong, whatever they are: nobody looks at them."""
        column, vocabulary = given.get("sampling_params"), self.model.vocab_size
        biases = [(each or {}).get("logit_bias") for each in (column if isinstance(column, list) else [column])]
        tables = [("allowed_token_ids", given.get("allowed_token_ids")), *(("logit_bias", bias) for bias in biases)]
        for name, table in tables:
            if isinstance(table, dict | list) and len(table) > vocabulary:
                require_few(table, name)
                text = f"{name} has {len(table)} entries, and the model has {vocabulary} tokens; give each token once."
                raise RequestError(text, field=name)

    def _bounded_ids(self, ids: Any, last: bool) -> Any:
        """The ids of a prompt, unless they are more than the engine could read: looking at millions takes seconds."""
        bound = TextBound(self.model.context_length)
        if not isinstance(ids, list) or len(ids) <= bound.tokens or isinstance(ids[0], list):
            return ids
        if self.settings.scheduler.allow_auto_truncate:
            return ids[-bound.tokens :] if last else ids[: bound.tokens]
        raise bound.too_long(str(len(ids)))


async def offload(size: int, work: Callable[[], T]) -> T:
    """The result of `work`, whose cost grows with `size` characters, or with what the body holds; long work runs in a
    thread."""
    return await asyncio.to_thread(work) if size >= LONG_TEXT or body_bytes.get() >= LONG_BODY else work()


def _check_logprobs(inputs: Inputs) -> None:
    asked = [(prompt, prompt.logprobs) for prompt in inputs.prompts if prompt.logprobs is not None]
    of_prompts = sum((len(prompt.ids) - spec.start) * spec.width for prompt, spec in asked if spec.start >= 0)
    later, fewer = "give a later logprob_start_len", "send fewer requests in one call"
    for entries, most, what, advice in (
        (of_prompts, MAX_PROMPT_LOGPROBS, "of the prompt's tokens", later),
        (sum(spec.width for _, spec in asked), MAX_OUTPUT_LOGPROBS, "with each token of all answers", fewer),
    ):
        if entries > most:
            text = f"top_logprobs_num asks for {entries} logprobs {what}; at most {most} are given at once."
            raise RequestError(f"{text} Ask for fewer of each token, or {advice}.", field="top_logprobs_num")


def _check_shared(inputs: Inputs) -> None:
    """Bounds what is sent many times over. What a single request brings its body bounds."""
    if len(inputs.prompts) == 1:
        return
    sizes: dict[int, int] = {}  # of shared parameters
    total = 0
    for prompt in inputs.prompts:
        if id(prompt.sampling) not in sizes:
            entries = len(prompt.sampling.logit_bias) + sum(map(len, prompt.bad_words))
            sizes[id(prompt.sampling)] = len(msgspec.msgpack.encode(prompt.sampling)) + ENTRY_BYTES * entries
        total += sizes[id(prompt.sampling)]
    if total > MAX_SENT_BYTES:
        problem = f"{len(inputs.prompts)} requests with sampling parameters of {total >> 20} MiB in all"
        limit = f"{MAX_SENT_BYTES >> 20} MiB ({ENTRY_BYTES} bytes for each entry of a table) may be sent in one call"
        raise RequestError(f"{problem}: {limit}; send several.", field="sampling_params")
