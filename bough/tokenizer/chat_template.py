"""Chat templates: a model's own Jinja program that turns a conversation into its prompt.

Templates come with model files, so they run in Jinja's immutable sandbox, with what `transformers` offers to them. A
template that refuses a conversation answers that request with a 400.

Some templates read a message's content as text, some as a list of parts, some as either. Which it is, and what they
write in the place of an image, is found by trying: the ways to write such a loop in Jinja are many.
"""

from __future__ import annotations

import itertools
import json
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import cache, cached_property, partial, wraps
from os.path import commonprefix
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NoReturn, get_args

from bough.core.errors import RequestError, SettingsError
from bough.core.media import MediaKind
from bough.core.setting_checks import json_object

if TYPE_CHECKING:
    from jinja2 import Environment, Template

# Marks the end of the message to continue. Its trailing space shows whether the template trimmed the message.
CONTINUE_MARK = "<<<bough-continues-here>>> "
KINDS: tuple[MediaKind, ...] = get_args(MediaKind)
PROBE = "bough-tries-this"
LIMIT_S, LIMIT_EACH_S = 1.0, 0.001  # of computing, for a prompt and for each of its messages and tools
MOST_TEXT = 1 << 27  # characters of a text, or entries of a list, that a template may make
MOST_MADE = 1 << 28  # the same of all calls, or of one: its two largest arguments multiplied
WIDEST = 1 << 20  # a number that says how much a call makes
# Calls and filters that are told so by a number, that may make as much as two arguments multiplied, and that format.
WIDTHS = {"center", "ljust", "rjust", "zfill", "expandtabs", "to_bytes", "_to_json"}
WIDTHS |= {"do_center", "do_indent", "do_batch", "do_slice", "do_round", "do_wordwrap"}
MULTIPLY = {"expandtabs", "replace", "join", "translate", "_to_json"}
MULTIPLY |= {"do_indent", "do_replace", "do_join", "do_wordwrap"}
FORMAT = {"format": "{", "format_map": "{", "do_format": "%"}
# In a format, a width or precision of four digits, or one that an argument gives; or a name that could hide one.
WIDE = {"%": re.compile(r"%(\([^()]*\))?[-+ #0.\d]*(\*|\d{4})|%\([^()]*(\(|\Z)")}
WIDE |= {"{": re.compile(r"\{[^{}]*(\{|\d{4})")}
# What Python raises of a template, while it is compiled and while it runs.
FAULTS = (TypeError, ValueError, AttributeError, LookupError, ArithmeticError, RuntimeError, MemoryError, SyntaxError)
SIZED = (str, bytes, list, tuple, range)
VIEWS = tuple(map(type, ({}.keys(), {}.values(), {}.items())))
CONTAINERS: tuple[type[Any], ...] = (list, tuple, dict, MappingProxyType, *VIEWS)
# How much an argument may weigh for slow ones, and for those that make many values of one.
SLOW = "do_title do_wordwrap do_urlize do_urlencode do_striptags do_wordcount do_pprint encode decode"
MANY = "split rsplit splitlines do_list do_batch do_slice do_sort do_unique do_groupby lower upper do_lower do_upper"
HEAVIEST = {**dict.fromkeys(SLOW.split(), 1 << 18), **dict.fromkeys(MANY.split(), 1 << 24)}


