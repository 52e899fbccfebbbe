"""How roles become text, piece by piece, so that a state's text only ever grows and its prefix can be reused.

A chat template is run on the roles, with marks in place of the contents: what stands between two marks belongs between
two messages. Templates that rewrite older messages cannot do so here.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from os.path import commonprefix
from typing import Any, Protocol

from bough.core.errors import RequestError, SettingsError, nearest
from bough.core.files import table_beside
from bough.core.media import MediaKind
from bough.tokenizer.chat_template import ChatTemplate

MARK = "[[bough-message-{}]]"


class ChatFormat(Protocol):
    """What stands around messages. `roles` are those of the conversation up to and with the message in question."""

    @property
    def stop(self) -> tuple[str, ...]:
        """Where an assistant's message ends, if no token of the model says so."""

    def opening(self, roles: tuple[str, ...], *, generated: bool) -> str:
        """What to write when the last of the roles begins; `generated`: the model is to write it."""

    def closing(self, roles: tuple[str, ...]) -> str:
        """What to write when it ends."""


class NoChat:
    stop: tuple[str, ...] = ()

    def opening(self, roles: tuple[str, ...], *, generated: bool) -> str:
        raise RequestError(
            "This model has no chat template, so roles have no meaning for it; use plain text, or give one "
            "(--chat-template, or chat_template_name= of RuntimeEndpoint)."
        )

    def closing(self, roles: tuple[str, ...]) -> str:
        return self.opening(roles, generated=False)


class TemplateFormat:
    stop: tuple[str, ...] = ()

    def __init__(self, template: ChatTemplate, first_token: str = "") -> None:
        """`first_token` is one that the tokenizer writes before every text; the template's own is then left out."""
        self.template = template
        self._first_token = first_token
        self._prompt, self._opening, self.closing = map(
            cache, (self._find_prompt, self._find_opening, self._find_closing)
        )

    def opening(self, roles: tuple[str, ...], *, generated: bool) -> str:
        prompted = generated and roles[-1] == "assistant" and len(roles) > 1
        return self._prompt(roles) if prompted else self._opening(roles)

    def _find_opening(self, roles: tuple[str, ...]) -> str:
        before = len(roles) - 1
        try:
            text = self._render(roles)
        except RequestError:
            if roles != ("system",):
                raise
            text = self._render(("system", "user"))  # some templates put the system message into the user's
        if not before:
            return self._between(text, None, 0).removeprefix(self._first_token)
        return self._without_closing(roles, self._between(text, before - 1, before))

    def _find_prompt(self, roles: tuple[str, ...]) -> str:
        text = self._render(roles[:-1], add_generation_prompt=True)
        return self._without_closing(roles, self._between(text, len(roles) - 2, None))

    def _find_closing(self, roles: tuple[str, ...]) -> str:
        try:
            return self._between(self._render(roles), len(roles) - 1, None)
        except RequestError:
            if roles != ("system",):
                raise
            return ""  # what follows comes with the user's message

    def _without_closing(self, roles: tuple[str, ...], text: str) -> str:
        return text[len(commonprefix([text, self.closing(roles[:-1])])) :]  # noqa: RUF071  # not of paths

    def _render(self, roles: Sequence[str], *, add_generation_prompt: bool = False) -> str:
        messages: list[Mapping[str, Any]] = [{"role": role, "content": MARK.format(i)} for i, role in enumerate(roles)]
        return self.template.render(messages, add_generation_prompt=add_generation_prompt)

    def _between(self, text: str, after: int | None, before: int | None) -> str:
        """What stands between two marks; None is an end of the text."""
        if after is not None:
            _, found, text = text.partition(MARK.format(after))
            self._require(found)
        if before is not None:
            text, found, _ = text.partition(MARK.format(before))
            self._require(found)
        return text

    def _require(self, found: str) -> None:
        if not found:
            raise RequestError("The chat template drops a message, so the conversation cannot be written step by step.")


def place_of(chat_format: ChatFormat, kind: MediaKind) -> str:
    """What stands in the text for a picture or a film."""
    own = chat_format.template.place_of(kind) if isinstance(chat_format, TemplateFormat) else None
    return own or f"<{kind}>"


