"""API speculative execution: one call for a whole assistant message with several generations in it.

Chat APIs cannot continue a message. For `"Name:" + gen("name") + "\\nAge:" + gen("age")` the model writes freely, the
program's own text is searched in what it wrote, and what stands between are the variables. Where the model did not keep
to the form, it is asked again a few times. Pure: the writer makes the calls.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from bough.core.errors import RequestError
from bough.lang.expressions import Gen, Text

Item = TypeVar("Item", bound=Text | Gen)
ATTEMPTS = 4


def attempts(sampling: Mapping[str, Any]) -> int:
    """How often it is worth asking: a model that draws no lots would write the same again."""
    return 1 if sampling.get("temperature") == 0 else ATTEMPTS


def match(items: Sequence[Text | Gen], written: str) -> list[str] | None:
    """The text of each item as the model wrote it, or None if it wrote something else."""
    found: list[str] = []
    at = 0
    if isinstance(items[0], Text):
        written = written.lstrip()  # as the program's own text is
    for i, item in enumerate(items):
        if isinstance(item, Text):
            value = item.value.lstrip() if at == 0 else item.value  # a message does not begin with a space
            if not written.startswith(value, at):
                return None
            found.append(item.value)
            at += len(value)
            continue
        end = _end_of(item, items[i + 1] if i + 1 < len(items) else None, written, at)
        if end is None:
            return None
        found.append(written[at:end])
        at = end
    return found


def no_match(items: Sequence[Text | Gen], attempts: int) -> RequestError:
    form = "".join(item.value if isinstance(item, Text) else f"<{item.name}>" for item in items)
    return RequestError(
        f"The model did not keep to the form {form!r} in {attempts} attempt{'s' * (attempts > 1)}; show it the form in "
        "the prompt, or raise num_api_spec_tokens."
    )


def _end_of(item: Gen, following: Text | Gen | None, written: str, at: int) -> int | None:
    """Where a generation ends: before the program's next text, or at its own stop."""
    stops = item.sampling.get("stop") or ()
    stops = (*((stops,) if isinstance(stops, str) else stops), *item.ends)
    ends = [place for stop in stops if (place := written.find(stop, at)) >= 0]
    if isinstance(following, Text):
        place = written.find(following.value, at)
        if place < 0:
            return None
        ends.append(place)
    if following is not None and not ends:
        return None  # nothing tells two generations apart
    return min(ends, default=len(written))
