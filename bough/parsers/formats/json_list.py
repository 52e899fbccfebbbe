"""`[{"name": ..., "parameters": {...}}]` as the whole answer: how a call is forced where a format cannot be."""

from __future__ import annotations

from bough.parsers.calls import Calls, attempt
from bough.parsers.events import Text
from bough.parsers.formats.json_call import call_list
from bough.parsers.source import Source, Steps


class JsonList:
    """No model's own format. A grammar makes the model write it, so there is nothing around the list."""

    shape = None

    def read(self, source: Source, calls: Calls) -> Steps[None]:
        if (yield from source.starts_after_space("[")):
            source.mark()
            yield from attempt(source, calls, self._list(source, calls))
        yield from source.rest(Text)

    def _list(self, source: Source, calls: Calls) -> Steps[None]:
        yield from source.skip_space()
        yield from call_list(source, calls)
