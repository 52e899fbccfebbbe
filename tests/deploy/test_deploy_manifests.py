"""deploy/: Kubernetes accepts the manifests; their commands, probes, variables and metrics are ones that there are."""

from __future__ import annotations

import configparser
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from bough.cli.commands import Parser
from bough.cli.flags import add_engine_flags, given_settings
from bough.cli.gateway import _parser as gateway_parser
from bough.cli.gateway import settings_from
from bough.core.settings import Settings

ROOT = Path(__file__).parents[2]
BASE, CUDA = ROOT / "deploy/kubernetes/base", ROOT / "deploy/kubernetes/cuda"
GUIDE = (ROOT / "docs/deployment.md").read_text()


def documents(path: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(path.read_text()))


FOUND = {
    (each["kind"], each["metadata"]["name"]): each
    for name in ("engine", "gateway", "autoscaler")
    for each in documents(BASE / f"{name}.yaml")
}


def pod_of(name: str) -> dict[str, Any]:
    spec: dict[str, Any] = FOUND["Deployment", name]["spec"]["template"]["spec"]
    return spec


def served(words: list[str]) -> Settings:
    parser = Parser(program="bough serve", usage="", about="")
    add_engine_flags(parser, server=True)
    return Settings.from_flat(given_settings(parser.parse(words), {}))


def test_kubernetes_schemas_accept_them() -> None:
    validate = pytest.importorskip("kubernetes_validate")
    for document in FOUND.values():
        validate.validate(document, validate.latest_version(), strict=True)
    broken = {**FOUND["Service", "bough"], "spec": {"ports": 5}}
    with pytest.raises(validate.ValidationError):
        validate.validate(broken, validate.latest_version(), strict=True)


def test_kustomizations_name_files_that_are_there_and_patch_what_is_there() -> None:
    (base,), (cuda,) = documents(BASE / "kustomization.yaml"), documents(CUDA / "kustomization.yaml")
    assert sorted(base["resources"]) == sorted(
        path.name for path in BASE.glob("*.yaml") if path.stem != "kustomization"
    )
    assert [(CUDA / each).resolve() for each in cuda["resources"]] == [BASE]
    (patch,) = cuda["patches"]
    target = FOUND[patch["target"]["kind"], patch["target"]["name"]]
    for step in yaml.safe_load(patch["patch"]):
        *way, last = [word.replace("~1", "/") for word in step["path"].split("/")[1:]]
        place: Any = target
        for word in way:
            place = place[int(word) if isinstance(place, list) else word]
        assert (last in place) == (step["op"] == "replace")
    images = {
        container["image"] for name in ("bough-engine", "bough-gateway") for container in pod_of(name)["containers"]
    }
    assert images == {image["name"] for image in cuda["images"]}


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="there is no kubectl")
@pytest.mark.parametrize("folder", [BASE, CUDA])
def test_kubectl_renders_the_kustomizations(folder: Path) -> None:
    made = subprocess.run(["kubectl", "kustomize", folder], capture_output=True, text=True)
    assert made.returncode == 0, made.stderr
    rendered = {(each["kind"], each["metadata"]["name"]): each for each in yaml.safe_load_all(made.stdout)}
    assert rendered.keys() == FOUND.keys()
    (container,) = rendered["Deployment", "bough-engine"]["spec"]["template"]["spec"]["containers"]
    assert ("nvidia.com/gpu" in container["resources"]["limits"]) == (folder == CUDA)


def test_the_engine_runs_with_its_flags_and_is_probed() -> None:
    pod = pod_of("bough-engine")
    (container,) = pod["containers"]
    command, *flags = container["args"]
    settings = served(flags)
    assert command == "serve" and settings.server.host == "0.0.0.0"
    assert container["ports"] == [{"name": "http", "containerPort": settings.server.port}]
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[probe]["httpGet"] == {"path": "/health", "port": "http"}
    assert pod["terminationGracePeriodSeconds"] > settings.server.drain_timeout_s
    assert "/cache" in {mount["mountPath"] for mount in container["volumeMounts"]}
    assert "ENV BOUGH_HOME=/cache" in (ROOT / "Containerfile").read_text()
    assert f"useradd --uid {pod['securityContext']['runAsUser']} " in (ROOT / "Containerfile").read_text()


def test_the_gateway_finds_the_engines_with_their_key() -> None:
    pod, engine = pod_of("bough-gateway"), pod_of("bough-engine")
    (container,), (engine_container,) = pod["containers"], engine["containers"]
    command, *flags = [word.replace("$(NAMESPACE)", "n") for word in container["args"]]
    secrets = {each["name"]: each["valueFrom"].get("secretKeyRef", {}).get("key", "n") for each in container["env"]}
    settings = settings_from(gateway_parser().parse(flags), (), secrets)
    assert command == "gateway" and settings.service_discovery and settings.service_discovery_namespace == "n"
    assert settings.service_discovery_port == engine_container["ports"][0]["containerPort"]
    labels = FOUND["Deployment", "bough-engine"]["spec"]["template"]["metadata"]["labels"]
    assert list(settings.selector) == [f"{key}={value}" for key, value in labels.items()]
    engine_keys = [each["valueFrom"]["secretKeyRef"]["key"] for each in engine_container["env"]]
    assert engine_keys == [settings.worker_api_key] and settings.api_keys == ("client",)
    assert settings.admin_api_key == "admin" and pod["terminationGracePeriodSeconds"] > settings.drain_timeout_s
    named = set(re.findall(r"--from-literal=(\w+)=", GUIDE))
    assert named == {"worker", "client", "admin"}
    (rule,) = FOUND["Role", "bough-gateway"]["rules"]
    assert rule == {"apiGroups": [""], "resources": ["pods"], "verbs": ["list", "watch"]}


def test_the_autoscaler_reads_metrics_that_there_are() -> None:
    blocks = [yaml.safe_load(block) for block in re.findall(r"```yaml\n(.*?)```", GUIDE, re.DOTALL)]
    (rules,) = [block["rules"] for block in blocks]
    series = {rule["name"]["as"]: rule["seriesQuery"].partition("{")[0] for rule in rules}
    spec = FOUND["HorizontalPodAutoscaler", "bough-engine"]["spec"]
    assert {metric["pods"]["metric"]["name"] for metric in spec["metrics"]} == series.keys()
    metrics = (ROOT / "docs/metrics.md").read_text()  # which a test holds to the code
    assert not [name for name in series.values() if f"| `{name}` |" not in metrics]
    assert (spec["scaleTargetRef"]["kind"], spec["scaleTargetRef"]["name"]) in FOUND


def test_the_unit_starts_a_server_with_its_file() -> None:
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    text = (ROOT / "deploy/systemd/bough.service").read_text()
    unit.read_string(text)
    program, command, *flags = shlex.split(unit["Service"]["ExecStart"])
    file = ROOT / "deploy/systemd/bough.yaml"
    assert (program, command, flags) == ("/opt/bough/bin/bough", "serve", ["--config", f"/etc/bough/{file.name}"])
    settings = served(["--config", str(file)])
    assert float(unit["Service"]["TimeoutStopSec"]) > settings.server.drain_timeout_s
    (folder,) = {unit["Service"]["CacheDirectory"]}  # all that it can write
    environ = dict(re.findall(r"^Environment=(\w+)=(.+)$", text, re.MULTILINE))
    assert environ == {"BOUGH_HOME": f"%C/{folder}", "TRITON_CACHE_DIR": f"%C/{folder}/triton"}
    assert settings.server.port == 30000 and "/opt/bough/bin/pip install" in GUIDE
