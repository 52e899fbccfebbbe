"""Who calls the gateway: the keys of its clients, and how much each of them may ask.

Clients are strangers to each other: their keys never open management, which has a key of its own. Where clients have
keys and management has none, it is refused. Owns the keys and their rate limits; a changed configuration replaces them.
"""

from __future__ import annotations

import hmac
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from bough.server.endpoint import Access, sent_keys, unauthorised
from bough.server.errors import HttpError


@dataclass(frozen=True, slots=True)
class ClientKey:
    """One client: its key, the name under which logs show it, and its own rate."""

    key: str
    name: str
    rate_limit_rps: float | None = None
    rate_limit_burst: float | None = None


class Clients:
    """Lets in whom its keys and rates allow."""

    def __init__(
        self,
        keys: Sequence[ClientKey] = (),
        admin_key: str | None = None,
        rate_limit_rps: float | None = None,
        rate_limit_burst: float | None = None,
    ) -> None:
        self._keys = [(client.key.encode(), client) for client in keys]
        self._admin = None if admin_key is None else admin_key.encode()
        self._common = [] if rate_limit_rps is None else [TokenBucket(rate_limit_rps, rate_limit_burst)]
        self._buckets = {
            client.key: TokenBucket(client.rate_limit_rps, client.rate_limit_burst)
            for client in keys
            if client.rate_limit_rps is not None
        }

    def identify(self, access: Access, headers: Iterable[tuple[bytes, bytes]]) -> ClientKey | None:
        """Whose key the request carries; None where none is needed. Raises a 401 for a wrong or missing one, and a 403
        for management that no key opens."""
        if access == "admin":
            self._check_admin(headers)
            return None
        if access == "open" or not self._keys:
            return None
        given = sent_keys(headers)
        # Every pair is compared in full, so that the time reveals nothing.
        matches = [client for mine, client in self._keys for key in given if hmac.compare_digest(key, mine)]
        if not matches:
            raise unauthorised("api", given)
        return matches[0]

    def _check_admin(self, headers: Iterable[tuple[bytes, bytes]]) -> None:
        if self._admin is None:
            if self._keys:
                message = "Management is refused to clients; start the gateway with --admin-api-key and send that key."
                raise HttpError(403, message, "PermissionDeniedError")
            return
        given = sent_keys(headers)
        if not any([hmac.compare_digest(key, self._admin) for key in given]):  # noqa: C419
            raise unauthorised("admin", given)

    def count(self, client: ClientKey | None, now_s: float) -> None:
        """One more request. Raises a 429 for one over the rate of all or of its client; it is not counted then."""
        own = self._buckets.get(client.key) if client is not None else None
        wait_s = take_from_all([*self._common, *([own] if own is not None else ())], now_s)
        if wait_s:
            seconds = max(1, math.ceil(wait_s))
            message = f"Too many requests; try again in {seconds} s."
            raise HttpError(429, message, "RateLimitError", {"Retry-After": str(seconds)})


class TokenBucket:
    """Fills at `rate` per second up to `burst`."""

    def __init__(self, rate: float, burst: float | None = None) -> None:
        self.rate = rate
        self.burst = max(1.0, rate if burst is None else burst)
        self._level = self.burst
        self._seen_s: float | None = None

    def wait_s(self, now_s: float) -> float:
        """How long until a request may pass; 0 when one may at once. Takes nothing."""
        if self._seen_s is not None:
            self._level = min(self.burst, self._level + (now_s - self._seen_s) * self.rate)
        self._seen_s = now_s
        return 0.0 if self._level >= 1.0 else (1.0 - self._level) / self.rate

    def add(self, tokens: float) -> None:
        self._level = min(self.burst, self._level + tokens)


def take_from_all(buckets: Sequence[TokenBucket], now_s: float) -> float:
    """0 and a token from every bucket; or the wait, and nothing taken: a refusal must not use up other limits."""
    wait_s = max((bucket.wait_s(now_s) for bucket in buckets), default=0.0)
    if not wait_s:
        for bucket in buckets:
            bucket.add(-1.0)
    return wait_s
