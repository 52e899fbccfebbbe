"""`bough gateway roll`: replaces the workers of a running gateway one by one, so that no request fails.

The gateway restarts workers that it has launched. Others are replaced by a worker at another address (`--replace OLD
NEW`), which must be in rotation before the old one is drained and removed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from bough.core.errors import BoughError
from bough.gateway.admin_client import AdminClient
from bough.gateway.registry import normal_url
from bough.gateway.worker import worker_id

POLL_S = 0.2
Say = Callable[[str], None]


def roll(
    client: AdminClient,
    replacements: Sequence[tuple[str, str]],
    timeout_s: float,
    say: Say = print,
    worker_api_key: str | None = None,
) -> None:
    """Without replacements, restarts the launched workers. `worker_api_key` is the key of the new workers: the gateway
    never sends its own to a worker that was added over HTTP."""
    if replacements:
        for old, new in replacements:
            _replace(client, normal_url(old), normal_url(new), worker_api_key, timeout_s, say)
        return
    mine = [worker for worker in client.workers() if worker["source"] == "launch"]
    if not mine:
        raise BoughError(
            "The gateway has started none of its workers, so it cannot restart them; start others and give "
            "`--replace OLD_URL NEW_URL` for each."
        )
    for worker in mine:
        _restart(client, worker["id"], timeout_s, say)


def _restart(client: AdminClient, identity: str, timeout_s: float, say: Say) -> None:
    before = client.worker(identity)
    say(f"{before['url']}: draining")
    client.call("POST", f"/workers/{identity}/restart")

    def replaced() -> bool:
        worker = client.worker(identity)
        return bool(worker["restarts"] > before["restarts"] and worker["state"] == "healthy")

    _wait(replaced, timeout_s, f"{before['url']} did not come back")
    say(f"{before['url']}: serves again")


def _replace(client: AdminClient, old: str, new: str, api_key: str | None, timeout_s: float, say: Say) -> None:
    if not any(worker["id"] == worker_id(old) for worker in client.workers()):
        raise BoughError(f"The gateway has no worker at {old}; `bough gateway top` shows those that it has.")
    added = client.call("POST", "/workers", {"url": new, "api_key": api_key})["id"]
    say(f"{new}: waiting for its checks")
    _wait(lambda: client.worker(added)["state"] == "healthy", timeout_s, f"{new} has not passed its checks")
    client.call("POST", f"/workers/{worker_id(old)}/drain")
    say(f"{old}: draining")
    _wait(lambda: not client.worker(worker_id(old))["load"], timeout_s, f"{old} still has requests")
    client.call("DELETE", f"/workers/{worker_id(old)}")
    say(f"{old}: removed")


def _wait(condition: Callable[[], bool], timeout_s: float, problem: str) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise BoughError(f"{problem} within {timeout_s:g} s (--timeout-s); the others are as they were.")
        time.sleep(POLL_S)
