"""Copy profiles: reading, the choice of `auto`, and every invalid file."""

import json
import types
from typing import Any

import jax
import pytest

from tests.caches import random_caches
from tests.worker.engine import Engine
from tpu_offload.config import CopyPath, OffloadConfig
from tpu_offload.copy_profile import FORMAT, VERSION, CopyProfile
from tpu_offload.errors import ConfigError
from tpu_offload.kernels import DirectCopier, StagedCopier, TransferSpec, choose_paths
from tpu_offload.types import Direction

DIRECT, STAGED, FUSED = CopyPath.DIRECT, CopyPath.STAGED, CopyPath.FUSED
BOTH = [DIRECT, STAGED]


def entry(**changes):
    rankings = {"save": ["direct", "staged"], "load": ["staged", "direct"]}
    return {"num_layers": 32, "page_nbytes": 65536} | rankings | changes


def profile(*entries, **changes):
    content = {"format": FORMAT, "version": VERSION, "device_kind": "TPU v6 lite"}
    return content | {"entries": list(entries) or [entry()]} | changes


def write(tmp_path, content):
    path = tmp_path / "p.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def choose(tmp_path, content, direction=Direction.SAVE, **kwargs: Any):
    asked: dict[str, Any] = {
        "device_kind": "TPU v6 lite",
        "num_layers": 32,
        "page_nbytes": 65536,
        "offered": BOTH,
    } | kwargs
    return CopyProfile.read(write(tmp_path, content)).choose(direction, **asked)


def test_the_best_for_each_direction(tmp_path):
    content = profile(other="keys", are={"left": "alone"})
    assert choose(tmp_path, content) is DIRECT
    assert choose(tmp_path, content, Direction.LOAD) is STAGED


def test_paths_that_are_not_offered_are_skipped(tmp_path):
    content = profile(entry(save=["fused", "staged", "direct"]))
    assert choose(tmp_path, content) is STAGED
    assert choose(tmp_path, content, offered=[*BOTH, FUSED]) is FUSED
    with pytest.raises(ConfigError, match=r"ranks only fused for saves.*TPU_OFFLOAD_SAVE_PATH to direct or staged"):
        choose(tmp_path, profile(entry(save=["fused"])))


@pytest.mark.parametrize(
    ("num_layers", "page_nbytes", "chosen", "warned"),
    [
        (8, 4096, DIRECT, False),
        (16, 4096, DIRECT, False),  # twice as large
        (32, 65536, STAGED, False),
        (20, 65536, STAGED, False),
        (80, 65536, STAGED, True),  # a block 2.5 times as large
        (32, 16384, STAGED, True),
        (2, 1024, DIRECT, True),
    ],
)
def test_nearest_geometry(tmp_path, caplog, num_layers, page_nbytes, chosen, warned):
    content = profile(entry(num_layers=8, page_nbytes=4096), entry(save=["staged"]))
    assert choose(tmp_path, content, num_layers=num_layers, page_nbytes=page_nbytes) is chosen
    assert ("may not choose the fastest path" in caplog.text) == warned


def test_another_device_kind_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match=r"measured on 'TPU v6 lite' and the KV caches are on 'TPU7x'; .*bench"):
        choose(tmp_path, profile(), device_kind="TPU7x")


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("", "is not JSON"),
        ("{", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("[]", "is not a profile: the file: "),
        ({}, "is not a profile: format: Field required"),
        (profile(format="x"), "is not a profile: format: expected 'tpu_offload.profile'"),
        (profile(version=2), "is not a profile: version: expected 1"),
        (profile(entries=[]), "is not a profile: entries: "),
        (profile(entry(save=[])), "is not a profile: entries.0.save: "),
        (profile(entry(save=["auto"])), "is not a profile: entries.0.save.0: expected 'direct', 'staged' or 'fused'"),
        (profile(entry(page_nbytes=0)), "is not a profile: entries.0.page_nbytes: "),
        (profile(entry(num_layers="many")), "is not a profile: entries.0.num_layers: "),
    ],
)
def test_a_malformed_file_is_one_clear_line(tmp_path, content, reason):
    path = write(tmp_path, content)
    with pytest.raises(ConfigError) as e:
        CopyProfile.read(path)
    assert f"TPU_OFFLOAD_COPY_PROFILE={path} {reason}" in str(e.value)
    assert "`tpu-offload bench" in str(e.value)
    assert "\n" not in str(e.value)


