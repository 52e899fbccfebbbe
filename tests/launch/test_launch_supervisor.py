"""Starting children: with the right package and nobody else's modules, and without leaving one behind."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import sysconfig
import threading
from pathlib import Path
from typing import Any

import psutil
import pytest
import zmq

import bough
from bough.core.child_environment import child_environment
from bough.core.errors import EngineDeadError
from bough.launch import supervisor as module
from bough.launch.client_end import Link
from bough.launch.spec import ChildSpec
from bough.launch.supervisor import Supervisor
from bough.loader.locate import locate
from bough.messages.channels import Addresses

HOME = str(Path(bough.__file__).resolve().parents[1])


def specs(model: Path, folder: Path) -> list[ChildSpec]:
    settings = {"load_format": "dummy", "skip_tokenizer_init": True, "log_level": "error"}
    addresses, files = Addresses.in_folder(folder), locate(str(model))
    return [ChildSpec(role, settings, addresses, files) for role in ("scheduler", "detokenizer")]


def test_the_child_finds_this_package_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)
    assert child_environment()["PYTHONPATH"] == HOME
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    assert child_environment()["PYTHONPATH"] == f"{HOME}{os.pathsep}/elsewhere"
    monkeypatch.setattr(sysconfig, "get_path", lambda name: HOME)
    assert child_environment()["PYTHONPATH"] == "/elsewhere"


def test_a_second_child_that_cannot_start_leaves_no_first_one(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[subprocess.Popen[bytes]] = []
    real = subprocess.Popen

    def popen(*arguments: Any, **options: Any) -> subprocess.Popen[bytes]:
        if started:
            raise OSError("no more processes")
        started.append(real(*arguments, **options))
        return started[0]

    monkeypatch.setattr(module.subprocess, "Popen", popen)
    supervisor = Supervisor()
    with pytest.raises(OSError, match="no more processes"):
        supervisor.start(specs(tiny_model, tmp_path))
    supervisor.close()
    assert len(started) == 1 and not psutil.pid_exists(started[0].pid)


def test_a_child_that_dies_at_once_is_reported_not_raised(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    supervisor = Supervisor()
    supervisor.start(specs(tiny_model, tmp_path))
    with pytest.raises(EngineDeadError, match="ended with exit code 1"):
        supervisor.wait_until_ready(60.0)
    assert supervisor.error is not None
    supervisor.close()


def test_a_child_that_leaves_when_endings_are_expected_has_not_died(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/true")
    deaths: list[EngineDeadError] = []
    supervisor = Supervisor()
    supervisor.on_death = deaths.append
    supervisor.expect_endings()
    others = threading.enumerate()  # among them may be the watchers of an engine that the session keeps
    supervisor.start(specs(tiny_model, tmp_path))
    for watcher in [thread for thread in threading.enumerate() if thread.name.startswith("watch-")]:
        if watcher not in others:
            watcher.join()
    supervisor.close()
    assert supervisor.error is None and not deaths


def test_a_link_can_be_closed_in_any_state(tmp_path: Path) -> None:
    Link([Addresses.in_folder(tmp_path)]).close()
    opened = Link([Addresses.in_folder(tmp_path)])
    opened.open()
    assert not opened.runs_here()
    opened.send_shutdown()
    opened.close()
    failing = Link([Addresses("ipc:///no/such/folder/s", "ipc:///no/such/folder/d", ("ipc:///no/such/folder/c",))])
    with pytest.raises(zmq.ZMQError, match="No such file"):
        failing.open()
    failing.send_shutdown()
    failing.close()


class FakeChild:
    """A child that is ready, and ends when it is told to."""

    def __init__(self, spec: ChildSpec) -> None:
        self.role, self.title, self.dp_rank, self.kind = spec.role, spec.title, spec.dp_rank, None
        self.ready: dict[str, Any] = {"title": spec.title}
        self.fatal, self.dismissed = None, False
        self.over = threading.Event()

    def send(self, spec: ChildSpec) -> None:
        pass

    def listen(self, on_ready: Any) -> int:
        self.over.wait(60.0)
        return 1

    def end_now(self, reason: str = "") -> None:
        self.reason = reason
        self.over.set()

    def describe_end(self, code: int) -> str:
        return f"The {self.title} process ended with exit code {code}."


@pytest.mark.parametrize("follows", [False, True])
def test_a_scheduler_that_leaves_in_order_has_died_unless_another_host_told_it_to(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, follows: bool
) -> None:
    class Leaving(FakeChild):
        def listen(self, on_ready: Any) -> int:
            return 1 - super().listen(on_ready)

    monkeypatch.setattr(module, "Child", Leaving)
    supervisor, ended, others = Supervisor(), threading.Event(), threading.enumerate()  # of engines of other tests
    supervisor.follows, supervisor.on_death = follows, lambda error: ended.set()
    supervisor.start(specs(tiny_model, tmp_path))
    supervisor.children[0].end_now()
    for thread in threading.enumerate():
        if thread.name == "watch-scheduler" and thread not in others:
            thread.join(60.0)
    assert ended.is_set() != follows


@pytest.mark.parametrize("hangs", [False, True])
def test_a_replica_ends_alone_and_the_last_one_ends_the_engine(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hangs: bool
) -> None:
    monkeypatch.setattr(module, "Child", FakeChild)
    lost: list[tuple[int, str]] = []
    deaths: list[str] = []
    news = threading.Semaphore(0)

    def on_loss(dp_rank: int, error: EngineDeadError) -> None:
        lost.append((dp_rank, str(error)))
        news.release()

    def on_death(error: EngineDeadError) -> None:
        deaths.append(str(error))
        news.release()

    supervisor = Supervisor()
    supervisor.on_death, supervisor.on_loss = on_death, on_loss
    both = [dataclasses.replace(spec, dp_rank=n) for n in (0, 1) for spec in specs(tiny_model, tmp_path)]
    supervisor.start([*both, dataclasses.replace(both[0], role="server", dp_rank=None)])
    titles = ["scheduler DP0", "detokenizer DP0", "scheduler DP1", "detokenizer DP1", "server"]
    assert [child.title for child in supervisor.children] == titles
    assert supervisor.wait_until_ready(60.0)["scheduler DP1"] == {"title": "scheduler DP1"}
    first, *_, last, server = supervisor.children
    supervisor.end_replica(1, "Replica 1 hangs.") if hangs else last.end_now()
    assert news.acquire(timeout=60.0)
    reason = "Replica 1 hangs." if hangs else "The detokenizer DP1 process ended with exit code 1."
    assert lost == [(1, reason)] and supervisor.error is None
    assert [child.over.is_set() for child in supervisor.children] == [False, False, True, True, False]  # type: ignore[attr-defined]
    first.end_now()
    assert news.acquire(timeout=60.0)
    assert deaths == ["The scheduler DP0 process ended with exit code 1."] and len(lost) == 1
    assert server.reason == deaths[0] and str(supervisor.error) == deaths[0]  # type: ignore[attr-defined]
