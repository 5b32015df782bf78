"""The manifests and the chart, without a cluster: Kubernetes' schemas, Helm itself, and the agreement of both."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from core.settings import Settings
from scripts import helm
from tests.conftest import need
from tests.support.servers import ROOT, run_module

MANIFESTS = sorted((ROOT / "deploy/kubernetes").glob("*.yaml"))
CHART = ROOT / "deploy/helm/lastbit"
VERSIONS = ("1.25.0", "1.30.0", "1.37.0")
"""The oldest release that the chart names, and newer ones."""
HELM_LABELS = {
    *("app.kubernetes.io/instance", "app.kubernetes.io/version", "app.kubernetes.io/managed-by"),
    "helm.sh/chart",
}


def load(text: str) -> list[dict[str, Any]]:
    return [document for document in yaml.safe_load_all(text) if document]


def manifests() -> list[dict[str, Any]]:
    return [document for path in MANIFESTS for document in load(path.read_text())]


@pytest.fixture(scope="session")
def program() -> Path:
    need("Helm for this machine", helm.fits_here())
    return helm.install()


def run(program: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([program, *arguments], capture_output=True, text=True)


def render(program: Path, *arguments: str) -> list[dict[str, Any]]:
    process = run(program, "template", "lastbit", str(CHART), *arguments)
    assert process.returncode == 0, process.stderr
    return load(process.stdout)


def pods(documents: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The pod specs, by the name of the object that creates the pods."""
    specs = {}
    for document in documents:
        spec = document.get("spec", {})
        template = spec.get("jobTemplate", {}).get("spec", spec).get("template")
        if template is not None:
            specs[document["metadata"]["name"]] = template["spec"]
    return specs


def without_helm(value: Any) -> Any:
    """Without the labels and annotations that only a Helm release has."""
    if isinstance(value, dict):
        return {
            key: without_helm(part) for key, part in value.items() if key not in HELM_LABELS and key != "annotations"
        }
    return [without_helm(part) for part in value] if isinstance(value, list) else value


@pytest.mark.parametrize("version", VERSIONS)
def test_the_manifests_fit_the_schemas(version: str) -> None:
    for document in manifests():
        kubernetes_validate.validate(document, version, strict=True)
    deployment = next(document for document in manifests() if document["kind"] == "Deployment")
    deployment["spec"]["template"]["spec"]["containers"][0]["livenesProbe"] = {}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(deployment, version, strict=True)


def test_every_reference_is_defined() -> None:
    """Keys of the Secret, labels of selectors, ports by name, volumes."""
    documents = manifests()
    (secret,) = [document for document in documents if document["kind"] == "Secret"]
    for name, spec in pods(documents).items():
        volumes = {volume["name"] for volume in spec["volumes"]}
        for container in spec["containers"]:
            assert {mount["name"] for mount in container["volumeMounts"]} == volumes, name
            references = [entry["valueFrom"]["secretKeyRef"] for entry in container["env"] if "valueFrom" in entry]
            assert references
            assert all(entry["name"] == secret["metadata"]["name"] for entry in references)
            assert {entry["key"] for entry in references} <= set(secret["stringData"])
            ports = {port["name"] for port in container.get("ports", [])}
            for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
                assert container.get(probe, {"httpGet": {"port": None}})["httpGet"]["port"] in {*ports, None}
    by_kind = {(document["kind"], document["metadata"]["name"]): document for document in documents}
    labels = by_kind["Deployment", "lastbit"]["spec"]["template"]["metadata"]["labels"]
    assert by_kind["Service", "lastbit"]["spec"]["selector"].items() <= labels.items()
    assert by_kind["PodDisruptionBudget", "lastbit"]["spec"]["selector"]["matchLabels"].items() <= labels.items()
    for name, spec in pods(documents).items():
        others = [document for document in documents if document["metadata"]["name"] == name and name != "lastbit"]
        for document in others:
            inner = document["spec"].get("jobTemplate", document)["spec"]["template"]["metadata"]["labels"]
            assert not by_kind["Service", "lastbit"]["spec"]["selector"].items() <= inner.items(), (name, spec)


def test_pods_run_without_privileges_and_their_commands_and_settings_exist() -> None:
    for name, spec in pods(manifests()).items():
        assert spec["automountServiceAccountToken"] is False, name
        # Otherwise Kubernetes would set LASTBIT_PORT to the address of the Service.
        assert spec["enableServiceLinks"] is False, name
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        (container,) = spec["containers"]
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        command, *words = [*container["command"], *container.get("args", [])]
        assert command == "lastbit-server"
        process = run_module("lastbit_server", *words, "--help")
        assert process.returncode == 0
        assert all(word.partition("=")[0] in process.stdout for word in words if word.startswith("--"))
        names = {entry["name"] for entry in container["env"]}
        assert names <= {f"LASTBIT_{field.upper()}" for field in Settings.model_fields}


