"""Which requests of browsers are accepted: no web page may use a server that its visitor happens to reach.

Browsers say where a request comes from (`Origin`, `Sec-Fetch-Site`); programs do not, and are let in. A page whose own
name points here (DNS rebinding) looks like the server's own; only the name in `Host` shows it.
"""

import functools
import ipaddress
import re
from collections.abc import Mapping

from starlette.types import Scope

from bough.core.errors import SettingsError
from bough.core.server_settings import EdgeSettings
from bough.server.errors import Failure
from bough.server.http_protocol import HEADERS_KEY

Headers = Mapping[bytes, bytes]
Network = ipaddress.IPv4Network | ipaddress.IPv6Network

OWN_SITES = (None, b"same-origin", b"none")  # `none`: the user typed the address
DEFAULT_PORTS = {b"http": b":80", b"https": b":443"}
LOCAL_NAMES = frozenset({b"localhost", b"127.0.0.1", b"[::1]"})
ORIGIN = re.compile(r"\*|null|[a-z][a-z0-9+.-]*://[^/\s*?#@]+")
HOST = re.compile(rb"(\[[^\]]*\]|[^\[\]:/*]+?)\.?(?::\d*)?")  # name or address, without final dot and port
UPLOADS = ("/v1/audio/", "/v1/files", "/v1/images/", "/v1/uploads", "/v1/videos")  # a gateway's workers take forms
SHOWN = 100  # characters of a header in a message


class BrowserRules:
    """Which requests one server accepts. `loopback`: it is bound to an address that only this machine reaches."""

    def __init__(self, settings: EdgeSettings, *, loopback: bool) -> None:
        self._origins = frozenset(origin.encode() for origin in allowed_origins(settings))
        self._any_origin = b"*" in self._origins
        self._hosts = _known_hosts(settings, loopback)
        self._proxies = _trusted_networks(settings.forwarded_allow_ips)

    def refusal(self, scope: Scope, route: str) -> Failure | None:
        headers: Headers = scope.get(HEADERS_KEY) or dict(scope["headers"])
        if len(headers) < len(scope["headers"]):  # of a header that comes twice both values must be allowed
            values: dict[bytes, list[bytes]] = {}
            for name, value in scope["headers"]:
                values.setdefault(name, []).append(value)
            headers = {name: b",".join(each) for name, each in values.items()}
        host = headers.get(b"host")
        if host and not self._knows(host, scope):
            shown = host[:SHOWN].decode("latin-1")
            advice = "If it is to be one, start the server with --allowed-hosts and the name, without its port."
            return Failure(403, f"Host {shown!r} is no name of this server. {advice}", "PermissionDeniedError")
        origin, site = headers.get(b"origin"), headers.get(b"sec-fetch-site")
        if origin is None and site is None:
            return None
        allowed = self._any_origin or origin in self._origins
        own = site in OWN_SITES and (origin is None or self._is_own(origin, site, headers, scope))
        if not (allowed or own):
            return _cross_site_page(origin)
        has_body = headers.get(b"content-length", b"0") != b"0" or b"transfer-encoding" in headers
        kind = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
        is_json = kind == b"application/json" or kind.endswith(b"+json")
        if not has_body or is_json or route.startswith(UPLOADS):
            return None
        message = "A web page must send its JSON with Content-Type: application/json."
        readable = {"Access-Control-Allow-Origin": origin.decode("latin-1")} if origin else {}  # by that page
        return Failure(415, message, "UnsupportedMediaTypeError", headers=readable)

    def _knows(self, host: bytes, scope: Scope) -> bool:
        if self._hosts is None:
            return True
        name = _name_in(host)
        # The address of the connection itself cannot be a rebound DNS name.
        return name in self._hosts or name.strip(b"[]").decode("latin-1") == (scope.get("server") or (None,))[0]

    def _is_own(self, origin: bytes, site: bytes | None, headers: Headers, scope: Scope) -> bool:
        scheme, _, place = origin.lower().partition(b"://")
        if scheme not in DEFAULT_PORTS:
            return False
        hosts, schemes = [headers.get(b"host")], [scope["scheme"].encode()]
        # Pages cannot forge these headers: a cross-site request with them needs a preflight, which does not carry them.
        if self._trusts(scope.get("client")):
            hosts.append(_first(headers.get(b"x-forwarded-host")))
            schemes.append(_first(headers.get(b"x-forwarded-proto")))
        # A proxy that terminates TLS may not say so; then the browser's `Sec-Fetch-Site` decides.
        if scheme not in schemes and site != b"same-origin":
            return False
        port = DEFAULT_PORTS[scheme]
        return place.removesuffix(port) in [host.lower().removesuffix(port) for host in hosts if host]

    def _trusts(self, client: tuple[str, int] | None) -> bool:
        """Browsers cannot reach a unix socket, whose clients have no address: only a proxy can have sent theirs."""
        if client is None or self._proxies is None:
            return True
        try:
            peer = ipaddress.ip_address(client[0])
        except ValueError:
            return False
        peer = getattr(peer, "ipv4_mapped", None) or peer
        return any(peer in network for network in self._proxies)


