"""`tpu-offload doctor`: each planted fault is found, and nothing else is; a good machine has none."""

import configparser
import dataclasses
import importlib.metadata
import json
import os
import queue
import re
import resource
import threading
import time
import types
from pathlib import Path

import jax
import numpy as np
import pytest

from tests.storage import servers
from tests.storage.memory_tier import MemoryTier
from tpu_offload.cli.main import main
from tpu_offload.config import OffloadConfig
from tpu_offload.doctor import KNOWN_FAULTS, SUPPORTED, Level, examine, installed_versions
from tpu_offload.doctor import devices as of_devices
from tpu_offload.doctor import tiers as of_tiers
from tpu_offload.doctor.host import Host, check_host
from tpu_offload.doctor.settings import check_profile, read_settings
from tpu_offload.doctor.tiers import check_tiers
from tpu_offload.doctor.versions import check_known_faults, check_versions
from tpu_offload.errors import ConfigError
from tpu_offload.measure.worker_copies import WorkerCopies
from tpu_offload.storage import make_tier

ROOT = Path(__file__).parents[2]
GB = 2**30
VLLM = {"vllm-tpu": "0.32.0", "tpu-inference": "0.32.0"}
GOOD = installed_versions() | VLLM
GOOD_HOST = Host(
    total_nbytes=1000 * GB, available_nbytes=900 * GB, memlock_nbytes=None, huge_pages="madvise", num_nodes=2
)


@pytest.fixture(autouse=True)
def no_settings(monkeypatch):
    for name in list(os.environ):
        if name.startswith("TPU_OFFLOAD_"):
            monkeypatch.delenv(name)


def found(findings, level):
    return [f"{finding.check}: {finding.text}" for finding in findings if finding.level is level]


def errors(findings):
    return found(findings, Level.ERROR)


def warnings(findings):
    return found(findings, Level.WARNING)


def config_of(**settings):
    return OffloadConfig.create(**settings)


# Versions.


def test_vllm_may_be_built_from_source(monkeypatch):
    """Its distribution is called vllm then, as in images that are built from a checkout."""
    version = importlib.metadata.version

    def from_source(name):
        if name == "vllm-tpu":
            raise importlib.metadata.PackageNotFoundError(name)
        return {"vllm": "0.32.0+tpu", "tpu-inference": "0.32.0"}.get(name) or version(name)

    monkeypatch.setattr(importlib.metadata, "version", from_source)
    assert installed_versions()["vllm-tpu"] == "0.32.0+tpu"
    assert not warnings(check_versions(installed_versions()))


def test_the_installed_versions_are_supported():
    findings = list(check_versions(installed_versions()))
    assert not errors(findings)
    assert not [line for line in warnings(findings) if "not installed: vLLM cannot be served" not in line]
    assert not warnings(check_versions(installed_versions() | VLLM))


def test_the_table_is_that_of_setup_cfg():
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    lines = [*setup["options"]["install_requires"].split(), f"python{setup['options']['python_requires']}"]
    lines += [line for line in setup["options.extras_require"]["vllm"].split() if not line.startswith("#")]
    assert {one.package + one.versions for one in SUPPORTED if one.package != "tpu-inference"} == set(lines)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"jax": "0.10.2", "jaxlib": "0.10.2"}, ["jax 0.10.2 is not supported (older", "jaxlib 0.10.2"]),
        ({"numpy": None}, ["numpy is not installed"]),
        ({"python": "3.11.9"}, ["python 3.11.9 is not supported"]),
        ({"pydantic": "nonsense"}, ["pydantic nonsense is not supported"]),
    ],
)
def test_bad_versions_are_errors(changes, expected):
    installed = {name: version for name, version in (installed_versions() | changes).items() if version}
    said = errors(check_versions(installed))
    assert len(said) == len(expected)
    assert all(text in line for text, line in zip(expected, said, strict=True))


