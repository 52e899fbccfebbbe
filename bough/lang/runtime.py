"""`Runtime`: a server of one's own as a back end, started and ended by the program that uses it. It can also be asked
directly, by SGLang's methods."""

from __future__ import annotations

import asyncio
import atexit
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from bough.lang.backends.endpoint import RuntimeEndpoint
from bough.lang.expressions import Gen
from bough.lang.loop import wait_for
from bough.lang.program import function


@function
def _continuation(s: Any, prompt: str, sampling: Mapping[str, Any]) -> None:
    s += prompt
    s += Gen("text", sampling)


class Runtime:
    """Starts a server with these settings (`bough serve --help` lists them) on a free port. `url` is its address,
    `endpoint` the back end; it is one itself."""

    def __init__(self, **server_args: Any) -> None:
        from bough.launch.owned_server import OwnedServer

        self._server = OwnedServer(server_args)
        atexit.register(self.shutdown)
        try:
            self.url = self._server.url
            self.endpoint = RuntimeEndpoint(self.url, server_args.get("api_key"))
        except BaseException:
            self.shutdown()
            raise

    def generate(
        self, prompt: str | Sequence[str], sampling_params: Mapping[str, Any] | None = None, **fields: Any
    ) -> str:
        """The server's answer to `/generate`, as JSON; `fields` are others of its request (`return_logprob` …)."""
        body = {"text": prompt, "sampling_params": dict(sampling_params or {}), **fields}
        return json.dumps(wait_for(self.endpoint._call("/generate", body)))

    def encode(self, prompt: str | Sequence[str], **fields: Any) -> str:
        """The server's answer to `/encode`, as JSON."""
        return json.dumps(wait_for(self.endpoint._call("/encode", {"text": prompt, **fields})))

    async def async_generate(self, prompt: str, sampling_params: Mapping[str, Any] | None = None) -> AsyncIterator[str]:
        """What comes after a prompt, piece by piece. Leaving it early aborts the request."""
        state = await _continuation.async_run(prompt, sampling_params or {}, stream=True, backend=self.endpoint)
        try:
            async for piece in state.text_async_iter("text"):
                yield piece
        finally:
            state.cancel()

    add_request = async_generate  # SGLang's other name for it

    def cache_prefix(self, prefix: str) -> None:
        self.endpoint.cache_prefix(prefix)

    def flush_cache(self) -> bool:
        return self.endpoint.flush_cache()

    async def get_server_info(self) -> dict[str, Any]:
        """To be awaited, as SGLang's; `bough.get_server_info(runtime)` is not."""
        return await asyncio.to_thread(self.endpoint.get_server_info)

    def shutdown(self) -> None:
        """Ends the server. Harmless when called twice."""
        self._server.close()
        atexit.unregister(self.shutdown)

    def __enter__(self) -> Runtime:
        return self

    def __exit__(self, *raised: object) -> None:
        self.shutdown()
