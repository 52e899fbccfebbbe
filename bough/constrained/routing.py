"""What xgrammar is asked to follow, and how large that is.

xgrammar's masks are the quickest where a text can be read in one way, or a few; where the readings grow with the text
(`readings`), one mask can take it minutes. llguidance bounds the work of each mask, so such specs go there. So do
schemas whose strings have many states, or that name many values: xgrammar would compute masks for each of them
beforehand, llguidance computes them as it goes. And so do multiples, which only llguidance can count.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from bough.constrained.automata import TooLarge, deterministic
from bough.constrained.ebnf import Rules, inline
from bough.constrained.ebnf_writer import ebnf_text
from bough.constrained.limits import LIGHT_CHARS, LIGHT_RULES
from bough.constrained.pattern_tree import Choice, JsonNumber, Node, Text, Token, parts_of, positions
from bough.constrained.readings import grammar_has_many_readings, many_readings
from bough.constrained.regexes import parse_regex

MAX_STRING_STATES = 150  # of all strings: each takes xgrammar up to a tenth of a second to compile
MAX_VALUES = 1_500  # of all enums: twice as many take it four times as long
UNCOUNTED = 10_000  # states of a string whose automaton is too large to be made
REPEATING = ("star", "plus", "repeat")
DELIMITED = ("tag", "const_string")  # formats that say themselves where they begin


# ---- schemas


def is_large(*schemas: Rules) -> bool:
    """Whether the strings of schemas have more states, or their enums more values, than xgrammar should compile."""
    nodes = [node for rules in schemas for root in rules.values() for node in parts_of(root)]
    values = sum(len(node.part.options) for node in nodes if isinstance(node, Token) and isinstance(node.part, Choice))
    return values > MAX_VALUES or _states(nodes) > MAX_STRING_STATES


def size_of(rules: Rules) -> int:
    """How much there is to compile in a schema, in positions of a regular expression."""
    text = ebnf_text(rules)
    states = _states([node for root in rules.values() for node in parts_of(root)])
    return states + text.count("\n") // LIGHT_RULES + len(text) // LIGHT_CHARS


def _states(nodes: list[Node]) -> int:
    """The states of all strings and names, as automata."""
    found = 0
    for node in {node for node in nodes if isinstance(node, Text | JsonNumber)}:
        try:
            found += len(deterministic(node.pattern).edges) if isinstance(node, Text) else UNCOUNTED
        except TooLarge:
            found += UNCOUNTED
    return found


# ---- tags


def is_large_tag(tag: dict[str, Any]) -> bool:
    return is_large(*(found["rules"] for found in _formats(tag["format"]) if _is_schema(found)))


def is_ambiguous_tag(tag: dict[str, Any]) -> bool:
    """Whether readings may grow with the text. The ends of tags leave no doubt, only what people write in them."""
    return any(map(_is_ambiguous, _formats(tag["format"])))


def _is_ambiguous(found: dict[str, Any]) -> bool:
    match found["type"]:
        case "regex":
            return many_readings(parse_regex(found["pattern"]))
        case "grammar":
            regular = inline(found["rules"])
            return grammar_has_many_readings(found["rules"]) if regular is None else many_readings(regular)
    return found["type"] in REPEATING and found["content"]["type"] not in DELIMITED


def size_of_tag(tag: dict[str, Any]) -> int:
    """How much there is to compile in the schemas, grammars and patterns of a tag."""
    size = 0
    for found in _formats(tag["format"]):
        if _is_schema(found):
            size += size_of(found["rules"])
        elif found["type"] == "regex":
            size += positions(parse_regex(found["pattern"]))
        elif found["type"] == "grammar":
            size += sum(map(positions, found["rules"].values()))
    return size


def _is_schema(found: dict[str, Any]) -> bool:
    """Whether a format is a schema that was lowered to rules; in a style of its own, xgrammar reads it by itself."""
    return found["type"] == "json_schema" and "rules" in found


def _formats(found: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A format and all those in it."""
    yield found
    inner = [found["content"]] if "content" in found else []
    for part in (*found.get("elements", ()), *found.get("tags", ()), *inner):
        yield from _formats(part)
