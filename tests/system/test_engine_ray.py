"""One engine on two nodes of a real Ray cluster: its tokens, what is left behind, and the loss of each part."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
from ray.cluster_utils import Cluster

from bough import Engine, EngineDeadError, SettingsError
from bough.core.errors import ResourceError
from tests.fakes.checkpoints import write_checkpoint
from tests.fakes.ranks import LLAMA
from tests.parity.engines import LocalEngine
from tests.system.sockets import tree_of

PATIENCE_S = 60.0
GREEDY = {"temperature": 0.0, "max_new_tokens": 24, "ignore_eos": True}
SETTINGS = {"device": "cpu", "cpu_threads": 1, "skip_tokenizer_init": True, "max_total_tokens": 600}
ON_RAY = {**SETTINGS, "tp_size": 2, "nnodes": 2, "distributed_executor_backend": "ray"}

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ray") / "llama"
    write_checkpoint(path, 3, **LLAMA)
    return path


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    yield made
    made.shutdown()


@pytest.fixture
def worker(cluster: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The cluster's second node, for one test."""
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    node = cluster.add_node(num_cpus=1, node_ip_address="127.0.0.2")  # the address tells nodes apart
    yield node
    if node in cluster.worker_nodes:
        cluster.remove_node(node, allow_graceful=False)


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


def wait_gone(processes: list[psutil.Process]) -> None:
    assert not psutil.wait_procs(processes, timeout=PATIENCE_S)[1]


def placements() -> list[str]:
    """The states of those that the cluster knows of."""
    return [each["state"] for each in ray.util.placement_group_table().values()]


@contextlib.contextmanager
def connected(cluster: Any) -> Iterator[None]:
    """A caller's own connection."""
    ray.init(address=cluster.address, logging_level="error")
    try:
        yield
    finally:
        ray.shutdown()


def generate_until_it_dies(engine: Engine, reason: str) -> None:
    with pytest.raises(EngineDeadError, match=reason):
        while True:
            engine.generate(input_ids=[5, 6], sampling_params=GREEDY)


def test_ray_places_ranks_and_loses_a_node(cluster: Any, worker: Any, model: Path) -> None:
    alone = LocalEngine(model, new=24, device="cpu", cpu_threads=1, attention_backend="torch", max_total_tokens=600)
    ((expected, _),) = alone.ask([5, 6, 7, 8])
    with Engine(model, **ON_RAY, check_ranks=True) as engine:
        placed = ranks()
        assert list(placed) == ["bough::executor TP1"]
        assert engine.generate(input_ids=[5, 6, 7, 8], sampling_params=GREEDY)["output_ids"] == expected
        assert placements() == ["CREATED"]
        cluster.remove_node(worker, allow_graceful=False)  # SIGKILL for all of Ray's processes there
        generate_until_it_dies(engine, r"Node 1 has (gone|ended)")
    wait_gone([*placed.values()])
    assert not ray.is_initialized()  # the engine had connected, and has let go
    with pytest.raises(ResourceError, match=r"--use-ray: the cluster has no room for .* each on a host of its own"):
        Engine(model, **ON_RAY, start_timeout_s=2.0)


@pytest.mark.long
def test_an_engine_that_is_closed_leaves_the_cluster_and_its_callers_connection_as_they_were(
    cluster: Any, worker: Any, model: Path
) -> None:
    with connected(cluster):
        with Engine(model, **ON_RAY) as engine:
            placed = ranks()
            assert len(engine.generate(input_ids=[5, 6], sampling_params=GREEDY)["output_ids"]) == 24
        wait_gone([*placed.values()])
        assert ray.is_initialized() and set(placements()) == {"REMOVED"}


@pytest.mark.long
def test_ray_places_attention_groups_whose_scheduler_is_missed(cluster: Any, worker: Any, model: Path) -> None:
    alone = LocalEngine(model, new=24, device="cpu", cpu_threads=1, attention_backend="torch", max_total_tokens=600)
    ((expected, _),) = alone.ask([5, 6, 7, 8])
    with Engine(model, **ON_RAY, dp_size=2, enable_dp_attention=True) as engine:
        placed = ranks()
        assert set(placed) == {"bough::scheduler DP1", "bough::detokenizer DP1"}
        for rank in (1, 0):
            output = engine.generate(input_ids=[5, 6, 7, 8], sampling_params=GREEDY, routed_dp_rank=rank)
            assert output["output_ids"] == expected and output["meta_info"]["dp_rank"] == rank
        placed["bough::scheduler DP1"].kill()
        generate_until_it_dies(
            engine, r"Node 1 has ended: The scheduler DP1 process \(pid \d+\) was killed by SIGKILL\."
        )
    wait_gone([*placed.values()])


KILLS = {  # and what callers are told
    "the rank": r"Node 1 has ended: The executor TP1 process \(pid \d+\) was killed by SIGKILL\.",
    "the actor": r"Node 1 has (gone|ended)",
    "the scheduler": r"The scheduler process \(pid \d+\) was killed by SIGKILL\.",
}


@pytest.mark.long
@pytest.mark.parametrize("victim", KILLS)
def test_a_killed_process_ends_the_engine_and_leaves_nothing_in_the_cluster(
    cluster: Any, worker: Any, model: Path, victim: str
) -> None:
    with connected(cluster):
        with Engine(model, **ON_RAY) as engine:
            (rank,) = ranks().values()
            actor, own = rank.parent(), tree_of(psutil.Process().pid)
            scheduler = next(each for each in own if " ".join(each.cmdline()).strip() == "bough::scheduler")
            assert actor is not None
            {"the rank": rank, "the actor": actor, "the scheduler": scheduler}[victim].kill()
            generate_until_it_dies(engine, KILLS[victim])
        wait_gone([rank, actor, scheduler])
        assert set(placements()) == {"REMOVED"}


def test_without_a_cluster_ray_is_refused(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    with pytest.raises(SettingsError, match=r"--use-ray: no Ray cluster answers at .*:1 .* name it in RAY_ADDRESS"):
        Engine(model, **SETTINGS, tp_size=2, nnodes=2, use_ray=True)