class ChatTemplate:
    """A model's templates by name (nearly always one, "default") and the special tokens they may name. `placeholders`
    are what the model's prompts have in the place of media, for templates that know nothing of them."""

    def __init__(
        self,
        sources: str | Mapping[str, str],
        variables: Mapping[str, str] | None = None,
        placeholders: Mapping[str, str] | None = None,
    ) -> None:
        self.sources = {"default": sources} if isinstance(sources, str) else dict(sources)
        self.variables = dict(variables or {})
        self.placeholders = dict(placeholders or {})

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        continue_final_message: bool = False,
        **extra: Any,
    ) -> str:
        """The prompt. `extra` are the client's own template variables; they cannot replace the conversation. A
        content is text, or a list of parts: text, and media by their kind alone, such as `{"type": "image"}`."""
        messages = [self._fitted(message) for message in messages]
        if continue_final_message:
            if add_generation_prompt:
                raise RequestError(
                    "continue_final_message continues the last message, add_generation_prompt starts a new one; "
                    "set only one of them.",
                    field="continue_final_message",
                )
            messages = _with_continue_mark(messages)
        given = {"messages": messages, "tools": tools, "add_generation_prompt": add_generation_prompt}
        text = _run(self._choose(bool(tools)), {"documents": None, **self.variables, **extra, **given})
        return _cut_at_mark(text) if continue_final_message else text

    def place_of(self, kind: MediaKind) -> str | None:
        """What stands in a prompt for an image, a video or a recording."""
        return self._written_places.get(kind) or self.placeholders.get(kind)

    @cached_property
    def _written_places(self) -> dict[str, str]:
        """Those that the template writes itself: what a message with the item has more than one without it."""
        without = self._try([text_part(PROBE)])
        found: dict[str, str] = {}
        for kind in KINDS if without is not None else ():
            given = self._try([{"type": kind}, text_part(PROBE)])
            if without is None or given is None or len(given) <= len(without):
                continue
            start = len(commonprefix([without, given]))  # noqa: RUF071  # not of paths
            end = len(commonprefix([without[start:][::-1], given[start:][::-1]]))  # noqa: RUF071
            found[kind] = given[start : len(given) - end]
        return found

    @cached_property
    def _needs_parts(self) -> bool:
        """Whether text alone is lost on the template."""
        return self._try(PROBE) is None and self._try([text_part(PROBE)]) is not None

    def _try(self, content: Any) -> str | None:
        """The prompt of one message; None where the template refuses its content, drops it or prints the list."""
        try:
            text = _run(self._choose(False), {**self.variables, "messages": [{"role": "user", "content": content}]})
        except RequestError:
            return None
        before, found, _ = text.partition(PROBE)
        return text if found and not before.endswith(("'text': '", '"text": "')) else None

    def _fitted(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        """The message with its content in the form that the template reads. Media that it has no place for stand in
        front of the text, as the placeholders that processors look for."""
        content = message.get("content")
        if isinstance(content, str):
            return {**message, "content": [text_part(content)]} if self._needs_parts else message
        parts = [part for part in content if isinstance(part, Mapping)] if isinstance(content, list) else []
        kinds = [part["type"] for part in parts if part.get("type") in KINDS]
        if not kinds:
            return message
        if self._written_places.keys() >= set(kinds):
            shown = [{"type": part["type"]} if part["type"] in KINDS else part for part in parts]
            return {**message, "content": shown}
        for kind in kinds:
            if self.place_of(kind) is None:
                raise RequestError(
                    f"This model's chat template has no place for {kind}; give one that has with --chat-template.",
                    field="messages",
                )
        texts = [part["text"] for part in parts if part["type"] not in KINDS]
        return self._fitted({**message, "content": "\n".join([*map(str, map(self.place_of, kinds)), *texts])})

    def _choose(self, with_tools: bool) -> str:
        if with_tools and "tool_use" in self.sources:
            return self.sources["tool_use"]
        if "default" in self.sources:
            return self.sources["default"]
        raise RequestError(
            f"This model has no default chat template, only {', '.join(sorted(self.sources))}; "
            "start the server with --chat-template.",
            field="messages",
        )


class MistralTemplate(ChatTemplate):
    """Prompts as Mistral's own library writes them, where a `tekken.json` has no chat template beside it. The library
    is the extra `mistral`. There is no source that somebody else could render."""

    def __init__(self, tekken: Path) -> None:
        super().__init__({})
        self._tekken = tekken

    @cached_property
    def _library(self) -> Any:
        from mistral_common.tokens.tokenizers.mistral import MistralTokenizer

        return MistralTokenizer.from_file(self._tekken)  # seconds, and not every process renders prompts

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        continue_final_message: bool = False,
        **extra: Any,
    ) -> str:
        """An answer is to follow in any case: the format has no mark for that."""
        from mistral_common.exceptions import MistralCommonException
        from mistral_common.protocol.instruct.request import ChatCompletionRequest
        from mistral_common.tokens.tokenizers.base import SpecialTokenPolicy

        fitted = [self._fitted(message) for message in messages]  # which refuses media
        try:
            request = ChatCompletionRequest.from_openai(
                fitted, None if tools is None else list(tools), continue_final_message=continue_final_message, **extra
            )
            ids = self._library.encode_chat_completion(request).tokens
        except (MistralCommonException, TypeError, ValueError, AttributeError, LookupError) as error:
            reason = f"{type(error).__name__}: {error}"
            raise RequestError(f"mistral-common refused the messages: {reason}", field="messages") from None
        text: str = self._library.decode(ids, special_token_policy=SpecialTokenPolicy.KEEP)
        return text


