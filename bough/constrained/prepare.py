"""Makes a spec ready for a back end, or refuses it: the one place that says what can be enforced, and by whom.

A spec comes out in the language of the back end that follows it: the one asked for, or llguidance where that one is too
weak or too slow. With it come the gaps of a spec that is not strict, and whether a thread may compile it.
"""

import json
from collections.abc import Iterator
from typing import Any

from bough.constrained import limits
from bough.constrained import pattern_tree as pt
from bough.constrained.automata import TooLarge, deterministic
from bough.constrained.backends import resolve_backend
from bough.constrained.ebnf import Rules, inline, parse_ebnf
from bough.constrained.ebnf_writer import Unwritable, ebnf_text
from bough.constrained.interface import GrammarKind, GrammarSpec, Prepared
from bough.constrained.lark import lark_regex, lark_text, tag_to_lark
from bough.constrained.pattern_tree import Choice, JsonNumber, Node, Text, Token, parts_of, pattern_text, positions
from bough.constrained.readings import forced_text, grammar_has_many_readings, many_readings
from bough.constrained.regexes import parse_regex
from bough.constrained.schema_grammar import schema_rules
from bough.constrained.schema_lowering import lower_schema
from bough.constrained.tags import lower_tag, xgrammar_tag
from bough.constrained.type_forms import Gap
from bough.core.errors import RequestError

MAX_TOLD = 8  # gaps named in one error
# Who asked is not known here, and some fields are always strict, so the advice names the places where it works.
ADVICE = (
    "Remove these keywords, or have only the rest enforced: with strict: false for a schema in response_format, "
    "text.format or tools, with grammar_strict: false in native sampling_params."
)


def prepare(spec: GrammarSpec, backend: str, field: str | None = None) -> Prepared:
    """The spec in the form that the back end enforces; `field` is what the client called it."""
    name = resolve_backend(backend)
    field = field or ("choices" if spec.kind == "choice" else spec.kind)
    limits.require_size(spec.text, field)
    match spec.kind:
        case "json_schema":
            return _prepare_schema(spec, name, field)
        case "regex":
            tree = parse_regex(spec.text, field=field)
            limits.require_positions(positions(tree), field)
            return _prepare_regex(tree, name, positions(tree), name == "xgrammar" and many_readings(tree))
        case "choice":
            choices = json.loads(spec.text)
            limits.require_choices(len(choices), field)
            tree, size, longest = pt.choice(map(pt.literal, choices)), len(spec.text) // 64, max(map(len, choices))
            return _prepare_regex(tree, name, size, ambiguous=False, forced=longest)
        case "ebnf":
            return _prepare_ebnf(parse_ebnf(spec.text, field), name)
        case "structural_tag":
            return _prepare_tag(spec, name, field)


def _prepare_schema(spec: GrammarSpec, backend: str, field: str) -> Prepared:
    plain, gaps = lower_schema(json.loads(spec.text), field)
    warnings = _judge(gaps, spec, field)
    rules = schema_rules(plain, spec.any_whitespace, field)
    forced = forced_text(rules)
    if backend == "xgrammar" and not is_large(rules):
        return _for_xgrammar("ebnf", ebnf_text(rules), size_of(rules), warnings, forced)
    return _for_llguidance(lark_text(rules), warnings, forced)


def _prepare_regex(tree: Node, backend: str, size: int, ambiguous: bool, forced: int = 0) -> Prepared:
    text = pattern_text(tree)
    if backend == "llguidance" or ambiguous:
        return _for_llguidance(f"start: {lark_regex(text)}\n", forced=forced)
    if backend == "outlines-core":
        return Prepared(GrammarSpec("regex", text), backend)
    return _for_xgrammar("regex", text, size, forced=forced)


def _prepare_ebnf(rules: Rules, backend: str) -> Prepared:
    """A grammar without recursion is a regular expression, which every back end knows."""
    regular = inline(rules)
    if backend == "xgrammar":
        ambiguous = grammar_has_many_readings(rules) if regular is None else many_readings(regular)
        if not ambiguous:
            size, forced = sum(map(positions, rules.values())), forced_text(rules)
            return _for_xgrammar("ebnf", ebnf_text(rules), size, forced=forced)
    if regular is None:
        return _for_llguidance(lark_text(rules), forced=forced_text(rules))
    return _prepare_regex(regular, backend, 0, ambiguous=backend == "xgrammar")


def _prepare_tag(spec: GrammarSpec, backend: str, field: str) -> Prepared:
    tag, gaps = lower_tag(json.loads(spec.text), spec.any_whitespace, backend, field)
    warnings, forced = _judge(gaps, spec, field), _forced_in(tag["format"])
    if backend != "xgrammar":
        return _for_llguidance(tag_to_lark(tag), warnings, forced)

    def for_xgrammar() -> Prepared:
        return _for_xgrammar("structural_tag", json.dumps(xgrammar_tag(tag)), size_of_tag(tag), warnings, forced)

    ambiguous = any(map(_is_ambiguous, _formats(tag["format"])))
    if not ambiguous and not is_large(*(found["rules"] for found in _formats(tag["format"]) if _is_schema(found))):
        return for_xgrammar()
    try:
        return _for_llguidance(tag_to_lark(tag), warnings, forced)
    except RequestError as error:  # then xgrammar follows it, if its masks do not take without end
        if ambiguous:
            raise RequestError(
                f"The grammar can be read in many ways at once; only llguidance bounds the time for that, and it "
                f"cannot follow this one ({error}). Write it so that one character decides how a text is read.",
                field=error.field,
            ) from None
        try:
            return for_xgrammar()
        except Unwritable:
            raise error from None


