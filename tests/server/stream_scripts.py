"""Answers for property tests of streams: any tokens, cut anywhere, ended in any way."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import strategies as st

from bough.core.finish import FinishLength, FinishReason, FinishStop

TOKENS = st.one_of(
    st.integers(0, 257),
    st.sampled_from(list('e\u0301😀שלום\0"\\\n'.encode())),  # combining marks, emoji, right to left, NUL, quotes
)


@dataclass
class Script:
    """What one answer brings, and where its stream is cut."""

    ids: list[int]
    cuts: list[int]
    finish: FinishReason


SCRIPTS = st.builds(
    Script,
    st.one_of(st.lists(TOKENS, max_size=12), st.text(max_size=6).map(lambda text: list(text.encode(errors="ignore")))),
    st.lists(st.integers(1, 12), max_size=6),
    st.sampled_from([FinishStop(257), FinishStop("stop"), FinishStop(None), FinishLength(12)]),
)
