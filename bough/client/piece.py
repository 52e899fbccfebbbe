"""What is new in one answer since its reader last looked: the unit in which streams are read.

A piece is a snapshot of the news and a way to the whole answer. Its cost is that of the new tokens, however long the
answer has become; protocols that show everything again each time ask the answer for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from bough.core.finish import FinishReason

if TYPE_CHECKING:
    from bough.client.answer import Answer


class Piece(msgspec.Struct, frozen=True):
    """News of one answer; the last of them has `finish`. There is one for every token, so it must be cheap to make."""

    answer: Answer  # everything known so far; it may run ahead of this piece while its reader is busy
    text: str
    ids: list[int]
    first: int  # output tokens of this answer that came in earlier pieces
    finish: FinishReason | None  # as of this piece

    @property
    def logprob_span(self) -> tuple[int, int]:
        """Where its tokens begin and end in the answer's columns of logprobs."""
        first = self.first - self.answer.resumed_ids
        return first, first + len(self.ids)

    @property
    def index(self) -> int:
        """Which prompt or sample of its call the answer belongs to."""
        return self.answer.index