def test_a_file_that_cannot_be_read(tmp_path):
    with pytest.raises(ConfigError, match=r"no-such-file cannot be read: No such file or directory; .*bench"):
        CopyProfile.read(tmp_path / "no-such-file")
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        CopyProfile.read(tmp_path)


# --- in the worker


def own_profile(tmp_path, **changes):
    """A profile of the device and the caches that the tests run on."""
    kind = jax.devices()[0].device_kind
    return write(tmp_path, profile(entry(num_layers=3, page_nbytes=768, **changes), device_kind=kind))


def test_auto_takes_the_path_of_its_direction(tmp_path, caplog):
    engine = Engine("auto", copy_profile=own_profile(tmp_path))
    assert isinstance(engine.saver, DirectCopier)
    assert isinstance(engine.loader, StagedCopier)
    assert not caplog.records
    engine.check_round_trip()


def test_auto_for_one_direction_only(tmp_path):
    engine = Engine("staged saves, auto loads", copy_profile=own_profile(tmp_path, save=["direct"], load=["direct"]))
    assert isinstance(engine.saver, StagedCopier)
    assert isinstance(engine.loader, DirectCopier)


def test_one_path_is_one_copier(tmp_path):
    profile = own_profile(tmp_path, save=["fused", "staged"], load=["staged"])
    engine = Engine("auto", copy_profile=profile, offers_fused=False)
    assert engine.saver is engine.loader


@pytest.mark.parametrize("path", ["fused saves, direct loads", "direct saves, fused loads"])
def test_fused_is_refused_where_the_engine_does_not_offer_it(path):
    name = "SAVE" if path.startswith("fused") else "LOAD"
    with pytest.raises(ConfigError, match=rf"TPU_OFFLOAD_{name}_PATH=fused: .*set it to direct, staged or auto"):
        Engine(path, offers_fused=False)


def test_fused_is_refused_where_caches_span_hosts():
    """Hosts that share a model must run the same step, and the copies that fit may differ between them."""
    spec = types.SimpleNamespace(num_ranks=1, cache_sharding=types.SimpleNamespace(is_fully_addressable=False))
    config = OffloadConfig.create(save_path="fused")
    with pytest.raises(ConfigError, match=r"SAVE_PATH=fused: the KV caches span hosts; set it to direct, staged"):
        choose_paths(config, spec, fused=True)  # type: ignore[arg-type]


def test_fused_is_chosen_where_the_engine_offers_it(tmp_path):
    spec = TransferSpec.from_caches(random_caches(Engine().rng), segment_blocks=4, capacity=2)
    path = own_profile(tmp_path, save=["fused", "direct"])
    config = OffloadConfig.create(save_path="auto", load_path="fused", copy_profile=path)
    assert choose_paths(config, spec, fused=True) == {Direction.SAVE: FUSED, Direction.LOAD: FUSED}


def test_a_profile_that_cannot_be_used_takes_no_memory(tmp_path, monkeypatch):
    monkeypatch.setattr("tpu_offload.worker.host_memory.HostArena", None)
    with pytest.raises(ConfigError, match="measured on"):
        Engine("auto", copy_profile=write(tmp_path, profile()))


@pytest.mark.parametrize("off", ["num_cpu_chunks", "num_staging_blocks"])
def test_offloading_that_is_off_reads_no_profile(off, tmp_path):
    Engine("auto", copy_profile=tmp_path / "no-such-file", **{off: 0})
