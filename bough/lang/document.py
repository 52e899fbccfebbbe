"""What a state has written: its text, the same as messages, and the media in it. It only ever grows.

Owned by one executor. It knows roles and the chat format, and nothing of models or threads.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from bough.core.errors import RequestError
from bough.lang.chat import ChatFormat

IMAGE_PLACE = "<image>"  # where a picture stands in the text


@dataclass(slots=True)
class Document:
    """Text and messages. Copies are cheap: what has been written is shared."""

    chat_format: ChatFormat
    text: str = ""
    messages: tuple[dict[str, Any], ...] = ()  # those that are complete
    roles: tuple[str, ...] = ()  # of all messages, with the open one
    role: str | None = None  # of the open message
    role_start: int = 0  # where its content begins
    images: tuple[tuple[int, str | bytes], ...] = ()  # with the place in the text
    videos: tuple[tuple[str, int], ...] = ()

    def copy(self) -> Document:
        return dataclasses.replace(self)

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

    def add_image(self, source: str | bytes, *, placed: bool) -> None:
        """`placed`: the text says where; APIs are told by the message's parts."""
        self.images += ((len(self.text), source),)
        if placed:
            self.text += IMAGE_PLACE

    @property
    def all_messages(self) -> tuple[dict[str, Any], ...]:
        """With the open one, as far as it has come."""
        if self.role is None:
            return self.messages
        return (*self.messages, {"role": self.role, "content": self._content()})

    def _content(self) -> Any:
        """The open message: its text, or parts in their order where there are pictures."""
        inside = [(place, source) for place, source in self.images if place >= self.role_start]
        if not inside:
            return self.text[self.role_start :]
        parts: list[dict[str, Any]] = []
        start = self.role_start
        for place, source in [*inside, (len(self.text), None)]:
            text = self.text[start:place].removeprefix(IMAGE_PLACE)
            parts += [{"type": "text", "text": text}] if text else []
            parts += [{"type": "image", "image": source}] if source is not None else []
            start = place
        return parts