def _for_xgrammar(kind: GrammarKind, text: str, size: int, warnings: tuple[str, ...] = (), forced: int = 0) -> Prepared:
    spec, light = GrammarSpec(kind, text), size <= limits.LIGHT_POSITIONS
    return Prepared(spec, "xgrammar", warnings, light, forced <= limits.MAX_FORCED)


def _for_llguidance(text: str, warnings: tuple[str, ...] = (), forced: int = 0) -> Prepared:
    """It compiles lazily and within limits of its own, so all its grammars are light."""
    return Prepared(GrammarSpec("ebnf", text), "llguidance", warnings, light=True, jumps=forced <= limits.MAX_FORCED)


def _judge(gaps: tuple[Gap, ...], spec: GrammarSpec, field: str) -> tuple[str, ...]:
    """The warnings of a spec. A strict one is refused if it has a gap; unknown keywords are warnings all the same."""
    missing = tuple(f"{field}#{gap.path} {gap.reason}" for gap in gaps if not gap.says_nothing)
    if not missing or not spec.strict:
        return missing + tuple(f"{field}#{gap.path} {gap.reason}" for gap in gaps if gap.says_nothing)
    more = f", and {len(missing) - MAX_TOLD} more" if len(missing) > MAX_TOLD else ""
    text = f"Not all of {field} can be guaranteed: {'; '.join(missing[:MAX_TOLD])}{more}. {ADVICE}"
    raise RequestError(text, field=field)


# ---- what xgrammar is asked to follow, and how large that is
#
# xgrammar's masks are the quickest where a text can be read in one way, or a few; where the readings grow with the text
# (`readings`), one mask can take it minutes. llguidance bounds the work of each mask, so such specs go there. So do
# schemas whose strings have many states or that name many values, because xgrammar computes masks for each beforehand,
# and multiples, which only llguidance can count.


MAX_STRING_STATES = 150  # of all strings: each takes xgrammar up to a tenth of a second to compile
MAX_VALUES = 1_500  # of all enums: twice as many take it four times as long
UNCOUNTED = 10_000  # states of a string whose automaton is too large to be made
REPEATING = ("star", "plus", "repeat")
DELIMITED = ("tag", "const_string")  # formats that say themselves where they begin


def is_large(*schemas: Rules) -> bool:
    """Whether the strings of schemas have more states, or their enums more values, than xgrammar should compile."""
    nodes = [node for rules in schemas for root in rules.values() for node in parts_of(root)]
    values = sum(len(node.part.options) for node in nodes if isinstance(node, Token) and isinstance(node.part, Choice))
    return values > MAX_VALUES or _states(nodes) > MAX_STRING_STATES


def size_of(rules: Rules) -> int:
    """How much there is to compile in a schema, in positions of a regular expression."""
    text = ebnf_text(rules)
    states = _states([node for root in rules.values() for node in parts_of(root)])
    return states + text.count("\n") // limits.LIGHT_RULES + len(text) // limits.LIGHT_CHARS


def _states(nodes: list[Node]) -> int:
    """The states of all strings and names, as automata."""
    found = 0
    for node in {node for node in nodes if isinstance(node, Text | JsonNumber)}:
        try:
            found += len(deterministic(node.pattern).edges) if isinstance(node, Text) else UNCOUNTED
        except TooLarge:
            found += UNCOUNTED
    return found


def _is_ambiguous(found: dict[str, Any]) -> bool:
    """Whether readings may grow with the text. The ends of tags leave no doubt, only what people write in them."""
    match found["type"]:
        case "regex":
            return many_readings(parse_regex(found["pattern"]))
        case "grammar":
            regular = inline(found["rules"])
            return grammar_has_many_readings(found["rules"]) if regular is None else many_readings(regular)
    return found["type"] in REPEATING and found["content"]["type"] not in DELIMITED


def size_of_tag(tag: dict[str, Any]) -> int:
    size = 0
    for found in _formats(tag["format"]):
        if _is_schema(found):
            size += size_of(found["rules"])
        elif found["type"] == "regex":
            size += positions(parse_regex(found["pattern"]))
        elif found["type"] == "grammar":
            size += sum(map(positions, found["rules"].values()))
    return size


def _forced_in(found: dict[str, Any]) -> int:
    """`forced_text` of a format. A schema that xgrammar reads by itself forces about as much as its rules would."""
    match found["type"]:
        case "json_schema" | "grammar":
            return forced_text(found["rules"] if "rules" in found else schema_rules(found["json_schema"], False))
        case "regex":
            return positions(parse_regex(found["pattern"]))
    times: int = max(1, found.get("min", 1))
    own = sum(len(str(found.get(name, ""))) for name in ("value", "begin", "end", "separator"))
    inner = [0, *map(_forced_in, _inner(found))]
    return times * (own + (sum(inner) if found["type"] == "sequence" else max(inner)))


def _is_schema(found: dict[str, Any]) -> bool:
    """Whether a format is a schema that was lowered to rules; in a style of its own, xgrammar reads it by itself."""
    return found["type"] == "json_schema" and "rules" in found


def _formats(found: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield found
    for part in _inner(found):
        yield from _formats(part)


def _inner(found: dict[str, Any]) -> tuple[dict[str, Any], ...]:
    return (*found.get("elements", ()), *found.get("tags", ()), *([found["content"]] if "content" in found else ()))
