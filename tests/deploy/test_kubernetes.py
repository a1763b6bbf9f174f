"""The manifests are valid for Kubernetes, and their numbers fit together."""

from typing import Any

import pytest
from tests.deploy.documents import FOLDER, Document, bytes_of, read, read_all, require_settings

from kvtier.quantities import parse_bytes

kubernetes_validate = pytest.importorskip(
    "kubernetes_validate", reason="needs Kubernetes' schemas: pip install kubernetes-validate"
)

OLDEST = "1.29"
"""The oldest release that still gets fixes somewhere; newer ones only add fields."""

FILES = sorted(path.name for path in (FOLDER / "kubernetes").glob("*.yaml"))

DOCUMENTS = [(name, document) for name in FILES for document in read_all(f"kubernetes/{name}")]


def of_kind(kind: str, name: str) -> Document:
    """Return one object."""
    (found,) = [one for _, one in DOCUMENTS if one["kind"] == kind and one["metadata"]["name"] == name]
    return found


ENGINE = of_kind("StatefulSet", "kvtier-vllm")["spec"]

POD: dict[str, Any] = ENGINE["template"]["spec"]  # Any: YAML

(CONTAINER,) = POD["containers"]

VOLUMES = {volume["name"]: volume for volume in POD["volumes"]}

(CLAIM,) = ENGINE["volumeClaimTemplates"]

SETTINGS = require_settings(of_kind("ConfigMap", "kvtier-settings")["data"]["kv-transfer-config"])

PODS = [document for _, document in DOCUMENTS if document["kind"] in ("StatefulSet", "Deployment")]


@pytest.mark.parametrize("release", [OLDEST, kubernetes_validate.latest_version()])
@pytest.mark.parametrize(
    "document", [one for _, one in DOCUMENTS], ids=[f"{name}-{one['kind']}" for name, one in DOCUMENTS]
)
def test_kubernetes_accepts_each_object(document: Document, release: str) -> None:
    kubernetes_validate.validate(document, release, strict=True)


def test_a_field_that_kubernetes_does_not_know_is_refused() -> None:
    broken = {**of_kind("Service", "kvtier-vllm"), "spek": {}}

    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(broken, OLDEST, strict=True)


def test_host_memory_fits_into_shared_memory_and_that_into_the_container() -> None:
    shared_memory = VOLUMES["dshm"]["emptyDir"]
    host_bytes = parse_bytes("cpu_bytes_to_use", SETTINGS["cpu_bytes_to_use"])

    assert shared_memory["medium"] == "Memory"
    assert host_bytes < bytes_of(shared_memory["sizeLimit"])
    assert bytes_of(shared_memory["sizeLimit"]) < bytes_of(CONTAINER["resources"]["limits"]["memory"])
    (mount,) = [mount for mount in CONTAINER["volumeMounts"] if mount["name"] == "dshm"]
    assert mount["mountPath"] == "/dev/shm"  # noqa: S108 - what Linux calls it


def test_the_directory_of_the_fs_tier_is_a_volume_with_room_for_it() -> None:
    (tier,) = [tier for tier in SETTINGS["secondary_tiers"] if tier["type"] == "fs"]
    (mount,) = [mount for mount in CONTAINER["volumeMounts"] if mount["name"] == CLAIM["metadata"]["name"]]

    assert mount["mountPath"] == tier["root_dir"]
    room_bytes = bytes_of(CLAIM["spec"]["resources"]["requests"]["storage"])
    assert parse_bytes("capacity_bytes", tier["capacity_bytes"]) < room_bytes


def test_the_valkey_that_the_settings_name_is_the_service() -> None:
    (tier,) = [tier for tier in SETTINGS["secondary_tiers"] if tier["type"] == "valkey"]
    service = of_kind("Service", "kvtier-valkey")

    assert tier["url"] == f"redis://{service['metadata']['name']}:{service['spec']['ports'][0]['port']}"
    (allowed,) = of_kind("NetworkPolicy", "kvtier-valkey")["spec"]["ingress"]
    assert allowed["from"] == [{"podSelector": ENGINE["selector"]}]


def test_the_engine_gets_the_settings_and_time_to_write_its_blocks() -> None:
    (variable,) = [one for one in CONTAINER["env"] if "valueFrom" in one]
    assert f"--kv-transfer-config=$({variable['name']})" in CONTAINER["args"]
    assert variable["valueFrom"]["configMapKeyRef"] == {
        "name": "kvtier-settings",
        "key": "kv-transfer-config",
    }
    (flag,) = [one for one in CONTAINER["args"] if one.startswith("--shutdown-timeout=")]
    assert int(flag.partition("=")[2]) < POD["terminationGracePeriodSeconds"]


def test_each_probe_asks_a_port_that_is_open() -> None:
    (port,) = CONTAINER["ports"]
    assert f"--port={port['containerPort']}" in CONTAINER["args"]
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert CONTAINER[probe]["httpGet"] == {"path": "/health", "port": port["name"]}
    notes = ENGINE["template"]["metadata"]["annotations"]
    assert notes["prometheus.io/port"] == str(port["containerPort"])
    assert notes["prometheus.io/scrape"] == "true"


@pytest.mark.parametrize("document", PODS, ids=lambda document: document["metadata"]["name"])
def test_each_pod_runs_without_privileges_and_on_a_root_that_it_cannot_write(document: Document) -> None:
    pod = document["spec"]["template"]["spec"]

    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["runAsUser"] > 0
    assert pod["automountServiceAccountToken"] is False
    for container in pod["containers"]:
        context = container["securityContext"]
        assert context["allowPrivilegeEscalation"] is False
        assert context["readOnlyRootFilesystem"] is True
        assert context["capabilities"] == {"drop": ["ALL"]}


@pytest.mark.parametrize("document", PODS, ids=lambda document: document["metadata"]["name"])
def test_each_pod_is_found_by_its_controller_and_its_service(document: Document) -> None:
    labels = document["spec"]["template"]["metadata"]["labels"]

    assert document["spec"]["selector"]["matchLabels"] == labels
    assert of_kind("Service", document["metadata"]["name"])["spec"]["selector"] == labels


def test_the_volumes_that_are_mounted_are_those_that_there_are() -> None:
    mounted = {mount["name"] for mount in CONTAINER["volumeMounts"]}

    assert mounted == {*VOLUMES, CLAIM["metadata"]["name"]}


def test_the_image_runs_as_the_user_whom_the_manifest_names() -> None:
    recipe = (FOLDER / "container" / "Containerfile").read_text(encoding="utf-8")

    assert f"useradd --uid {POD['securityContext']['runAsUser']} " in recipe
    assert read("compose.yaml")["services"]["vllm"]["build"]["dockerfile"] == "deploy/container/Containerfile"
