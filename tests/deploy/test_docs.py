"""docs/deploy.md: the table of versions is doctor's, and what it names exists."""

import re

import pytest

from tests.deploy.manifests import GKE, ROOT, environment, read, server
from tpu_offload.config import OffloadConfig
from tpu_offload.doctor.versions import SUPPORTED
from tpu_offload.plan import find_machine

DOC = (ROOT / "docs" / "deploy.md").read_text()


def test_the_table_of_versions_is_that_of_doctor():
    rows = re.findall(r"^\| `([\w-]+)` \| ([<>=.,\d]+) \| (.+) \|$", DOC, re.MULTILINE)
    assert rows == [(one.package, one.versions, one.why) for one in SUPPORTED]


@pytest.mark.parametrize("name", ["docs/deploy.md", "docs/release.md", "docs/monitoring.md"])
def test_links_lead_to_something(name):
    path = ROOT / name
    links = re.findall(r"\]\((?!https?:)([^)#]*)(?:#([^)]*))?\)", path.read_text())
    assert links
    for target, anchor in links:
        linked = (path.parent / target).resolve() if target else path
        assert linked.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.+)$", linked.read_text(), re.MULTILINE)
            assert anchor in {slug(heading) for heading in headings}, f"{target}#{anchor}"


def slug(heading):
    return re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")


def test_settings_and_paths_that_it_names_exist():
    known = {f"TPU_OFFLOAD_{name.upper()}" for name in OffloadConfig.model_fields}
    assert {*re.findall(r"TPU_OFFLOAD_[A-Z_]+[A-Z]", DOC)} <= known
    paths = {*re.findall(r"(?<!tests/)deploy/[\w./-]+\w", DOC)}
    assert len(paths) > 8
    assert all((ROOT / path).exists() for path in paths)
    assert all((GKE / folder).is_dir() for folder in ("server", "disk", "router", "doctor"))
    assert read(GKE / "doctor" / "job.yaml")


def test_its_memory_is_that_of_the_manifest():
    rows = dict(re.findall(r"^\| (.+) \| (\d+) \|$", DOC, re.MULTILINE))
    gib = {re.split(r"[,:(]| by | through ", name)[0].strip(): int(value) for name, value in rows.items()}
    assert gib["the machine"] == find_machine("v6e-8").host_nbytes // 2**30
    assert f"{gib['request and limit of the container']}Gi" == server()["resources"]["limits"]["memory"]
    assert gib["`TPU_OFFLOAD_HOST_GB`"] == float(environment(server())["TPU_OFFLOAD_HOST_GB"])
    shm, left = gib["`/dev/shm`"], gib["left for vLLM"]
    assert left == gib["request and limit of the container"] - gib["`TPU_OFFLOAD_HOST_GB`"] - shm