def test_another_vllm_is_untested_and_a_nightly_is_what_it_leads_to():
    assert "vllm-tpu 0.33.1 is not supported" in warnings(check_versions(GOOD | {"vllm-tpu": "0.33.1"}))[0]
    assert not warnings(check_versions(installed_versions() | VLLM))
    assert not warnings(check_versions(GOOD | {"vllm-tpu": "0.32.1.dev3+g12ab"}))


def test_jax_beside_another_jaxlib():
    said = warnings(check_versions(GOOD | {"jaxlib": "0.99.0"}))
    assert said == [f"versions: jax {installed_versions()['jax']} beside jaxlib 0.99.0"]


def test_known_faults_are_mended_unless_the_patch_is_off():
    good = list(check_known_faults(VLLM, config_of(host_gb=1)))
    said = f"{len(KNOWN_FAULTS)} of the installed versions, mended by the connector (docs/upstream)"
    assert [finding.text for finding in good] == [said]
    said = errors(check_known_faults(VLLM, config_of(host_gb=1, patch_runner=False)))
    assert len(said) == sum(fault.needs_patch for fault in KNOWN_FAULTS) == 4
    assert "lose their sampled token" in said[0]
    assert not errors(check_known_faults(VLLM | {"tpu-inference": "0.40"}, config_of(patch_runner=False)))
    assert all((ROOT / fault.document).exists() for fault in KNOWN_FAULTS)


# Settings.


def test_settings_that_do_not_parse_or_contradict(monkeypatch):
    monkeypatch.setenv("TPU_OFFLOAD_HOST_GBS", "3")
    config, findings = read_settings({})
    assert config is None
    assert "TPU_OFFLOAD_HOST_GBS" in errors(findings)[0]
    monkeypatch.delenv("TPU_OFFLOAD_HOST_GBS")
    monkeypatch.setenv("TPU_OFFLOAD_STORAGE_GB", "3")
    assert "TPU_OFFLOAD_STORAGE_GB is set but not used" in warnings(read_settings({})[1])[0]
    monkeypatch.delenv("TPU_OFFLOAD_STORAGE_GB")
    assert "host_gb" in errors(read_settings({"host_gb": -1})[1])[0]
    assert "turns offloading off" in warnings(read_settings({"host_gb": 0})[1])[0]
    assert "vLLM has none and refuses it" in errors(read_settings({"save_path": "fused"})[1])[0]
    assert "vLLM recomputes preempted requests" in errors(read_settings({"host_gb": 1, "swap_gb": 3})[1])[0]
    assert "vLLM has compute only" in errors(read_settings({"host_gb": 1, "save_on": "compute,eviction"})[1])[0]
    storage = {"host_gb": 10, "storage_tier": "file", "storage_options": "/x", "storage_gb": 5}
    assert "storage tier 0:file has 5 GB and the host tier 10" in warnings(read_settings(storage)[1])[0]


def test_good_settings():
    config, findings = read_settings({"host_gb": 10})
    assert (config.host_gb, [finding.text for finding in findings]) == (10, ["valid"])


# The host.


def test_a_good_host():
    assert not any(f.level is not Level.OK for f in check_host(GOOD_HOST, config_of(host_gb=700), on_tpu=True))


@pytest.mark.parametrize(
    ("changes", "settings", "level", "text"),
    [
        ({}, {"host_gb": 2000}, Level.ERROR, "TPU_OFFLOAD_HOST_GB=2000 and 900.0 GB can be allocated"),
        ({}, {"host_gb": 800}, Level.WARNING, "the host tier is cut to 720.0 GB"),
        ({"available_nbytes": 50 * GB}, {"host_gb": 100}, Level.WARNING, "the host tier is cut to 40.0 GB"),
        ({}, {}, Level.WARNING, "TPU_OFFLOAD_HOST_GB is not set"),
        ({"memlock_nbytes": 8 << 20}, {"host_gb": 10}, Level.WARNING, "the process may lock 0.00781 GB"),
        ({"huge_pages": "never"}, {"host_gb": 10}, Level.WARNING, "transparent huge pages are off"),
    ],
)
def test_faults_of_the_host(changes, settings, level, text):
    host = dataclasses.replace(GOOD_HOST, **changes)
    findings = list(check_host(host, config_of(**settings), on_tpu=True))
    assert [finding for finding in findings if finding.level is not Level.OK and text not in finding.text] == []
    assert [finding.level for finding in findings if text in finding.text] == [level]


