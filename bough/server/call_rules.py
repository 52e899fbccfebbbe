"""When a grammar governs the calls of an answer: those that must come, those of strict tools, and those that may come
instead of what the answer must match otherwise. Pure, but for the names under which the client knows what is said of
it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from bough.core.errors import RequestError
from bough.core.sampling_params import GRAMMAR_FIELDS
from bough.parsers import CallGrammar, can_watch, forced_calls, has_json_arguments, watched_calls
from bough.parsers.formats.base import ToolFormat
from bough.server.errors import add_field_names, client_name
from bough.server.tools import ToolUse
from bough.tokenizer.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class CallRules:
    """`calls` is the format of the model's own calls; `tags`: grammars may be structural tags."""

    tools: ToolUse
    calls: ToolFormat | None
    tags: bool
    tokenizer: Tokenizer | None = None

    def grammar(self, given: Mapping[str, Any]) -> CallGrammar | None:
        """What the tools ask of the answer, beside or instead of what its request asks."""
        try:
            return self._grammar(given)
        except RecursionError:
            raise RequestError("tools: a schema is nested too deep for a grammar.", field="tools") from None

    def _grammar(self, given: Mapping[str, Any]) -> CallGrammar | None:
        tools, asked = self.tools, asked_for(given)
        if tools.must:
            if asked is not None:
                raise RequestError(
                    f"{asked} and tool_choice each say what the answer must match; give one of them.",
                    field="tool_choice",
                )
            grammar = forced_calls(self.forcible, tools.schemas, single=tools.single)
            lenient = all(tool.strict is False for tool in tools.tools)
            return replace(grammar, fields={**grammar.fields, "grammar_strict": not lenient})
        if asked is not None:
            return self._beside(asked, given[asked])
        if not self.watched or self.calls is None:
            return None
        return watched_calls(self.calls, tools.schemas, tools.strict_names, single=tools.single)

    def _beside(self, asked: str, value: Any) -> CallGrammar | None:
        """Calls, or what the request asks for; None where that alone holds, because nobody cares for calls, or because
        they could turn out to be neither."""
        tools, calls = self.tools, self.calls
        if calls is None or not tools.tools or not (self.watched or asked == "json_schema"):
            return None
        if isinstance(value, str | list) and not value:  # which is the engine's to refuse
            return None
        held = tools.strict_names if has_json_arguments(calls) else frozenset(tools.schemas)
        if not self._can_watch(held):
            return None
        otherwise = _as_format(asked, value)
        add_field_names({f"structural_tag#/format/elements/1/{key}": client_name(asked) for key in otherwise})
        return watched_calls(calls, tools.schemas, held, single=tools.single, otherwise=otherwise)

    @property
    def watched(self) -> bool:
        """Whether calls are the model's own choice, but those of strict tools are held to their form, once begun."""
        strict = self.tools.strict_names
        return bool(strict) and not self.tools.must and self._can_watch(strict)

    def _can_watch(self, names: Collection[str]) -> bool:
        schemas = [self.tools.schemas[name] for name in names]
        return self.tags and can_watch(self.calls, schemas) and self._in_plain_tokens()

    def _in_plain_tokens(self) -> bool:
        """Whether the model writes the format without special tokens, which grammars do not see: under one it could not
        begin a call as it is used to."""
        if self.calls is None or self.calls.shape is None or self.tokenizer is None:
            return True
        texts = self.tokenizer.encode_batch(self.calls.shape.markers, add_special_tokens=False)
        return not any(self.tokenizer.special_ids.intersection(ids) for ids in texts)

    @property
    def assured(self) -> frozenset[str]:
        """The tools whose calls a grammar guards, so that they cannot turn out to be text."""
        if self.tools.must:
            return frozenset(self.tools.schemas)
        return self.tools.strict_names if self.watched else frozenset()

    @property
    def forcible(self) -> ToolFormat | None:
        """The format of calls that must come; None where they are a list."""
        return self.calls if self.tags else None


def asked_for(sampling: Mapping[str, Any]) -> str | None:
    """The field that says what the answer must match."""
    return next((name for name in GRAMMAR_FIELDS if sampling.get(name) is not None), None)


def _as_format(name: str, asked: Any) -> dict[str, Any]:
    """What a field asks for, as a format inside of a structural tag."""
    match name:
        case "json_schema":
            return {"type": "json_schema", "json_schema": asked}
        case "regex":
            return {"type": "regex", "pattern": asked}
        case "ebnf":
            return {"type": "grammar", "grammar": asked}
        case "choices":
            return {"type": "or", "elements": [{"type": "const_string", "value": text} for text in asked]}
    raise RequestError(
        f"{name} and tools that are strict each say what the answer must match; set strict to false.", field=name
    )
