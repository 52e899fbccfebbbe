"""How models set their thinking apart from their answer, by SGLang's names (`--reasoning-parser`).

Where the prompt can be seen, `thinks_from_start` looks at it instead of believing the table.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from bough.core.errors import RequestError
from bough.parsers.events import Reasoning, Text
from bough.parsers.formats.base import ToolFormat
from bough.parsers.formats.json_calls import Cohere
from bough.parsers.formats.messages import Harmony, Inkling, Muse
from bough.parsers.formats.tagged_arguments import KimiK3
from bough.parsers.source import SPACE, Markers, Source, Steps


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """`start` and `end` are the texts around the thinking."""

    start: str = "<think>"
    end: str = "</think>"
    forced: bool = False  # an answer begins inside of the thinking, unless its prompt shows otherwise
    calls: tuple[str, ...] = ()  # what begins a call, and so ends the thinking of a model that forgot to say so
    shown: bool = False  # the thinking is not set apart; only its first marker, which the prompt has, is shown again
    closing: str = ""  # what ends the thinking and begins the answer, for one who cuts it short; else `end`
    framing: tuple[str, ...] = ()  # markers around the answer, which are not shown
    framed: ToolFormat | None = None  # what reads the answer instead, where thinking is one of several kinds of message

    @property
    def cut(self) -> str:
        """The text that, written by somebody else than the model, ends its thinking."""
        return self.closing or self.end

    def thinks_from_start(self, prompt: str, continued: str = "") -> bool:
        """Whether the answer to a prompt begins inside of the thinking: what the prompt ends with tells, or, where the
        answer goes on with words that stand there already (`continued`), the last marker in those."""
        if self.start in continued or self.end in continued:
            return continued.rfind(self.start) > continued.rfind(self.end)
        said = prompt.rstrip(SPACE)
        if said.endswith(self.start.rstrip(SPACE)):
            return True
        return self.forced and not said.endswith(self.end)

    def read(self, source: Source, thinking: bool, openings: Iterable[str] = ()) -> Steps[None]:
        """A whole stream. The thinking stands at its beginning; later markers are just text. Blanks around the markers
        belong to nobody. An answer that begins with one of `openings` has no thinking at all."""
        if self.shown:
            yield Text(self.start)
            yield from source.rest(Text)
            return
        for opening in openings:
            if (yield from source.starts_after_space(opening)):
                yield from self._answer(source)
                return
        if (yield from source.starts_after_space(self.start)):
            thinking = True
            yield from source.skip_space()
            yield from source.skip(self.start)
        if not thinking and (yield from source.starts_after_space(self.end)):  # it has ended before it began
            yield from source.skip_space()
            yield from source.skip(self.end)
            yield from source.skip_space()
        if thinking:
            yield from source.skip_space()
            marker = yield from source.passage(Markers(self.end, *self.calls, before=SPACE), Reasoning)
            if marker == self.end:
                yield from source.skip_space()
            if marker in self.calls and marker not in self.framing:
                yield Text(marker)
        yield from self._answer(source)

    def _answer(self, source: Source) -> Steps[None]:
        if not self.framing:
            yield from source.rest(Text)
            return
        while (yield from source.passage(Markers(*self.framing), Text)) is not None:
            pass


HARMONY = ReasoningFormat(
    "<|channel|>analysis<|message|>",
    "<|channel|>final<|message|>",
    closing="<|end|><|start|>assistant<|channel|>final<|message|>",
    framed=Harmony(),
)
THINK = ReasoningFormat()
THINK_FORCED = ReasoningFormat(forced=True)
THINK_OR_CALL = ReasoningFormat(calls=("<tool_call>",))

REASONING_FORMATS: dict[str, ReasoningFormat] = {
    "apertus2509": ReasoningFormat("<|inner_prefix|>", "<|inner_suffix|>", calls=("<|tools_prefix|>",)),
    "cohere_command4": ReasoningFormat(
        "<|START_THINKING|>",
        "<|END_THINKING|>",
        forced=True,
        calls=("<|START_ACTION|>", "<|START_TEXT|>", "<|START_RESPONSE|>"),
        framing=Cohere.FRAMING,
    ),
    "deepseek-r1": THINK_FORCED,
    "deepseek-v3": THINK,
    "deepseek-v4": THINK,
    "dots": ReasoningFormat(calls=("<dots_function_call>",)),
    "gemma4": ReasoningFormat("<|channel>thought\n", "<channel|>"),
    "glm45": THINK_OR_CALL,
    "gpt-oss": HARMONY,
    "hunyuan": ReasoningFormat(calls=("<tool_calls>",)),
    "inkling": ReasoningFormat(
        "<|content_thinking|>",
        "<|content_text|>",
        closing="<|end_message|><|message_model|><|content_text|>",
        framed=Inkling(),
    ),
    "interns1": THINK_OR_CALL,
    "kimi": ReasoningFormat("◁think▷", "◁/think▷"),
    "kimi_k2": ReasoningFormat(calls=("<|tool_calls_section_begin|>",)),
    "kimi_k3": ReasoningFormat(
        "<|open|>think<|sep|>",
        "<|close|>think<|sep|>",
        calls=(KimiK3.TOOLS, KimiK3.RESPONSE),
        framing=KimiK3.FRAMING,
    ),
    "mimo": THINK_OR_CALL,
    "minimax": ReasoningFormat(forced=True, calls=("<minimax:tool_call>",)),
    "minimax-append-think": ReasoningFormat(shown=True),
    "minimax-m3": ReasoningFormat("<mm:think>", "</mm:think>"),
    "mistral": ReasoningFormat("[THINK]", "[/THINK]"),
    "muse": ReasoningFormat(
        "to=self<|message|>",
        "to=user<|message|>",
        closing="<|eom|><|start|>assistant to=user<|message|>",
        framed=Muse(),
    ),
    "nemotron_3": THINK_OR_CALL,
    "poolside_v1": THINK_OR_CALL,
    "qwen3": THINK_OR_CALL,
    "qwen3-thinking": ReasoningFormat(forced=True, calls=("<tool_call>",)),
    "step3": THINK_FORCED,
    "step3p5": THINK_FORCED,
}


def reasoning_format(name: str, field: str | None = None) -> ReasoningFormat:
    """The format by this name; `field` is where a client gave it."""
    if name not in REASONING_FORMATS:
        known = ", ".join(REASONING_FORMATS)
        raise RequestError(f"There is no reasoning parser {name!r}; the known ones are {known}.", field=field)
    return REASONING_FORMATS[name]
