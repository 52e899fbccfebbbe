"""An address and a file that nobody may touch: an HTTP server that counts visits, a secret, and a watch over what
this process itself opens and connects to."""

from __future__ import annotations

import contextlib
import http.server
import json
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SECRET = "open sesame"
FILE = "bait.json"
NETWORK = {"socket.connect", "socket.getaddrinfo", "urllib.Request"}
_watching: list[list[str]] = []


def _on_audit(event: str, arguments: tuple[Any, ...]) -> None:
    if _watching and (event in NETWORK or (event == "open" and FILE in str(arguments[0]))):
        for seen in _watching:
            seen.append(f"{event} {arguments}")


sys.addaudithook(_on_audit)  # for good: Python has no way to take one off


@dataclass
class Bait:
    url: str
    file: str  # as a URL
    fetched: list[str] = field(default_factory=list)  # paths that somebody has asked the server for
    touched: list[str] = field(default_factory=list)  # what this process did itself, of NETWORK and with the file

    def schemas(self) -> dict[str, dict[str, Any]]:
        """Every way in which a schema may name what is not in it. The enums make a validator look."""
        here, there = self.url, {"enum": [SECRET, "other"]}
        return {
            "a URL": {**there, "$ref": f"{here}/a"},
            "a file": {**there, "$ref": self.file},
            "a part of a file": {**there, "$ref": f"{self.file}#/const"},
            "a file by its path": {**there, "$ref": self.file.removeprefix("file://")},
            "in a negation": {**there, "not": {"$ref": f"{here}/a"}},
            "in a condition": {**there, "if": {"$ref": self.file}, "then": False},
            "in a property": {"type": "object", "properties": {"p": {**there, "$ref": f"{here}/a"}}},
            "in a definition": {**there, "$ref": "#/$defs/d", "$defs": {"d": {"$ref": f"{here}/a"}}},
            "dynamic": {**there, "$dynamicRef": f"{here}/a"},
            "recursive": {**there, "$recursiveRef": f"{here}/a"},
            "relative to the schema's own address": {"$id": f"{here}/base/s", **there, "$ref": "a#/x"},
            "relative to a folder": {"$id": f"{self.file}.schema", **there, "not": {"$ref": FILE}},
            "relative to an inner address": {**there, "allOf": [{"$id": f"{here}/i/", "not": {"$ref": "a"}}]},
            "by way of what is no schema": {**there, "$ref": "#/x-more", "x-more": {"not": {"$ref": self.file}}},
            "its own kind": {"$schema": f"{here}/kind", **there, "not": {"$ref": f"{here}/kind"}},
        }


class _Handler(http.server.BaseHTTPRequestHandler):
    bait: Bait

    def do_GET(self) -> None:
        self.bait.fetched.append(self.path)
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps({"const": SECRET}).encode())

    def log_message(self, format: str, *arguments: Any) -> None:
        return


@contextlib.contextmanager
def laid_out(folder: Path) -> Iterator[Bait]:
    file = folder / FILE
    file.write_text(json.dumps({"const": SECRET}))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Handler) as server:
        bait = _Handler.bait = Bait(f"http://127.0.0.1:{server.server_port}", file.as_uri())
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        _watching.append(bait.touched)
        try:
            yield bait
        finally:
            _watching.remove(bait.touched)
            server.shutdown()
