"""The gateway's clients: their keys and rate limits.

Client keys never open management: it has a key of its own, and is refused where clients have keys and it has none.
"""

import contextlib
import hmac
import math
from collections.abc import Iterable, Sequence

import msgspec

from bough.core.gateway_settings import GatewaySettings
from bough.server.endpoint import Access, Keys, sent_keys, unauthorised
from bough.server.errors import HttpError


class ClientKey(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Also as the configuration file has it."""

    key: str
    name: str | None = None
    rate_limit_rps: float | None = None
    rate_limit_burst: float | None = None


class Clients:
    def __init__(self, settings: GatewaySettings, more: Sequence[ClientKey] = ()) -> None:
        """`more` keys come from the configuration file. Each process of the gateway has its part of every rate."""
        processes = settings.processes

        def bucket(rate: float, burst: float | None) -> TokenBucket:
            return TokenBucket(rate / processes, None if burst is None else burst / processes)

        rate = settings.rate_limit_rps
        self._common = [] if rate is None else [bucket(rate, settings.rate_limit_burst)]
        keys = [*(ClientKey(key, f"key {number}") for number, key in enumerate(settings.api_keys, 1)), *more]
        self._keys = [(client.key.encode(), client) for client in keys]
        self.open_to_all = not keys and not self._common  # who calls does not matter
        self._admin = Keys(keys[0].key if keys else None, settings.admin_api_key, "gateway")
        self._buckets = {
            client.key: bucket(client.rate_limit_rps, client.rate_limit_burst)
            for client in keys
            if client.rate_limit_rps is not None
        }

    def identify(self, access: Access, headers: Iterable[tuple[bytes, bytes]]) -> ClientKey | None:
        """The client whose key the request carries; None where none is needed. Raises a 401 or 403."""
        if access in ("admin", "admin_only"):
            self._admin.check("admin_only", headers)
            return None
        if access == "open" or not self._keys:
            return None
        given = sent_keys(headers)
        # Every pair is compared in full, so that the time reveals nothing.
        matches = [client for mine, client in self._keys for key in given if hmac.compare_digest(key, mine)]
        if not matches:
            raise unauthorised("api", given)
        return matches[0]

    def is_operator(self, headers: Iterable[tuple[bytes, bytes]]) -> bool:
        """Whether the request may manage the fleet."""
        with contextlib.suppress(HttpError):
            self._admin.check("admin_only", headers)
            return True
        return False

    def count(self, client: ClientKey | None, now_s: float) -> None:
        """Counts a request, or raises a 429 without counting it."""
        own = self._buckets.get(client.key) if client is not None else None
        if wait_s := take_from_all([*self._common, *([own] if own is not None else ())], now_s):
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
        """Seconds until a request may pass; takes no token."""
        if self._seen_s is not None:
            self._level = min(self.burst, self._level + (now_s - self._seen_s) * self.rate)
        self._seen_s = now_s
        return 0.0 if self._level >= 1.0 else (1.0 - self._level) / self.rate

    def add(self, tokens: float) -> None:
        level = self._level + tokens
        self._level = level if level < self.burst else self.burst


def take_from_all(buckets: Sequence[TokenBucket], now_s: float) -> float:
    """Takes a token from every bucket and returns 0, or returns the wait and takes none."""
    wait_s = max((bucket.wait_s(now_s) for bucket in buckets), default=0.0)
    if not wait_s:
        for bucket in buckets:
            bucket.add(-1.0)
    return wait_s
