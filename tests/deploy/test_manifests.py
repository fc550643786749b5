"""The manifests of deploy/gke: valid, consistent, and with the settings and sizes that the package knows."""

import copy
import dataclasses
import json
import re
import shlex
import subprocess
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from tests.deploy.manifests import (
    GKE,
    build,
    environment,
    flags,
    of,
    picker_config,
    pod_specs,
    read,
    server,
    the,
)
from tests.deploy.validation import validate
from tpu_offload.config import OffloadConfig
from tpu_offload.doctor.findings import Level
from tpu_offload.doctor.host import Host, check_host
from tpu_offload.plan import PlanOptions, find_machine, find_model, make_plan, serve_command

FOLDERS = ("server", "disk", "router")
APPLIED = {folder: build(GKE / folder) for folder in FOLDERS} | {"doctor": read(GKE / "doctor" / "job.yaml")}
GIB = 2**30


@pytest.mark.parametrize("folder", APPLIED)
def test_manifests_match_their_schemas(folder):
    assert APPLIED[folder]
    for manifest in APPLIED[folder]:
        validate(manifest)


def test_the_configuration_of_the_endpoint_picker_matches_its_schema():
    validate(picker_config(APPLIED["router"]))


@pytest.mark.parametrize(
    ("folder", "kind", "path", "value"),
    [
        ("server", "StatefulSet", "spec.template.spec.containers.0.resource", {}),
        ("server", "StatefulSet", "spec.template.spec.containers.0.ports.0.containerPort", "8000"),
        ("server", "StatefulSet", "spec.template.spec.terminationGracePeriodSeconds", "2m"),
        ("server", "PodMonitoring", "spec.endpoints.0.interval", "15 s"),
        ("server", "PodMonitoring", "metadata.lables", {}),
        ("disk", "StatefulSet", "spec.volumeClaimTemplates.0.spec.accessMode", "ReadWriteOnce"),
        ("router", "Gateway", "spec.listeners.0.protocol", ""),
        ("router", "HTTPRoute", "spec.rules.0.backendRefs.0.port", "8000"),
        ("router", "HTTPRoute", "spec.rules.0.timeout", "1s"),
        ("router", "InferencePool", "spec.extensionRef", {"name": "x"}),
        ("router", "InferencePool", "spec.endpointPickerRef.failureMode", "Open"),
        ("router", "HealthCheckPolicy", "spec.default.config.type", "GET"),
        ("router", "GCPBackendPolicy", "spec.default.timeoutSeconds", 1),
        ("router", "Role", "rules.0.verb", ["get"]),
    ],
)
def test_a_mistake_is_found(folder, kind, path, value):
    manifest = copy.deepcopy(the(APPLIED[folder], kind))
    *parents, last = path.split(".")
    place: Any = manifest
    for name in parents:
        place = place[int(name) if name.isdigit() else name]
    place[last] = value
    with pytest.raises((kubernetes_validate.ValidationError, jsonschema.ValidationError)):
        validate(manifest)


def test_all_files_are_applied():
    for folder in FOLDERS:
        kustomization = yaml.safe_load((GKE / folder / "kustomization.yaml").read_text())
        named = {*kustomization["resources"], *(patch["path"] for patch in kustomization.get("patches", []))}
        assert {path.name for path in (GKE / folder).iterdir()} - {"kustomization.yaml"} == named - {"../server"}
    names = [of(one) for folder in ("server", "router") for one in APPLIED[folder]]
    assert len(set(names)) == len(names)


def test_an_overlay_changes_what_it_names():
    (base,), (disk,) = (pod["containers"] for pod in map(only_pod, (APPLIED["server"], APPLIED["disk"])))
    assert environment(disk).items() > environment(base).items()
    assert environment(disk)["TPU_OFFLOAD_STORAGE_OPTIONS"] in [mount["mountPath"] for mount in disk["volumeMounts"]]
    assert [one["name"] for one in disk["volumeMounts"]] == ["cache", "shm", "kv"]
    assert (disk["args"], disk["resources"]) == (base["args"], base["resources"])
    (claim,) = the(APPLIED["disk"], "StatefulSet")["spec"]["volumeClaimTemplates"]
    size = re.fullmatch(r"(\d+)Gi", claim["spec"]["resources"]["requests"]["storage"])
    assert size
    assert float(environment(disk)["TPU_OFFLOAD_STORAGE_GB"]) <= 0.9 * int(size[1])  # the file system needs some