def test_the_host_is_read(tmp_path):
    (tmp_path / "kernel/mm/transparent_hugepage").mkdir(parents=True)
    (tmp_path / "kernel/mm/transparent_hugepage/enabled").write_text("always madvise [never]\n")
    for node in ("node0", "node1"):
        (tmp_path / "devices/system/node" / node).mkdir(parents=True)
    host = Host.read(sysfs=tmp_path)
    assert (host.huge_pages, host.num_nodes) == ("never", 2)
    assert 0 < host.available_nbytes <= host.total_nbytes
    assert Host.read(sysfs=tmp_path / "nowhere").num_nodes == 1


# Storage.


@pytest.fixture(autouse=True)
def any_speed(monkeypatch):
    """Tests do not depend on how fast a busy machine is."""
    monkeypatch.setattr(of_tiers, "_SLOW_NBYTES_PER_S", 0.0)


def test_a_slow_tier_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr(of_tiers, "_SLOW_NBYTES_PER_S", 1e18)
    (finding,) = check_tiers(storage_of(tmp_path))
    assert finding.level is Level.WARNING
    assert "in one thread" in finding.text


def storage_of(directory, name="file"):
    return config_of(host_gb=1, storage_tier=name, storage_options=str(directory), storage_gb=2)


def test_a_file_tier_is_tried_and_left_as_it_was(tmp_path):
    kept = tmp_path / "kv" / "worker-0"
    kept.mkdir(parents=True)
    for directory in (tmp_path / "kv", tmp_path / "new" / "a" / "b"):
        (finding,) = check_tiers(storage_of(directory))
        assert finding.level is Level.OK, finding
        assert finding.figures["read_nbytes_per_s"] > 0
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["kv", "worker-0"]


def test_an_object_tier_is_tried_and_left_as_it_was(tmp_path):
    (tmp_path / "kv" / ("0a" * 16)).mkdir(parents=True)
    for directory in (tmp_path / "kv", tmp_path / "new" / "a b"):
        (finding,) = check_tiers(storage_of(f"file://{directory}".replace(" ", "%20"), "object"))
        assert finding.level is Level.OK, finding
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["0a" * 16, "kv"]


def test_a_disk_without_room_for_the_tier_is_an_error(tmp_path):
    settings = config_of(host_gb=1, storage_tier="file", storage_options=str(tmp_path / "kv"), storage_gb=2**20)
    (finding,) = check_tiers(settings)
    assert finding.level is Level.ERROR
    assert "1.04858e+06 GB need 1027604.42 GB or more, and " in finding.text
    assert "an engine does not start there; reduce TPU_OFFLOAD_STORAGE_GB" in finding.text
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("num_workers", "size_gb", "options", "needed"),
    [
        (1, 0.06, "min_free_gb=0", None),  # 4 MiB are there, and a tier has whole chunks
        (1, 0.08, "min_free_gb=0", "0.01"),
        (2, 0.08, "min_free_gb=0", "0.02"),
        (0, 0.08, "min_free_gb=0", "0.02"),
        (1, 0.0675, "min_free_gb=0", None),
        (1, 0.0685, "min_free_gb=0", None),  # 1 MiB is free
        (1, 0.0685, "min_free_gb=1", "0.00"),
    ],
)
def test_what_a_tier_has_allocated_is_needed_no_more(tmp_path, monkeypatch, num_workers, size_gb, options, needed):
    (tmp_path / "kv").mkdir()
    for worker_id in range(num_workers):
        directory = tmp_path / "kv" / f"worker-{worker_id}"
        directory.mkdir()
        (directory / "segment-00000.kv").write_bytes(bytes(1 << 22))
    disk = types.SimpleNamespace(f_bavail=1 << 20, f_frsize=1)
    monkeypatch.setattr(os, "statvfs", lambda path: disk)
    tier = storage_tier(f"{tmp_path}/kv,{options}", size_gb=size_gb)
    if needed is None:
        of_tiers._check_space(tier)
    else:
        with pytest.raises(ConfigError, match=f"kv: {size_gb} GB need {needed} GB or more"):
            of_tiers._check_space(tier)


