"""Does what expressions say: writes text and roles into one state's document, and asks the back end for the rest."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping, Sequence
from typing import Any

from bough.core.errors import RequestError
from bough.lang.backends.base import OPTIONS, GenOutput, GenRequest, Usage, stops_of
from bough.lang.chat import Document
from bough.lang.choices import normalized
from bough.lang.expressions import Gen, Image, RoleBegin, RoleEnd, ScopeBegin, ScopeEnd, Select, Text, Video
from bough.lang.slots import Changes, Slot
from bough.lang.steps import RunOptions, Settle, Step
from bough.parsers import AnswerFormat, reasoning_format


class Writer:
    def __init__(self, options: RunOptions, document: Document, changes: Changes) -> None:
        self.options = options
        self.backend = options.backend
        self.document = document
        self.usage = Usage()
        self._changes = changes
        self.start = 0  # where a branch begins in the text that it shares with its parent
        self._scopes: dict[str, int] = {}
        self._pattern: list[Step] | None = None  # an assistant message that will be one call

    def go_on_from(self, other: Writer) -> None:
        self.document = copy.copy(other.document)
        self.start = len(self.document.text)
        self._scopes = dict(other._scopes)

    def do_at_once(self, step: Step) -> bool:
        """Does a step that needs no waiting; False if it is another."""
        if self._pattern is not None:
            return False
        document = self.document
        match step.expr:
            case Text(value):
                document.text += value
            case RoleBegin(role, generated):
                document.begin(role, generated=generated)
                if role == "assistant" and self.options.speculates:
                    self._pattern = []
            case RoleEnd(role):
                document.end(role)
            case ScopeBegin(name):
                self._scopes[name] = len(document.text)
            case ScopeEnd(name):
                assert step.slot is not None
                step.slot.fill(document.text[self._scopes.pop(name) :])
            case Image(source):
                document.add_media({"type": "image", "image": source}, placed=not self.backend.chat_only)
            case Video(path, frames):
                part = {"type": "video", "video": path, "num_frames": frames}
                document.add_media(part, placed=not self.backend.chat_only)
            case Settle():  # nothing is being put together
                pass
            case _:
                return False
        return True

    async def do(self, step: Step) -> None:
        if self._pattern is not None:
            await self._put_together(self._pattern, step)
        elif isinstance(step.expr, Gen):
            await self._generate(step.expr, step)
        elif isinstance(step.expr, Select):
            await self._select(step.expr, step.slot)
        else:
            self.do_at_once(step)

    # With the back end ------------------------------------------------------------------------------------------------

    async def _generate(self, gen: Gen, step: Step) -> None:
        if gen.reasoning is not None and self.options.stream:
            raise RequestError("separate_reasoning() needs the whole answer; run without stream=True.")
        shown = gen.reasoning is not None and not self.backend.chat_only  # marks may be special tokens
        own = {**gen.sampling, "skip_special_tokens": False} if shown else gen.sampling
        request = self._request(own, gen.ends)
        streams = self.options.stream and request.sampling.get("n", 1) == 1
        output = await (self._read_stream(request, step.slot) if streams else self.backend.generate(request))
        self._count(output.metas)
        if gen.reasoning is not None:
            output = _without_reasoning(gen.reasoning, request.text, output, step.thoughts)
        self.document.text = request.text + output.texts[0]
        if step.slot is not None:
            many = len(output.texts) > 1
            step.slot.fill(*((output.texts, output.metas) if many else (output.texts[0], output.metas[0])))

    async def _read_stream(self, request: GenRequest, slot: Slot | None) -> GenOutput:
        output = GenOutput([""], [{}])
        async for output in self.backend.stream(request):
            self.document.text = request.text + output.texts[0]
            if slot is not None:
                slot.partial, slot.meta = output.texts[0], output.metas[0]
            self._changes.notify()
        return output

    def _request(self, own: Mapping[str, Any], ends: Sequence[str] = ()) -> GenRequest:
        merged = {**self.options.sampling, **own}
        options = {name: merged.pop(name) for name in OPTIONS if name in merged}
        if "lora_path" in options and not self.backend.has_adapters:
            raise RequestError("lora_path is for Bough's own engines; name the fine-tuned model instead.")
        document = self.document
        more = (*ends, *(document.chat_format.stop if document.role == "assistant" else ()))
        if more:
            merged["stop"] = (*stops_of(merged), *more)
        images = [part["image"] for part in document.media_of("image")]
        videos = [(part["video"], part["num_frames"]) for part in document.media_of("video")]
        return GenRequest(document.text, document.all_messages, merged, options, images, videos)

    async def _select(self, select: Select, slot: Slot | None) -> None:
        method = select.method
        if self.document.media:
            raise RequestError("select() scores texts alone; after image() or video() use gen() with a regex.")
        scores = await self.backend.score(
            self.document.text, select.choices, unconditional=method.requires_unconditional_logprobs
        )
        self._count(scores.metas)
        decision = method(
            choices=select.choices,
            normalized_prompt_logprobs=[normalized(tokens) for tokens in scores.tokens],
            input_token_logprobs=scores.tokens,
            output_token_logprobs=[[] for _ in select.choices],  # nothing is generated
            unconditional_token_logprobs=scores.alone,
        )
        self.document.text += decision.decision
        if slot is not None:
            slot.fill(decision.decision, decision.meta_info)

    def _count(self, metas: Sequence[Mapping[str, Any]]) -> None:
        for meta in metas:
            self.usage.add(meta)
            self.backend.token_usage.add(meta)

    # A message of several generations as one call ---------------------------------------------------------------------

    async def _put_together(self, pattern: list[Step], step: Step) -> None:
        """Collects the parts of an assistant message, and asks for all of them when it ends or somebody waits."""
        if isinstance(step.expr, Text | Gen):
            pattern.append(step)
            return
        self._pattern = None
        generations = [part for part in pattern if isinstance(part.expr, Gen)]
        if len(generations) > 1 or (generations and pattern[0] is not generations[0]):
            await self._speculate(pattern)
        else:
            for part in pattern:
                await self.do(part)
        await self.do(step)

    async def _speculate(self, pattern: Sequence[Step]) -> None:
        items = [part.expr for part in pattern if isinstance(part.expr, Text | Gen)]
        own = next(dict(item.sampling) for item in items if isinstance(item, Gen))
        own |= {"max_new_tokens": self.options.num_api_spec_tokens, "stop": (), "n": 1}
        if any(isinstance(item, Gen) and "json_schema" in item.sampling for item in items):
            told = "A message of several parts that is one call (num_api_spec_tokens) takes no json_schema"
            raise RequestError(f"{told}; give that gen() an assistant message of its own.", field="json_schema")
        own.pop("regex", None)  # it is not that of the whole message; `match` looks at it
        request = self._request(own)
        attempts = 1 if request.sampling.get("temperature") == 0 else ATTEMPTS  # it would write the same again
        for _ in range(attempts):
            output = await self.backend.generate(request)
            self._count(output.metas)
            texts = match(items, output.texts[0])
            if texts is not None:
                break
        else:
            form = "".join(item.value if isinstance(item, Text) else f"<{item.name}>" for item in items)
            told = f"The model did not keep to the form {form!r} in {attempts} attempt{'s' * (attempts > 1)}"
            raise RequestError(f"{told}; show it the form in the prompt, or raise num_api_spec_tokens.")
        for part, text in zip(pattern, texts, strict=True):
            self.document.text += text
            if part.slot is not None:
                part.slot.fill(text, output.metas[0])


def _without_reasoning(model_type: str, prompt: str, output: GenOutput, thoughts: Slot | None) -> GenOutput:
    kind = reasoning_format(model_type)
    form = AnswerFormat(reasoning=kind, thinking=kind.thinks_from_start(prompt))
    parsed = [form.parse(text) for text in output.texts]
    if thoughts is not None:
        thinking = [answer.reasoning.strip() for answer in parsed]
        thoughts.fill(thinking[0] if len(thinking) == 1 else thinking)
    pairs = zip(parsed, output.texts, strict=True)
    return GenOutput([p.text if p.text == text else p.text.lstrip() for p, text in pairs], output.metas)


# API speculative execution: one call for a whole assistant message with several generations in it. Chat APIs cannot
# continue a message. For `"Name:" + gen("name") + "\\nAge:" + gen("age")` the model writes freely, the program's own
# text is searched in what it wrote, and what stands between are the variables.


ATTEMPTS = 4


def match(items: Sequence[Text | Gen], written: str) -> list[str] | None:
    """The text of each item as the model wrote it, or None if it wrote something else."""
    found: list[str] = []
    at = 0
    if isinstance(items[0], Text):
        written = written.lstrip()  # as the program's own text is
    for i, item in enumerate(items):
        if isinstance(item, Text):
            value = item.value.lstrip() if at == 0 else item.value  # a message does not begin with a space
            if not written.startswith(value, at):
                return None
            found.append(item.value)
            at += len(value)
            continue
        end = _end_of(item, items[i + 1] if i + 1 < len(items) else None, written, at)
        if end is None or not re.fullmatch(item.sampling.get("regex", "(?s:.*)"), written[at:end]):
            return None
        found.append(written[at:end])
        at = end
    return found


def _end_of(item: Gen, following: Text | Gen | None, written: str, at: int) -> int | None:
    """Where a generation ends: before the program's next text, or at its own stop."""
    stops = (*stops_of(item.sampling), *item.ends)
    ends = [place for stop in stops if (place := written.find(stop, at)) >= 0]
    if isinstance(following, Text):
        place = written.find(following.value, at)
        if place < 0:
            return None
        ends.append(place)
    if following is not None and not ends:
        return None  # nothing tells two generations apart
    return min(ends, default=len(written))
