"""What the back ends of chat APIs have in common: messages instead of text, and fewer knobs.

A generation must be the first thing in an assistant's message, unless `@function(num_api_spec_tokens=…)`. What an API
has no word for is refused where it changes the meaning of a program, and else left out with a warning.
"""

import importlib
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from bough.core.errors import RequestError, SettingsError
from bough.core.sampling_params import SamplingParams
from bough.lang.backends.base import Backend, GenRequest
from bough.lang.chat import FORMATS, ChatFormat
from bough.lang.primitives import DTYPE_REGEXES

logger = logging.getLogger(__name__)

DEFAULTS = SamplingParams()
MEANT = {"regex", "json_schema", "stop_regex", "stop_token_ids"}  # without these a program would mean something else


def load_sdk(module: str, extra: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        text = f"This back end needs the package {module!r}; install it with: pip install 'bough[{extra}]'."
        raise SettingsError(text) from error


class ChatApiBackend(Backend):
    chat_only = True
    has_adapters = False
    chat_format: ChatFormat = FORMATS["default"]  # only for reading: what is sent are messages
    service = "This API"
    known: frozenset[str] = frozenset()  # sampling fields that it has a word for

    _complete: Callable[..., Any]  # the SDK's call
    _refused: tuple[type[Exception], ...]  # its errors that tell of a refusal

    def __init__(self) -> None:
        super().__init__()
        self._warned: set[str] = set()

    async def _create(self, **arguments: Any) -> Any:
        try:
            return await self._complete(**arguments)
        except self._refused as error:
            raise RequestError(f"{self.service}: {error}", status_code=getattr(error, "status_code", 400)) from error

    def asked(self, request: GenRequest) -> dict[str, Any]:
        """The sampling fields that say something, under the engine's names, and the limit, which APIs do not know.
        Defaults are not sent, because some models refuse a parameter that others ignore."""
        fields = {name: value for name, value in request.sampling.items() if value not in (None, (), [], "")}
        fields = {n: v for n, v in fields.items() if n == "max_new_tokens" or v != getattr(DEFAULTS, n, ...)}
        for name in fields.keys() - self.known:
            if name == "regex" and fields[name] in DTYPE_REGEXES.values():
                raise RequestError(
                    f"{self.service} cannot hold this generation to a type (gen_int, gen_float, gen_string, dtype); "
                    "use a chat model behind OpenAI(), or a server behind RuntimeEndpoint().",
                    field="dtype",
                )
            if name in MEANT:
                raise RequestError(f"{self.service} has no {name}; leave it out, or use another back end.", field=name)
            if name not in self._warned:
                self._warned.add(name)
                logger.warning("%s has no %s; it is left out", self.service, name)
        return {name: value for name, value in fields.items() if name in self.known}

    def conversation(self, request: GenRequest) -> list[Mapping[str, Any]]:
        *before, last = request.messages or ({},)
        if last.get("role") != "assistant" or last.get("content"):
            raise RequestError(
                f"{self.service} writes whole messages: gen() must come right after the beginning of assistant(). To "
                "write text and generations into one message, use @function(num_api_spec_tokens=128)."
            )
        return before


def with_media(content: Any, block: Callable[[Mapping[str, Any]], dict[str, Any]]) -> Any:
    """The content of a message, its pictures and films in the form that an API asks for."""
    if isinstance(content, str):
        return content
    return [part if part["type"] == "text" else block(part) for part in content]


def meta_of(identity: str | None, reason: str | None, usage: Sequence[int | None]) -> dict[str, Any]:
    """SGLang's `meta_info`, as far as an API tells it. `usage` is prompt, cached and completion tokens."""
    kind = {"length": "length", "max_tokens": "length", None: None}.get(reason, "stop")
    prompt, cached, completion = usage
    return {
        "id": identity,
        "finish_reason": None if kind is None else {"type": kind},
        "prompt_tokens": prompt or 0,
        "cached_tokens": cached or 0,
        "completion_tokens": completion or 0,
    }
