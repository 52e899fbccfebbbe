"""Mooncake as a store: the real one where package and master are installed, and its answers otherwise."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from bough.core.errors import SettingsError
from bough.storage.backends import NO_ROOM, NOT_THERE, open_store
from bough.storage.store import HEADER, Store
from tests.storage.store_checks import KEYS, SIZE, check_store, content, empty


class Answers:
    """What Mooncake's store answers, of a cluster with room for some runs."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.room, self.lost, self.given = 6 * (SIZE + HEADER.size), False, ()

    def setup(self, *given: Any) -> int:
        self.given = given
        return -1 if given[-1] == "nowhere:1" else 0

    def _code(self, code: int) -> int:
        return -900 if self.lost else code

    def put_parts(self, key: str, *parts: Any) -> int:
        value = b"".join(map(bytes, parts))
        if sum(map(len, self.values.values())) + len(value) > self.room:
            return self._code(NO_ROOM)
        if not self.lost:
            self.values.setdefault(key, value)
        return self._code(0)

    def get_size(self, key: str) -> int:
        return self._code(len(self.values[key]) if key in self.values else NOT_THERE)

    def get_buffer(self, key: str) -> bytes | None:
        return self.values.get(key)

    def remove(self, key: str, force: bool = False) -> int:
        assert force, "what was read lately cannot be removed otherwise"
        return self._code(0 if self.values.pop(key, None) is not None else NOT_THERE)

    def remove_by_regex(self, pattern: str, force: bool = False) -> int:
        assert force
        gone = [key for key in self.values if re.match(pattern, key)]
        return self._code(len([self.values.pop(key) for key in gone]))

    def close(self) -> int:
        return 0


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> Answers:
    found, module = Answers(), ModuleType("mooncake.store")
    vars(module)["MooncakeDistributedStore"] = lambda: found
    monkeypatch.setitem(sys.modules, "mooncake", ModuleType("mooncake"))
    monkeypatch.setitem(sys.modules, "mooncake.store", module)
    return found


def test_what_it_answers_makes_a_store(answers: Answers) -> None:
    store = open_store(
        "mooncake", '{"master_server_address": "far:50051", "protocol": "rdma", "device_name": "mlx5_0"}'
    )
    assert answers.given[0] == "127.0.0.1" and answers.given[-3:] == ("rdma", "mlx5_0", "far:50051")
    check_store(store)
    answers.values["others"] = b"value"
    store.clear()
    assert answers.values == {"others": b"value"} and store.counts["failures"] == 0


def test_a_full_cluster_drops_runs_and_a_lost_master_is_a_failure(answers: Answers) -> None:
    store = open_store("mooncake")
    assert store.put(KEYS, [content(number) for number in range(8)]) == 6
    assert (store.counts["dropped"], store.counts["failures"]) == (2, 0)
    answers.lost = True
    assert store.get(KEYS[:1], empty(1)) == 0 and store.counts["failures"] == 1
    with pytest.raises(store.errors, match="remove_by_regex"):
        store.clear()


def test_a_master_that_is_not_there_and_a_missing_package_are_named(
    answers: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SettingsError, match="nowhere:1 cannot be joined"):
        open_store("mooncake", '{"master_server_address": "nowhere:1"}')
    monkeypatch.setitem(sys.modules, "mooncake.store", None)
    with pytest.raises(SettingsError, match=r"bough\[mooncake\]"):
        open_store("mooncake")


# ---- the real one


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    pytest.importorskip("mooncake.store", reason="Mooncake is not installed, or lacks a library", exc_type=ImportError)
    program = shutil.which("mooncake_master") or shutil.which("mooncake_master", path=str(Path(sys.executable).parent))
    if program is None:
        pytest.skip("no mooncake_master on this machine")
    ports = []
    for _ in range(2):
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            ports.append(found.getsockname()[1])
    log = (tmp_path_factory.mktemp("mooncake") / "log").open("wb")
    flags = [f"--rpc_port={ports[0]}", f"--metrics_port={ports[1]}"]
    master = subprocess.Popen([program, *flags], stdout=log, stderr=subprocess.STDOUT)
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", ports[0])) == 0:
                break
        time.sleep(0.05)
    options = {"master_server_address": f"127.0.0.1:{ports[0]}", "global_segment_size": 64 << 20}
    store = open_store("mooncake", json.dumps(options))
    yield store
    store.close()
    master.terminate()
    master.wait(10)
    log.close()


@pytest.mark.slow
def test_a_cluster_is_a_store(cluster: Store) -> None:
    check_store(cluster)


@pytest.mark.slow
def test_runs_of_megabytes_come_back_and_a_full_cluster_drops_them(cluster: Store) -> None:
    size, before = 4 << 20, cluster.counts["failures"]
    assert cluster.put(KEYS[:2], [content(number, size) for number in range(2)]) == 2
    buffers = empty(2, size)
    assert cluster.get(KEYS[:2], buffers) == 2 and np.array_equal(buffers[1], content(1, size))
    assert sum(cluster.put([key], [content(0, 16 << 20)]) for key in KEYS[2:]) < 6
    assert cluster.counts["dropped"] > 0 and cluster.counts["failures"] == before
    cluster.clear()
    assert cluster.get(KEYS[:1], empty(1, size)) == 0
