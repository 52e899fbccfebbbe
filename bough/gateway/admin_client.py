"""Talks to a running gateway's management routes, for the commands `roll` and `top`. Keeps its address and key."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from typing import Any

from bough.core.errors import BoughError

TIMEOUT_S = 30.0


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """urllib would carry the admin key to wherever an answer points; a redirect is an error instead."""

    def redirect_request(self, *args: Any) -> None:
        return None


_OPENER = urllib.request.build_opener(_NoRedirects)


class AdminClient:
    """Short calls to a gateway."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        self.url = url.rstrip("/") if "://" in url else f"http://{url.rstrip('/')}"
        self._headers = {"content-type": "application/json"}
        if api_key is not None:
            self._headers["authorization"] = f"Bearer {api_key}"

    def workers(self) -> list[dict[str, Any]]:
        workers: list[dict[str, Any]] = self.call("GET", "/workers")["workers"]
        return workers

    def worker(self, identity: str) -> dict[str, Any]:
        return self.call("GET", f"/workers/{identity}")

    def text(self, path: str) -> str:
        return self._fetch("GET", path, None).decode()

    def call(self, method: str, path: str, body: Any = None) -> dict[str, Any]:
        """The answer's JSON; whatever goes wrong is a sentence with the gateway's own words."""
        answer: dict[str, Any] = json.loads(self._fetch(method, path, body))
        return answer

    def _fetch(self, method: str, path: str, body: Any) -> bytes:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, self._headers, method=method)
        try:
            with _OPENER.open(request, timeout=TIMEOUT_S) as response:
                content: bytes = response.read()
                return content
        except urllib.error.HTTPError as error:
            raise BoughError(f"{self.url}{path} answered {error.code}: {_message(error.read())}") from None
        except (OSError, http.client.HTTPException) as error:
            raise BoughError(f"There is no gateway at {self.url}: {error}; give its address with --url.") from None


def _message(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return body.decode(errors="replace")[:200]
