"""Hosts of one engine without ranks: who may join, and how each side hears of the other's end."""

from __future__ import annotations

import contextlib
import socket
import sys
import threading
import types
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bough.core.errors import EngineDeadError, ModelError, SettingsError
from bough.core.parallel_settings import ParallelSettings
from bough.core.settings import Settings
from bough.launch import nodes
from bough.launch.engine_processes import EngineProcesses
from bough.launch.head import Head, RayNodes
from bough.launch.nodes import NodeLink, check_nodes, facts_of
from bough.launch.spec import of_groups, replica_specs
from bough.launch.supervisor import Supervisor
from bough.loader.locate import ModelFiles, fingerprint
from bough.messages.channels import Addresses, split_address

KEY = "k" * 32
PATIENCE_S = 30.0
LOOPBACK = "127.0.0.1"


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(nodes.KEY_VARIABLE, KEY)


@pytest.fixture
def files(tmp_path: Path) -> ModelFiles:
    config, weights = tmp_path / "config.json", tmp_path / "model.safetensors"
    config.write_text("{}")
    weights.write_bytes(bytes(range(256)) * 1000)
    return ModelFiles("tiny", tmp_path, safetensors=(weights,), config=config)


class Deaths:
    """What the owner of a supervisor hears."""

    def __init__(self) -> None:
        self._heard: list[EngineDeadError] = []
        self._event = threading.Event()
        self.supervisor = Supervisor()
        self.supervisor.on_death = self._hear

    def _hear(self, error: EngineDeadError) -> None:
        self._heard.append(error)
        self._event.set()

    def wait(self) -> str:
        assert self._event.wait(PATIENCE_S)
        assert len(self._heard) == 1
        return str(self._heard[0])


class FirstHost:
    def __init__(self, files: ModelFiles, cleanup: contextlib.ExitStack, placed: bool = True, **settings: Any) -> None:
        parallel = {"tp_size": 4, "nnodes": 2, "dist_init_addr": f"{LOOPBACK}:0", **settings}
        self.deaths = Deaths()
        head = self.head = Head(Settings.from_flat(parallel), files, cleanup)
        if placed:
            self.addresses = head.place(Addresses.in_folder(files.folder, 1, parallel["tp_size"]))
            head.watch(self.deaths.supervisor)
        endpoint = head._socket.getsockopt_string(nodes.zmq.LAST_ENDPOINT)
        self.settings = Settings.from_flat(
            parallel
            | {"node_rank": 1, "dist_init_addr": endpoint.removeprefix("tcp://"), "start_timeout_s": PATIENCE_S}
        )
        self._cleanup = cleanup

    def link(self, settings: Settings | None = None, key: str = KEY) -> NodeLink:
        link = NodeLink(settings or self.settings, key)
        self._cleanup.callback(link.close)
        return link


@pytest.fixture
def cleanup() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as stack:
        yield stack


@pytest.fixture
def first(files: ModelFiles, cleanup: contextlib.ExitStack) -> FirstHost:
    return FirstHost(files, cleanup)


def follow(link: NodeLink) -> tuple[Deaths, threading.Thread]:
    deaths = Deaths()
    thread = threading.Thread(target=link.follow, args=(deaths.supervisor, lambda: None), daemon=True)
    thread.start()
    return deaths, thread


def test_a_host_that_joins_learns_where_the_ranks_meet(first: FirstHost, files: ModelFiles) -> None:
    assert first.link().join(files) == first.addresses
    near, *far = first.addresses.ranks
    assert near.startswith("ipc://")
    assert len(far) == 2 and all(address.startswith(f"tcp://{LOOPBACK}:") for address in far)
    assert {*far, first.addresses.store, first.addresses.results} == set(first.head._listeners)


def test_an_end_in_order_is_told(first: FirstHost, files: ModelFiles) -> None:
    link = first.link()
    link.join(files)
    deaths, thread = follow(link)
    first.deaths.supervisor.expect_endings()
    thread.join(PATIENCE_S)
    assert not thread.is_alive() and deaths.supervisor.error is None


