"""`bough run-batch` against a small server; with a real model in `tests/system/test_run_batch.py`."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from bough.cli.main import main

Capture = pytest.CaptureFixture[str]


class Server:
    """Answers each request with the status that stands in its body, and keeps count."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        self.failing = False
        self.keys: set[str | None] = set()
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                server.asked.append({"path": self.path, **body})
                if body.get("hang_up"):
                    self.close_connection = True
                    return
                server.keys.add(self.headers["Authorization"])
                status = 503 if server.failing else body.get("status", 200)
                answer = json.dumps({"id": f"cmpl-{body['prompt']}", "echo": body["prompt"]}).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, *args: object) -> None:
                pass

        class Listener(ThreadingHTTPServer):
            request_queue_size = 64

        self.http = Listener(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}"
        threading.Thread(target=self.http.serve_forever, daemon=True).start()


@pytest.fixture
def server() -> Iterator[Server]:
    found = Server()
    yield found
    found.http.shutdown()
    found.http.server_close()


def line(custom_id: str, **changes: Any) -> dict[str, Any]:
    body = {"prompt": custom_id, **changes.pop("body", {})}
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": body, **changes}


def write(path: Path, lines: list[Any]) -> str:
    path.write_text("".join((entry if isinstance(entry, str) else json.dumps(entry)) + "\n" for entry in lines))
    return str(path)


def answers(path: Path) -> dict[str, Any]:
    lines = [json.loads(found) for found in path.read_text().splitlines()]
    by_id = {found["custom_id"]: found for found in lines}
    assert len(by_id) == len(lines)
    return by_id


def test_every_request_has_its_answer_in_openais_format(server: Server, tmp_path: Path, capsys: Capture) -> None:
    given = write(tmp_path / "in.jsonl", [line(f"r{i}") for i in range(20)])
    out = tmp_path / "out.jsonl"
    assert main(["run-batch", "-i", given, "-o", str(out), "--url", server.url, "--api-key", "k"]) == 0
    found = answers(out)
    assert set(found) == {f"r{i}" for i in range(20)} and server.keys == {"Bearer k"}
    for custom_id, answer in found.items():
        assert answer["id"].startswith("batch_req_") and answer["error"] is None
        body = {"id": f"cmpl-{custom_id}", "echo": custom_id}
        assert answer["response"] == {"status_code": 200, "request_id": f"cmpl-{custom_id}", "body": body}
    captured = capsys.readouterr()
    assert "20 of 20 requests answered" in captured.out and "20/20" in captured.err


def test_a_run_goes_on_where_the_last_one_stopped(server: Server, tmp_path: Path, capsys: Capture) -> None:
    """What was answered is not asked again, a request's own error included; what the server failed is, and so is what a
    killed run wrote half of."""
    given = write(tmp_path / "in.jsonl", [line("good"), line("wrong", body={"status": 400}), line("busy"), line("new")])
    out = tmp_path / "out.jsonl"
    flags = ["run-batch", "-i", given, "-o", str(out), "--url", server.url]
    write(tmp_path / "first.jsonl", [line("good"), line("wrong", body={"status": 400})])
    assert main(["run-batch", "-i", str(tmp_path / "first.jsonl"), *flags[3:]]) == 1
    server.failing = True
    write(tmp_path / "second.jsonl", [line("busy")])
    assert main(["run-batch", "-i", str(tmp_path / "second.jsonl"), *flags[3:]]) == 1
    assert answers(out)["busy"]["response"]["status_code"] == 503
    with out.open("a") as half:
        half.write('{"id": "batch_req_1", "custom_id": "ne')
    server.failing, server.asked = False, []
    assert main(flags) == 1  # for the one whose answer is an error
    assert sorted(asked["prompt"] for asked in server.asked) == ["busy", "new"]
    assert {name: answer["response"]["status_code"] for name, answer in answers(out).items()} == {
        "good": 200,
        "wrong": 400,
        "busy": 200,
        "new": 200,
    }
    out_text = capsys.readouterr().out
    assert "2 of 4 requests were answered before" in out_text
    assert "3 of 4 requests answered" in out_text and "1 failed" in out_text
    server.asked = []
    assert main(flags) == 1 and not server.asked  # as long as it stands there
    assert "3 of 4 requests answered" in capsys.readouterr().out
    assert main(["run-batch", "-i", write(tmp_path / "good.jsonl", [line("good")]), *flags[3:]]) == 0


def test_texts_become_vectors_too(server: Server, tmp_path: Path) -> None:
    given = write(tmp_path / "in.jsonl", [line("a", url="/v1/embeddings")])
    assert main(["run-batch", "-i", given, "-o", str(tmp_path / "out.jsonl"), "--url", server.url]) == 0
    assert [asked["path"] for asked in server.asked] == ["/v1/embeddings"]


