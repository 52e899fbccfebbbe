"""A vendor's API for tests: a real HTTP server on a free port that records bodies and answers from a script."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

# A list is a stream of events (name, data); a tuple is a status other than 200, with its body.
Reply = dict[str, Any] | list[tuple[str | None, Any]] | tuple[int, dict[str, Any]]


class VendorServer:
    """`script` gives the reply to a path and a body."""

    def __init__(self, script: Callable[[str, dict[str, Any]], Reply]) -> None:
        self.script = script
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.url = ""


@contextmanager
def vendor(script: Callable[[str, dict[str, Any]], Reply]) -> Iterator[VendorServer]:
    server = VendorServer(script)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            server.bodies.append(body)
            server.headers.append({name.lower(): value for name, value in self.headers.items()})
            reply = server.script(self.path, body)
            status, shown = reply if isinstance(reply, tuple) else (200, reply)
            stream = isinstance(shown, list)
            raw = _events(shown) if isinstance(shown, list) else json.dumps(shown).encode()
            self.send_response(status)
            self.send_header("Content-Type", "text/event-stream" if stream else "application/json")
            self.send_header("Content-Length", str(len(raw)))
            self.end_headers()
            self.wfile.write(raw)

        def log_message(self, *args: Any) -> None:
            """Silent."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        server.url = f"http://127.0.0.1:{http.server_address[1]}"
        thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        try:
            yield server
        finally:
            http.shutdown()
            thread.join()


def _events(events: list[tuple[str | None, Any]]) -> bytes:
    lines = []
    for name, data in events:
        head = "" if name is None else f"event: {name}\n"
        lines.append(f"{head}data: {data if isinstance(data, str) else json.dumps(data)}\n\n")
    return "".join(lines).encode()
