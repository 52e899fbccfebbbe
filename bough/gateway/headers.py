"""Which headers pass the gateway. Hop-by-hop headers and keys do not; everything else does."""

from collections.abc import Mapping, Sequence
from typing import Any

RawHeaders = Sequence[tuple[bytes, bytes]]
Headers = Mapping[bytes, bytes]  # of a header that comes twice the first

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


def upstream_headers(
    raw: RawHeaders, named: Headers, request_id: str, client: Sequence[Any] | None
) -> list[tuple[bytes, bytes]]:
    kept = passing(raw, named, NOT_UPSTREAM)
    if client is not None and b"x-forwarded-for" not in named:
        kept.append((b"x-forwarded-for", str(client[0]).encode()))
    kept.append((b"x-request-id", request_id.encode("latin-1")))
    return kept


def passing(raw: RawHeaders, named: Headers, left_out: frozenset[bytes]) -> list[tuple[bytes, bytes]]:
    """`Connection: x-hop` makes x-hop a header of this connection as well."""
    if b"connection" in named:
        hops = b",".join(value for name, value in raw if name == b"connection")
        left_out = left_out.union(word.strip().lower() for word in hops.split(b","))
    kept = []
    for header in raw:  # for so few a comprehension would cost as much again
        if header[0] not in left_out:
            kept.append(header)
    return kept
