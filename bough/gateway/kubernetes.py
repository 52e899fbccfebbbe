"""Workers from Kubernetes: every running pod with the given labels is one.

Pods are listed, then watched; when a watch ends they are listed again and compared. While the API server cannot be
reached nothing changes. Health checks decide whether a pod is healthy.
"""

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

from bough.core.errors import SettingsError
from bough.gateway.registry import DISCOVERED, Registry, normal_url
from bough.gateway.worker import worker_id

WATCH_S = 300  # the server ends a watch after that, and the pods are listed again
GRACE_S = 30  # for its end to arrive
SHORTEST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 30.0  # also after a watch that ended well: some end at once

log = logging.getLogger(__name__)


def url_of(pod: Any, port: int) -> str | None:
    """None while the pod cannot take requests."""
    if pod.metadata.deletion_timestamp is not None or pod.status is None:
        return None
    if pod.status.phase != "Running" or not pod.status.pod_ip:
        return None
    address: str = pod.status.pod_ip
    return f"http://[{address}]:{port}" if ":" in address else f"http://{address}:{port}"


class KubernetesPods:
    """Adds and removes workers. `selector` holds `key=value` labels that must all match; without a namespace all are
    searched. Uses the pod's service account in a cluster, the user's kubeconfig elsewhere."""

    def __init__(self, registry: Registry, selector: Sequence[str], port: int, namespace: str | None = None) -> None:
        for label in selector:
            if "=" not in label:
                raise SettingsError(f"--selector takes labels such as app=bough, got {label!r}.")
        if not selector:
            raise SettingsError("--service-discovery needs a --selector, such as app=bough.")
        self._api = _import_client()
        self._registry = registry
        self._selector = ",".join(selector)
        self._namespace = namespace
        self._port = port
        self._failures = 0  # in a row
        self._urls: dict[str, str] = {}  # by the pod's unique id: its name and address may come again

    async def follow(self) -> None:
        from aiohttp import ClientError

        configuration = await self._configuration()
        async with self._api.client.ApiClient(configuration) as connection:
            pods = self._api.client.CoreV1Api(connection)
            while True:
                try:
                    await self._list_and_watch(pods)
                    self._failures = 0
                except (self._api.client.exceptions.ApiException, OSError, ClientError) as error:
                    if getattr(error, "status", None) != 410:  # the place in the history is gone: list again
                        self._failures += 1
                        log.warning("the Kubernetes API cannot be watched, trying again: %s", _reason(error))
                await asyncio.sleep(min(LONGEST_PAUSE_S, SHORTEST_PAUSE_S * 2**self._failures))

    async def _configuration(self) -> Any:
        configuration = self._api.client.Configuration()
        try:
            try:
                self._api.config.load_incluster_config(client_configuration=configuration)
            except self._api.config.ConfigException:
                await self._api.config.load_kube_config(client_configuration=configuration)
        except (self._api.config.ConfigException, OSError) as error:
            problem = f"there is neither a service account nor a usable kubeconfig ({error})"
            raise SettingsError(f"--service-discovery finds no Kubernetes cluster: {problem}.") from None
        return configuration

    async def _list_and_watch(self, pods: Any) -> None:
        everywhere = self._namespace is None
        listing = pods.list_pod_for_all_namespaces if everywhere else pods.list_namespaced_pod
        where = () if everywhere else (self._namespace,)
        found = await listing(*where, label_selector=self._selector, _request_timeout=GRACE_S)
        for gone in self._urls.keys() - {pod.metadata.uid for pod in found.items}:
            self._place(gone, None)
        for pod in found.items:
            self._place(pod.metadata.uid, url_of(pod, self._port))
        async with self._api.watch.Watch() as watch:
            events = watch.stream(
                listing,
                *where,
                label_selector=self._selector,
                resource_version=found.metadata.resource_version,
                timeout_seconds=WATCH_S,
                _request_timeout=WATCH_S + GRACE_S,
            )
            async for event in events:
                pod = event["object"]
                if event["type"] in ("ADDED", "MODIFIED"):
                    self._place(pod.metadata.uid, url_of(pod, self._port))
                elif event["type"] == "DELETED":
                    self._place(pod.metadata.uid, None)

    def _place(self, uid: str, url: str | None) -> None:
        """A pod is a worker at this URL, or none. Never removes a worker from another source."""
        before = self._urls.pop(uid, None)
        if url is not None:
            self._urls[uid] = url
        if before == url:
            return
        self._failures = 0
        worker = None if before is None else self._registry.get(worker_id(normal_url(before)))
        if worker is not None and worker.source == DISCOVERED:
            self._registry.remove(worker)
        if url is not None:
            self._registry.add(url, source=DISCOVERED)


def _import_client() -> Any:
    try:
        import kubernetes.aio.config
        import kubernetes.aio.watch
        from kubernetes.aio import client
    except ImportError:
        text = "--service-discovery needs the Kubernetes client; install it with `pip install 'bough[kubernetes]'`."
        raise SettingsError(text) from None
    _ = client.CoreV1Api  # loading it takes a second, and requests must not wait for that
    return kubernetes.aio


def _reason(error: Exception) -> str:
    status, reason = getattr(error, "status", None), getattr(error, "reason", None)
    return f"{status} {reason}" if status else str(error) or type(error).__name__
