"""Workers from Kubernetes: every running pod with the given labels is one.

Lists the pods, then watches them; whenever the watch ends (the API server ends each after a while, or has forgotten the
place where it began) they are listed again and compared, so nothing is missed for good. An API server that cannot be
reached changes nothing: pods that ran still run. Whether a pod is well is for the gateway's own health checks to say;
one that is being deleted gets no more requests from that moment on.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from typing import Any

from bough.core.errors import SettingsError
from bough.gateway.discovery.interface import SourceChange

WATCH_S = 300  # the server ends a watch after that, and the pods are listed again
GRACE_S = 30  # for its end to arrive
SHORTEST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 30.0  # also after a watch that ended well: some end at once

log = logging.getLogger(__name__)


def url_of(pod: Any, port: int) -> str | None:
    """Where a pod can be asked; None while it cannot, or is about to go."""
    if pod.metadata.deletion_timestamp is not None or pod.status is None:
        return None
    if pod.status.phase != "Running" or not pod.status.pod_ip:
        return None
    address: str = pod.status.pod_ip
    return f"http://[{address}]:{port}" if ":" in address else f"http://{address}:{port}"


class PodTable:
    """Owns which pods are known, and says what a look at them changes."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._urls: dict[str, str] = {}  # by the pod's unique id: its name and address may come again

    def listed(self, pods: Iterable[Any]) -> Iterator[SourceChange]:
        """All pods there are."""
        pods = list(pods)
        there = {pod.metadata.uid for pod in pods}
        for gone in [uid for uid in self._urls if uid not in there]:
            yield SourceChange("remove", self._urls.pop(gone))
        for pod in pods:
            yield from self.seen(pod)

    def seen(self, pod: Any, deleted: bool = False) -> Iterator[SourceChange]:
        """One pod as it is now."""
        uid = pod.metadata.uid
        url = None if deleted else url_of(pod, self._port)
        before = self._urls.pop(uid, None)
        if before is not None and before != url:
            yield SourceChange("remove", before)
        if url is not None:
            self._urls[uid] = url
            if before != url:
                yield SourceChange("add", url)


class KubernetesPods:
    """A source of workers. `selector` holds `key=value` labels, all of which must match; without a namespace all are
    searched. In a cluster the pod's own service account is used, elsewhere the user's kubeconfig."""

    def __init__(self, selector: Sequence[str], port: int, namespace: str | None = None) -> None:
        for label in selector:
            if "=" not in label:
                raise SettingsError(f"--selector takes labels such as app=bough, got {label!r}.")
        if not selector:
            raise SettingsError("--service-discovery needs a --selector, such as app=bough.")
        self._api = import_client()
        self._selector = ",".join(selector)
        self._namespace = namespace
        self._pods = PodTable(port)

    async def changes(self) -> AsyncIterator[SourceChange]:
        failures = 0
        configuration = await self._configuration()
        async with self._api.client.ApiClient(configuration) as connection:
            pods = self._api.CoreV1Api(connection)
            while True:
                try:
                    async for change in self._once(pods):
                        failures = 0
                        yield change
                    failures = 0
                except (self._api.client.exceptions.ApiException, OSError, self._api.ClientError) as error:
                    if getattr(error, "status", None) != 410:  # the place in the history is gone: list again
                        failures += 1
                        log.warning("the Kubernetes API cannot be watched, trying again: %s", _reason(error))
                await asyncio.sleep(min(LONGEST_PAUSE_S, SHORTEST_PAUSE_S * 2**failures))

    async def _configuration(self) -> Any:
        configuration = self._api.client.Configuration()
        try:
            try:
                self._api.config.load_incluster_config(client_configuration=configuration)
            except self._api.config.ConfigException:
                await self._api.config.load_kube_config(client_configuration=configuration)
        except (self._api.config.ConfigException, OSError) as error:
            raise SettingsError(
                f"--service-discovery finds no Kubernetes cluster: there is neither a service account nor a usable "
                f"kubeconfig ({error})."
            ) from None
        return configuration

    async def _once(self, pods: Any) -> AsyncIterator[SourceChange]:
        """Lists, and watches until the watch ends."""
        everywhere = self._namespace is None
        listing = pods.list_pod_for_all_namespaces if everywhere else pods.list_namespaced_pod
        where = () if everywhere else (self._namespace,)
        found = await listing(*where, label_selector=self._selector, _request_timeout=GRACE_S)
        for change in self._pods.listed(found.items):
            yield change
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
                if event["type"] in ("ADDED", "MODIFIED", "DELETED"):
                    for change in self._pods.seen(event["object"], deleted=event["type"] == "DELETED"):
                        yield change


class _Client:
    """The parts of the official client that are used."""

    def __init__(self) -> None:
        from aiohttp import ClientError
        from kubernetes.aio import client, config, watch

        self.client: Any = client
        self.CoreV1Api: Any = client.CoreV1Api  # named here: loading it takes a second, and requests must not wait
        self.config: Any = config
        self.watch: Any = watch
        self.ClientError = ClientError


def import_client() -> _Client:
    try:
        return _Client()
    except ImportError:
        raise SettingsError(
            "--service-discovery needs the Kubernetes client; install it with `pip install 'bough[kubernetes]'`."
        ) from None


def _reason(error: Exception) -> str:
    status, reason = getattr(error, "status", None), getattr(error, "reason", None)
    return f"{status} {reason}" if status else str(error) or type(error).__name__