def storage_tier(options, *, size_gb):
    return config_of(host_gb=1, storage_tier="file", storage_options=options, storage_gb=size_gb).storage_tiers[0]


class Lying(MemoryTier):
    def read(self, key, record):
        super().read(key, record)
        record[5] ^= 1


class Frozen(MemoryTier):
    thawed: threading.Event

    def write(self, key, record):
        self.thawed.wait(60)


class Dead(MemoryTier):
    def write(self, key, record):
        raise ConnectionRefusedError(111, "Connection refused")


class Forgetting(MemoryTier):
    """As a server without room for more than one record."""

    def write(self, key, record):
        self.values.clear()
        super().write(key, record)


class Refusing(MemoryTier):
    def write(self, key, record):
        part = record[4096:]  # a view, which the traceback has
        raise OSError(f"the server refuses {len(part)} bytes")


@pytest.mark.parametrize(
    ("tier", "level", "text"),
    [
        (Refusing, Level.ERROR, "it fails: OSError: the server refuses"),
        (Lying, Level.ERROR, "8 of 8 records came back with other bytes"),
        (Frozen, Level.ERROR, "no answer within 1 s"),
        (Forgetting, Level.ERROR, "a record of 4 MiB was written and is missing: it has no room"),
        (Dead, Level.ERROR, "it fails: ConnectionRefusedError: Connection refused"),
        (MemoryTier, Level.OK, "in one thread"),
    ],
)
def test_tiers_that_lie_freeze_or_are_dead(tier, level, text):
    timeout_s, Frozen.thawed = 1 if tier is Frozen else 60, threading.Event()
    (finding,) = check_tiers(storage_of("x", "valkey"), make=lambda name, spec: tier(spec), timeout_s=timeout_s)
    Frozen.thawed.set()
    assert finding.level is level
    assert text in finding.text


def test_little_is_stored_at_a_time():
    tiers = []

    def make(name, spec):
        tiers.append(MemoryTier(spec))
        return tiers[-1]

    (finding,) = check_tiers(storage_of("x", "valkey"), make=make)
    assert finding.level is Level.OK
    assert tiers[0].most_values == tiers[0].spec.num_chunks == 2


@pytest.mark.parametrize(
    ("options", "used"),
    [
        ("valkey://h:1", "valkey://h:1?ttl_s=60"),
        ("valkey://h:1/2?timeout_s=1", "valkey://h:1/2?timeout_s=1&ttl_s=60"),
        ("valkey://h:1?ttl_s=5&timeout_s=1", "valkey://h:1?ttl_s=5&timeout_s=1"),
        ("h:1", "h:1"),
    ],
)
def test_records_on_a_server_expire_if_the_check_is_killed(options, used):
    found = []

    def make(name, spec):
        found.append(spec.options)
        return MemoryTier(spec)

    (_,) = check_tiers(storage_of(options, "valkey"), make=make)
    assert found == [used]


def test_nothing_is_left_on_a_server():
    with servers.running(servers.valkey()) as server:
        (finding,) = check_tiers(storage_of(f"valkey://127.0.0.1:{server.port}?timeout_s=60", "valkey"))
        assert finding.level is Level.OK, finding
        assert "keys=" not in servers.ask(server.port, "INFO", "keyspace")