@cache
def template_defaults(given: str) -> Mapping[str, Any]:
    """The variables of `--default-chat-template-kwargs`."""
    return json_object(given, "default-chat-template-kwargs")


def given_template(given: str) -> str:
    """The template that a user named (`--chat-template`): a file, or text with Jinja in it. It is compiled here, so
    that what cannot be parsed is reported before anything is started with it."""
    from jinja2 import TemplateSyntaxError

    source = given
    if "{{" not in given and "{%" not in given:
        try:
            source = Path(given).read_text(encoding="utf-8")
        except (OSError, ValueError) as error:  # the second: no text, or no name that a file could have
            reason = getattr(error, "strerror", None) or error
            raise SettingsError(
                f"--chat-template {given!r} is neither a Jinja template nor a file that can be read ({reason})."
            ) from None
    try:
        compile_template(source)
    except TemplateSyntaxError as error:
        raise SettingsError(f"--chat-template, line {error.lineno}: {error.message}") from None
    except FAULTS as error:
        raise SettingsError(f"--chat-template cannot be compiled: {error}.") from None
    return source


def text_part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def _run(source: str, variables: Mapping[str, Any]) -> str:
    from jinja2 import TemplateError

    given = len(variables["messages"]) + len(variables.get("tools") or ())
    _clock.due_s, _clock.made = time.thread_time() + LIMIT_S + LIMIT_EACH_S * given, 0
    _clock.weights, _clock.kept, _clock.held = {}, [], 0
    try:
        return compile_template(source).render(variables)
    except TemplateError as error:
        raise RequestError(f"The chat template refused the messages: {error.message}", field="messages") from None
    except RequestError:
        raise
    except FAULTS as error:
        # Most often it met a shape of message that it does not expect.
        raise RequestError(
            f"The chat template cannot render these messages: {type(error).__name__}: {error}", field="messages"
        ) from None
    finally:
        _clock.__dict__.clear()


@cache
def compile_template(source: str) -> Template:
    """The compiled template; compiling costs milliseconds, a template is rendered for every chat request."""
    return _environment().from_string(source)