def allowed_origins(settings: EdgeSettings) -> list[str]:
    found = []
    for word in _words(settings.allowed_origins):
        origin = word.lower().rstrip("/")
        if not ORIGIN.fullmatch(origin):
            problem = f"--allowed-origins: {word!r} is no origin"
            raise SettingsError(f"{problem}; write https://app.example or http://localhost:3000, or * for all.")
        scheme = origin.partition("://")[0]
        found.append(origin.removesuffix(DEFAULT_PORTS.get(scheme.encode(), b"").decode()))
    return found


def _known_hosts(settings: EdgeSettings, loopback: bool) -> frozenset[bytes] | None:
    names = _words(settings.allowed_hosts)
    if "*" in names or not (names or loopback):
        return None
    if loopback:
        names.append(settings.host)
    return LOCAL_NAMES | {_host_name(name) for name in names}


def _host_name(name: str) -> bytes:
    """As `Host` would have it: an IPv6 address stands in brackets there."""
    bare = name.encode()
    found = _name_in(b"[%b]" % bare if bare.count(b":") > 1 and b"[" not in bare else bare)
    if not found:
        raise SettingsError(f"--allowed-hosts: {name!r} is no name of a host; write app.example or 10.0.0.5.")
    return found


@functools.lru_cache(maxsize=64)  # clients of one server use few
def _name_in(host: bytes) -> bytes:
    """The name or address in a value of `Host`; empty if there is none."""
    match = HOST.fullmatch(host)
    return b"" if match is None else match[1].lower()


def _trusted_networks(text: str) -> list[Network] | None:
    words = _words(text)
    if "*" in words:
        return None
    try:
        return [ipaddress.ip_network(word, strict=False) for word in words]
    except ValueError as error:
        advice = "write addresses or networks such as 10.0.0.5,10.1.0.0/16, or * for all."
        raise SettingsError(f"--forwarded-allow-ips: {error}; {advice}") from None


def _words(text: str | None) -> list[str]:
    return [word for word in re.split(r"[,\s]+", text or "") if word]


def _first(value: bytes | None) -> bytes | None:
    """Each proxy adds its own behind those of the ones before; the first faces the browser."""
    return None if value is None else value.partition(b",")[0].strip().lower()


def _cross_site_page(origin: bytes | None) -> Failure:
    if origin is None:
        problem = "Another site's web page sent this request."
        advice = "Open the address directly, or start the server with --allowed-origins '*' to let every page call it."
    else:
        problem = f"Web pages of {origin[:SHOWN].decode('latin-1')!r} may not call this server."
        proxy = "a proxy that shows both under one name must pass on Host, or X-Forwarded-Host and X-Forwarded-Proto"
        advice = "If you trust them, start it with --allowed-origins and that origin; "
        advice += f"{proxy} (--forwarded-allow-ips)."
    return Failure(403, f"{problem} {advice}", "PermissionDeniedError")