def test_the_first_hosts_death_is_told_with_its_reason(first: FirstHost, files: ModelFiles) -> None:
    link = first.link()
    link.join(files)
    deaths, _ = follow(link)
    first.deaths.supervisor.fail(EngineDeadError("x"), "The scheduler was killed.")
    assert deaths.wait() == "The first host has ended: The scheduler was killed."


def test_another_hosts_death_is_told_with_its_reason_and_kind(first: FirstHost, files: ModelFiles) -> None:
    link = first.link()
    link.join(files)
    deaths, _ = follow(link)
    deaths.supervisor.fail(ModelError("The file is damaged."), "long text")
    assert first.deaths.wait() == "Node 1 has ended: The file is damaged."
    assert isinstance(first.deaths.supervisor.error, ModelError)


def test_a_host_that_is_told_to_stop_says_so(first: FirstHost, files: ModelFiles) -> None:
    link = first.link()
    link.join(files)

    def stop() -> None:
        raise SystemExit(143)

    with pytest.raises(SystemExit):
        link.follow(Deaths().supervisor, stop)
    assert first.deaths.wait() == "Node 1 has ended: It was told to stop."


def test_a_host_that_vanishes_has_gone(first: FirstHost, files: ModelFiles) -> None:
    gone = NodeLink(first.settings, KEY)
    gone.join(files)
    gone.close()
    assert first.deaths.wait() == "Node 1 has gone: its connection has ended."


def test_a_first_host_that_vanishes_has_gone(first: FirstHost, files: ModelFiles) -> None:
    link = first.link()
    link.join(files)
    deaths, _ = follow(link)
    first.head._reaches = lambda peer, message: True  # type: ignore[method-assign]  # it goes without a word
    first.deaths.supervisor.expect_endings()
    assert deaths.wait() == "The first host has ended: its connection was lost."


OTHER_SETTINGS = {
    "--page-size": {"page_size": 16},
    "--max-total-tokens": {"max_total_tokens": 77},
    "--dtype": {"dtype": "bfloat16"},
}


@pytest.mark.parametrize("flag", OTHER_SETTINGS)
def test_hosts_with_other_settings_are_refused_on_both_sides(first: FirstHost, files: ModelFiles, flag: str) -> None:
    other = Settings.from_flat(first.settings.to_flat() | OTHER_SETTINGS[flag])
    with pytest.raises(SettingsError, match=f"Hosts must not differ in {flag}: node 1 has "):
        first.link(other).join(files)
    assert f"differ in {flag}" in first.deaths.wait()


def test_what_belongs_to_a_host_may_differ(first: FirstHost, files: ModelFiles) -> None:
    own = {"model_path": "/another/disk", "cpu_threads": 3, "port": 1, "host": "::1", "log_level": "error"}
    assert first.link(Settings.from_flat(first.settings.to_flat() | own)).join(files) == first.addresses