def test_probes_use_the_right_paths() -> None:
    """While the database is unreachable a pod gets no calls, and is not restarted."""
    (container,) = pods(manifests())["lastbit"]["containers"]
    paths = {probe: container[probe]["httpGet"]["path"] for probe in container if probe.endswith("Probe")}
    assert paths == {"startupProbe": "/healthz", "livenessProbe": "/healthz", "readinessProbe": "/readyz"}


def test_the_chart_renders_the_manifests(program: Path) -> None:
    """Both must agree, so that neither is forgotten in a change."""
    rendered = {
        (document["kind"], document["metadata"]["name"]): without_helm(document) for document in render(program)
    }
    plain_manifests = {
        (document["kind"], document["metadata"]["name"]): document
        for document in manifests()
        if document["kind"] != "Secret"
    }
    assert rendered == plain_manifests


def test_helm_finds_nothing_wrong_with_the_chart(program: Path) -> None:
    process = run(program, "lint", "--strict", str(CHART))
    assert process.returncode == 0, process.stdout + process.stderr


def test_every_value_of_the_chart_can_be_set(program: Path, tmp_path: Path) -> None:
    values = {
        "image": {"repository": "registry.example/lastbit", "digest": "sha256:" + "0" * 64},
        "imagePullSecrets": [{"name": "pull"}],
        "secret": "mine",
        "settings": {"LASTBIT_LOG_LEVEL": "debug", "LASTBIT_WEBHOOKS_ALLOW_PRIVATE": True},
        "service": {"replicas": 3, "port": 80, "minAvailable": 2, "resources": {}},
        "migration": {"enabled": False},
        "janitor": {"schedule": "5 * * * *", "keep": "90d", "keepFailed": "365d"},
        "dispatcher": {"replicas": 2},
        "nodeSelector": {"disk": "fast"},
        "tolerations": [{"key": "lastbit", "operator": "Exists"}],
    }
    file = tmp_path / "values.yaml"
    file.write_text(json.dumps(values))
    documents = render(program, "--values", str(file))
    for document in documents:
        kubernetes_validate.validate(document, VERSIONS[-1], strict=True)
    specs = pods(documents)
    assert set(specs) == {"lastbit", "lastbit-dispatcher", "lastbit-janitor"}
    for spec in specs.values():
        (container,) = spec["containers"]
        assert container["image"] == "registry.example/lastbit@sha256:" + "0" * 64
        assert {"name": "LASTBIT_WEBHOOKS_ALLOW_PRIVATE", "value": "true"} in container["env"]
        assert spec["nodeSelector"] == {"disk": "fast"}
        assert spec["imagePullSecrets"] == [{"name": "pull"}]
    assert {"--keep=90d", "--keep-failed=365d"} < {*specs["lastbit-janitor"]["containers"][0]["args"]}
    assert '"name": "lastbit"' not in json.dumps(specs["lastbit"]["volumes"])
    scale = {document["metadata"]["name"]: document["spec"].get("replicas") for document in documents}
    assert (scale["lastbit"], scale["lastbit-dispatcher"]) == (3, 2)


def test_numbers_of_a_values_file_are_written_in_full(program: Path, tmp_path: Path) -> None:
    """As a setting is read: a whole number has no point and no exponent."""
    settings = {"LASTBIT_MAX_WAITING_BYTES": 536_870_912, "LASTBIT_TOKEN_ITEMS": 1_000_000, "LASTBIT_WORKERS": 2}
    settings |= {"LASTBIT_JANITOR_EVERY": 0, "LASTBIT_DISPATCHER_EVERY": 0.25, "LASTBIT_LOG_LEVEL": "debug"}
    file = tmp_path / "values.yaml"
    file.write_text(yaml.safe_dump({"settings": settings}))
    (container,) = pods(render(program, "--values", str(file)))["lastbit"]["containers"]
    environment = {entry["name"]: entry.get("value") for entry in container["env"]}
    assert environment.items() >= {name: str(value) for name, value in settings.items()}.items()


@pytest.mark.parametrize(
    "setting",
    ["service.replicas=0", "janitor.keep=soon", "servise.port=1", "settings.LASTBIT_DATABASE_URL=x", "image.digest=x"],
)
def test_invalid_values_are_refused(program: Path, setting: str) -> None:
    process = run(program, "template", "lastbit", str(CHART), "--set", setting)
    assert process.returncode != 0
    assert "values don't meet the specifications of the schema" in process.stderr


def test_the_migration_runs_first(program: Path) -> None:
    (job,) = [document for document in render(program) if document["kind"] == "Job"]
    assert job["metadata"]["annotations"]["helm.sh/hook"] == "pre-install,pre-upgrade"
    (entry,) = [entry for entry in pods([job])["lastbit-migrate"]["containers"][0]["env"] if "valueFrom" in entry]
    assert entry["valueFrom"]["secretKeyRef"]["key"] == "migrate-database-url"
