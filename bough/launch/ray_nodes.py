"""Hosts that Ray chooses: a placement group with a bundle for each, the first where this process is, and in each other
one an actor that is the node. Everything goes when the engine does."""

import contextlib
import logging
import os
import socket
import threading
from collections.abc import Callable
from typing import Any

from bough.core.errors import BoughError, EngineDeadError, ResourceError, SettingsError
from bough.core.settings import Settings
from bough.messages.channels import split_address

log = logging.getLogger(__name__)

CONNECT_S = 5.0  # until a host that does not answer counts as absent


class Node:
    """In a process of Ray's. Its ranks are children of that process and leave with it, however it goes."""

    def run(self, flat: dict[str, Any], key: str) -> None:
        from bough.launch.node_process import run_node

        run_node(Settings.from_flat(flat), key)


class RayNodes:
    def __init__(self, settings: Settings, cleanup: contextlib.ExitStack) -> None:
        try:
            import ray
            from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy as Place

            if not ray.is_initialized():
                ray.init(address=_find_cluster(), logging_level="warning")
                cleanup.callback(ray.shutdown)
        except ImportError:
            raise SettingsError("--use-ray needs Ray: pip install 'bough[ray]'.") from None
        except (OSError, ValueError) as error:
            raise SettingsError(f"--use-ray: {error} Start one with `ray start`, or name it in RAY_ADDRESS.") from None
        self._ray, self._settings, self._over = ray, settings, threading.Event()
        host = str(ray.util.get_node_ip_address())
        self.address = f"{host}:0"  # a free port
        device, here = settings.model.device, settings.parallel.ranks_per_node
        gpus = here if device == "cuda" or (device == "auto" and ray.cluster_resources().get("GPU")) else 0
        bundle = {"CPU": here} | ({"GPU": gpus} if gpus else {})
        bundles = [bundle | {f"node:{host}": 0.001}, *[bundle] * (settings.parallel.nnodes - 1)]
        group = ray.util.placement_group(bundles, strategy="STRICT_SPREAD")
        cleanup.callback(ray.util.remove_placement_group, group)
        if not group.wait(settings.process.start_timeout_s):
            raise ResourceError(f"--use-ray: the cluster has no room for {bundles}, each on a host of its own.")
        places = [Place(group, i) for i in range(len(bundles))]
        options = [{"num_cpus": here, "num_gpus": gpus, "scheduling_strategy": place} for place in places]
        self._actors = [ray.remote(Node).options(**each).remote() for each in options[1:]]
        for actor in self._actors:
            cleanup.callback(ray.kill, actor)
        cleanup.callback(self._over.set)
        if gpus:  # this process is outside of Ray and takes those of the first bundle
            visible = ray.remote(os.getenv).options(**options[0]).remote("CUDA_VISIBLE_DEVICES", "")
            os.environ["CUDA_VISIBLE_DEVICES"] = ray.get(visible)

    def start(self, address: str, key: str, fail: Callable[[BoughError], None]) -> None:
        """Has the actors join at the address; `fail` hears of one that Ray loses or cannot start."""
        flat = self._settings.to_flat()
        flat |= {"use_ray": False, "distributed_executor_backend": None, "dist_init_addr": address}
        runs = [actor.run.remote(flat | {"node_rank": i}, key) for i, actor in enumerate(self._actors, start=1)]

        def watch() -> None:
            ended: list[Any] = []
            while not self._over.is_set() and not ended:
                ended, _ = self._ray.wait(runs, timeout=1.0)
            if not self._over.is_set():
                try:
                    reason = self._ray.get(ended[0]) or "it left."
                except self._ray.exceptions.RayError as error:
                    reason = getattr(error, "cause", error)
                fail(EngineDeadError(f"Node {runs.index(ended[0]) + 1} has ended: {reason}"))

        threading.Thread(target=watch, daemon=True, name="bough-ray").start()


def _find_cluster() -> str:
    """The address that is stated, or the word for what `ray start` has left on this host. Somebody answers there: Ray
    itself would try for minutes, and in silence."""
    from ray._private.services import canonicalize_bootstrap_address

    stated = os.environ.get("RAY_ADDRESS") or "auto"
    found: str | None = None if "://" in stated else canonicalize_bootstrap_address(stated)
    if found is None:  # Ray's client, or a cluster that is begun here
        return stated
    log.info("joining the Ray cluster at %s", found)
    try:
        socket.create_connection(split_address(found), CONNECT_S).close()
    except OSError as error:
        left = " Ray's file on this host names it; `ray stop` removes that." if stated == "auto" else ""
        raise ConnectionError(f"no Ray cluster answers at {found} ({error}).{left}") from None
    return stated
