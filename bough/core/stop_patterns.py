"""Stop regexes, compiled under limits: a pattern comes from a client, and no request may hold up the others.

Compiling writes a repetition out: `(a{1000}){1000}` is a million nodes. So a pattern's length and an upper bound on its
nodes are checked first. The edge compiles to check, the detokenizer to search; both remember.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

from bough.core.errors import RequestError

if TYPE_CHECKING:
    import regex

MAX_PATTERN_CHARS = 4096  # of all patterns of a call together; compiles within some 40 ms whatever they are
MAX_PATTERN_NODES = 20_000

# What a count repeats ends just before its brace. A group, another brace, and the spaces and comments of verbose
# patterns may hide something that is itself repeated, so their counts multiply; everything else is a single node.
_COUNT = re.compile(r"([)}\s]?)\{\s*(\d+)")


def check_patterns(patterns: Iterable[str]) -> None:
    """Raises a `RequestError` unless these patterns, together, are cheap to compile, and valid."""
    patterns = tuple(patterns)
    chars = sum(map(len, patterns))
    if chars > MAX_PATTERN_CHARS:
        text = f"stop_regex has {chars} characters; all patterns of a request together may have {MAX_PATTERN_CHARS}."
        raise RequestError(text, field="stop_regex")
    if sum(map(_most_nodes, patterns)) > MAX_PATTERN_NODES:
        text = f"stop_regex repeats too much: its counts, written out, may make at most {MAX_PATTERN_NODES} steps"
        raise RequestError(f"{text}; use smaller counts, or + and *.", field="stop_regex")
    for pattern in patterns:
        compile_pattern(pattern)


@functools.lru_cache(maxsize=256)
def compile_pattern(pattern: str) -> regex.Pattern[str]:
    """The pattern, ready to search; it has passed `check_patterns`, here or in another process."""
    import regex  # not needed by the many requests without one

    try:
        return regex.compile(pattern)
    except regex.error as error:
        raise RequestError(f"stop_regex {_shown(pattern)} is not valid: {error}.", field="stop_regex") from None
    except (RecursionError, OverflowError):
        text = f"stop_regex {_shown(pattern)} cannot be compiled; nest its groups less deeply."
        raise RequestError(text, field="stop_regex") from None


def _most_nodes(pattern: str) -> int:
    counts = [(before, int(count[:9])) for before, count in _COUNT.findall(pattern)]
    single = sum(count for before, count in counts if not before)
    return (len(pattern) + single) * math.prod(max(count, 1) for before, count in counts if before)


def _shown(pattern: str) -> str:
    return repr(pattern if len(pattern) <= 80 else pattern[:77] + "...")