@pytest.mark.parametrize("name", ["file", "object"])
@pytest.mark.parametrize("there", [False, True])
def test_an_interrupt_leaves_nothing(tmp_path, monkeypatch, name, there):
    """Ctrl-C while records are written."""
    directory = tmp_path / "kv" / "a b"
    if there:
        (directory / "of others").mkdir(parents=True)
    before = sorted(tmp_path.rglob("*"))
    is_written = threading.Event()

    class Queue(queue.SimpleQueue):
        def get(self, block=True, timeout=None):
            assert is_written.wait(60)
            raise KeyboardInterrupt

    def make(name, spec):
        tier = make_tier(name, spec)
        write = tier.write

        def slow_write(key, record):
            write(key, record)
            is_written.set()
            time.sleep(0.1)

        monkeypatch.setattr(tier, "write", slow_write)
        return tier

    monkeypatch.setattr("queue.SimpleQueue", Queue)
    options = f"{directory},min_free_gb=0" if name == "file" else f"file://{directory}".replace(" ", "%20")
    with pytest.raises(KeyboardInterrupt):
        list(check_tiers(storage_of(options, name), make=make))
    assert sorted(tmp_path.rglob("*")) == before


def test_a_directory_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    (finding,) = check_tiers(storage_of(tmp_path / "file"))
    assert finding.level is Level.ERROR
    assert "the directory cannot be used" in finding.text


def test_a_directory_that_cannot_be_looked_for_is_one_finding(tmp_path):
    """As one below a directory that may not be searched: the doctor ended there, without what it had found."""
    (finding,) = check_tiers(storage_of(tmp_path / ("x" * 300)))
    assert finding.level is Level.ERROR
    assert "the directory cannot be used" in finding.text


@pytest.mark.parametrize("name", ["worker-0", "worker-0/lock"])
def test_what_an_engine_of_another_user_has_left_is_an_error(tmp_path, monkeypatch, name):
    """The directory itself takes files, so that all was well, and then no engine started."""
    lock = tmp_path / "kv" / "worker-0" / "lock"
    lock.parent.mkdir(parents=True)
    lock.write_text("")
    refused = tmp_path / "kv" / name
    refuse_access(monkeypatch, refused)
    (finding,) = check_tiers(storage_of(tmp_path / "kv"))
    assert finding.level is Level.ERROR
    assert f"{refused} belongs to user {os.getuid()}, and user {os.geteuid()} may not read and write it" in finding.text
    assert "worker 0 of an engine does not start there" in finding.text
    assert [path.name for path in (tmp_path / "kv").iterdir()] == ["worker-0"]


def test_what_is_no_part_of_a_file_tier_may_be_of_another_user(tmp_path, monkeypatch):
    """Files of the user's own, and what another check has left."""
    names = ["worker-notes.txt", "worker-0/notes.txt", "worker-0/segment-000.kv.tmp", "worker-60001/lock"]
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("")
    refuse_access(monkeypatch, *(tmp_path / name for name in names), tmp_path / "worker-60001")
    (finding,) = check_tiers(storage_of(tmp_path))
    assert finding.level is not Level.ERROR, finding.text


def refuse_access(monkeypatch, *refused):
    access = os.access
    monkeypatch.setattr(
        os, "access", lambda path, *args, **how: access(path, *args, **how) and Path(path) not in refused
    )


# Devices.


def test_every_copy_path_is_right_here():
    findings = list(of_devices.check_copies(jax.local_devices()[:1]))
    assert [finding.check for finding in findings] == [
        "direct copies, bfloat16", "staged copies, bfloat16", "direct copies, float8_e4m3fn",
        "staged copies, float8_e4m3fn",
    ]  # fmt: skip
    assert all(finding.level is Level.OK for finding in findings), findings


def test_a_copy_path_that_changes_a_bit_is_found(monkeypatch):
    finish = WorkerCopies.finish

    def broken(self, caches):
        caches = finish(self, caches)
        raw = np.array(caches[1]).view(np.uint8)
        raw[11, 3, 1, 0, 5] ^= 4
        return [caches[0], jax.device_put(raw.view(caches[1].dtype), caches[1].sharding), *caches[2:]]

    monkeypatch.setattr(WorkerCopies, "finish", broken)
    monkeypatch.setattr(WorkerCopies, "_fill", lambda self, caches: None)
    findings = list(of_devices.check_copies(jax.local_devices()[:1]))
    assert len(errors(findings)) == 4
    assert all("pages have other bytes than before" in line for line in errors(findings))


