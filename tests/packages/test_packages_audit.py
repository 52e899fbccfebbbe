"""The audit of dependencies, against a registry of the test's own."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tools import audit

ADVISORY = {"id": "PYSEC-1", "aliases": ["CVE-1"], "fixed_in": ["1.1"], "withdrawn": None}
PAGES: dict[str, Any] = {
    "/good/1.0/json": {"vulnerabilities": []},
    "/bad/1.0/json": {"vulnerabilities": [ADVISORY]},
    "/withdrawn/1.0/json": {"vulnerabilities": [{**ADVISORY, "withdrawn": "2026-01-01"}]},
    "/newest/2.0/json": None,
    "/newest/json": {"info": {"version": "2.0"}, "vulnerabilities": [ADVISORY]},
    "/old/json": {"info": {"version": "2.0"}, "vulnerabilities": [ADVISORY]},
}


@pytest.fixture
def registry() -> Iterator[str]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            page = PAGES.get(self.path)
            self.send_response(404 if page is None else 200)
            self.end_headers()
            self.wfile.write(json.dumps(page).encode())

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.parametrize(
    ("releases", "code", "said"),
    [
        ([("good", "1.0"), ("withdrawn", "1.0")], 0, "2 of 2 releases were looked up; 0 have known vulnerabilities."),
        ([("good", "1.0+cpu"), ("bad", "1.0")], 1, "bad 1.0: PYSEC-1, CVE-1; fixed in 1.1"),
        ([("newest", "2.0")], 1, "newest 2.0: PYSEC-1"),
        ([("good", "1.0"), ("old", "1.0")], 0, "Not audited: old 1.0"),
        ([("old", "1.0"), ("nothing", "1.0")], 2, "0 of 2 releases were looked up"),
    ],
)
def test_what_is_known_is_said(
    registry: str,
    releases: list[tuple[str, str]],
    code: int,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(audit, "installed", lambda: iter(releases))
    assert audit.main(["--registry", registry]) == code
    assert said in capsys.readouterr().out


def test_a_registry_that_is_not_there_is_no_clean_bill(capsys: pytest.CaptureFixture[str]) -> None:
    assert audit.main(["--registry", "http://127.0.0.1:9"]) == 2
    assert "cannot be asked" in capsys.readouterr().err


def test_make_runs_it() -> None:
    assert "-m tools.audit" in (Path(__file__).parents[2] / "Makefile").read_text()