def only_pod(manifests):
    (pod,) = pod_specs(manifests)
    return pod


@pytest.mark.parametrize("folder", ["server", "disk", "doctor"])
def test_settings_are_those_of_the_package(folder, monkeypatch):
    """Unknown names, values that do not parse and contradictions are errors of `OffloadConfig`."""
    (container,) = only_pod(APPLIED[folder])["containers"]
    for name, value in environment(container).items():
        if name.startswith("TPU_OFFLOAD_"):
            monkeypatch.setenv(name, value)
    config = OffloadConfig.from_env()
    assert config.enabled
    assert config.host_gb == 1000
    assert config.has_storage == (folder == "disk")
    monkeypatch.setenv("TPU_OFFLOAD_HOST_GB", "0")  # the comment in the manifest: turns it off
    assert not OffloadConfig.from_env().enabled


def test_doctor_examines_what_will_serve():
    (doctor,) = only_pod(APPLIED["doctor"])["containers"]
    ours = lambda one: {k: v for k, v in environment(one).items() if k.startswith("TPU_OFFLOAD_")}  # noqa: E731
    assert ours(doctor) == ours(server())
    assert doctor["resources"] == server()["resources"]
    assert doctor["securityContext"] == server()["securityContext"]
    kustomization = yaml.safe_load((GKE / "server" / "kustomization.yaml").read_text())
    (image,) = kustomization["images"]
    assert doctor["image"] == f"{image['newName']}:{image['newTag']}"
    assert {container["image"] for container in containers(APPLIED["server"])} == {image["name"]}
    for pod in (only_pod(APPLIED["doctor"]), only_pod(APPLIED["server"])):
        assert pod["nodeSelector"] == only_pod(APPLIED["server"])["nodeSelector"]


def containers(manifests):
    return [one for pod in pod_specs(manifests) for one in (*pod.get("initContainers", ()), *pod["containers"])]


def test_flags_and_sizes_are_those_of_plan():
    given = flags(server())
    plan = planned(max_tokens=int(given["--max-model-len"]))
    assert plan.caches is not None
    _, _, model, *args = shlex.split(serve_command(plan, decode_save=True))
    expected = flags({"args": args})
    connector = json.loads(expected.pop("--kv-transfer-config"))
    assert connector.pop("kv_connector_extra_config").keys() == {"host_gb", "decode_save"}  # here in the environment
    assert json.loads(given["--kv-transfer-config"]) == connector
    assert {name: given[name] for name in expected} == expected
    assert given.keys() - expected.keys() == {
        "--port",
        "--shutdown-timeout",
        "--kv-transfer-config",
        "--kv-events-config",
    }
    assert model == server()["args"][0]
    assert int(server()["resources"]["limits"]["google.com/tpu"]) == plan.serving.num_devices
    assert only_pod(APPLIED["server"])["nodeSelector"] == {
        "cloud.google.com/gke-tpu-accelerator": "tpu-v6e-slice",
        "cloud.google.com/gke-tpu-topology": "2x4",
    }


def test_memory_fits_the_machine_and_the_host_tier_fits_the_memory():
    """`plan` has the share of a host's memory; a pod has less than the host, and the tier has to fit into that."""
    limits, requests = server()["resources"]["limits"], server()["resources"]["requests"]
    assert limits["memory"] == requests["memory"]  # nothing of it is lent out, and eviction takes others first
    limit = int(limits["memory"].removesuffix("Gi")) * GIB
    machine = find_machine("v6e-8")
    assert limit + 10 * GIB <= gke_allocatable(machine.host_nbytes)  # 10 for the node's own pods
    host_gb = float(environment(server())["TPU_OFFLOAD_HOST_GB"])
    of_pod = planned(host_nbytes=limit)
    assert 0.97 * of_pod.host_gb <= host_gb <= of_pod.host_gb
    shm = next(one for one in only_pod(APPLIED["server"])["volumes"] if one["name"] == "shm")
    left = limit - host_gb * GIB - int(shm["emptyDir"]["sizeLimit"].removesuffix("Gi")) * GIB
    assert left > 2 * of_pod.weight_nbytes  # vLLM reads them through the page cache, which counts as the pod's


def planned(*, host_nbytes=None, **options):
    machine = find_machine("v6e-8")
    if host_nbytes is not None:
        chip = dataclasses.replace(machine.chip, hosts={**machine.chip.hosts, machine.num_chips: host_nbytes})
        machine = dataclasses.replace(machine, chip=chip)
    return make_plan(find_model("qwen3-32b"), machine, PlanOptions(**options))


