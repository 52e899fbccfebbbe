"""Which headers pass the gateway. Hop-by-hop headers and keys do not; everything else does."""

from collections.abc import Iterable, Sequence
from typing import Any

RawHeaders = Sequence[tuple[bytes, bytes]]

HOP_BY_HOP = frozenset(
    b"connection keep-alive proxy-authenticate proxy-authorization proxy-connection te trailer transfer-encoding "
    b"upgrade".split()
)
# Besides, not to a worker: keys, what the HTTP client writes itself, the gateway's own protocol with its workers,
# encodings, because answers are looked into, and what browsers say of their page, which the gateway has judged.
NOT_UPSTREAM = HOP_BY_HOP.union(
    b"accept-encoding authorization x-api-key host content-length expect x-request-id x-bough-resume origin "
    b"sec-fetch-site sec-fetch-mode sec-fetch-dest sec-fetch-user".split()
)
# Besides, not to a client: what the gateway's own HTTP server writes.
NOT_DOWNSTREAM = HOP_BY_HOP | {b"date", b"content-length", b"x-request-id", b"x-bough-resume"}


def upstream_headers(raw: RawHeaders, request_id: str, client: Sequence[Any] | None) -> list[tuple[bytes, bytes]]:
    named = _named_in_connection(raw)
    kept = [(name, value) for name, value in raw if name not in NOT_UPSTREAM and name not in named]
    if client is not None and not any(name == b"x-forwarded-for" for name, _ in raw):
        kept.append((b"x-forwarded-for", str(client[0]).encode()))
    kept.append((b"x-request-id", request_id.encode("latin-1")))
    return kept


def downstream_headers(raw: RawHeaders) -> list[tuple[bytes, bytes]]:
    named = _named_in_connection(raw)
    return [(name, value) for name, value in raw if name not in NOT_DOWNSTREAM and name not in named]


def header(raw: RawHeaders, *names: bytes) -> str | None:
    """The value of the first of these headers that is present; names in lower case."""
    for wanted in names:
        for name, value in raw:
            if name == wanted:
                return value.decode("latin-1")
    return None


def _named_in_connection(raw: Iterable[tuple[bytes, bytes]]) -> frozenset[bytes]:
    """`Connection: x-hop` makes x-hop a header of this connection as well."""
    values = [value for name, value in raw if name == b"connection"]
    return frozenset(word.strip().lower() for value in values for word in value.split(b",")) if values else frozenset()
