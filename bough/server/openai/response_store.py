"""Remembers responses, so that they can be fetched, cancelled and continued.

In memory and bounded: the oldest finished ones go first, those that still run never. A conversation is kept whole with
each of its responses; its messages are shared, so that a long one costs its length once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from bough.core.errors import RequestError
from bough.server.errors import HttpError
from bough.server.messages import Message, text_size
from bough.server.openai.response_input import said_in
from bough.server.openai.response_objects import ResponseObject

MAX_RESPONSES = 1000
MAX_CHARACTERS = 64 << 20


@dataclass(slots=True)
class Record:
    """One response and the conversation that led to it, its own answer included once there is one."""

    response: ResponseObject
    messages: Sequence[Message]
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    size: int = field(init=False)  # characters
    counted: int = 0  # of them, those that the store has counted

    def __post_init__(self) -> None:
        self.size = text_size(self.messages) + len(self.response.instructions or "")

    def end(self, response: ResponseObject) -> None:
        """Keeps the final form; what was said joins the conversation."""
        said = said_in(response.output)
        self.messages = [*self.messages, *said]
        self.size += text_size(said)
        self.response = response
        self.ended.set()


class ResponseStore:
    """Owns the records, by id, oldest first."""

    def __init__(self, max_responses: int = MAX_RESPONSES, max_characters: int = MAX_CHARACTERS) -> None:
        self._records: dict[str, Record] = {}
        self._size = 0  # characters of all records
        self._max_responses = max_responses
        self._max_characters = max_characters

    def add(self, record: Record) -> None:
        """Remembers a response. Its id may be that of an ended one, which it replaces."""
        id = record.response.id
        earlier = self._records.pop(id, None)
        if earlier is not None and not earlier.ended.is_set():
            self._records[id] = earlier
            raise RequestError(f"rid {id!r} is in use by another response; choose another.", field="rid")
        self._size -= 0 if earlier is None else earlier.counted
        self._records[id] = record
        self.update(record)

    def update(self, record: Record) -> None:
        """Counts what a response has become; one that is not stored, or was replaced, does not matter."""
        if self._records.get(record.response.id) is record:
            self._size += record.size - record.counted
            record.counted = record.size
            self._trim()

    def find(self, id: str) -> Record:
        record = self._records.get(id)
        if record is None:
            raise HttpError(404, f"There is no response {id!r}; it may have been forgotten.", "NotFoundError")
        return record

    def forget(self, id: str) -> None:
        record = self._records.pop(id, None)
        self._size -= 0 if record is None else record.counted

    def __len__(self) -> int:
        return len(self._records)

    def _trim(self) -> None:
        """Forgets the oldest finished responses until the rest fits. The newest stays, however large it is."""
        if self._fits():
            return
        for id, record in list(self._records.items())[:-1]:
            if record.ended.is_set():
                self.forget(id)
            if self._fits():
                return

    def _fits(self) -> bool:
        return len(self._records) <= self._max_responses and self._size <= self._max_characters
