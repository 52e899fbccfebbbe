"""Media from http(s) URLs, which come from anybody: nobody may reach through them what only this machine can.

A name is resolved once, its addresses are judged, and the connection goes to one of those that were judged. Each redirect
is judged again. Proxies of the environment are not used: they would resolve names anew.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import ssl
from collections.abc import Collection
from functools import cache
from typing import NamedTuple

import httpx

from bough.core.errors import RequestError
from bough.core.media import MediaSource
from bough.multimodal.sources import FIELDS, too_large

MOST_REDIRECTS = 5
NAT64 = ipaddress.ip_network("64:ff9b::/96")
TYPES = ("application/octet-stream", "binary/octet-stream", "application/ogg", "application/mp4")


class FetchRules(NamedTuple):
    domains: Collection[str]  # empty: all, with public addresses
    most: int  # bytes
    timeout_s: float  # for all of it


@cache
def _certificates() -> ssl.SSLContext:
    return ssl.create_default_context()


async def fetch(source: MediaSource, rules: FetchRules, transport: httpx.AsyncBaseTransport | None = None) -> bytes:
    """Each has a client of its own: neither cookies nor connections go from one URL to the next."""
    field, verify = FIELDS[source.kind], await asyncio.to_thread(_certificates)
    options = {"verify": verify, "trust_env": False, "transport": transport, "timeout": rules.timeout_s}
    try:
        async with asyncio.timeout(rules.timeout_s), httpx.AsyncClient(**options) as client:
            return await _fetch(httpx.URL(str(source.content)), source, rules, client)
    except TimeoutError:
        what = f"takes longer than {rules.timeout_s:g} s (--mm-timeout-s)"
        raise RequestError(f"Fetching the {source.kind} {what}; send its bytes.", field=field) from None
    except (httpx.HTTPError, httpx.InvalidURL, UnicodeError) as error:
        reason = type(error).__name__
        raise RequestError(f"The {source.kind} cannot be fetched ({reason}); check the URL.", field=field) from None


async def _fetch(url: httpx.URL, source: MediaSource, rules: FetchRules, client: httpx.AsyncClient) -> bytes:
    for _ in range(MOST_REDIRECTS + 1):
        address = await judge(url, source, rules)
        request = client.build_request(
            "GET",
            url.copy_with(host=address, username=None, password=None),
            headers={"Host": url.netloc.decode(), "Accept-Encoding": "identity", "User-Agent": "bough"},
            extensions={"sni_hostname": url.host},
        )
        response = await client.send(request, stream=True)
        try:
            if response.has_redirect_location:
                url = url.join(response.headers["location"])
                continue
            return await _body(response, source, rules)
        finally:
            await response.aclose()
    text = f"The URL of the {source.kind} leads on more than {MOST_REDIRECTS} times; give the last one."
    raise RequestError(text, field=FIELDS[source.kind])


async def judge(url: httpx.URL, source: MediaSource, rules: FetchRules) -> str:
    """The address to connect to, or the reason why there is none."""
    field, host = FIELDS[source.kind], url.host.rstrip(".").lower()
    if url.scheme not in ("http", "https") or not host:
        raise RequestError("Media are fetched from http and https URLs with a host.", field=field)
    if rules.domains and host not in rules.domains:
        raise RequestError(f"Media are not fetched from {host}; --allowed-media-domains does not name it.", field=field)
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, url.port or 0, type=socket.SOCK_STREAM)
    except OSError:
        raise RequestError(f"There is no host {host!r}; check the URL.", field=field) from None
    addresses = [str(each[4][0]) for each in found]
    if not rules.domains and not all(map(is_public, addresses)):
        raise RequestError(
            f"{host} has a private address, from which media are not fetched; name it in --allowed-media-domains, or "
            "send the bytes.",
            field=field,
        )
    return addresses[0]


def is_public(text: str) -> bool:
    """Whether an address is one of the internet's, by itself and by the IPv4 address that it may carry."""
    address = ipaddress.ip_address(text.partition("%")[0])
    if isinstance(address, ipaddress.IPv6Address):
        inner = address.ipv4_mapped or address.sixtofour or (address.teredo or (None, None))[1]
        if inner is None and address in NAT64:
            inner = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
        if inner is not None:
            return is_public(str(inner))
        if address.is_site_local:
            return False
    return address.is_global and not address.is_multicast


async def _body(response: httpx.Response, source: MediaSource, rules: FetchRules) -> bytes:
    field = FIELDS[source.kind]
    if response.status_code != 200:
        raise RequestError(f"The {source.kind}'s URL answers {response.status_code}; check it.", field=field)
    kind = response.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind and not kind.startswith(("image/", "video/", "audio/")) and kind not in TYPES:
        raise RequestError(f"The URL answers with {kind}, which is no {source.kind}.", field=field)
    if int(response.headers.get("content-length") or 0) > rules.most:
        raise too_large(rules.most, source)
    content = bytearray()
    async for piece in response.aiter_raw():
        content += piece
        if len(content) > rules.most:
            raise too_large(rules.most, source)
    return bytes(content)