def test_a_copy_path_that_does_not_compile_is_found(monkeypatch):
    def fail(self, *args):
        raise RuntimeError("INTERNAL: Mosaic failed\nmore")

    monkeypatch.setattr(WorkerCopies, "dispatch", fail)
    said = errors(of_devices.check_copies(jax.local_devices()[:1]))
    assert len(said) == 4
    assert "it fails: RuntimeError" in said[0]
    assert "more" not in said[0]


def test_no_device(monkeypatch):
    def fail():
        raise RuntimeError("The TPU is already in use by process with pid 17.\nmore")

    monkeypatch.setattr(jax, "devices", fail)
    devices, findings = of_devices.find_devices()
    assert not devices
    assert errors(findings) == ["devices: jax finds no device: The TPU is already in use by process with pid 17."]


def test_a_platform_that_jax_does_not_have(monkeypatch):
    """For `JAX_PLATFORMS=cuda` without CUDA jax fails an assertion."""

    def fail():
        raise AssertionError

    monkeypatch.setattr(of_devices, "check_backend", fail)
    assert errors(of_devices.find_devices()[1])[0].startswith("devices: jax finds no device: AssertionError")


def test_a_profile_of_another_device(tmp_path):
    path = tmp_path / "profile.json"
    entry = {"num_layers": 2, "page_nbytes": 65536, "save": ["direct"], "load": ["direct"]}
    profile = {"format": "tpu_offload.profile", "version": 1, "device_kind": "TPU v9", "entries": [entry]}
    path.write_text(json.dumps(profile))
    settings = config_of(host_gb=1, save_path="auto", copy_profile=str(path))
    said = errors(check_profile(jax.local_devices(), settings))
    assert len(said) == 1
    assert "measured on 'TPU v9'" in said[0]
    path.write_text(json.dumps(profile | {"device_kind": jax.local_devices()[0].device_kind}))
    assert not errors(check_profile(jax.local_devices(), settings))


def test_a_profile_that_is_not_used_is_not_read(monkeypatch):
    settings = config_of(host_gb=1, save_path="direct", load_path="direct", copy_profile="/nowhere/profile.json")
    assert list(check_profile([], settings)) == []


def test_a_profile_without_an_end_is_no_profile():
    settings = config_of(host_gb=1, save_path="auto", copy_profile="/dev/zero")
    assert "is not JSON" in errors(check_profile([], settings))[0]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"eviction_policy": "os:getcwd"}, "expected a class derived from tpu_offload.EvictionPolicy"),
        ({"eviction_policy": "no_such_module:Policy"}, "no_such_module cannot be imported"),
        ({"save_path": "auto", "copy_profile": "/nowhere/profile.json"}, "cannot be read: No such file"),
        ({"save_path": "auto", "copy_profile": "a\0b"}, "expected the path of a file"),
        ({"storage_tier": "file", "storage_options": "/tmp/a\0b", "storage_gb": 1}, "has a null character"),
    ],
)
def test_settings_that_name_what_is_not_there(settings, said):
    """Beside an engine that has the devices, too."""
    found_errors = errors(examine({"host_gb": 0.1, **settings}, with_devices=False))
    assert len(found_errors) == 1
    assert said in found_errors[0]


def test_a_host_tier_that_takes_long_to_allocate(monkeypatch):
    monkeypatch.setattr(of_devices, "_SLOW_ALLOCATION_S", 0.0)
    findings = list(of_devices.check_allocation(jax.local_devices()[:1], config_of(host_gb=3)))
    assert [finding.check for finding in findings] == ["pinned memory", "copy speed"]
    assert "the host tier is complete after" in warnings(findings)[0]


# The command.


