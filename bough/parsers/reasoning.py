"""How models set their thinking apart from their answer; `registry` has them by name."""

from collections.abc import Iterable
from dataclasses import dataclass

from bough.parsers.events import Reasoning, Text
from bough.parsers.formats.base import ToolFormat
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
        thinking = (yield from source.skip_after_space(self.start)) or thinking
        if not thinking and (yield from source.skip_after_space(self.end)):  # it has ended before it began
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
