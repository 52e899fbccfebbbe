"""`Runtime`: a server of one's own as a back end, started and ended by the program that uses it."""

from __future__ import annotations

import atexit
from types import TracebackType
from typing import Any

from bough.lang.backends.endpoint import RuntimeEndpoint


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

    def shutdown(self) -> None:
        """Ends the server. Harmless when called twice."""
        self._server.close()
        atexit.unregister(self.shutdown)

    def __enter__(self) -> Runtime:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()