def test_another_model_is_refused(first: FirstHost, files: ModelFiles) -> None:
    weights = files.folder / "tuned.safetensors"
    content = bytearray(files.safetensors[0].read_bytes())
    content[len(content) // 2] ^= 1  # a number of the same shape
    weights.write_bytes(content)
    other = replace(files, safetensors=(weights,))
    assert fingerprint(other) != fingerprint(files)
    with pytest.raises(SettingsError, match=r"differ in the files of the model: node 1 has \w+, the first \w+"):
        first.link().join(other)


def test_another_version_is_refused(first: FirstHost, files: ModelFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes, "__version__", "9.9.9")
    with pytest.raises(SettingsError, match=r"differ in Bough's version: node 1 has 9\.9\.9, the first "):
        first.link().join(files)


def test_a_node_rank_cannot_join_twice(first: FirstHost, files: ModelFiles) -> None:
    first.link().join(files)
    with pytest.raises(SettingsError, match="Two hosts have --node-rank 1"):
        first.link().join(files)


def test_a_host_without_the_key_learns_nothing(first: FirstHost, files: ModelFiles) -> None:
    with pytest.raises(SettingsError, match="refuses this one: give both the same BOUGH_CLUSTER_KEY"):
        first.link(key="x" * 32).join(files)
    assert first.deaths.supervisor.error is None
    assert first.link().join(files) == first.addresses


def test_noise_on_the_port_disturbs_nobody(first: FirstHost, files: ModelFiles) -> None:
    port = split_address(first.settings.parallel.dist_init_addr or "")[1]
    for noise in (b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 1000, b""):
        with socket.create_connection((LOOPBACK, port)) as stranger:
            stranger.sendall(noise)
    assert first.link().join(files) == first.addresses
    assert first.deaths.supervisor.error is None


GROUPS = {"tp_size": 4, "dp_size": 4, "enable_dp_attention": True}


def grouped(files: ModelFiles, cleanup: contextlib.ExitStack, **settings: Any) -> FirstHost:
    return FirstHost(files, cleanup, placed=False, **GROUPS, **settings)


def test_attention_groups_are_placed_when_their_hosts_say_where_they_are(
    files: ModelFiles, cleanup: contextlib.ExitStack, tmp_path: Path
) -> None:
    first, (there, elsewhere) = grouped(files, cleanup), (tmp_path / "there", tmp_path / "elsewhere")
    there.mkdir()
    elsewhere.mkdir()
    first.head.watch(first.deaths.supervisor)
    link, far = first.link(), ("tcp://10.0.0.2:4711", "tcp://10.0.0.2:4712")
    with ThreadPoolExecutor(1) as threads:
        placing = threads.submit(first.head.place_groups, there, 2)
        told = link.join(files, far)
        here = placing.result(PATIENCE_S)
    assert [each.scheduler for each in here] == list(told.schedulers) and told.schedulers[2:] == far
    assert [bool(each.detokenizer) for each in here] == [True, True, False, False]  # others end their own
    assert all(each.clients == told.clients and each.store == told.store for each in here)
    assert {*told.clients, told.store, *told.schedulers[:2]} == set(first.head.listeners)
    beyond = of_groups(elsewhere, told, range(2, 4), first.settings.parallel)
    assert [each.scheduler for each in beyond] == list(told.schedulers)
    assert all(str(elsewhere) in each.detokenizer for each in beyond[2:])
    # Of a scheduler's messages, only its own way in may be listened at by it; it connects to all others.
    specs = [replica_specs(first.settings, here, number, files, "x:y")[0] for number in (0, 1)]
    equipped = [set(first.head.equip(spec).listeners) for spec in specs]
    assert equipped == [{here[0].scheduler, told.store}, {here[1].scheduler}]
    _, following = follow(link)
    assert first.head.announced() == []  # it has no children here, so all are ready
    first.deaths.supervisor.expect_endings()
    following.join(PATIENCE_S)
    assert not following.is_alive()


def test_a_host_of_attention_groups_that_does_not_come_is_an_error(
    files: ModelFiles, cleanup: contextlib.ExitStack, tmp_path: Path
) -> None:
    first = grouped(files, cleanup, start_timeout_s=1.0)
    first.head.watch(first.deaths.supervisor)
    with pytest.raises(EngineDeadError, match=r"1 of 1 other hosts did not come in time \(1 s, --start-timeout-s\)"):
        first.head.place_groups(tmp_path, 1)
    assert "did not come in time" in first.deaths.wait()


def test_another_host_than_the_first_has_no_engine(cleanup: contextlib.ExitStack) -> None:
    there = {"nnodes": 2, "tp_size": 2, "node_rank": 1, "dist_init_addr": "a:1"}
    with pytest.raises(SettingsError, match="start the others with `bough serve --node-rank N`"):
        EngineProcesses(Settings.from_flat(there), cleanup)


@pytest.mark.parametrize(
    "frames", [[b"\xc1"], [b"\x81\xa4type\xa1\xff"], [b"", b"\xc1"]], ids=["noise", "no UTF-8", "two"]
)
def test_a_host_that_speaks_another_version_ends_the_engine(
    first: FirstHost, files: ModelFiles, frames: list[bytes]
) -> None:
    link = first.link()
    link.join(files)
    link._socket.send_multipart(frames)
    assert first.deaths.wait().startswith("Node 1 has ended: it sent what only another version knows")


def test_the_first_host_that_does_not_come_is_an_error(files: ModelFiles, first: FirstHost) -> None:
    nowhere = first.settings.to_flat() | {"dist_init_addr": f"{LOOPBACK}:1", "start_timeout_s": 1.0}
    with pytest.raises(EngineDeadError, match=r"did not answer at 127\.0\.0\.1:1 in time"):
        first.link(Settings.from_flat(nowhere)).join(files)


def test_an_address_of_another_machine_is_refused(files: ModelFiles, cleanup: contextlib.ExitStack) -> None:
    with pytest.raises(SettingsError, match=r"--dist-init-addr 192\.0\.2\.1:1234: cannot listen there"):
        FirstHost(files, cleanup, dist_init_addr="192.0.2.1:1234")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"node_rank": 1}, "--node-rank 1: with several hosts, say how many"),
        ({"nnodes": 2, "tp_size": 2, "dp_size": 2}, "--dp-size is for one host"),
        (
            {"nnodes": 2, "tp_size": 6, "dp_size": 3, "enable_dp_attention": True},
            "each of the 3 groups of --enable-dp-attention is on one host; use a --dp-size that is a multiple of 2",
        ),
        ({"nnodes": 2, "tp_size": 3}, "\\(3\\) cannot be spread evenly"),
        ({"nnodes": 2, "tp_size": 2}, "needs --dist-init-addr HOST:PORT"),
        ({"nnodes": 2, "tp_size": 2, "dist_init_addr": "localhost"}, "needs --dist-init-addr HOST:PORT"),
        ({"use_ray": True}, "--use-ray needs --nnodes above 1"),
        ({"distributed_executor_backend": "ray", "nnodes": 2, "tp_size": 2, "node_rank": 1}, "neither --node-rank nor"),
    ],
)
def test_what_describes_no_hosts_is_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        check_nodes(ParallelSettings(**given))


