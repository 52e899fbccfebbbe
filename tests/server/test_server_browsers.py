"""Which requests of browsers are let in: the rules as tables, then the server that keeps them on every route."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from bough.core.errors import SettingsError
from bough.core.server_settings import ServerSettings
from bough.core.settings import Settings
from bough.launch.service import MODEL_EXECUTOR, MainServer
from bough.server.app import Front, Phase
from bough.server.browsers import BrowserRules, allowed_origins
from bough.server.context import ServerContext
from bough.server.http import is_loopback, open_listener
from bough.server.protocols import all_endpoints
from tests.server.native_engine import NativeEngine, open_server

HOME = "localhost:30000"
PAGE = "https://page.example"
JSON = {"content-type": "application/json", "content-length": "2"}


def verdict(
    headers: dict[str, str],
    *,
    loopback: bool = True,
    scheme: str = "http",
    client: tuple[str, int] | None = ("127.0.0.1", 5),
    server: tuple[str, int] | None = ("127.0.0.1", 30000),
    path: str = "/generate",
    **settings: Any,
) -> int:
    """200 for a request that is let in, or the status of its refusal."""
    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    scope = {"path": path, "headers": raw, "scheme": scheme, "client": client, "server": server}
    refusal = BrowserRules(ServerSettings(**settings), loopback=loopback).refusal(scope, path)
    return 200 if refusal is None else refusal.status


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        # Programs: no word of an origin, any content type or none, HTTP/1.0 without a Host.
        ({}, 200),
        ({"host": ""}, 200),
        ({"host": HOME}, 200),
        ({"host": HOME, "content-type": "application/x-www-form-urlencoded", "content-length": "9"}, 200),
        ({"host": HOME, "content-length": "9"}, 200),
        ({"host": HOME, "sec-fetch-mode": "cors", "user-agent": "node"}, 200),  # Node's fetch
        # What a browser asks on behalf of its user, or of the server's own page.
        ({"host": HOME, "sec-fetch-site": "none"}, 200),
        ({"host": HOME, "sec-fetch-site": "same-origin"}, 200),
        ({"host": HOME, "origin": "http://localhost:30000"}, 200),
        ({"host": HOME, "origin": "http://localhost:30000", "sec-fetch-site": "same-origin"}, 200),
        ({"host": "LOCALHOST:30000", "origin": "http://localhost:30000"}, 200),
        ({"host": "localhost", "origin": "http://localhost"}, 200),
        ({"host": "localhost:80", "origin": "http://localhost"}, 200),
        ({"host": "[::1]:30000", "origin": "http://[::1]:30000"}, 200),
        # Other pages, those on another port of the same machine among them.
        ({"host": HOME, "origin": PAGE}, 403),
        ({"host": HOME, "origin": "null"}, 403),
        ({"host": HOME, "origin": ""}, 403),
        ({"host": HOME, "origin": "http://localhost:30001"}, 403),
        ({"host": HOME, "origin": "http://localhost"}, 403),
        ({"host": HOME, "origin": "http://127.0.0.1:30000"}, 403),
        ({"host": HOME, "origin": "https://localhost:30000"}, 403),
        ({"host": HOME, "origin": "http://localhost:30000.page.example"}, 403),
        ({"host": HOME, "origin": "chrome-extension://localhost:30000"}, 403),
        ({"origin": "http://localhost:30000"}, 403),
        ({"host": HOME, "sec-fetch-site": "cross-site"}, 403),  # an <img>, a link
        ({"host": HOME, "sec-fetch-site": "same-site"}, 403),
        ({"host": HOME, "sec-fetch-site": ""}, 403),
        ({"host": HOME, "sec-fetch-site": "something-else"}, 403),
        # Both must agree.
        ({"host": HOME, "origin": PAGE, "sec-fetch-site": "same-origin"}, 403),
        ({"host": HOME, "origin": PAGE, "sec-fetch-site": "none"}, 403),
        ({"host": HOME, "origin": "null", "sec-fetch-site": "same-origin"}, 403),
        ({"host": HOME, "origin": "http://localhost:30000", "sec-fetch-site": "cross-site"}, 403),
    ],
)
def test_a_page_is_let_in_when_it_is_the_servers_own(headers: dict[str, str], status: int) -> None:
    assert verdict(headers) == status


FOREIGN = {"host": HOME, "sec-fetch-site": "cross-site"}


@pytest.mark.parametrize(
    ("allowed", "headers", "status"),
    [
        (PAGE, FOREIGN | {"origin": PAGE}, 200),
        (f"http://other.example, {PAGE}", FOREIGN | {"origin": PAGE}, 200),
        ("HTTPS://Page.example:443/", FOREIGN | {"origin": PAGE}, 200),
        (PAGE, FOREIGN | {"origin": "http://page.example"}, 403),
        (PAGE, FOREIGN | {"origin": "https://page.example:8443"}, 403),
        (PAGE, FOREIGN | {"origin": "https://sub.page.example"}, 403),
        (PAGE, FOREIGN, 403),  # which page sent it is unknown
        (PAGE, FOREIGN | {"origin": "null"}, 403),
        ("null", FOREIGN | {"origin": "null"}, 200),
        (PAGE, {"host": HOME, "origin": "http://localhost:30000"}, 200),
        ("*", FOREIGN | {"origin": PAGE}, 200),
        ("*", FOREIGN | {"origin": "null"}, 200),
        ("*", FOREIGN, 200),
        (f"{PAGE},*", FOREIGN, 200),
        ("", FOREIGN | {"origin": PAGE}, 403),
    ],
)
def test_pages_of_allowed_origins_are_let_in(allowed: str, headers: dict[str, str], status: int) -> None:
    assert verdict(headers, allowed_origins=allowed) == status


APP = "https://app.example"
FORWARDED = {"host": "10.0.0.9:30000", "x-forwarded-host": "app.example", "x-forwarded-proto": "https", "origin": APP}
KEPT_HOST = {"host": "app.example", "origin": APP}


@pytest.mark.parametrize(
    ("headers", "client", "trusted", "status"),
    [
        (FORWARDED, "127.0.0.1", "127.0.0.1", 200),
        (FORWARDED, "::ffff:127.0.0.1", "127.0.0.1", 200),
        (FORWARDED, "10.0.0.5", "127.0.0.1", 403),
        (FORWARDED, "10.0.0.5", "10.0.0.4,10.0.0.5", 200),
        (FORWARDED, "10.0.0.5", "10.0.0.0/8", 200),
        (FORWARDED, "fd00::5", "10.0.0.0/8 fd00::/8", 200),
        (FORWARDED, "10.0.0.5", "*", 200),
        (FORWARDED, "127.0.0.1", "", 403),
        (FORWARDED, "testclient", "127.0.0.1", 403),
        (FORWARDED, None, "127.0.0.1", 200),  # a unix socket
        (FORWARDED | {"x-forwarded-host": "app.example, inner", "x-forwarded-proto": "https,http"}, None, "", 200),
        (FORWARDED | {"x-forwarded-proto": "http"}, "127.0.0.1", "127.0.0.1", 403),
        (FORWARDED | {"x-forwarded-host": "other.example"}, "127.0.0.1", "127.0.0.1", 403),
        (FORWARDED | {"sec-fetch-site": "cross-site"}, "127.0.0.1", "127.0.0.1", 403),
        # TLS ends at the proxy: it says so, or the browser does.
        (KEPT_HOST, "127.0.0.1", "127.0.0.1", 403),
        (KEPT_HOST | {"x-forwarded-proto": "https"}, "127.0.0.1", "127.0.0.1", 200),
        (KEPT_HOST | {"x-forwarded-proto": "https"}, "10.0.0.5", "127.0.0.1", 403),
        (KEPT_HOST | {"sec-fetch-site": "same-origin"}, "10.0.0.5", "127.0.0.1", 200),
        # Other proxies and load balancers: programs behind them, and probes.
        ({"host": "app.example", "x-forwarded-for": "1.2.3.4", "x-forwarded-host": "x"}, "10.0.0.5", "127.0.0.1", 200),
    ],
)
def test_a_trusted_proxy_says_under_which_name_it_shows_the_server(
    headers: dict[str, str], client: str | None, trusted: str, status: int
) -> None:
    peer = None if client is None else (client, 5)
    assert verdict(headers, client=peer, loopback=False, forwarded_allow_ips=trusted) == status


def test_over_tls_the_own_origin_is_https() -> None:
    assert verdict({"host": HOME, "origin": "https://localhost:30000"}, scheme="https") == 200
    assert verdict({"host": "localhost", "origin": "https://localhost:443"}, scheme="https") == 200
    assert verdict({"host": "localhost", "origin": "http://localhost"}, scheme="https") == 403


@pytest.mark.parametrize(
    ("host", "allowed", "loopback", "status"),
    [
        ("localhost", None, True, 200),
        ("localhost:9", None, True, 200),  # a tunnel has a port of its own
        ("localhost.:9", None, True, 200),
        ("LocalHost", None, True, 200),
        ("127.0.0.1:30000", None, True, 200),
        ("[::1]:30000", None, True, 200),
        ("[::1]", None, True, 200),
        ("evil.example:30000", None, True, 403),
        ("localhost.evil.example", None, True, 403),
        ("evil.example#localhost", None, True, 403),
        ("localhost:30000@evil.example", None, True, 403),
        ("[::1].evil.example", None, True, 403),
        ("127.0.0.1.evil.example", None, True, 403),
        ("0.0.0.0:30000", None, True, 403),
        ("10.0.0.9", None, True, 403),
        ("::1", None, True, 403),
        ("evil.example", None, False, 200),
        ("app.example:30000", "app.example", True, 200),
        ("app.example", "other.example, App.Example:443", True, 200),
        ("sub.app.example", "app.example", True, 403),
        ("localhost", "app.example", True, 200),
        ("[fd00::5]:30000", "fd00::5", True, 200),
        ("[fd00::5]:30000", "[fd00::5]", True, 200),
        ("evil.example", "*", True, 200),
        ("evil.example", "app.example", False, 403),
        ("app.example", "app.example", False, 200),
        ("localhost", "app.example", False, 200),
    ],
)
def test_a_server_on_loopback_knows_its_names(host: str, allowed: str | None, loopback: bool, status: int) -> None:
    assert verdict({"host": host}, loopback=loopback, allowed_hosts=allowed) == status
    own_page = {"host": host, "sec-fetch-site": "same-origin", "origin": f"http://{host}"}
    assert verdict(own_page, loopback=loopback, allowed_hosts=allowed, allowed_origins="*") == status


def test_the_address_that_was_called_is_a_name_of_the_server() -> None:
    """A kubelet asks for the pod's address, and nobody else's name can be that."""
    pod = {"allowed_hosts": "app.example", "loopback": False, "server": ("10.1.2.3", 30000)}
    assert verdict({"host": "10.1.2.3:30000"}, **pod) == 200
    assert verdict({"host": "10.1.2.4:30000"}, **pod) == 403
    assert verdict({"host": "[fd00::5]:30000"}, server=("fd00::5", 30000)) == 200
    assert verdict({"host": "evil"}, server=None) == 403
    assert verdict({"host": "box:30000"}, host="box") == 200  # a name of 127.0.1.1 in many an /etc/hosts


@pytest.mark.parametrize(
    ("name", "own", "foreign"),
    [
        ("host", "localhost:30000", "evil.example"),
        ("origin", "http://localhost:30000", PAGE),
        ("sec-fetch-site", "same-origin", "cross-site"),
        ("content-type", "application/json", "text/plain"),
    ],
)
def test_a_second_value_of_a_header_does_not_hide_the_first(name: str, own: str, foreign: str) -> None:
    rest = {"host": HOME, "origin": "http://localhost:30000", **JSON}
    raw = [(key.encode(), value.encode()) for key, value in rest.items() if key != name]
    rules = BrowserRules(ServerSettings(), loopback=True)
    for values in ((own, foreign), (foreign, own), (own,)):
        headers = [*raw, *((name.encode(), value.encode()) for value in values)]
        scope = {"path": "/generate", "headers": headers, "scheme": "http", "client": ("127.0.0.1", 5), "server": None}
        assert (rules.refusal(scope, "/generate") is None) is (values == (own,)), values


def test_many_headers_are_looked_at_once() -> None:
    """Also where one of them comes twice, which must be found."""

    class Headers(list[tuple[bytes, bytes]]):
        looks = 0

        def __iter__(self) -> Iterator[tuple[bytes, bytes]]:
            self.looks += 1
            return super().__iter__()

    headers = Headers((f"x-{number % 999}".encode(), b"") for number in range(1000))
    rules = BrowserRules(ServerSettings(), loopback=True)
    assert rules.refusal({"type": "http", "headers": headers, "scheme": "http"}, "/generate") is None
    assert headers.looks < 5


def test_a_forwarded_host_does_not_stand_for_the_name_that_was_called() -> None:
    """A page that was rebound to this machine may send it, and comes from a trusted address."""
    rebound = {"host": "evil.example:30000", "origin": "http://evil.example:30000", "x-forwarded-host": "localhost"}
    assert verdict(rebound) == 403


OWN = {"host": HOME, "origin": "http://localhost:30000"}
BODY = {"content-length": "2"}


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        (OWN, 200),
        (OWN | {"content-length": "0"}, 200),
        (OWN | JSON, 200),
        (OWN | BODY | {"content-type": "Application/JSON; charset=utf-8"}, 200),
        (OWN | BODY | {"content-type": "application/merge-patch+json"}, 200),
        (OWN | BODY, 415),
        (OWN | BODY | {"content-type": ""}, 415),
        (OWN | BODY | {"content-type": "text/plain"}, 415),
        (OWN | BODY | {"content-type": "text/plain; application/json"}, 415),
        (OWN | BODY | {"content-type": "application/x-www-form-urlencoded"}, 415),
        (OWN | BODY | {"content-type": "multipart/form-data; boundary=x"}, 415),
        (OWN | BODY | {"content-type": "application/jsonp"}, 415),
        (OWN | {"transfer-encoding": "chunked", "content-type": "text/plain"}, 415),
        ({"host": HOME, "sec-fetch-site": "same-origin", "content-length": "2"}, 415),
        ({"host": HOME, "origin": PAGE, "content-length": "2"}, 403),
    ],
)
def test_a_page_must_send_json_as_json(headers: dict[str, str], status: int) -> None:
    assert verdict(headers) == status


def test_forms_may_go_where_files_are_taken() -> None:
    form = OWN | {"content-length": "2", "content-type": "multipart/form-data; boundary=x"}
    assert verdict(form, path="/v1/audio/transcriptions") == 200 and verdict(form, path="/v1/completions") == 415


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("allowed_origins", "app.example"),
        ("allowed_origins", "https://*.example"),
        ("allowed_origins", '["*"]'),
        ("allowed_hosts", "https://app.example"),
        ("allowed_hosts", "*.example"),
        ("forwarded_allow_ips", "proxy.example"),
        ("forwarded_allow_ips", "10.0.0.0/99"),
    ],
)
def test_a_value_that_would_never_match_is_refused_at_the_start(name: str, value: str) -> None:
    with pytest.raises(SettingsError, match=f"--{name.replace('_', '-')}: .*; write "):
        BrowserRules(ServerSettings(**{name: value}), loopback=True)


def test_origins_are_taken_as_browsers_write_them() -> None:
    settings = ServerSettings(allowed_origins="HTTP://A.example:80/ https://b.example:80,app://c.d null *")
    assert allowed_origins(settings) == ["http://a.example", "https://b.example:80", "app://c.d", "null", "*"]


# ---- the server

CHROME = {
    "Connection": "keep-alive",
    "sec-ch-ua": '"Chromium";v="140", "Not=A?Brand";v="24", "Google Chrome";v="140"',
    "sec-ch-ua-mobile": "?0",
    "sec-ch-ua-platform": '"Linux"',
    "User-Agent": "Mozilla/5.0 (X11; Linux x86_64) AppleWebKit/537.36 (KHTML, like Gecko) Chrome/140.0.0.0 "
    "Safari/537.36",
    "Accept-Encoding": "gzip, deflate, br, zstd",
    "Accept-Language": "en-GB,en;q=0.9",
}
TYPED = CHROME | {
    "Upgrade-Insecure-Requests": "1",
    "Accept": "text/html,application/xhtml+xml,application/xml;q=0.9,image/avif,image/webp,image/apng,*/*;q=0.8",
    "Sec-Fetch-Site": "none",
    "Sec-Fetch-Mode": "navigate",
    "Sec-Fetch-User": "?1",
    "Sec-Fetch-Dest": "document",
}
LINKED = TYPED | {"Sec-Fetch-Site": "cross-site", "Referer": f"{PAGE}/"}
FETCHED = CHROME | {
    "Accept": "*/*",
    "Sec-Fetch-Site": "same-origin",
    "Sec-Fetch-Mode": "cors",
    "Sec-Fetch-Dest": "empty",
    "Referer": "http://localhost/docs",
}
POSTED = FETCHED | {"Origin": "http://localhost", "Content-Type": "application/json"}
FOREIGN_IMAGE = LINKED | {"Sec-Fetch-Mode": "no-cors", "Sec-Fetch-Dest": "image"}
FOREIGN_POST = FETCHED | {
    "Sec-Fetch-Site": "cross-site",
    "Sec-Fetch-Mode": "no-cors",
    "Origin": PAGE,
    "Content-Type": "text/plain;charset=UTF-8",
}
PREFLIGHT = FETCHED | {
    "Sec-Fetch-Site": "cross-site",
    "Origin": PAGE,
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization,content-type",
}


def ask(method: str, path: str, headers: dict[str, str], body: str | None = None, **settings: Any) -> httpx.Response:
    async def go() -> httpx.Response:
        async with open_server(NativeEngine(lambda message: [97]), **settings) as http:
            return await http.request(method, path, headers=headers, content=body)

    return asyncio.run(go())


def test_the_page_of_routes_works_in_a_browser() -> None:
    shown = ask("GET", "/docs", TYPED)
    assert shown.status_code == 200 and 'fetch("openapi.json")' in shown.text
    assert ask("GET", "/openapi.json", FETCHED).json()["paths"]
    assert ask("GET", "/docs", LINKED).status_code == 403


def test_the_servers_own_page_may_generate() -> None:
    assert ask("POST", "/generate", POSTED, '{"text": "a"}').status_code == 200
    refused = ask("POST", "/generate", POSTED | {"Content-Type": "text/plain"}, '{"text": "a"}')
    assert refused.status_code == 415 and "application/json" in refused.json()["error"]["message"]
    assert refused.headers["access-control-allow-origin"] == "http://localhost"  # or the page could not read it


def test_curl_needs_no_header() -> None:
    curl = {"User-Agent": "curl/8.5.0", "Accept": "*/*", "Content-Type": "application/x-www-form-urlencoded"}
    assert ask("POST", "/generate", curl, '{"text": "a"}').status_code == 200


def test_no_other_page_reaches_any_route() -> None:
    async def go() -> None:
        engine = NativeEngine(lambda message: [97])
        async with open_server(engine) as http:
            for endpoint in all_endpoints(engine.context()):
                for method in (*endpoint.methods, "HEAD", "OPTIONS"):
                    for headers in (FOREIGN_POST, FOREIGN_IMAGE, PREFLIGHT, {"host": "evil.example"}):
                        refused = await http.request(method, endpoint.path, headers=headers, content=b"{}")
                        assert refused.status_code == 403, (method, endpoint.path)
                        assert "x-request-id" in refused.headers
                        assert "access-control-allow-origin" not in refused.headers
                        assert "--allowed-" in refused.text or method == "HEAD"
        assert not engine.commands and not engine.requests

    asyncio.run(go())


def test_a_page_behind_a_proxy_may_upload_too() -> None:
    """The proxy has kept the prefix under which it shows the server."""
    form = POSTED | {"Content-Type": "multipart/form-data; boundary=x"}
    assert ask("POST", "/llm/v1/audio/transcriptions", form, "--x--", root_path="/llm").status_code != 415
    assert ask("POST", "/llm/v1/completions", form, "--x--", root_path="/llm").status_code == 415
    assert ask("POST", "/llm/v1/audio/transcriptions", form, "--x--").status_code == 415


@pytest.mark.parametrize("path", ["/flush_cache", "/start_profile", "/stop_profile"])
def test_gets_that_change_state_are_for_programs_and_the_own_page(path: str) -> None:
    async def go() -> None:
        engine = NativeEngine(lambda message: [97])
        async with open_server(engine) as http:
            assert (await http.get(path, headers=FOREIGN_IMAGE)).status_code == 403 and not engine.commands
            assert (await http.get(path)).status_code == 200
            assert (await http.get(path, headers=FETCHED)).status_code == 200

    asyncio.run(go())


@pytest.mark.parametrize(
    ("path", "error"),
    [
        ("/generate", {"type": "PermissionDeniedError", "code": 403}),
        ("/v1/chat/completions", {"type": "invalid_request_error", "code": None}),
        ("/llm/v1/chat/completions", {"type": "invalid_request_error", "code": None}),
        ("/v1/messages", {"type": "permission_error"}),
    ],
)
def test_refusals_have_the_shape_of_their_route(path: str, error: dict[str, Any]) -> None:
    told = ask("POST", path, FOREIGN_POST, "{}", root_path="/llm").json()["error"]
    assert told | error == told and PAGE in told["message"] and "--allowed-origins" in told["message"]
    assert "evil.example" in ask("GET", "/api/tags", {"host": "evil.example"}).json()["error"]


def test_preflights_of_allowed_origins_are_answered() -> None:
    allowed = ask("OPTIONS", "/v1/chat/completions", PREFLIGHT, allowed_origins=PAGE)
    assert allowed.status_code == 200 and allowed.headers["access-control-allow-origin"] == PAGE
    post = FOREIGN_POST | {"Sec-Fetch-Mode": "cors", "Content-Type": "application/json"}
    reply = ask("POST", "/generate", post, '{"text": "a"}', allowed_origins="HTTPS://Page.example/")
    assert reply.status_code == 200 and reply.headers["access-control-allow-origin"] == PAGE
    refused = ask("OPTIONS", "/v1/chat/completions", PREFLIGHT, allowed_origins="https://other.example")
    assert refused.status_code == 403 and "access-control-allow-origin" not in refused.headers
    assert ask("OPTIONS", "/v1/chat/completions", PREFLIGHT, allowed_origins="*").status_code == 200


def test_pages_are_refused_in_every_phase() -> None:
    async def go() -> None:
        front = Front(browsers=BrowserRules(ServerSettings(), loopback=True))
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app=front), base_url="http://localhost") as http:
            for phase in Phase:
                front.phase = phase
                assert (await http.get("/health", headers=FOREIGN_IMAGE)).status_code == 403
                assert (await http.get("/health", headers={"host": "evil.example"})).status_code == 403
                assert (await http.get("/health")).status_code == 503  # no application was given to it

    asyncio.run(go())


class DoneError(Exception):
    """The test has seen what it wanted."""


def test_bough_serve_keeps_the_rules_from_its_first_moment() -> None:
    async def go() -> None:
        settings = Settings.from_flat({"port": 0, "allowed_hosts": "app.example"})
        listener = open_listener(settings.server)
        base_url = f"http://localhost:{listener.getsockname()[1]}"

        class Preparing(MainServer):
            async def prepare(self, cleanup: contextlib.AsyncExitStack) -> ServerContext:
                async with httpx.AsyncClient(base_url=base_url) as http:
                    seen = [
                        (await http.get("/health", headers=headers)).status_code
                        for headers in ({}, {"host": "app.example"}, {"host": "evil.example"}, {"origin": PAGE})
                    ]
                assert seen == [503, 503, 403, 403]
                raise DoneError

        await Preparing(settings, listener, MODEL_EXECUTOR).run()

    with pytest.raises(DoneError):
        asyncio.run(go())


@pytest.mark.parametrize(
    ("address", "loopback"), [("127.0.0.1", True), ("127.0.0.2", True), ("localhost", True), ("0.0.0.0", False)]
)
def test_what_is_bound_to_loopback(address: str, loopback: bool) -> None:
    with open_listener(ServerSettings(host=address, port=0)) as listener:
        assert is_loopback(listener) is loopback


def test_over_a_unix_socket_no_name_is_checked(tmp_path: Any) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "s"))
        assert not is_loopback(listener)
