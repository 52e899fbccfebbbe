"""`bough replay` against a server that answers from a list."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from bough.cli.main import main

SEEN: list[tuple[str, object]] = []
ANSWERS = {
    "dies": b'data: {"text":"a"}\n\ndata: {"error":{"message":"The engine has ended."}}\n\ndata: [DONE]\n\n',
    "dies in a message": b"event: message_start\ndata: {}\n\nevent: error\ndata: {}\n\n",
    "speaks of errors": b'data: {"text":"event: error, {\\"error\\"}"}\n\ndata: [DONE]\n\n',
}


class Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        SEEN.append((self.path, body))
        self.send_response(500 if body["text"] == "bad" else 200)
        written = ANSWERS.get(body["text"], b"")
        self.send_header("content-length", str(len(written)))
        self.end_headers()
        self.wfile.write(written)

    def log_message(self, *args: object) -> None:
        return


@pytest.fixture
def url() -> Iterator[str]:
    SEEN.clear()
    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def dump(path: Path, *texts: str) -> str:
    lines = [
        {"time": 0.0, "path": "/generate", "finished": text == "done", "reason": "", "body": {"text": text}}
        for text in texts
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def test_a_dump_is_sent_again(url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", dump(tmp_path / "d", "done", "cut"), "--url", url]) == 0
    assert sorted(str(body) for _, body in SEEN) == ["{'text': 'cut'}", "{'text': 'done'}"]
    assert "2 of 2 requests answered" in capsys.readouterr().out


def test_only_what_was_running(url: str, tmp_path: Path) -> None:
    assert main(["replay", dump(tmp_path / "d", "done", "bad"), "--url", url, "--unfinished", "--speed", "0"]) == 1
    assert SEEN == [("/generate", {"text": "bad"})]


def test_a_stream_that_breaks_off_is_no_answer(url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", dump(tmp_path / "d", *ANSWERS), "--url", url, "--speed", "0"]) == 1
    written = capsys.readouterr().out
    assert written.count("200, with an error\n") == 2 and "1 of 3 requests answered." in written


def test_another_file_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "d").write_text('{"a": 1}\n')
    assert main(["replay", str(tmp_path / "d")]) == 2
    assert "not of a crash dump" in capsys.readouterr().err


@pytest.mark.parametrize("url", ["ftp://x", "http://[", ""])
def test_what_is_no_address_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], url: str) -> None:
    assert main(["replay", dump(tmp_path / "d", "done"), "--url", url]) == 2
    assert "looks like http://host:port" in capsys.readouterr().err
