"""The manifests: Kubernetes accepts what it knows of them, and their commands are ones that this version takes."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from bough.cli.commands import Parser
from bough.cli.flags import add_engine_flags, given_settings
from bough.core.settings import Settings
from bough.launch import nodes
from bough.launch.nodes import KEY_VARIABLE, check_nodes

FOLDER = Path(__file__).parents[2] / "examples/kubernetes"
MANIFESTS = {path.name: list(yaml.safe_load_all(path.read_text())) for path in sorted(FOLDER.glob("*.yaml"))}
DOCUMENTS = {f"{name}/{each['kind']}": each for name, found in MANIFESTS.items() for each in found}
LWS = DOCUMENTS["leader-worker-set.yaml/LeaderWorkerSet"]["spec"]["leaderWorkerTemplate"]
RAY = DOCUMENTS["ray.yaml/RayJob"]["spec"]
LWS_VARIABLES = {"$(LWS_GROUP_SIZE)": "2", "$(LWS_WORKER_INDEX)": "1", "$(LWS_LEADER_ADDRESS)": "bough-0.bough.default"}
PODS = {
    "LWS": LWS["workerTemplate"],
    "Ray's head": RAY["rayClusterSpec"]["headGroupSpec"]["template"],
    **{f"Ray's {group['groupName']}": group["template"] for group in RAY["rayClusterSpec"]["workerGroupSpecs"]},
}


def served(argv: list[str]) -> Settings:
    parser = Parser(program="bough serve", usage="", about="")
    add_engine_flags(parser, server=True)
    return Settings.from_flat(given_settings(parser.parse(argv), {}))


def containers() -> Iterator[dict[str, Any]]:
    for pod in PODS.values():
        yield from pod["spec"]["containers"]


@pytest.mark.parametrize("name", DOCUMENTS)
def test_a_document_says_what_it_is(name: str) -> None:
    document = DOCUMENTS[name]
    assert document["metadata"]["name"] == "bough" and document["apiVersion"] and document["spec"]


def test_kubernetes_schemas_accept_the_documents_and_the_pods() -> None:
    validate = pytest.importorskip("kubernetes_validate")
    version = validate.latest_version()
    known = [each for each in DOCUMENTS.values() if each["apiVersion"] in ("v1", "networking.k8s.io/v1")]
    pods = [{"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, **template} for template in PODS.values()]
    for document in [*known, *pods]:
        validate.validate(document, version, strict=True)
    broken = {**pods[0], "spec": {**pods[0]["spec"], "containers": [{"image": 5}]}}
    with pytest.raises(validate.ValidationError):
        validate.validate(broken, version, strict=True)


def test_the_leader_worker_set_runs_hosts_of_one_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    (container,) = LWS["workerTemplate"]["spec"]["containers"]
    assert container["command"] == ["bough", "serve"] and LWS_VARIABLES["$(LWS_GROUP_SIZE)"] == str(LWS["size"])
    text = " ".join(container["args"])
    for variable, value in LWS_VARIABLES.items():
        assert variable in text
        text = text.replace(variable, value)
    settings = served(text.split())
    secrets = {each["name"]: each["valueFrom"]["secretKeyRef"]["name"] for each in container["env"]}
    assert secrets == {KEY_VARIABLE: "bough-cluster"} and "bough-cluster" in (FOLDER / "README.md").read_text()
    monkeypatch.setenv(nodes.KEY_VARIABLE, "k" * 64)
    check_nodes(settings.parallel)
    assert settings.parallel.ranks_per_node == int(container["resources"]["limits"]["nvidia.com/gpu"])
    assert settings.server.port == container["ports"][0]["containerPort"]
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[probe]["httpGet"] == {"path": "/health", "port": "http"}
    assert LWS["workerTemplate"]["spec"]["terminationGracePeriodSeconds"] > settings.server.drain_timeout_s


def test_the_ray_job_runs_an_engine_on_all_its_hosts() -> None:
    words = shlex.split(RAY["entrypoint"])
    assert words[:2] == ["bough", "serve"]
    settings = served(words[2:])
    check_nodes(settings.parallel)
    groups = RAY["rayClusterSpec"]["workerGroupSpecs"]
    assert settings.parallel.on_ray and settings.parallel.nnodes == 1 + sum(group["replicas"] for group in groups)
    for container in (PODS["Ray's head"]["spec"]["containers"][0], PODS["Ray's ranks"]["spec"]["containers"][0]):
        assert int(container["resources"]["limits"]["nvidia.com/gpu"]) == settings.parallel.ranks_per_node
    ports = PODS["Ray's head"]["spec"]["containers"][0]["ports"]
    assert {"name": "http", "containerPort": settings.server.port} in ports


def test_ranks_of_a_host_share_memory() -> None:
    for pod in PODS.values():
        memory = {volume["name"] for volume in pod["spec"]["volumes"] if volume.get("emptyDir", {}).get("medium")}
        for container in pod["spec"]["containers"]:
            assert memory & {mount["name"] for mount in container["volumeMounts"] if mount["mountPath"] == "/dev/shm"}


@pytest.mark.parametrize("name", MANIFESTS)
def test_the_service_leads_to_the_port_that_serves(name: str) -> None:
    (port,) = DOCUMENTS[f"{name}/Service"]["spec"]["ports"]
    assert port["port"] == 30000
    assert port["targetPort"] in {each["name"] for container in containers() for each in container.get("ports", ())}