def test_a_good_machine_passes(tmp_path, capsys):
    path = tmp_path / "report.json"
    settings: dict[str, object] = {"kv_connector": "TPUOffloadConnector", "kv_connector_extra_config": {"host_gb": 0.1}}
    settings["kv_load_failure_policy"] = "recompute"
    assert main(["doctor", "--settings", json.dumps(settings), "--json", str(path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    report = json.loads(path.read_text())
    assert len(lines) == len(report["findings"]) + 1
    assert re.fullmatch(r"0 errors, [12] warnings, \d+ s", lines[-1]), "that there is no TPU, and perhaps no vLLM"
    assert "warning devices: " in "\n".join(lines)
    assert all(re.match(r"(ok|warning|error) +[\w :,]+: ", line) for line in lines[:-1])
    assert {"python", "jax", "tpu_offload"} <= set(report["versions"])


@pytest.mark.parametrize("given", [{}, {"kv_load_failure_policy": "fail"}], ids=["by default", "given"])
def test_the_policy_by_which_failed_loads_end_requests(capsys, given):
    settings = {"kv_connector": "TPUOffloadConnector", "kv_connector_extra_config": {"host_gb": 0.1}} | given
    assert main(["doctor", "--no-devices", "--settings", json.dumps(settings)]) == 0
    assert "warning settings: kv_load_failure_policy is 'fail': a request whose load" in capsys.readouterr().out


def test_a_bad_machine_has_status_1(monkeypatch, capsys):
    monkeypatch.setenv("TPU_OFFLOAD_HOST_GB", "100000")
    assert main(["doctor", "--no-devices"]) == 1
    said = capsys.readouterr().out
    assert "error   host memory: TPU_OFFLOAD_HOST_GB=100000" in said
    assert " -> set it to at most " in said


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ("{", "--settings is not JSON"),
        ("3", "--settings is 3; expected an object"),
        ("[]", "--settings is []"),
        (
            '{"kv_connector": "LMCacheConnector"}',
            "is of the connector 'LMCacheConnector'; expected TPUOffloadConnector",
        ),
        ('{"kv_connector_extra_config": 3}', "kv_connector_extra_config in --settings is 3"),
        ('{"kv_role": "kv_producer"}', "has the kv_role 'kv_producer'; expected kv_both"),
    ],
)
def test_bad_flags_have_one_line(settings, message, capsys):
    assert main(["doctor", "--settings", settings]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1


def test_without_devices_jax_is_left_alone(monkeypatch):
    monkeypatch.setattr(of_devices, "find_devices", lambda: pytest.fail("devices were used"))
    assert not any(finding.check == "devices" for finding in examine({}, with_devices=False))


@pytest.mark.parametrize(
    ("place", "shown"),
    [
        ("valkey://me:SECRET@127.0.0.1:1/0", "valkey://***@127.0.0.1:1"),
        ("valkey://me:an/SECRET@127.0.0.1:1/0", "valkey://***@127.0.0.1:1"),
        ("valkey://me:an@SECRET@127.0.0.1:1/0", "valkey://***@127.0.0.1:1"),
        ("valkey://me:a SECRET@127.0.0.1:1/0", "valkey://***@127.0.0.1:1"),
        ("valkey://me:a\nSECRET@127.0.0.1:1/0", "valkey://***@127.0.0.1:1"),
        ("valkey://me:a?SECRET@127.0.0.1:1/0", "valkey://me:a?***@"),
        ('valkey://me:a"SECRET@127.0.0.1:1/0', "valkey://***@127.0.0.1:1"),
        ("valkey:/me:SECRET@127.0.0.1:1/0", "valkey:/***@127.0.0.1:1"),
        ("me:SECRET@127.0.0.1:1/0", "***@127.0.0.1:1"),
        ("valkye://me:" + 60 * "SECRET" + "@h:1/0", "valkye://***@h:1/0"),
        ("valkey://127.0.0.1:1/0?password=SECRET&ca_file=/x", "127.0.0.1:1/0?***&ca_file=/x"),
        ("valkey://127.0.0.1:1/0?password=a;SECRET", "127.0.0.1:1/0?***"),
        ('valkey://127.0.0.1:1/0?password=a"SECRET', "127.0.0.1:1/0?***"),
        ("valkey://127.0.0.1:1/0?password=a&SECRET", "127.0.0.1:1/0?***&***"),
        ("valkey://127.0.0.1:1/0?pass%77ord=SECRET", "127.0.0.1:1/0?***"),
        ("s3://bucket/p?aws_secret_access_key=SE/SECRET&region=us", "s3://bucket/p?***&region=us"),
        ("s3://bucket/p?password_file=/run/file", "s3://bucket/p?password_file=/run/file"),
    ],
)
@pytest.mark.parametrize("as_list", [False, True])
def test_a_report_has_no_passwords(tmp_path, capsys, place, shown, as_list):
    path = tmp_path / "report.json"
    options = [place] if as_list else place
    settings = {"host_gb": 0.1, "storage_tier": "valkey", "storage_options": options, "storage_gb": 1}
    given = {"kv_connector_extra_config": settings} if as_list else settings
    assert main(["doctor", "--no-devices", "--settings", json.dumps(given), "--json", str(path)]) == 1
    report = json.loads(path.read_text())
    assert "SECRET" not in path.read_text()
    argv = report["argv"]
    given = json.loads(argv[argv.index("--settings") + 1])
    options = given.get("kv_connector_extra_config", given)["storage_options"]
    assert shown in (options[0] if as_list else options)


def test_a_part_of_a_transfer_config_is_enough(capsys):
    main(
        [
            "doctor",
            "--no-devices",
            "--settings",
            '{"kv_role": "kv_both", "kv_connector_extra_config": {"host_gb": 0.1}}',
        ]
    )
    assert "TPU_OFFLOAD_HOST_GB=0.1" in capsys.readouterr().out


def test_beside_an_engine_its_memory_is_no_fault():
    host = dataclasses.replace(GOOD_HOST, available_nbytes=50 * GB)
    assert not warnings(check_host(host, config_of(host_gb=100), on_tpu=True, beside_engine=True))


def test_an_interrupted_check_leaves_nothing(tmp_path):
    """The main thread removes the folder, whatever the thread that makes the tier does."""
    (tmp_path / "kv").mkdir()
    release = threading.Event()
    checks = check_tiers(storage_of(tmp_path / "kv" / "a"), make=lambda name, spec: stuck(spec), timeout_s=0.2)

    def stuck(spec):
        Path(spec.options, f"worker-{spec.worker_id}").mkdir(parents=True)
        release.wait(60)
        raise OSError("too late")

    (finding,) = checks
    release.set()
    assert "no answer within 0.2 s" in finding.text
    assert list(tmp_path.rglob("*")) == [tmp_path / "kv"]


def test_a_disk_that_freezes_is_said_before_it_is_waited_for(tmp_path, monkeypatch):
    removed: list[str] = []
    monkeypatch.setattr("shutil.rmtree", lambda path, ignore_errors: removed.append(path.name))
    Frozen.thawed = threading.Event()
    checks = iter(check_tiers(storage_of(tmp_path), make=lambda name, spec: Frozen(spec), timeout_s=0.2))
    assert "no answer within 0.2 s" in next(checks).text
    assert not removed
    Frozen.thawed.set()
    assert not list(checks)
    assert len(removed) == 1


@pytest.mark.parametrize(("capabilities", "unlimited"), [("000001fffeffffff", True), ("00000000a80425fb", False)])
def test_with_ipc_lock_there_is_no_limit_of_locked_memory(tmp_path, monkeypatch, capabilities, unlimited):
    """The second is what a container gets by default."""
    monkeypatch.setattr(resource, "getrlimit", lambda _: (8 << 20, 8 << 20))
    (tmp_path / "self").mkdir()
    (tmp_path / "self" / "status").write_text(f"Name:\tx\nCapEff:\t{capabilities}\n")
    assert Host.read(procfs=tmp_path).memlock_nbytes == (None if unlimited else 8 << 20)
    assert Host.read(procfs=tmp_path / "nowhere").memlock_nbytes == 8 << 20
