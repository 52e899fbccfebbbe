"""A stranger's first ten minutes with Bough, as a script with its times.

`make ten-minutes` clones this checkout into an empty folder and does there what the quickstart says: `make serve`,
which makes the environment, fetches the model and starts the server; then the page in Chromium, the first chat, the
tree, and an example program over the server. It prints a table of times. Of this checkout only the commits are used.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
EXAMPLE = "examples/lang/few_shot_qa.py"
QUESTION = {"role": "user", "content": "Which trees grow in wet soil?"}
GREETING = "Chat with "  # what the page says before the name of its model
SERVED = re.compile(r"served at (\S+)")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


class Diary:
    """What was done, what came of it, and how long it took."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._rows: list[tuple[str, float, str]] = []

    def note(self, what: str, seconds: float, found: str) -> None:
        self._rows.append((what, seconds, found))
        print(f"{what}: {seconds:.1f} s, {found}", file=sys.stderr, flush=True)

    def do(self, what: str, act: Callable[[], str]) -> None:
        began = time.monotonic()
        found = act()
        self.note(what, time.monotonic() - began, found)

    def table(self) -> str:
        whole = time.monotonic() - self._began
        cores = os.cpu_count()
        lines = ["| step | seconds | what was seen |", "|---|---:|---|"]
        lines += [f"| {what} | {seconds:.1f} | {found} |" for what, seconds, found in self._rows]
        lines.append(f"| all of it | {whole:.1f} | {time.strftime('%Y-%m-%d')}, {platform.machine()}, {cores} cores |")
        return "\n".join(lines)


def clone(source: Path, folder: Path) -> str:
    subprocess.run(["git", "clone", "--quiet", "--no-local", source, folder], check=True)
    return f"{sum(1 for path in folder.rglob('*') if path.is_file() and '.git' not in path.parts)} files"


class Served:
    """`make serve` in the clone, on a free port; ended with all that it started."""

    def __init__(self, folder: Path, home: Path | None) -> None:
        self._folder = folder
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        environ = {name: value for name, value in os.environ.items() if not name.startswith(("BOUGH_", "PYTHON"))}
        environ |= {"BOUGH_PORT": port} | ({} if home is None else {"BOUGH_HOME": str(home)})
        self._process = subprocess.Popen(
            ["make", "serve"], cwd=folder, env=environ, stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        self.environ = environ
        self.url = ""
        self._set_up_at = float("nan")

    def wait(self, diary: Diary) -> None:
        began = time.monotonic()
        installed = threading.Thread(target=self._watch_set_up, daemon=True)
        installed.start()
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if found := SERVED.search(line):
                self.url = found[1]
                break
        else:
            raise SystemExit("`make serve` has ended before it served; its messages stand above.")
        installed.join()
        diary.note("`make serve`: until it serves", time.monotonic() - began, self.url)
        diary.note("of that: `.venv`", self._set_up_at - began, "environment made, packages installed")

    def _watch_set_up(self) -> None:
        while not (self._folder / ".venv" / ".installed").exists():
            if self._process.poll() is not None:
                return
            time.sleep(0.2)
        self._set_up_at = time.monotonic()

    def end(self) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGINT)
            self._process.wait(60)


def show_page(url: str) -> str:
    """In Chromium, if there is one; else its files alone."""
    if CHROMIUM is None:
        with urllib.request.urlopen(f"{url}/ui/app.js") as answer:
            return f"{len(answer.read())} bytes (no Chromium here)"
    flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=5000", "--dump-dom"]
    with tempfile.TemporaryDirectory() as profile:
        command = [CHROMIUM, *flags, f"--user-data-dir={profile}", f"{url}/ui"]
        shown = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout
    found = re.search(GREETING + "<b>([^<]+)</b>", shown)
    if not found:
        raise SystemExit("The page does not name its model.")
    return f"the page names its model, {found[1]}"


def events(url: str, body: Any = None) -> Iterator[Any]:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as answer:
        for line in answer:
            if line.startswith(b"data: {"):
                yield json.loads(line[6:])


def chat(url: str) -> str:
    began, first, text = time.monotonic(), 0.0, ""
    for event in events(f"{url}/v1/chat/completions", {"messages": [QUESTION], "max_tokens": 64, "stream": True}):
        text += event["choices"][0]["delta"].get("content") or ""
        if text and not first:
            first = time.monotonic() - began
    if not text:
        raise SystemExit("The first chat brought no text.")
    return f"first token after {first:.2f} s, {len(text)} characters"


def see_tree(url: str) -> str:
    replica = next(events(f"{url}/ui/tree"))["replicas"][0]
    if not replica["parent"]:
        raise SystemExit("The tree is empty after a chat.")
    return f"{len(replica['parent'])} nodes, {replica['cached_tokens']} cached tokens"


def run_example(folder: Path, served: Served) -> str:
    command = [".venv/bin/python", EXAMPLE, served.url]
    shown = subprocess.run(command, cwd=folder, env=served.environ, capture_output=True, text=True, check=True).stdout
    return f"`{EXAMPLE}`: {len(shown.splitlines())} answers"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", type=Path, default=ROOT, help="the repository to clone; this one when left out")
    parser.add_argument("--keep-models", action="store_true", help="use the models that this machine has already")
    args = parser.parse_args()
    diary = Diary()
    with tempfile.TemporaryDirectory(prefix="bough-stranger-") as place:
        folder, home = Path(place) / "bough", Path(place) / "home"
        diary.do("`git clone`", lambda: clone(args.source, folder))
        served = Served(folder, None if args.keep_models else home)
        try:
            served.wait(diary)
            diary.do("the page", lambda: show_page(served.url))
            diary.do("the first chat", lambda: chat(served.url))
            diary.do("the tree", lambda: see_tree(served.url))
            diary.do("an example program", lambda: run_example(folder, served))
            print(diary.table(), flush=True)  # ending and cleaning up are no part of the ten minutes
        finally:
            served.end()


if __name__ == "__main__":
    main()
