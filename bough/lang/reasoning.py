"""Splits what a reasoning model wrote into its thinking and its answer, by the marks of its family."""

from __future__ import annotations

from dataclasses import dataclass

from bough.core.errors import RequestError


@dataclass(frozen=True, slots=True)
class ReasoningMarks:
    """How a family thinks aloud. `begins_thinking`: the prompt opens the thinking, so only its end is written."""

    begin: str
    end: str
    begins_thinking: bool = False

    def split(self, text: str) -> tuple[str, str]:
        """(thinking, answer). Thinking that was cut off leaves no answer."""
        opened = text.lstrip().startswith(self.begin)
        if not opened and not (self.begins_thinking or self.end in text):
            return "", text
        thinking, _, answer = text.lstrip().removeprefix(self.begin).partition(self.end)
        return thinking.strip(), answer.lstrip()


THINK = ReasoningMarks("<think>", "</think>")
THINK_AT_ONCE = ReasoningMarks("<think>", "</think>", begins_thinking=True)
MARKS = {
    "deepseek-r1": THINK_AT_ONCE,
    "deepseek-v3": THINK,
    "glm45": THINK,
    "interns1": THINK,
    "kimi": ReasoningMarks("◁think▷", "◁/think▷"),
    "kimi_k2": THINK,
    "minimax": THINK_AT_ONCE,
    "qwen3": THINK,
    "qwen3-thinking": THINK_AT_ONCE,
    "step3": THINK_AT_ONCE,
}


def marks_of(model_type: str) -> ReasoningMarks:
    if model_type not in MARKS:
        raise RequestError(
            f"separate_reasoning() knows no model_type {model_type!r}; known are {', '.join(MARKS)}.",
            field="model_type",
        )
    return MARKS[model_type]
