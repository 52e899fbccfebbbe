"""Which back end follows a prepared spec: the one that was chosen, unless its masks might take without end.

xgrammar's masks are the quickest where a text can be read in one way, or a few; where the readings grow with the text
(`readings`), one mask can take it minutes. llguidance bounds the work of each mask, so such specs go there. Asked of
specs that are prepared for xgrammar; owns nothing.
"""

from __future__ import annotations

import json
from typing import Any

from bough.constrained.ebnf import inline, parse_ebnf
from bough.constrained.interface import GrammarSpec
from bough.constrained.readings import grammar_has_many_readings, many_readings
from bough.constrained.regexes import parse_regex

UNBOUNDED = "xgrammar"
BOUNDED = "llguidance"
REPEATING = ("star", "plus", "repeat")
DELIMITED = ("tag", "const_string")  # formats that say themselves where they begin


def needs_bounded_masks(spec: GrammarSpec) -> bool:
    """Whether the readings of a text may grow with it."""
    match spec.kind:
        case "regex":
            return many_readings(parse_regex(spec.text))
        case "ebnf":
            return _in_grammar(spec.text)
        case "json_schema" | "json_object" | "structural_tag":
            return _inside(json.loads(spec.text))
        case "choice":
            return False


def _in_grammar(text: str) -> bool:
    rules = parse_ebnf(text)
    regular = inline(rules)
    return grammar_has_many_readings(rules) if regular is None else many_readings(regular)


def _inside(value: Any) -> bool:
    """In a plain schema or a tag: JSON itself and the ends of tags leave no doubt, only what people write in them."""
    if isinstance(value, list):
        return any(map(_inside, value))
    if not isinstance(value, dict):
        return False
    patterns = [value.get("pattern"), *value.get("patternProperties", ())]
    if any(isinstance(pattern, str) and many_readings(parse_regex(pattern)) for pattern in patterns):
        return True
    if isinstance(value.get("grammar"), str) and _in_grammar(value["grammar"]):
        return True
    if value.get("type") in REPEATING and value["content"]["type"] not in DELIMITED:
        return True
    return any(map(_inside, value.values()))