@pytest.mark.parametrize("key", ["", "short"])
def test_hosts_need_a_key(monkeypatch: pytest.MonkeyPatch, key: str) -> None:
    monkeypatch.setenv(nodes.KEY_VARIABLE, key)
    with pytest.raises(SettingsError, match=r"one secret .* BOUGH_CLUSTER_KEY; make one with `python -c"):
        check_nodes(ParallelSettings(nnodes=2, tp_size=2, dist_init_addr="a:1"))


def test_the_key_is_in_nothing_that_is_shown(files: ModelFiles) -> None:
    settings = Settings.from_flat({"nnodes": 2, "tp_size": 2, "dist_init_addr": "a:1"})
    shown = [settings.to_shown(), facts_of(settings, files)]
    assert KEY not in repr(shown)


def test_addresses_of_both_kinds() -> None:
    assert split_address("node-0.local:5000") == ("node-0.local", 5000)
    assert split_address("[fd00::1]:5000") == ("fd00::1", 5000)


@pytest.mark.parametrize("stated", [None, "192.0.2.9:6379"])
def test_a_ray_cluster_that_has_ended_is_told_at_once(
    stated: str | None, cleanup: contextlib.ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray's own search is played: it finds an address where nobody listens any more."""
    with socket.create_server(("127.0.0.1", 0)) as closed:
        address = f"127.0.0.1:{closed.getsockname()[1]}"
    parts = {
        "ray": {"is_initialized": lambda: False, "init": lambda **options: pytest.fail("it would try for minutes")},
        "ray.util": {},
        "ray.util.scheduling_strategies": {"PlacementGroupSchedulingStrategy": None},
        "ray._private": {},
        "ray._private.services": {"canonicalize_bootstrap_address": lambda found: address},
    }
    for name, members in parts.items():
        monkeypatch.setitem(sys.modules, name, module := types.ModuleType(name))
        vars(module).update(members)
    monkeypatch.delenv("RAY_ADDRESS", raising=False) if stated is None else monkeypatch.setenv("RAY_ADDRESS", stated)
    with pytest.raises(SettingsError, match=f"--use-ray: no Ray cluster answers at {address} .*refused") as told:
        RayNodes(Settings.from_flat({"use_ray": True, "nnodes": 2, "tp_size": 2}), cleanup)
    assert ("`ray stop` removes that" in str(told.value)) == (stated is None)
