"""`python -m tools.image`: builds the image without a registry of images, starts its server and asks it once.

The base is a Debian that mmdebstrap makes from packages, in place of the one that the Containerfile names. `make image`
builds with buildah, which needs no daemon; steps run in a chroot. The server then runs in a container of the image, as
its user and with its own command. Needs root, mmdebstrap and buildah. pip's settings for a mirror (PIP_CERT,
PIP_INDEX_URL, PIP_FIND_LINKS) hold in the build too.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil

from bough.loader.catalogue import home

ROOT = Path(__file__).parents[1]
START_S, POLL_S, STOP_S = 300, 0.5, 60
CERTIFICATES = "/etc/mirror-certificates.pem"  # where packages of the base do not write
QUESTION = {"messages": [{"role": "user", "content": "Name a tree."}], "max_tokens": 8, "temperature": 0}


class Builder:
    """buildah with a store of its own in `folder`."""

    def __init__(self, folder: Path, driver: str) -> None:
        self._folder = folder
        places = ["--root", folder / "store", "--runroot", folder / "run", "--storage-driver", driver]
        self.command = ["buildah", *map(str, places)]

    def do(self, *words: str) -> str:
        return subprocess.run([*self.command, *words], check=True, stdout=subprocess.PIPE, text=True).stdout.strip()

    def base(self, suite: str) -> str:
        """A minimal Debian; made once in a folder."""
        name, tar = f"localhost/debian:{suite}", self._folder / f"{suite}.tar"
        if not self.do("images", "--quiet", "--filter", f"reference={name}"):
            subprocess.run(["mmdebstrap", "--quiet", "--variant=minbase", suite, tar], check=True)
            empty = self.do("from", "scratch")
            self.do("add", "--quiet", empty, str(tar), "/")
            self.do("commit", "--quiet", "--rm", empty, name)
            tar.unlink()
        return name

    def image(self, base: str, variant: str) -> str:
        """By `make image`."""
        flags = ["--isolation", "chroot", "--layers=false", *self._pip_flags()]
        settings = {"BUILDER": self.command, "BUILD_FLAGS": flags, "BASE": [base], "VARIANT": [variant]}
        words = [f"{name}={shlex.join(value)}" for name, value in settings.items()]
        subprocess.run(["make", "image", *words], cwd=ROOT, check=True, stdout=sys.stderr)
        return f"localhost/bough:{variant}"

    def _pip_flags(self) -> list[str]:
        """Volumes of the build: what pip is told here, and the files that this names."""
        lines, volumes = ["[global]"], []
        if certificates := os.environ.get("PIP_CERT"):
            lines.append(f"cert = {CERTIFICATES}")
            volumes.append(f"{certificates}:{CERTIFICATES}:ro")
        if index := os.environ.get("PIP_INDEX_URL"):
            lines.append(f"index-url = {index}")
        if links := os.environ.get("PIP_FIND_LINKS", "").split():
            lines.append(f"find-links = {' '.join(links)}")
            volumes += [f"{link}:{link}:ro" for link in links if Path(link).is_dir()]
        config = self._folder / "pip.conf"
        config.write_text("\n".join(lines) + "\n")
        return [word for volume in (*volumes, f"{config}:/etc/pip.conf:ro") for word in ("--volume", volume)]

    @contextmanager
    def container(self, image: str) -> Iterator[str]:
        name = self.do("from", "--pull-never", image)
        try:
            yield name
        finally:
            self.do("rm", name)

    def run(self, container: str, *words: str, models: Path) -> list[str]:
        """The command that runs another in a container."""
        volumes = ["--volume", f"{models}:/cache/models:ro"] if models.is_dir() else []
        return [*self.command, "run", "--isolation", "chroot", *volumes, container, "--", *words]


def serve_once(builder: Builder, image: str, models: Path) -> dict[str, Any]:
    """What a container of the image answers, and how it ends when it is told to stop."""
    config = json.loads(builder.do("inspect", "--type", "image", image))["OCIv1"]["config"]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    began = time.monotonic()
    with builder.container(image) as container:
        words = builder.run(container, *config["Entrypoint"], *config["Cmd"], "--port", str(port), models=models)
        process = subprocess.Popen(words, stdout=sys.stderr)
        try:
            _wait_until_healthy(process, port)
            started_s = time.monotonic() - began
            answer = httpx.post(f"http://127.0.0.1:{port}/v1/chat/completions", json=QUESTION, timeout=START_S)
            answer.raise_for_status()
            users = {str(child.uids().real) for child in _of_image(process)}
            python = subprocess.check_output(builder.run(container, "python", "--version", models=models), text=True)
        finally:
            for child in _of_image(process)[:1]:  # what it started ends with it
                child.send_signal(signal.Signals[config["StopSignal"]])
            ended = process.wait(STOP_S)
    said = answer.json()["choices"][0]["message"]["content"]
    facts = {"python": python.strip(), "ready_s": round(started_s, 1), "answer": said, "users": sorted(users)}
    return {"image": image, **facts, "exit_code": ended}


def _wait_until_healthy(process: subprocess.Popen[Any], port: int) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise SystemExit(f"The server ended with code {process.returncode} before it was ready.")
        try:
            if httpx.get(f"http://127.0.0.1:{port}/health").status_code == 200:
                return
        except httpx.TransportError:
            time.sleep(POLL_S)
    raise SystemExit(f"The server was not ready after {START_S} s.")


def _of_image(process: subprocess.Popen[Any]) -> list[psutil.Process]:
    """What runs in the container, its command first; not buildah's own processes around it."""
    if process.poll() is not None:
        return []
    below = psutil.Process(process.pid).children(recursive=True)
    return [each for each in below if not each.cmdline()[0].startswith("buildah")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--variant", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--suite", default="trixie", help="of Debian, for the base")
    parser.add_argument("--folder", type=Path, help="keeps base and image; without it both are removed")
    parser.add_argument("--storage-driver", default="overlay", help="vfs where overlays cannot be mounted")
    parser.add_argument("--models", type=Path, default=home() / "models", help="models that the server may read")
    given = parser.parse_args()
    folder = given.folder or Path(tempfile.mkdtemp(prefix="bough-image-"))
    folder.mkdir(parents=True, exist_ok=True)
    builder = Builder(folder.absolute(), given.storage_driver)
    try:
        image = builder.image(builder.base(given.suite), given.variant)
        print(json.dumps(serve_once(builder, image, given.models), indent=2))
    finally:
        if given.folder is None:
            builder.do("rm", "--all")
            shutil.rmtree(folder)


if __name__ == "__main__":
    main()
