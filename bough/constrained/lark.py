"""Rules, patterns and structural tags in the grammar language of llguidance.

Its lexer reads the longest text that any lexeme matches. Where a grammar says what its tokens are (`Token`, `Text`),
these are the lexemes; elsewhere each character is one, so that no lexeme swallows what another rule should read.
"""

import itertools
import json
from collections.abc import Mapping
from typing import Any

from bough.constrained import charsets
from bough.constrained import pattern_tree as pt
from bough.constrained.ebnf import ROOT, Rules
from bough.constrained.pattern_tree import Node
from bough.constrained.regexes import parse_regex
from bough.core.errors import RequestError

CHARACTER = pt.choice([pt.Chars(pt.RAW_IN_JSON), parse_regex('\\\\(?:["\\\\/bfnrt]|u[0-9A-CE-F][0-9A-F]{3})')])
QUOTE = pt.literal('"')


def lark_text(rules: Mapping[str, Node], prefix: str = "") -> str:
    """The rules; the one where a grammar begins is called `start`."""
    names = {name: prefix + ("start" if name == ROOT else f"r{index}") for index, name in enumerate(rules)}
    writer = _Writer(names, prefix)
    lines = [f"{names[name]}: {writer.write(node)}" for name, node in rules.items()]
    return "\n".join([*lines, *writer.more]) + "\n"


def lark_regex(pattern: str) -> str:
    return f"/{pattern.replace('/', chr(92) + '/')}/" if pattern else '""'


class _Writer:
    def __init__(self, names: Mapping[str, str], prefix: str) -> None:
        self.more: list[str] = []  # rules and terminals that the given ones lead to
        self._names = names
        self._prefix = prefix
        self._known: dict[Node, str] = {}

    def write(self, node: Node) -> str:
        match node:
            case pt.Chars(found):
                return lark_regex(charsets.class_text(found, single=False))
            case pt.Reference(name):
                return self._names[name]
            case pt.Row(parts):
                return " ".join(map(self.write, parts)) if parts else '""'
            case pt.Choice(options):
                return "(" + " | ".join(map(self.write, options)) + ")"
            case pt.Repeat(part, least, most):
                return f"({self.write(part)}){pt.quantifier(least, most)}"
            case pt.Token(part):
                return lark_regex(pt.pattern_text(part))
            case pt.Text(pt.Meet() as pattern):
                return self._joined(pattern)
            case pt.Text(pt.Repeat(pt.Chars(charsets.ALL), least, most), free=True):
                return lark_regex(pt.pattern_text(_quoted(pt.Repeat(CHARACTER, least, most))))
            case pt.Text(pattern):
                return lark_regex(pt.pattern_text(_quoted(pt.in_json(pattern))))
            case pt.JsonNumber(schema):
                return f"%json {schema}"
            case pt.Meet():
                raise TypeError("patterns are joined in a string only")

    def _joined(self, pattern: pt.Meet) -> str:
        """A terminal of the strings that all of some patterns match and none of others."""
        if pattern not in self._known:
            self._known[pattern] = f"{self._prefix.upper()}TEXT{len(self._known)}"
            spelt = pt.in_json(pattern)
            assert isinstance(spelt, pt.Meet)
            texts = [lark_regex(pt.pattern_text(_quoted(part))) for part in (*spelt.all_of, *spelt.none_of)]
            signs = ["" for _ in spelt.all_of] + ["~" for _ in spelt.none_of]
            joined = " & ".join(sign + text for sign, text in zip(signs, texts, strict=True))
            self.more.append(f"{self._known[pattern]}: {joined}")
        return self._known[pattern]


def _quoted(node: Node) -> Node:
    return pt.Row((QUOTE, node, QUOTE))


# ---- structural tags
#
# Free text is a lexeme that ends, lazily, with what may follow it: a trigger, or the text that closes a tag. So text
# may stand last, inside a tag that has an end, or between triggered tags; elsewhere it cannot be enforced.

ANY_TEXT = "/(.|\\n)*/"


