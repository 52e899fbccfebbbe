"""Who may call what: the API's key and the key of the management routes.

Keys come as `Authorization: Bearer` or `x-api-key`, are compared in constant time, and never appear in an answer or a
log line.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable, Iterable

from bough.server.endpoint import Access
from bough.server.errors import HttpError


class Keys:
    """With only an API key, that opens management too; with both, only the admin key does."""

    def __init__(self, api_key: str | None, admin_api_key: str | None) -> None:
        self._one_for_all = admin_api_key is None
        self._needed: dict[Access, bytes | None] = {
            "open": None,
            "api": _encoded(api_key),
            "admin": _encoded(admin_api_key if admin_api_key is not None else api_key),
        }

    def check(self, access: Access, headers: Iterable[tuple[bytes, bytes]]) -> None:
        """Raises a 401 unless the headers carry the key that `access` needs."""
        needed = self._needed[access]
        if needed is None:
            return
        given = sent_keys(headers)
        # Every candidate is compared, in full: how long it takes tells nothing.
        if not any([hmac.compare_digest(key, needed) for key in given]):  # noqa: C419
            raise unauthorised("api" if self._one_for_all else access, given)


def sent_keys(headers: Iterable[tuple[bytes, bytes]]) -> list[bytes]:
    """Every key that a request carries, in whichever header."""
    sent = (READERS[name](value).strip() for name, value in headers if name in READERS)
    return [key for key in sent if key]


def unauthorised(access: Access, given: list[bytes]) -> HttpError:
    what = "admin key" if access == "admin" else "API key"
    problem = f"This route needs the {what}: " + ("the one sent is wrong." if given else "none was sent.")
    hint = " Send it as `Authorization: Bearer KEY` or `x-api-key: KEY`."
    return HttpError(401, problem + hint, "AuthenticationError", {"WWW-Authenticate": "Bearer"})


def _encoded(key: str | None) -> bytes | None:
    return None if key is None else key.encode()


def _bearer(value: bytes) -> bytes:
    scheme, _, key = value.partition(b" ")
    return key if scheme.lower() == b"bearer" else b""


READERS: dict[bytes, Callable[[bytes], bytes]] = {b"authorization": _bearer, b"x-api-key": bytes}