def gke_allocatable(nbytes):
    """Of a node's memory, what pods can have: GKE keeps shares of it, and 100 MiB against eviction."""
    reserved, left = 0.0, float(nbytes)
    for size, share in ((4, 0.25), (4, 0.2), (8, 0.1), (112, 0.06), (10**9, 0.02)):
        part = min(left, size * GIB)
        reserved, left = reserved + part * share, left - part
    return nbytes - reserved - 100 * 2**20


def test_doctor_finds_nothing_wrong_with_these_settings(monkeypatch):
    limit = int(server()["resources"]["limits"]["memory"].removesuffix("Gi")) * GIB
    host = Host(total_nbytes=limit, available_nbytes=limit, memlock_nbytes=None, huge_pages="always", num_nodes=2)
    monkeypatch.setenv("TPU_OFFLOAD_HOST_GB", environment(server())["TPU_OFFLOAD_HOST_GB"])
    found = list(check_host(host, OffloadConfig.from_env(), on_tpu=True))
    assert {one.level for one in found} == {Level.OK}, found


def test_the_pod_ends_in_time_and_starts_in_time():
    pod, container = only_pod(APPLIED["server"]), server()
    sleep = int(container["lifecycle"]["preStop"]["exec"]["command"][-1])
    drain = int(flags(container)["--shutdown-timeout"])
    assert pod["terminationGracePeriodSeconds"] >= sleep + drain + 30
    probe = container["startupProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] == 3600
    (picker,) = pod_specs(APPLIED["router"])
    assert picker["terminationGracePeriodSeconds"] >= pod["terminationGracePeriodSeconds"]


@pytest.mark.parametrize("folder", APPLIED)
def test_ports_mounts_and_selectors_exist(folder):
    for manifest in APPLIED[folder]:
        if manifest["kind"] in ("StatefulSet", "Deployment"):
            labels = manifest["spec"]["template"]["metadata"]["labels"]
            assert manifest["spec"]["selector"]["matchLabels"].items() <= labels.items()
    for pod in pod_specs(APPLIED[folder]):
        claims = the(APPLIED[folder], "StatefulSet")["spec"].get("volumeClaimTemplates", []) if folder == "disk" else []
        volumes = {one["name"] for one in pod.get("volumes", [])} | {one["metadata"]["name"] for one in claims}
        for container in (*pod.get("initContainers", ()), *pod["containers"]):
            assert {mount["name"] for mount in container.get("volumeMounts", [])} <= volumes
            ports = {port["name"] for port in container.get("ports", [])}
            probes = (container.get(name, {}) for name in ("startupProbe", "livenessProbe", "readinessProbe"))
            assert {probe["httpGet"]["port"] for probe in probes if "httpGet" in probe} <= ports
            assert "memory" in container["resources"]["limits"]
    pods = [*APPLIED["server"], *APPLIED["router"]]
    for service in (one for one in APPLIED[folder] if one["kind"] in ("Service", "PodMonitoring")):
        selector = service["spec"]["selector"]
        template = selected(pods, selector.get("matchLabels", selector))
        ports = {port["name"] for one in template["spec"]["containers"] for port in one["ports"]}
        named = [port.get("targetPort", port["port"]) for port in service["spec"].get("ports", [])]
        assert {*named, *(endpoint["port"] for endpoint in service["spec"].get("endpoints", []))} <= ports


def selected(manifests, labels):
    (found,) = [
        one["spec"]["template"]
        for one in manifests
        if one["kind"] in ("StatefulSet", "Deployment")
        and labels.items() <= one["spec"]["template"]["metadata"]["labels"].items()
    ]
    return found


def test_the_route_leads_to_the_servers():
    router = APPLIED["router"]
    route, pool = the(router, "HTTPRoute"), the(router, "InferencePool")
    assert [of(the(router, "Gateway"))] == [("Gateway", parent["name"]) for parent in route["spec"]["parentRefs"]]
    (rule,) = route["spec"]["rules"]
    assert rule["backendRefs"] == [
        {"group": "inference.networking.k8s.io", "kind": "InferencePool", "name": pool["metadata"]["name"]}
    ]
    template = selected(APPLIED["server"], pool["spec"]["selector"]["matchLabels"])
    (port,) = pool["spec"]["targetPorts"]
    assert port["number"] == template["spec"]["containers"][0]["ports"][0]["containerPort"]
    assert port["number"] == int(flags(server())["--port"])
    picker = pool["spec"]["endpointPickerRef"]
    (service,) = [one for one in router if of(one) == ("Service", picker["name"])]
    assert picker["port"]["number"] in [port["port"] for port in service["spec"]["ports"]]
    for kind in ("HealthCheckPolicy", "GCPBackendPolicy"):
        target = the(router, kind)["spec"]["targetRef"]
        assert target == {"group": "inference.networking.k8s.io", "kind": "InferencePool", "name": "vllm"}


def test_only_the_router_reads_the_events():
    policy = the(APPLIED["server"], "NetworkPolicy")["spec"]
    template = selected(APPLIED["server"], policy["podSelector"]["matchLabels"])
    ports = {port["name"] for port in template["spec"]["containers"][0]["ports"]}
    everyone, picker = policy["ingress"]
    assert everyone == {"ports": [{"port": "http"}]}
    (source,) = picker["from"]
    assert selected(APPLIED["router"], source["podSelector"]["matchLabels"])
    assert {one["port"] for rule in policy["ingress"] for one in rule["ports"]} == ports == {"http", "kv-events"}


def test_the_router_hears_and_understands_the_servers():
    config, given, args = picker_config(APPLIED["router"]), flags(server()), server()["args"]
    plugins = {plugin.get("name", plugin["type"]): plugin.get("parameters", {}) for plugin in config["plugins"]}
    used = [one["pluginRef"] for profile in config["schedulingProfiles"] for one in profile["plugins"]]
    sources = config["dataLayer"]["sources"]
    used += [one["pluginRef"] for source in sources for one in (source, *source["extractors"])]
    assert {*used, "token-producer"} == set(plugins)
    producer = plugins["precise-prefix-cache-producer"]
    assert plugins["prefix-cache-scorer"]["prefixMatchInfoProducerName"] in plugins
    assert producer["tokenProcessorConfig"]["blockSizeTokens"] == int(given["--block-size"])
    assert plugins["token-producer"]["modelName"] == args[0]
    host, port = re.fullmatch(r"http://(\w+):(\d+)", plugins["token-producer"]["vllm"]["url"]).groups()
    (service,) = [one for one in APPLIED["server"] if of(one) == ("Service", host)]
    assert int(port) in [one["port"] for one in service["spec"]["ports"]]
    events = json.loads(given["--kv-events-config"])
    socket = producer["kvEventsConfig"]["podDiscoveryConfig"]["socketPort"]
    assert events["endpoint"] == f"tcp://*:{socket}"
    assert socket in [one["containerPort"] for one in server()["ports"]]
    topic = events["topic"].split("@")
    assert topic == ["kv", f"$(POD_IP):{given['--port']}", args[0]]
    assert "POD_IP" in [one["name"] for one in server()["env"]]
    assert events["topic"].startswith(producer["kvEventsConfig"]["topicFilter"])
    assert {tier["name"] for tier in producer["indexerConfig"]["kvCacheBackendConfigs"]} >= {"gpu", "cpu"}
    (container,) = [one for pod in pod_specs(APPLIED["router"]) for one in pod["containers"]]
    arguments = dict(argument.removeprefix("--").split("=", 1) for argument in container["args"])
    assert arguments["pool-name"] == the(APPLIED["router"], "InferencePool")["metadata"]["name"]
    (mount,) = container["volumeMounts"]
    assert arguments["config-file"] == f"{mount['mountPath']}/config.yaml"


def test_limits_of_the_node_are_raised_never_lowered_and_a_failure_is_one(tmp_path):
    (pod,) = [pod for pod in pod_specs(APPLIED["server"]) if "initContainers" in pod]
    (script,) = pod["initContainers"][0]["args"]
    maps, entries = tmp_path / "maps", tmp_path / "entries"
    script = script.replace("/proc/sys/vm/max_map_count", str(maps))
    script = script.replace("/sys/module/vfio_iommu_type1/parameters/dma_entry_limit", str(entries))

    def run():
        return subprocess.run(["/bin/sh", "-c", script], capture_output=True, text=True, timeout=60).returncode

    maps.write_text("65530\n")
    assert run() == 0, "a node without VFIO's limit"
    entries.write_text("9000000\n")
    assert run() == 0
    assert (maps.read_text(), entries.read_text()) == ("33554432\n", "9000000\n")
    maps.unlink()
    assert run() != 0