def tag_to_lark(tag: dict[str, Any]) -> str:
    writer = _TagWriter()
    start = writer.write(tag["format"], last=True)
    return "\n".join([f"start: {start}", *writer.rules]) + "\n"


class _TagWriter:
    def __init__(self) -> None:
        self.rules: list[str] = []
        self._numbers = itertools.count(1)

    def write(self, found: dict[str, Any], last: bool = False) -> str:
        """An expression for one format; `last` says that nothing follows it."""
        match found["type"]:
            case "const_string":
                return _literal(found["value"])
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
                inner = self._rule(self.write(found["content"]))
                most = "" if found.get("max") == -1 else found.get("max")
                marks = {"optional": "?", "star": "*", "plus": "+", "repeat": f"{{{found.get('min')},{most}}}"}
                return f"{inner}{marks[found['type']]}"
            case "tag":
                return f"{_literal(found['begin'])} {self._content_and_end(found)}"
            case "triggered_tags":
                return self._triggered(found, last)
            case "tags_with_separator":
                tag = self._rule(" | ".join(self._rule(self.write(tag)) for tag in found["tags"]))
                several = tag if found.get("stop_after_first") else f"{tag} ({_literal(found['separator'])} {tag})*"
                return several if found.get("at_least_one") else f"({several})?"
            case "any_text" if last and not found.get("excludes"):
                return self._rule(self._terminal(ANY_TEXT))
        here = f"{found['type']} at this place of a structural tag"
        raise _refusal(f"cannot enforce {here}; start the server with --grammar-backend xgrammar.")

    def _content_and_end(self, tag: dict[str, Any]) -> str:
        """What stands between a tag's beginning and its end, and the end."""
        ends = [tag["end"]] if isinstance(tag["end"], str) else tag["end"]
        closing = "|".join(pt.pattern_text(pt.literal(end)) for end in ends)
        if tag["content"]["type"] == "any_text":
            if not all(ends) or tag["content"].get("excludes"):
                raise _refusal("can enforce text inside a tag only up to the tag's end.")
            return self._rule(lark_regex(f"(.|\\n)*({closing})"), lazy=True)
        content = self._rule(self.write(tag["content"]))
        return f"{content} ({' | '.join(map(_literal, ends))})" if any(ends) else content

    def _triggered(self, found: dict[str, Any], last: bool) -> str:
        if found.get("excludes") or not (last or found.get("stop_after_first")):
            where = "at the end of a structural tag, and without excludes"
            raise _refusal(f"can enforce triggered_tags only {where}.")
        options = []
        for trigger in found["triggers"]:
            tags = [tag for tag in found["tags"] if tag["begin"].startswith(trigger)]
            head = self._rule(lark_regex(f"(.|\\n)*{pt.pattern_text(pt.literal(trigger))}"), lazy=True)
            bodies = [f"{_literal(tag['begin'].removeprefix(trigger))} {self._content_and_end(tag)}" for tag in tags]
            if bodies:
                options.append(f"{head} {self._rule(' | '.join(bodies))}")
        tag = self._rule(" | ".join(options))
        if found.get("stop_after_first"):
            return tag if found.get("at_least_one") else f"({tag} | {self._terminal(ANY_TEXT)})"
        return f"{tag}{'+' if found.get('at_least_one') else '*'} {self._terminal(ANY_TEXT)}"

    def _grammar(self, rules: Rules) -> str:
        prefix = f"g{next(self._numbers)}_"
        self.rules += lark_text(rules, prefix).splitlines()
        return f"{prefix}start"

    def _rule(self, body: str, lazy: bool = False) -> str:
        name = f"t{next(self._numbers)}"
        self.rules.append(f"{name}{'[lazy]' if lazy else ''}: {body}")
        return name

    def _terminal(self, body: str) -> str:
        name = f"TEXT{next(self._numbers)}"
        self.rules.append(f"{name}: {body}")
        return name


def _refusal(what: str) -> RequestError:
    return RequestError(f"The grammar back end llguidance {what}", field="structural_tag")


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if text else ""
