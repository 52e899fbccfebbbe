"""One engine on two nodes of a real Ray cluster: its tokens, what is left behind, and the loss of a node."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from bough import Engine, EngineDeadError, SettingsError
from bough.core.errors import ResourceError
from tests.fakes.checkpoints import write_checkpoint
from tests.fakes.ranks import LLAMA
from tests.parity.engines import LocalEngine

ray = pytest.importorskip(
    "ray", reason="Ray (78 MB) is not installed where tests run by themselves; pip install 'bough[ray]' to run these"
)

PATIENCE_S = 60.0
GREEDY = {"temperature": 0.0, "max_new_tokens": 24, "ignore_eos": True}
SETTINGS = {"device": "cpu", "cpu_threads": 1, "skip_tokenizer_init": True, "max_total_tokens": 600}

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ray") / "llama"
    write_checkpoint(path, 3, **LLAMA)
    return path


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    from ray.cluster_utils import Cluster

    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    yield made
    made.shutdown()


def ranks() -> dict[str, psutil.Process]:
    """Those below Ray's actors, by title."""
    found = {}
    for process in psutil.process_iter():
        try:
            titles = [" ".join(each.cmdline()).strip() for each in (process, *process.parents()[:1])]
        except psutil.Error:  # it has left meanwhile
            continue
        if titles[0].startswith("bough::") and titles[-1].startswith("ray::"):
            found[titles[0]] = process
    return found


def test_ray_places_ranks_and_loses_a_node(cluster: Any, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    alone = LocalEngine(model, new=24, device="cpu", cpu_threads=1, attention_backend="torch", max_total_tokens=600)
    ((expected, _),) = alone.ask([5, 6, 7, 8])
    on_ray = {**SETTINGS, "tp_size": 2, "nnodes": 2, "distributed_executor_backend": "ray"}
    worker = cluster.add_node(num_cpus=1, node_ip_address="127.0.0.2")  # the address tells nodes apart
    with Engine(model, **on_ray) as engine:
        placed = ranks()
        assert list(placed) == ["bough::executor TP1"]
        assert engine.generate(input_ids=[5, 6, 7, 8], sampling_params=GREEDY)["output_ids"] == expected
        states = [each["state"] for each in ray.util.placement_group_table().values()]
        assert states == ["CREATED"]
    assert not ray.is_initialized()  # the engine had connected, and has let go
    assert not psutil.wait_procs(placed.values(), timeout=PATIENCE_S)[1]

    ray.init(address=cluster.address, logging_level="error")  # a caller's own connection stays
    try:
        states = [each["state"] for each in ray.util.placement_group_table().values()]
        assert states == ["REMOVED"]
        with Engine(model, **on_ray) as engine:
            placed = ranks()
            cluster.remove_node(worker, allow_graceful=False)
            with pytest.raises(EngineDeadError, match=r"Node 1 has (gone|ended)"):
                while True:
                    engine.generate(input_ids=[5, 6], sampling_params=GREEDY)
        assert not psutil.wait_procs(placed.values(), timeout=PATIENCE_S)[1]
        assert ray.is_initialized()
        with pytest.raises(ResourceError, match=r"--use-ray: the cluster has no room for .* each on a host of its own"):
            Engine(model, **on_ray, start_timeout_s=3.0)
    finally:
        ray.shutdown()


def test_without_a_cluster_ray_is_refused(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    with pytest.raises(SettingsError, match=r"--use-ray: no Ray cluster answers at .*:1 .* name it in RAY_ADDRESS"):
        Engine(model, **SETTINGS, tp_size=2, nnodes=2, use_ray=True)
