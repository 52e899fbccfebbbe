"""The scheduler's way to grammars: asked before there is a compiler, answered when there is one."""

from __future__ import annotations

import time

import numpy as np
import pytest

from bough.constrained.interface import Ticket
from bough.core.errors import ModelError, RequestError
from bough.core.plan import mask_words
from bough.core.settings import SchedulerSettings
from bough.launch.grammars import GrammarDesk
from bough.tokenizer.tokenizer import Tokenizer
from tests.fakes.grammar_specs import json_schema_spec, regex_spec
from tests.fakes.scripted_engine import IM_END, byte_level_tokenizer


def settled(ticket: Ticket) -> Ticket:
    for _ in range(6000):
        if ticket.done:
            return ticket
        time.sleep(0.01)
    raise AssertionError("the grammar is not compiled within a minute")


def test_grammars_are_compiled_and_forced_text_is_spelt() -> None:
    desk = GrammarDesk(byte_level_tokenizer, (IM_END,), 300, SchedulerSettings())
    try:
        early = settled(desk.request(json_schema_spec({"const": "abc"})))
        matcher = early.result().matcher()
        assert matcher.forced() == b'"abc"'
        words = np.zeros(mask_words(300), dtype=np.int32)
        matcher.fill(words)
        assert np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist() == [ord('"')]
        assert matcher.accept(ord('"'))
        spelt = list(desk.spell(ord('"'), matcher.forced()))
        assert bytes(spelt) == b'"abc"'[: len(spelt)] and len(spelt) > 2
        with pytest.raises(RequestError) as refused:
            settled(desk.request(regex_spec("("))).result()
        assert refused.value.status_code == 400
    finally:
        desk.close()


def test_without_a_back_end_grammars_are_refused() -> None:
    desk = GrammarDesk(byte_level_tokenizer, (IM_END,), 300, SchedulerSettings(grammar_backend="none"))
    with pytest.raises(RequestError, match="--grammar-backend none"):
        desk.request(regex_spec("a"))
    desk.close()


@pytest.mark.parametrize("error", [ModelError("The tokenizer is broken."), OSError("its file is broken")])
def test_a_tokenizer_that_cannot_be_read_refuses_every_grammar(error: Exception) -> None:
    def fail() -> Tokenizer:
        raise error

    desk = GrammarDesk(fail, (IM_END,), 300, SchedulerSettings())
    for _ in range(2):
        with pytest.raises(RequestError, match="broken"):
            settled(desk.request(regex_spec("a"))).result()
    desk.close()
