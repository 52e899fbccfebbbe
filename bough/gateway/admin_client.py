"""Talks to a running gateway's management routes, for the commands `roll` and `top`. Keeps its address and key."""

from __future__ import annotations

from typing import Any

import httpx

from bough.core.errors import BoughError

TIMEOUT_S = 30.0


class AdminClient:
    """Short calls to a gateway. A redirect is an error: following it would carry the admin key elsewhere."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        self.url = url.rstrip("/") if "://" in url else f"http://{url.rstrip('/')}"
        self._headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}

    def workers(self) -> list[dict[str, Any]]:
        workers: list[dict[str, Any]] = self.call("GET", "/workers")["workers"]
        return workers

    def worker(self, identity: str) -> dict[str, Any]:
        return self.call("GET", f"/workers/{identity}")

    def text(self, path: str) -> str:
        return self._fetch("GET", path).text

    def call(self, method: str, path: str, body: Any = None) -> dict[str, Any]:
        content: dict[str, Any] = self._fetch(method, path, body).json()
        return content

    def _fetch(self, method: str, path: str, body: Any = None) -> httpx.Response:
        try:
            response = httpx.request(method, self.url + path, json=body, headers=self._headers, timeout=TIMEOUT_S)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise BoughError(f"There is no gateway at {self.url}: {error}; give its address with --url.") from None
        if not response.is_success:
            raise BoughError(f"{self.url}{path} answered {response.status_code}: {_message(response)}")
        return response


def _message(response: httpx.Response) -> str:
    try:
        return str(response.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return response.text[:200]
