"""The manifests in deploy/gke as a cluster would get them."""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
GKE = ROOT / "deploy" / "gke"
_MERGED_BY = {"containers": "name", "env": "name", "volumeMounts": "mountPath", "volumes": "name", "ports": "name"}

type Manifest = dict[str, Any]


def read(path: Path) -> list[Manifest]:
    """The documents of a file."""
    return [document for document in yaml.safe_load_all(path.read_text()) if document]


def build(folder: Path) -> list[Manifest]:
    """What `kubectl apply -k` would apply of a folder: its resources, with its strategic merge patches."""
    kustomization = yaml.safe_load((folder / "kustomization.yaml").read_text())
    built: list[Manifest] = []
    for name in kustomization["resources"]:
        built += build(folder / name) if (folder / name).is_dir() else read(folder / name)
    for patch in kustomization.get("patches", []):
        for change in read(folder / patch["path"]):
            index = [of(one) for one in built].index(of(change))
            built[index] = _merged(built[index], change)
    return built


def of(manifest: Manifest) -> tuple[str, str]:
    """Its kind and its name."""
    return manifest["kind"], manifest["metadata"]["name"]


def the(manifests: list[Manifest], kind: str) -> Manifest:
    """The only one of a kind."""
    (found,) = [one for one in manifests if one["kind"] == kind]
    return found


def server() -> Manifest:
    """The container of vLLM."""
    (container,) = the(build(GKE / "server"), "StatefulSet")["spec"]["template"]["spec"]["containers"]
    return container


def environment(container: Manifest) -> dict[str, str]:
    """Its environment variables that have a value here."""
    return {one["name"]: one["value"] for one in container["env"] if "value" in one}


def flags(container: Manifest) -> dict[str, str]:
    """Its arguments `--name=value` and `--name value`."""
    found, args = {}, container["args"]
    for i, argument in enumerate(args):
        name, is_pair, value = argument.partition("=")
        if name.startswith("--"):
            found[name] = value if is_pair else args[i + 1]
    return found


def picker_config(manifests: list[Manifest]) -> Manifest:
    """The configuration of the endpoint picker."""
    config = yaml.safe_load(the(manifests, "ConfigMap")["data"]["config.yaml"])
    assert isinstance(config, dict)
    return config


def _merged(base: Any, change: Any, field: str = "") -> Any:
    """A strategic merge, as far as these patches need it: lists of named things are merged by name."""
    if isinstance(base, dict) and isinstance(change, dict):
        merged = copy.deepcopy(base)
        for name, value in change.items():
            merged[name] = _merged(base[name], value, name) if name in base else copy.deepcopy(value)
        return merged
    if isinstance(base, list) and field in _MERGED_BY:
        key = _MERGED_BY[field]
        changes = {one[key]: one for one in change}
        kept = [_merged(one, changes.pop(one[key])) if one[key] in changes else copy.deepcopy(one) for one in base]
        return kept + list(changes.values())
    return copy.deepcopy(change)


def pod_specs(manifests: list[Manifest]) -> Iterator[Manifest]:
    """The pods that these make."""
    for one in manifests:
        template = one.get("spec", {}).get("template") if one["kind"] in ("StatefulSet", "Deployment", "Job") else None
        if template is not None:
            yield template["spec"]
