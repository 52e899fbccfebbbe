"""Hosts that Ray chooses: a placement group with a bundle for each, the first where this process is, and in each other
one an actor that is the node. Everything goes when the engine does."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from typing import Any

from bough.core.errors import BoughError, EngineDeadError, ResourceError, SettingsError
from bough.core.settings import Settings

LOOK_S = 1.0  # between two looks at the actors


class Node:
    """In a process of Ray's. Its ranks are children of that process and leave with it, however it goes."""

    def gpus(self) -> str:
        return os.environ.get("CUDA_VISIBLE_DEVICES", "")

    def run(self, flat: dict[str, Any], key: str) -> str:
        """Why it has ended; empty: in order."""
        from bough.launch.node_process import run_node

        try:
            run_node(Settings.from_flat(flat), key)
        except BoughError as error:
            return str(error)
        return ""


class RayNodes:
    def __init__(self, settings: Settings, cleanup: contextlib.ExitStack) -> None:
        try:
            import ray
            from ray.util import get_node_ip_address, placement_group, remove_placement_group
            from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
        except ImportError:
            raise SettingsError("--use-ray needs Ray: pip install 'bough[ray]'.") from None
        if not ray.is_initialized():
            try:
                ray.init(address=os.environ.get("RAY_ADDRESS", "auto"), logging_level="warning")
            except ConnectionError as error:
                raise SettingsError(
                    f"--use-ray: {error} Start one with `ray start`, or name it in RAY_ADDRESS."
                ) from None
            cleanup.callback(ray.shutdown)
        self._ray, self._settings = ray, settings
        self.host = str(get_node_ip_address())
        device, here = settings.model.device, float(settings.parallel.ranks_per_node)
        gpus = here if device == "cuda" or (device == "auto" and ray.cluster_resources().get("GPU")) else 0.0
        bundle = {"CPU": here} | ({"GPU": gpus} if gpus else {})
        bundles = [bundle | {f"node:{self.host}": 0.001}, *[bundle] * (settings.parallel.nnodes - 1)]
        group = placement_group(bundles, strategy="STRICT_SPREAD")
        cleanup.callback(remove_placement_group, group)
        if not group.wait(settings.process.start_timeout_s):
            raise ResourceError(f"--use-ray: the cluster has no room for {bundles}, each on a host of its own.")

        def actor(number: int) -> Any:
            place = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=number)
            kind = ray.remote(Node).options(num_cpus=here, num_gpus=gpus, scheduling_strategy=place)
            made = kind.remote()
            cleanup.callback(ray.kill, made)
            return made

        self._actors = [actor(number) for number in range(1, len(bundles))]
        if gpus:  # this process is outside of Ray and takes those of the first bundle
            self._holder = actor(0)
            os.environ["CUDA_VISIBLE_DEVICES"] = ray.get(self._holder.gpus.remote())
        self._over = threading.Event()
        cleanup.callback(self._over.set)

    def start(self, address: str, key: str, fail: Callable[[BoughError], None]) -> None:
        """Has the actors join at the address; `fail` hears of one that Ray loses or cannot start."""
        flat = self._settings.to_flat()
        flat |= {"use_ray": False, "distributed_executor_backend": None, "dist_init_addr": address}
        runs = {
            actor.run.remote(flat | {"node_rank": number}, key): number
            for number, actor in enumerate(self._actors, start=1)
        }

        def watch() -> None:
            ended: list[Any] = []
            while not self._over.is_set() and not ended:
                ended, _ = self._ray.wait(list(runs), timeout=LOOK_S)
            if not self._over.is_set():
                try:
                    reason = self._ray.get(ended[0]) or "it left."
                except self._ray.exceptions.RayError as error:
                    reason = str(error)
                fail(EngineDeadError(f"Node {runs[ended[0]]} has ended: {reason}"))

        threading.Thread(target=watch, daemon=True, name="bough-ray").start()