def test_a_server_that_is_gone_is_said_of_each_request(server: Server, tmp_path: Path, capsys: Capture) -> None:
    given = write(tmp_path / "in.jsonl", [line("a", body={"hang_up": True})])
    out = tmp_path / "out.jsonl"
    assert main(["run-batch", "-i", given, "-o", str(out), "--url", server.url]) == 1
    answer = answers(out)["a"]
    assert answer["response"] is None and answer["error"]["code"] == "server_unreachable"
    assert "1 failed" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("url", "code", "says"),
    [
        ("http://127.0.0.1:9", 1, "No server answers at http://127.0.0.1:9"),
        ("127.0.0.1:9", 1, "No server answers at http://127.0.0.1:9"),
        ("nowhere.invalid", 1, "No server answers at http://nowhere.invalid"),
        ("ftp://x", 2, "looks like http://host:port; got 'ftp://x'"),
        ("http://[", 2, "looks like http://host:port"),
        ("", 2, "looks like http://host:port"),
    ],
)
def test_a_server_that_was_never_there_is_one_line(
    tmp_path: Path, capsys: Capture, url: str, code: int, says: str
) -> None:
    given = write(tmp_path / "in.jsonl", [line("a"), line("b")])
    out = tmp_path / "out.jsonl"
    assert main(["run-batch", "-i", given, "-o", str(out), "--url", url]) == code
    assert says in capsys.readouterr().err and not out.exists()


def test_an_address_may_be_without_its_scheme(server: Server, tmp_path: Path) -> None:
    given = write(tmp_path / "in.jsonl", [line("a")])
    address = server.url.removeprefix("http://")
    assert main(["run-batch", "-i", given, "-o", str(tmp_path / "out.jsonl"), "--url", address]) == 0


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        (["{"], "line 1 is not JSON"),
        (["[1]"], "must be an object"),
        ([line("a"), line("a")], "line 2: custom_id 'a' stands on an earlier line"),
        ([line("")], 'needs a "custom_id"'),
        ([line("a", method="GET")], '"method" must be "POST"'),
        ([line("a", url="/v1/files")], "must be one of /v1/chat/completions"),
        ([line("a", body={"stream": True})], 'leave "stream" out'),
        ([""], "has no requests"),
    ],
)
def test_a_bad_line_is_named_before_anything_is_asked(
    server: Server, tmp_path: Path, capsys: Capture, lines: list[Any], says: str
) -> None:
    given = write(tmp_path / "in.jsonl", lines)
    assert main(["run-batch", "-i", given, "-o", str(tmp_path / "out.jsonl"), "--url", server.url]) == 2
    assert says in capsys.readouterr().err and not server.asked


def test_both_files_and_sensible_flags_are_needed(tmp_path: Path, capsys: Capture) -> None:
    assert main(["run-batch", "-i", "x"]) == 2
    assert "Give both files" in capsys.readouterr().err
    files = ["-i", str(tmp_path / "no.jsonl"), "-o", "out"]
    assert main(["run-batch", *files]) == 2
    assert "Cannot read" in capsys.readouterr().err
    assert main(["run-batch", *files, "--url", "http://x", "--page-size", "4"]) == 2
    assert "Leave them out" in capsys.readouterr().err
    assert main(["run-batch", *files, "--max-concurrency", "0"]) == 2
    assert "at least 1" in capsys.readouterr().err


def test_lines_end_at_newlines_only(server: Server, tmp_path: Path) -> None:
    """An answer may hold other characters that end a line of text."""
    text = "one\u2028two\u0085three"
    given, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    given.write_text(json.dumps(line("a", body={"prompt": text}), ensure_ascii=False) + "\n", encoding="utf-8")
    flags = ["run-batch", "-i", str(given), "-o", str(out), "--url", server.url]
    assert main(flags) == 0 and main(flags) == 0
    assert [asked["prompt"] for asked in server.asked] == [text]
    (answer,) = out.read_text(encoding="utf-8").strip().split("\n")
    assert json.loads(answer)["response"]["body"]["echo"] == text


def test_files_that_hold_no_answers_are_not_overwritten(server: Server, tmp_path: Path, capsys: Capture) -> None:
    given = write(tmp_path / "in.jsonl", [line("a")])
    notes = write(tmp_path / "notes.txt", ["dear diary", "today"])
    for out, said in ((given, "the same file"), (notes, "name another file")):
        before = Path(out).read_text()
        assert main(["run-batch", "-i", given, "-o", out, "--url", server.url]) != 0
        assert said in capsys.readouterr().err and Path(out).read_text() == before
    assert not server.asked
