"""Structural tags for llguidance: the long form (`tags.py`) written in the library's own grammar language.

Free text is a lexeme that ends, lazily, with what may follow it: a trigger, or the text that closes a tag. So text may
stand last, inside a tag that has an end, or between triggered tags; elsewhere it cannot be enforced.
"""

from __future__ import annotations

import json
from typing import Any

from bough.constrained.ebnf import Rules
from bough.constrained.lark import lark_regex, lark_text
from bough.constrained.pattern_tree import literal, pattern_text
from bough.core.errors import RequestError

ANY_TEXT = "/(.|\\n)*/"


def tag_to_lark(tag: dict[str, Any]) -> str:
    """A grammar of the whole answer."""
    writer = _Writer()
    start = writer.write(tag["format"], last=True)
    return "\n".join([f"start: {start}", *writer.rules]) + "\n"


class _Writer:
    """The rules of one tag, numbered as they are made."""

    def __init__(self) -> None:
        self.rules: list[str] = []
        self._count = 0

    def write(self, found: dict[str, Any], last: bool = False) -> str:
        """An expression for one format; `last` says that nothing follows it."""
        match found["type"]:
            case "const_string":
                return _quoted(found["value"])
            case "json_schema" | "grammar" if "rules" in found:
                return self._grammar(found["rules"])
            case "regex":
                return lark_regex(found["pattern"])
            case "sequence":
                ends = len(found["elements"]) - 1
                return " ".join(
                    self._rule(self.write(part, last and at == ends)) for at, part in enumerate(found["elements"])
                )
            case "or":
                return "(" + " | ".join(self._rule(self.write(part, last)) for part in found["elements"]) + ")"
            case "optional" | "star" | "plus" | "repeat":
                return self._repeat(found)
            case "tag":
                return f"{_quoted(found['begin'])} {self._content_and_end(found)}"
            case "triggered_tags":
                return self._triggered(found, last)
            case "tags_with_separator":
                return self._separated(found)
            case "any_text" if last and not found.get("excludes"):
                return self._rule(self._terminal(ANY_TEXT))
        raise RequestError(
            f"The grammar back end llguidance cannot enforce {found['type']} at this place of a structural tag; start "
            "the server with --grammar-backend xgrammar.",
            field="structural_tag",
        )

    def _repeat(self, found: dict[str, Any]) -> str:
        inner = self._rule(self.write(found["content"]))
        most = "" if found.get("max") == -1 else found.get("max")
        marks = {"optional": "?", "star": "*", "plus": "+", "repeat": f"{{{found.get('min')},{most}}}"}
        return f"{inner}{marks[found['type']]}"

    def _content_and_end(self, tag: dict[str, Any]) -> str:
        """What stands between a tag's beginning and its end, and the end."""
        ends = [tag["end"]] if isinstance(tag["end"], str) else tag["end"]
        closing = "|".join(pattern_text(literal(end)) for end in ends)
        if tag["content"]["type"] == "any_text":
            if not all(ends) or tag["content"].get("excludes"):
                raise RequestError(
                    "The grammar back end llguidance can enforce text inside a tag only up to the tag's end.",
                    field="structural_tag",
                )
            return self._rule(lark_regex(f"(.|\\n)*({closing})"), lazy=True)
        content = self._rule(self.write(tag["content"]))
        return f"{content} ({' | '.join(map(_quoted, ends))})" if any(ends) else content

    def _triggered(self, found: dict[str, Any], last: bool) -> str:
        if found.get("excludes") or not (last or found.get("stop_after_first")):
            raise RequestError(
                "The grammar back end llguidance can enforce triggered_tags only at the end of a structural tag, and "
                "without excludes.",
                field="structural_tag",
            )
        options = []
        for trigger in found["triggers"]:
            tags = [tag for tag in found["tags"] if tag["begin"].startswith(trigger)]
            head = self._rule(lark_regex(f"(.|\\n)*{pattern_text(literal(trigger))}"), lazy=True)
            bodies = [f"{_quoted(tag['begin'].removeprefix(trigger))} {self._content_and_end(tag)}" for tag in tags]
            if bodies:
                options.append(f"{head} {self._rule(' | '.join(bodies))}")
        tag = self._rule(" | ".join(options))
        if found.get("stop_after_first"):
            return tag if found.get("at_least_one") else f"({tag} | {self._terminal(ANY_TEXT)})"
        return f"{tag}{'+' if found.get('at_least_one') else '*'} {self._terminal(ANY_TEXT)}"

    def _separated(self, found: dict[str, Any]) -> str:
        tag = self._rule(" | ".join(self._rule(self.write(tag)) for tag in found["tags"]))
        several = tag if found.get("stop_after_first") else f"{tag} ({_quoted(found['separator'])} {tag})*"
        return several if found.get("at_least_one") else f"({several})?"

    def _grammar(self, rules: Rules) -> str:
        prefix = f"g{self._next()}_"
        for line in lark_text(rules, prefix).splitlines():
            self.rules.append(line)
        return f"{prefix}start"

    def _rule(self, body: str, lazy: bool = False) -> str:
        name = f"t{self._next()}"
        self.rules.append(f"{name}{'[lazy]' if lazy else ''}: {body}")
        return name

    def _terminal(self, body: str) -> str:
        name = f"TEXT{self._next()}"
        self.rules.append(f"{name}: {body}")
        return name

    def _next(self) -> int:
        self._count += 1
        return self._count


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if text else ""
