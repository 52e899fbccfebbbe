"""The page in a real browser, over real servers: chat, branches, keys, the live tree, a gateway; light, dark, narrow.

`BOUGH_SCREENSHOTS=docs/images` keeps the pictures for docs/ui.md.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from bough.server.page import page_files
from tests.multimodal.checkpoints import SPECS, write_model
from tests.system import foreign
from tests.system.gateways import running_gateway
from tests.system.serving import running
from tests.system.test_serve_media import FLAGS, TEMPLATE

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "clients" / "ui"
AXE = SOURCE / "node_modules" / "axe-core" / "axe.min.js"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
KEYS = ("--api-key", "user-key", "--admin-api-key", "admin-key")
ONE_KEY = ("--api-key", "user-key", "--admin-api-key", "user-key")
TIERS = ("--enable-hierarchical-cache", "--hicache-size", "1")
with_builder = pytest.mark.skipif(
    not (SOURCE / "node_modules" / ".bin" / "vite").exists(), reason="`make ui` installs what builds the page"
)


@pytest.mark.slow
@with_builder
def test_the_committed_files_are_built_from_the_source(tmp_path: Path) -> None:
    subprocess.run(["npx", "vite", "build", "--outDir", tmp_path, "--logLevel", "error"], cwd=SOURCE, check=True)
    built = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    assert built == {name: file.body for name, file in page_files().items()}, "run `make ui`"


class Stranger(BaseHTTPRequestHandler):
    """A server with OpenAI's routes and no others."""

    def do_GET(self) -> None:
        models = {"object": "list", "data": [{"id": "stranger", "object": "model"}]}
        self.reply(200 if self.path == "/v1/models" else 404, json.dumps(models))

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        usage = {"prompt_tokens": 3, "completion_tokens": 1}
        choice = {"index": 0, "delta": {"content": "Nobody."}, "finish_reason": "stop"}
        chunk = json.dumps({"id": "chatcmpl-1", "choices": [choice], "usage": usage})
        self.reply(200, f"data: {chunk}\n\ndata: [DONE]\n\n", "text/event-stream")

    def reply(self, status: int, text: str, kind: str = "application/json") -> None:
        self.send_response(status)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *args: Any) -> None:
        """Silent."""