@cache
def _environment() -> Environment:
    from jinja2 import ext, nodes, parser, pass_context, visitor
    from jinja2.sandbox import ImmutableSandboxedEnvironment
    from jinja2.utils import Namespace

    class GenerationBlock(ext.Extension):
        """`{% generation %}` marks what an assistant wrote, for training; here its content is just rendered."""

        tags = {"generation"}  # noqa: RUF012  # jinja2 declares it so

        def parse(self, parser: parser.Parser) -> list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    class Counting(visitor.NodeTransformer):
        def visit_For(self, node: nodes.For) -> nodes.Node:
            node.iter = nodes.Filter(node.iter, "_ticking", [], [], None, None)
            return self.generic_visit(node)

        def visit_Assign(self, node: nodes.Assign) -> nodes.Node:
            node.node = nodes.Filter(self.visit(node.node), "_sized", [], [], None, None)
            return node

        def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
            self.generic_visit(node)
            return nodes.Filter(nodes.List(node.nodes), "join", [], [], None, None)

    class Limited(ImmutableSandboxedEnvironment):
        """Template authors need not mean well. To go on for ever takes loops or calls; to fill the memory, values that
        grow from one to the next by a name, an argument or a block, or an operator that multiplies."""

        intercepted_binops = frozenset(("+", "*", "**", "%"))
        concat = staticmethod(lambda parts: "".join(p) if _allow(sum(map(len, p := list(parts))) <= MOST_TEXT) else "")

        def _generate(self, source: nodes.Template, *given: Any, **options: Any) -> str:
            return super()._generate(Counting().visit(source), *given, **options)

        def call(self, context: Any, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
            owner = getattr(getattr(obj, "__wrapped__", obj), "__self__", None)  # Jinja wraps `format`
            make = partial(super().call, context, obj, *args, **kwargs)
            return _made(getattr(obj, "__name__", ""), make, owner, *args, *kwargs.values())

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            if operator == "+":
                _allow(_length(left) + _length(right) <= MOST_TEXT)
                made = left + right  # conversations are often gathered message by message, and not weighed anew
                return _keep(made, _weight(left) + _weight(right)) if isinstance(made, list) else made
            if operator == "%" and isinstance(left, str | bytes):
                _check_format("%", left, right)
            for value, times in ((left, right), (right, left)):
                if operator[0] == "*" and isinstance(times, int) and (operator == "**" or not isinstance(value, int)):
                    _sized(value, times << 10 if isinstance(value, int) else times)
            return _made("", partial(super().call_binop, context, operator, left, right))

    environment = Limited(trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlock, ext.loopcontrols])
    environment.finalize = pass_context(lambda _, shown: _counted(shown))
    del environment.globals["lipsum"]  # any amount of text, and of no use in a prompt
    environment.filters["tojson"] = _to_json
    summed = environment.filters["sum"]  # of lists, which copies what it has for each of them
    environment.filters["sum"] = wraps(summed)(lambda env, values, *a, **kw: summed(env, _ticking(values), *a, **kw))
    environment.filters = {name: _bounded(each) for name, each in environment.filters.items()}
    environment.filters |= {"_ticking": _ticking, "_sized": _sized}
    environment.globals["namespace"] = type("Namespace", (Namespace,), {"__repr__": object.__repr__})
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda format: datetime.now().strftime(_sized(format, 1 << 17))
    return environment


_clock, _steps = threading.local(), itertools.count()


def _tick() -> None:
    """Computing is counted, not time, so that a busy machine makes nothing fail."""
    if (not next(_steps) % 16 or _clock.made >> 24) and time.thread_time() > _clock.due_s:  # which is a system call
        raise RequestError("The chat template does not come to an end; give another with --chat-template.")
    if _clock.held > MOST_TEXT:
        _clock.weights, _clock.kept, _clock.held = {}, [], 0