@dataclass(slots=True)
class Document:
    """Text and messages. Copies are cheap: what has been written is shared."""

    chat_format: ChatFormat
    text: str = ""
    messages: tuple[dict[str, Any], ...] = ()  # those that are complete
    roles: tuple[str, ...] = ()  # of all messages, with the open one
    role: str | None = None  # of the open message
    role_start: int = 0  # where its content begins
    media: tuple[tuple[int, int, dict[str, Any]], ...] = ()  # parts of messages, with their places in the text

    def begin(self, role: str, *, generated: bool) -> None:
        if self.role is not None:
            raise RequestError(f"A {role} message cannot begin inside a {self.role} message; end that one first.")
        self.roles += (role,)
        self.text += self.chat_format.opening(self.roles, generated=generated)
        self.role, self.role_start = role, len(self.text)

    def end(self, role: str) -> None:
        if self.role != role:
            inside = "no message is open" if self.role is None else f"the open message is the {self.role}'s"
            raise RequestError(f"A {role} message cannot end here: {inside}.")
        self.messages += ({"role": role, "content": self._content()},)
        self.role = None
        self.text += self.chat_format.closing(self.roles)

    def add_media(self, part: dict[str, Any], *, placed: bool) -> None:
        """A picture or a film. `placed`: the text says where; APIs are told by the message's parts."""
        start = len(self.text)
        if placed:
            self.text += place_of(self.chat_format, part["type"])
        self.media += ((start, len(self.text), part),)

    def media_of(self, kind: MediaKind) -> list[dict[str, Any]]:
        return [part for _, _, part in self.media if part["type"] == kind]

    @property
    def all_messages(self) -> tuple[dict[str, Any], ...]:
        """With the open one, as far as it has come."""
        if self.role is None:
            return self.messages
        return (*self.messages, {"role": self.role, "content": self._content()})

    def _content(self) -> Any:
        """The open message: its text, or parts in their order where there are pictures or films."""
        inside = [each for each in self.media if each[0] >= self.role_start]
        if not inside:
            return self.text[self.role_start :]
        parts: list[dict[str, Any]] = []
        begin = self.role_start
        for start, end, part in [*inside, (len(self.text), 0, None)]:
            parts += [{"type": "text", "text": self.text[begin:start]}] if start > begin else []
            parts += [part] if part is not None else []
            begin = end
        return parts


# Formats by name, for servers that do not tell their template, and for APIs, where they are only for reading --------

Around = tuple[str, str]


@dataclass(frozen=True, slots=True)
class NamedFormat:
    """What stands around the messages of each role; a first message that is not the system's may get a default one."""

    around: Mapping[str, Around]
    stop: tuple[str, ...] = ()
    default_system: str | None = None

    def opening(self, roles: tuple[str, ...], *, generated: bool) -> str:
        before, _ = self.around[roles[-1]]
        if len(roles) == 1 and roles[0] != "system" and self.default_system is not None:
            left, right = self.around["system"]
            return f"{left}{self.default_system}{right}{before}"
        return before

    def closing(self, roles: tuple[str, ...]) -> str:
        return self.around[roles[-1]][1]


def _named_format(*, stop: Sequence[str] = (), default_system: str | None = None, **around: Around) -> NamedFormat:
    return NamedFormat({role: (before, after) for role, (before, after) in around.items()}, tuple(stop), default_system)


_TABLE = table_beside(__file__, "chat_formats.toml")
FORMATS: dict[str, NamedFormat] = {name: _named_format(**stated) for name, stated in _TABLE["formats"].items()}
FORMATS["qwen"] = FORMATS["chatml"]
PATHS: dict[str, str] = _TABLE["paths"]


def format_by_name(name: str) -> NamedFormat:
    if name not in FORMATS:
        hint = f" Did you mean {near!r}?" if (near := nearest(name, FORMATS)) else ""
        raise SettingsError(f"Unknown chat template {name!r}.{hint} Known: {', '.join(FORMATS)}.")
    return FORMATS[name]


def format_by_path(path: str) -> NamedFormat:
    return FORMATS[next((name for way, name in PATHS.items() if re.search(way, path, re.IGNORECASE)), "default")]