@contextlib.contextmanager
def stranger() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Stranger) as http:
        thread = threading.Thread(target=http.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{http.server_address[1]}"
        finally:
            http.shutdown()
            thread.join()


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    foreign.require("playwright")
    if CHROMIUM is None:
        pytest.skip("no Chromium here; the distribution's package `chromium` has one")
    flags = ["--chromium", CHROMIUM, "--api-key", "user-key", "--admin-key", "admin-key"]
    flags += ["--axe", str(AXE)] if AXE.exists() else []
    if folder := os.environ.get("BOUGH_SCREENSHOTS"):
        flags += ["--screenshots", str(ROOT / folder)]
    images = tmp_path_factory.mktemp("images")
    write_model(images, "llava")
    (images / "chat_template.jinja").write_text(TEMPLATE.replace("PLACE", SPECS["llava"].place))
    with (
        running(*KEYS, *TIERS, "--max-total-tokens", "20000") as server,
        running(str(images), *FLAGS, "--served-model-name", "sees-images", *ONE_KEY) as seeing,
        # One server under two names is two workers.
        running_gateway(
            "--worker-urls",
            server.url,
            server.url.replace("127.0.0.1", "localhost"),
            "--worker-api-key",
            "user-key",
            *KEYS,
        ) as gateway,  # fmt: skip
        stranger() as other,
    ):
        workers = ("--images", seeing.url, "--stranger", other)
        found = foreign.what_it_saw("page", server.url, "--gateway", gateway.url, *workers, *flags)
        yield found | {"servers": sorted(urlsplit(url).netloc for url in (server.url, gateway.url))}


def cached(stats: str) -> int:
    found = re.search(r"(\d+) of \d+ prompt tokens cached", stats)
    assert found, stats
    return int(found[1])


@pytest.mark.slow
def test_chat_streams_branches_and_stops(seen: dict[str, Any]) -> None:
    assert seen["asked_for_key"] == "Keys" and "not accept" in seen["wrong_key"]
    assert seen["sizes_while_streaming"] > 1, "the answer grew before it was complete"
    assert "tokens/s" in seen["first_stats"] and "TTFT" in seen["first_stats"]
    assert cached(seen["branch_stats"]) > cached(seen["second_stats"]) > 0, "a branch shares what stands before it"
    assert "mountains" in seen["branch_shown"] and "by the sea" in seen["other_branch"]
    assert seen["stopped"] == "Stopped."


@pytest.mark.slow
def test_keys_alone_are_enough(seen: dict[str, Any]) -> None:
    edited = ["Edited message", "Edit", "Edited message", "Edit"]
    chosen = ["Previous branch", "Previous branch", "Regenerate", "Regenerate"]
    assert seen["focused"] == [*edited, *chosen, "Keys", "Keys", "Keys"], "it was lost to the top of the page"
    assert seen["edited_by_keys"] == "Name a tree of the north"


@pytest.mark.slow
def test_settings_reach_the_engine(seen: dict[str, Any]) -> None:
    assert "not JSON" in seen["bad_schema"] and "top_p" in seen["refused"], "the server's own sentence"
    assert re.fullmatch(r'\{\s*"tree":\s*"(oak|elm)"\s*\}', seen["structured"].strip())


@pytest.mark.slow
def test_a_tool_is_called_and_its_result_goes_back(seen: dict[str, Any]) -> None:
    assert "calls weather" in seen["call"] and re.search(r'"city": "(Oslo|Bern)"', seen["call"])
    question, call, result = seen["after_call"][-3:]
    assert question["role"] == "user" and result["role"] == "tool" and result["content"] == "It snows."
    assert call["tool_calls"][0]["id"] == result["tool_call_id"] and "tokens" in seen["result_stats"]


@pytest.mark.slow
def test_two_settings_answer_side_by_side(seen: dict[str, Any]) -> None:
    assert [stats.split()[0] for stats in seen["compared"]] == ["5", "9"] and seen["sides_left"] == 1


@pytest.mark.slow
def test_two_models_answer_side_by_side_and_images_go_to_the_one_that_takes_them(seen: dict[str, Any]) -> None:
    assert [head.split()[0] for head in seen["heads"]] == ["A", "B"] and "sees-images" in seen["heads"][0]
    assert seen["images_for_both"] == 0, "one of the two takes none"
    assert seen["shown_to"] == "sees-images" and seen["image_parts"] == ["image_url", "text"]
    assert "tokens" in seen["image_stats"] and seen["image_width"] == 300


@pytest.mark.slow
def test_an_answer_leads_to_its_own_timeline(seen: dict[str, Any]) -> None:
    order = ["tokenise", "queued", "prefill", "decode", "detokenise"]
    assert [stage for stage in seen["stages"] if stage in order] == order
    assert re.search(r"\d+ generated", seen["timeline_of"]) and seen["requests"] >= 8
    assert re.search(
        r"Step \d+: 1 decodes, 0 prompt tokens; device .+, plan .+, launch .+, wait .+, commit", seen["step"]
    )
    assert "not among the last" in seen["not_kept"]


@pytest.mark.slow
def test_what_a_model_says_is_never_run(seen: dict[str, Any]) -> None:
    assert seen["harmed"] is None and not {"IMG", "A", "SCRIPT", "B"} & set(seen["elements"])
    assert "H3" in seen["elements"] and seen["code"] == 'x = "<b>"'


@pytest.mark.slow
def test_the_tree_follows_the_engine(seen: dict[str, Any]) -> None:
    assert seen["clock_after"] > seen["clock_before"] and not seen["changed_while_paused"]
    assert re.match(r"\d+ tokens from \d+, \d+ hits", seen["node"])
    assert seen["text"].strip()
    dialogs, said = seen["without_key"]
    assert dialogs == 0 and "needs the admin key" in said, "a key that is not given is asked for once"
    held, back = seen["stepped_back"]
    assert back < held and seen["stepped_forth"], "a pause leads back through what was shown"
    dark, light = seen["shades"]
    assert dark < light, "it follows the system's colours, also with nothing new to show"
    assert seen["nodes_after_eviction"].split()[0] in ("1", "2")


@pytest.mark.slow
def test_a_node_names_the_requests_that_read_it_and_not_by_their_own_ids(seen: dict[str, Any]) -> None:
    both = re.search(r"read by (2: request [\d.]+, request [\d.]+)$", seen["read_node"])
    assert both and both[1] == seen["readers_in_the_table"]
    assert "generated" in seen["reader"] and seen["rids_on_the_page"] == []


@pytest.mark.slow
def test_a_tree_of_thousands_of_nodes_is_drawn(seen: dict[str, Any]) -> None:
    print(
        f"first paint after {seen['first_paint_ms']:.0f} ms, {seen['frames_per_second']:.1f} frames/s"
    )  # for docs/ui.md
    assert re.match(r"40 tokens from \d+", seen["node_of_many"]), "what the pointer is at is found among them"
    assert seen["nodes_of_many"].startswith("5,000 of 28,000")


@pytest.mark.slow
def test_a_page_that_stays_open_follows_a_server_that_begins_anew(seen: dict[str, Any]) -> None:
    assert re.search(r"used \S+ \S+ ago", seen["used_after_restart"]), "its clock is less than it was"
    assert "over the last 10 s: 2" in seen["steps_after_restart"], "its numbers are"
    assert float(seen["rate_after_restart"]) > 0, "and its counts"


@pytest.mark.slow
def test_the_page_of_routes_shows_bodies_of_every_kind(seen: dict[str, Any]) -> None:
    assert "Body (multipart/form-data)" in seen["body_of_recordings"] and '"file"' in seen["body_of_recordings"]


@pytest.mark.slow
def test_figures_and_workers_are_shown(seen: dict[str, Any]) -> None:
    assert "KV cache in use" in seen["figures"] and "of 20" in seen["figures"]
    told = ("Host tier", "Tokens/s", "Waiting", "Device busy", "Aborted or failed", "Retractions")
    assert not [name for name in told if name not in seen["figures"]]
    assert re.search(r"Running\s+[45]\b", seen["figures"]), "four streams, and perhaps the last question"
    for title in ("Time to first token", "Inter-token latency", "Queue time"):
        (chart,) = (text for text in seen["charts"] if text.startswith(title))
        assert re.search(r"p50 ≤ .+p99 ≤ .+ total$", chart, re.DOTALL), "the histogram has values"
    assert seen["workers"].count("closed") == 2, "both workers, with their breakers"
    shares = [int(share) for share in re.findall(r"\((\d+) %\)", seen["workers"])]
    assert len(shares) == 2 and abs(sum(shares) - 100) <= 1, "what each was sent of all requests, rounded"
    failed = [row.split("\t")[6] for row in seen["workers"].splitlines()]
    assert failed == ["0", "0"], "a count that has no sample yet"
    assert len(seen["watched"]) == 2, "either worker's tree and timelines can be seen"
    assert "tokens" in seen["gateway_stats"]
    reason = re.search(r"\tCostPolicy; (\d+) % of the prompt cached on http://\S+\t1\t", seen["routed"])
    assert reason is not None and int(reason[1]) > 50, "the worker that has the long beginning got the second request"


@pytest.mark.slow
def test_on_a_gateways_page_an_answer_leads_to_its_timeline_at_its_worker(seen: dict[str, Any]) -> None:
    order = ["tokenise", "queued", "prefill", "decode", "detokenise"]
    assert [stage for stage in seen["gateway_stages"] if stage in order] == order
    (generated,) = re.findall(r"^(\d+) tokens", seen["gateway_answer"])
    assert f" {generated} generated" in seen["gateway_timeline"], "the request of this answer"
    last = seen["routed"].splitlines()[0]
    assert "/v1/chat/completions" in last and seen["worker_of_timeline"] in last
    assert seen["after_the_other_worker"] == ["#timelines", True], "the answer is not there"


@pytest.mark.slow
def test_on_a_gateways_page_a_node_shows_its_text_if_the_worker_lets_the_gateway_read_it(seen: dict[str, Any]) -> None:
    assert "must be the worker's --admin-api-key as well" in seen["text_without_right"]
    assert "user" in seen["text_of_worker"] or "Name three trees" in seen["text_of_worker"]


@pytest.mark.slow
def test_a_worker_of_another_kind_has_no_link_and_makes_no_error(seen: dict[str, Any]) -> None:
    assert "1 tokens" in seen["stranger_stats"] and seen["links_of_stranger"] == 0
    assert len(seen["hints_of_stranger"]) == 2 and seen["errors_of_stranger"] == 0


@pytest.mark.slow
def test_no_other_host_is_called_and_no_script_fails(seen: dict[str, Any]) -> None:
    assert seen["hosts"] == seen["servers"] and not seen["errors"]


@pytest.mark.slow
def test_everybody_can_use_it(seen: dict[str, Any]) -> None:
    assert not seen["too_wide"], "views that scroll sideways on a phone"
    assert not seen["out_of_sight"], "links that a phone does not show"
    if not AXE.exists():
        pytest.skip("`make ui` installs axe, which looks for what keeps people out")
    assert len(seen["violations"]) == 18 and not any(seen["violations"].values())