def _ticking(values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        _tick()
        yield value


def _sized(value: Any, times: int = 1) -> Any:
    _allow(_weight(value) * abs(times) <= MOST_TEXT)
    return value


def _allow(fits: bool) -> bool:
    if not fits:
        raise RequestError("The chat template makes too much text; give another with --chat-template.")
    return True


def _length(value: Any) -> int:
    if isinstance(value, SIZED):
        return len(value)
    return 1 << 17 if isinstance(value, Iterator) else 0  # the length of an iterator is unknown


def _weight(value: Any) -> int:
    """Characters and values to write it: those of a list that stands in a list twice count twice. Large numbers count
    more: the time that they take grows faster than their length."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, int):
        return max(value.bit_length(), value.bit_length() ** 2 >> 10)
    if not isinstance(value, CONTAINERS):  # a method is written with what it belongs to
        return len(value) if isinstance(value, SIZED) else 1 + _length(getattr(value, "__self__", None))
    weights: dict[int, int] = _clock.weights
    if id(value) not in weights:
        inside = [*value, *value.values()] if hasattr(value, "values") else value
        _keep(value, 1 + sum(weights.get(id(e)) or (len(e) if type(e) is str else _weight(e)) for e in inside))
    return weights[id(value)]


def _keep(value: Any, weight: int) -> Any:
    """By its id, which stays its own as long as the value is kept; the next `_tick` lets go when these are many."""
    _clock.weights[id(value)] = weight
    _clock.kept.append(value)
    _clock.held += weight
    return value


def _check_format(sign: str, form: Any, *given: Any) -> None:
    _allow(_weight(form) <= WIDEST)
    plain = (form.decode("latin-1") if isinstance(form, bytes) else str(form)).replace(2 * sign, "")
    _allow(plain.count(sign) * (1000 + sum(map(_weight, given))) <= MOST_MADE)
    _allow(WIDE[sign].search(plain) is None)


def _made(name: str, make: Callable[[], Any], *given: Any) -> Any:
    """What a call makes of these; the first may be the text whose method it is."""
    _clock.made += 0 if name else sum(map(_length, given))  # a macro may call itself
    _allow(_clock.made <= MOST_MADE)
    width = max((abs(each) for each in given[1:] if isinstance(each, int)), default=0) if name in WIDTHS else 0
    _allow(width <= WIDEST and max(map(_weight, given), default=0) <= HEAVIEST.get(name, MOST_TEXT))
    if name in MULTIPLY:
        first, second = sorted([width, 1, *map(_weight if name in ("translate", "_to_json") else _length, given)])[-2:]
        _allow(first * second <= MOST_MADE)
    if name in FORMAT:
        _check_format(FORMAT[name], *given)
    return _counted(make())


def _counted(made: Any) -> Any:
    _tick()
    _clock.made += (size := len(made) if isinstance(made, str) else _length(_sized(made)))
    _allow(size <= MOST_TEXT and _clock.made <= MOST_MADE)
    return made


def _bounded(filter: Callable[..., Any]) -> Callable[..., Any]:
    named = wraps(filter)  # with what Jinja is to pass first
    return named(
        lambda *args, **kwargs: _made(filter.__name__, partial(filter, *args, **kwargs), *args, *kwargs.values())
    )


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | str | None = None, **options: Any) -> str:
    _allow(indent is None or (indent if isinstance(indent, int) else len(indent)) < 100)
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _raise_exception(message: str) -> NoReturn:
    from jinja2 import TemplateError

    raise TemplateError(message)


def _with_continue_mark(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    last = messages[-1] if messages else {}
    content = last.get("content")
    if isinstance(content, str):
        return [*messages[:-1], {**last, "content": content + CONTINUE_MARK}]
    if isinstance(content, list):
        for i in reversed(range(len(content))):
            part = content[i]
            if isinstance(part, Mapping) and isinstance(part.get("text"), str):
                marked = {**part, "text": part["text"] + CONTINUE_MARK}
                return [*messages[:-1], {**last, "content": [*content[:i], marked, *content[i + 1 :]]}]
    raise RequestError(
        "continue_final_message needs a last message with text to continue.", field="continue_final_message"
    )


def _cut_at_mark(text: str) -> str:
    where = text.rfind(CONTINUE_MARK.rstrip())
    if where < 0:
        raise RequestError(
            "The chat template drops the last message's text, so it cannot be continued; "
            "leave continue_final_message out.",
            field="continue_final_message",
        )
    trimmed = not text.startswith(CONTINUE_MARK, where)
    return text[:where].rstrip() if trimmed else text[:where]
