"""Media from http(s) URLs, which come from anybody: nobody may reach through them what only this machine can.

A name is resolved once, its addresses are judged, and the connection goes to one of those. Each redirect is judged
again. Proxies of the environment are not used: they would resolve names anew.
"""

import asyncio
import contextlib
import ipaddress
import socket
import ssl
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import NamedTuple

import httpx

from bough.core.errors import RequestError
from bough.multimodal.sources import too_large

MOST_REDIRECTS = 5
RESOLVERS = ThreadPoolExecutor(8, "bough-resolver")  # a name that resolves slowly holds up no thread of others
NAT64, INTERNET = map(ipaddress.ip_network, ("64:ff9b::/96", "2000::/3"))  # all of IPv6 that is given to anybody
# Where clouds tell machines about themselves, though Python counts these as the internet's: Oracle's, and Azure's.
METADATA = [ipaddress.ip_network(each) for each in ("192.0.0.0/24", "168.63.129.16/32")]
certificates = cache(ssl.create_default_context)
TYPES = ("image/", "video/", "audio/", "application/octet-stream", "binary/octet-stream", "application/ogg")


class FetchRules(NamedTuple):
    domains: Collection[str]  # empty: all that have public addresses
    most: int  # bytes
    timeout_s: float  # for all of it


async def fetch(text: str, rules: FetchRules, transport: httpx.AsyncBaseTransport | None = None) -> bytes:
    """Each has a client of its own: neither cookies nor connections go from one URL to the next."""
    verify = await asyncio.to_thread(certificates)
    client = httpx.AsyncClient(verify=verify, trust_env=False, transport=transport, timeout=rules.timeout_s)
    try:
        async with asyncio.timeout(rules.timeout_s), client:
            url = httpx.URL(text)
            for _ in range(MOST_REDIRECTS + 1):
                place = url.copy_with(host=await judge(url, rules))
                headers = {"Host": url.netloc.decode(), "Accept-Encoding": "identity", "User-Agent": "bough"}
                asked = client.build_request("GET", place, headers=headers, extensions={"sni_hostname": url.host})
                async with contextlib.aclosing(await client.send(asked, stream=True)) as response:
                    if not response.has_redirect_location:
                        return await _body(response, rules.most)
                    url = url.join(response.headers["location"])
    except TimeoutError:
        raise RequestError(
            f"Fetching the URL takes longer than {rules.timeout_s:g} s (--mm-timeout-s); send the bytes."
        ) from None
    except (httpx.HTTPError, httpx.InvalidURL, UnicodeError) as error:
        raise RequestError(f"The URL cannot be fetched ({type(error).__name__}); check it.") from None
    raise RequestError(f"The URL leads on more than {MOST_REDIRECTS} times; give the last one.")


async def judge(url: httpx.URL, rules: FetchRules) -> str:
    """The address to connect to, or the reason why there is none."""
    host = url.host.rstrip(".").lower()
    if url.scheme not in ("http", "https") or not host:
        raise RequestError("Media are fetched from http and https URLs with a host.")
    if rules.domains and host not in rules.domains:
        raise RequestError(f"Media are not fetched from {host}: --allowed-media-domains does not name it.")
    try:
        found = await asyncio.wrap_future(RESOLVERS.submit(socket.getaddrinfo, host, None, type=socket.SOCK_STREAM))
    except OSError:
        raise RequestError(f"There is no host {host!r}; check the URL.") from None
    addresses = [str(each[4][0]) for each in found]
    if not rules.domains and not all(map(is_public, addresses)):
        advice = "name it in --allowed-media-domains, or send the bytes"
        raise RequestError(f"{host} has a private address, from which media are not fetched; {advice}.")
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
        return address in INTERNET and address.is_global
    return address.is_global and not address.is_multicast and not any(address in each for each in METADATA)


async def _body(response: httpx.Response, most: int) -> bytes:
    kind = response.headers.get("content-type", "image/").lower()
    if response.status_code != 200 or not kind.startswith(TYPES):
        raise RequestError(f"The URL answers {response.status_code} with {kind}, which is no media; check it.")
    content = bytearray()
    async for piece in response.aiter_raw():
        content += piece
        if len(content) > most:
            raise too_large(most)
    return bytes(content)
