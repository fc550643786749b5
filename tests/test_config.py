"""Settings: every variable and its invalid values."""

import dataclasses
import logging
import math
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tpu_offload.config import (
    DEFAULT_NUM_CPU_CHUNKS,
    DEFAULT_STAGING_BUFFER_TOKENS,
    CopyPath,
    EvictionPolicyName,
    LoadMode,
    OffloadConfig,
    SaveEvent,
    StorageAdmission,
    StorageCopyPath,
    StorageEvictionPolicy,
    StorageWriteEvent,
    SwapMode,
)
from tpu_offload.errors import ConfigError
from tpu_offload.layout import KVLayout, LayerGroup, LayerGroupKind
from tpu_offload.types import Direction

GB = 2**30

# field -> (text in the environment, value in the config)
GOOD = {
    "staging_buffer_tokens": ("4096", 4096),
    "num_staging_blocks": ("32", 32),
    "staging_buffer_gb": ("0.5", 0.5),
    "num_cpu_chunks": (" 2048 ", 2048),
    "host_gb": ("1.5", 1.5),
    "state_share": ("0.25", 0.25),
    "host_memory_fraction": ("0.25", 0.25),
    "host_segment_gb": ("0.125", 0.125),
    "eviction_policy": ("s3fifo", EvictionPolicyName.S3FIFO),
    "blocks_per_chunk": ("4", 4),
    "save_path": ("staged", CopyPath.STAGED),
    "load_path": ("fused", CopyPath.FUSED),
    "load_mode": ("recompute", LoadMode.RECOMPUTE),
    "copy_profile": ("profiles/v6e.json", Path("profiles/v6e.json")),
    "decode_save": ("1", True),
    "save_on": ("preemption, eviction", (SaveEvent.PREEMPTION, SaveEvent.HBM_EVICTION)),
    "save_after_sightings": ("2", 2),
    "max_save_tokens": ("4096", 4096),
    "max_load_tokens": ("8192", 8192),
    "skip_jax_precompile": ("true", True),
    "block_size_buckets": ("1, 2,8", (1, 2, 8)),
    "sync_load": ("1", True),
    "patch_runner": ("0", False),
    "save_wait_s": ("0", 0.0),
    "load_wait_s": ("0", 0.0),
    "max_load_gb_per_step": ("0", 0.0),
    "swap_gb": (" auto", "auto"),
    "swap_safety": ("0.5", 0.5),
    "swap_mode": ("recompute", SwapMode.RECOMPUTE),
    "storage_tier": ("my.tiers:Tier", ("my.tiers:Tier",)),
    "storage_options": ("/mnt/disk", ("/mnt/disk",)),
    "num_storage_chunks": ("4096", (4096,)),
    "storage_gb": ("0.5; 20", (0.5, 20.0)),
    "storage_write_on": ("eviction", (StorageWriteEvent.HOST_EVICTION,)),
    "storage_admission": ("after_hit", (StorageAdmission.AFTER_HIT,)),
    "storage_eviction_policy": ("lru", (StorageEvictionPolicy.LRU,)),
    "storage_copy_path": ("hbm", StorageCopyPath.HBM),
    "storage_wait_s": ("0", 0.0),
    "storage_lookup_wait_s": ("0", 0.0),
    "max_storage_gb_in_flight": ("0.25", (0.25,)),
    "job_timeout_s": ("2.5", 2.5),
    "breaker_failures": ("0", 0),
    "breaker_retry_s": ("0.5", 0.5),
    "metrics_log_interval": ("0", 0.0),
    "batched_save": ("0", False),
    "save_threads": ("4", 4),
    "use_unpinned_host": ("1", True),
}

# field -> other fields that it needs
NEEDED = {"storage_tier": {"num_storage_chunks": 8}}

# field -> [(text, what the message must say is allowed)]
BAD = {
    "staging_buffer_tokens": [("-1", "greater than or equal to 0"), ("many", "integer"), ("", "integer")],
    "num_staging_blocks": [("-5", "greater than or equal to 0"), ("1.5", "integer")],
    "staging_buffer_gb": [
        ("-0.1", "greater than or equal to 0"),
        ("nan", "finite"),
        ("inf", "finite"),
        ("1GB", "number"),
    ],
    "num_cpu_chunks": [
        ("9" * 30, "less than or equal to 2147483647"),
        ("-1", "greater than or equal to 0"),
        ("0x10", "integer"),
    ],
    "host_gb": [("-1", "greater than or equal to 0"), ("nan", "finite"), ("lots", "number")],
    "host_memory_fraction": [("0", "greater than 0"), ("1.01", "less than or equal to 1"), ("nan", "1")],
    "host_segment_gb": [("0", "greater than 0"), ("inf", "finite")],
    "blocks_per_chunk": [
        ("0", "greater than or equal to 1"),
        ("4097", "less than or equal to 4096"),
        ("two", "integer"),
    ],
    "eviction_policy": [
        ("fifo", "TPU_OFFLOAD_EVICTION_POLICY='fifo': expected 'density', 'lru', 'arc', 's3fifo' or 'wtinylfu'"),
        ("", "TPU_OFFLOAD_EVICTION_POLICY='': expected 'density', 'lru', 'arc', 's3fifo' or 'wtinylfu'"),
        ("fifo", "module:Class of your own policy; did you mean s3fifo?"),
        ("LRU", "did you mean lru?"),
        ("w-tinylfu", "did you mean wtinylfu?"),
        ("my_policies:", "expected module:Class, like my_package.policies:MyPolicy"),
        (":FIFO", "expected module:Class"),
        ("my-policies:FIFO", "expected module:Class"),
        ("a:b:c", "expected module:Class"),
    ],
    "save_path": [
        ("diagonal", "'direct', 'staged', 'fused' or 'auto'"),
        ("", "'direct', 'staged', 'fused' or 'auto'"),
        ("auto", "needs a profile of this machine; run `tpu-offload bench`"),
    ],
    "load_path": [("STAGED", "'direct', 'staged', 'fused' or 'auto'"), ("auto", "set TPU_OFFLOAD_COPY_PROFILE")],
    "copy_profile": [("", "expected the path of a file")],
    "decode_save": [("maybe", "0 or 1")],
    "save_on": [
        ("evict", "'compute', 'eviction' or 'preemption'"),
        ("", "one or more of compute, eviction and preemption"),
        ("compute,compute", "without duplicates"),
    ],
    "state_share": [("0", "greater than 0"), ("1", "less than 1"), ("half", "number")],
    "save_after_sightings": [
        ("0", "greater than or equal to 1"),
        ("16", "less than or equal to 15"),
        ("often", "integer"),
    ],
    "max_save_tokens": [("-1", "greater than or equal to 0"), ("all", "integer")],
    "max_load_tokens": [("-1", "greater than or equal to 0"), ("1.5", "integer")],
    "skip_jax_precompile": [("2", "0 or 1")],
    "block_size_buckets": [
        ("2,4", "start with 1"),
        ("1,4,2", "ascending"),
        ("1,2,2", "ascending"),
        ("1,x", "integer"),
        ("0,1", "greater than or equal to 1"),
    ],
    "sync_load": [("never", "0 or 1")],
    "patch_runner": [("never", "0 or 1")],
    "save_wait_s": [("-1", "greater than or equal to 0"), ("inf", "finite number")],
    "load_wait_s": [("-1", "greater than or equal to 0"), ("inf", "finite number")],
    "max_load_gb_per_step": [("-1", "greater than or equal to 0"), ("inf", "finite number")],
    "swap_gb": [(text, "expected auto, or GB from 0 to 1048576") for text in ("-1", "nan", "inf", "AUTO", "", "1GB")],
    "swap_safety": [("0", "greater than 0"), ("1.5", "less than or equal to 1")],
    "swap_mode": [("copy", "'auto', 'swap' or 'recompute'")],
    "load_mode": [("swap", "'auto', 'load' or 'recompute'")],
    "storage_tier": [
        ("my.tiers:Tier", "needs a size; set TPU_OFFLOAD_STORAGE_GB, or TPU_OFFLOAD_NUM_STORAGE_CHUNKS to at least 1")
    ],
    "storage_options": [],  # whatever the tier takes
    "num_storage_chunks": [("0", "greater than or equal to 1"), ("many", "integer")],
    "storage_gb": [("0", "greater than 0"), ("inf", "finite number"), ("1TB", "number")],
    "storage_write_on": [("load", "'save' or 'eviction'")],
    "storage_admission": [("most", "'all', 'second_sighting' or 'after_hit'")],
    "storage_eviction_policy": [("my:Policy", "'auto', 'density', 'lru', 'arc', 's3fifo' or 'wtinylfu'")],
    "storage_copy_path": [("address", "'auto', 'host' or 'hbm'")],
    "storage_wait_s": [("-1", "greater than or equal to 0"), ("inf", "finite number")],
    "storage_lookup_wait_s": [("-1", "greater than or equal to 0"), ("inf", "finite number")],
    "max_storage_gb_in_flight": [("0", "greater than 0"), ("inf", "finite number")],
    "job_timeout_s": [("0", "greater than 0"), ("-3", "greater than 0"), ("nan", "finite number"), ("soon", "number")],
    "breaker_failures": [("-1", "greater than or equal to 0"), ("few", "integer")],
    "breaker_retry_s": [("0", "greater than 0"), ("inf", "finite number")],
    "metrics_log_interval": [("-1", "greater than or equal to 0"), ("nan", "finite number")],
    "batched_save": [("perhaps", "0 or 1")],
    "save_threads": [("0", "greater than or equal to 1")],
    "use_unpinned_host": [("sometimes", "0 or 1")],
}


def env_name(field):
    return "TPU_OFFLOAD_" + field.upper()


def make_layout(*, block_size=16, num_layers=2, page_shape=(16, 4, 2, 64), dtype="bfloat16", **kwargs):
    group = LayerGroup.uniform(LayerGroupKind.FULL_ATTENTION, tuple(range(num_layers)), page_shape, dtype)
    return KVLayout(block_size=block_size, groups=(group,), **kwargs)


def from_env(**variables):
    return OffloadConfig.from_env({env_name(field): text for field, text in variables.items()})


def test_the_tables_above_cover_every_field():
    assert set(GOOD) == set(BAD) == set(OffloadConfig.model_fields)


@pytest.mark.parametrize("field", GOOD)
def test_variable_is_read(field):
    text, value = GOOD[field]
    needed = NEEDED.get(field, {})
    config = from_env(**{field: text}, **{name: str(number) for name, number in needed.items()})
    assert getattr(config, field) == value
    assert type(getattr(config, field)) is type(value)
    assert OffloadConfig.create(**{field: value}, **needed) == config
    default = OffloadConfig.create(**needed)
    assert [f for f in OffloadConfig.model_fields if getattr(config, f) != getattr(default, f)] == [field]


@pytest.mark.parametrize(("field", "text", "allowed"), [(f, t, a) for f, cases in BAD.items() for t, a in cases])
def test_bad_value_names_variable_value_and_what_is_allowed(field, text, allowed):
    with pytest.raises(ConfigError) as caught:
        from_env(**{field: text})
    message = str(caught.value)
    assert env_name(field) in message
    assert text.strip() in message or any(repr(part) in message for part in text.split(","))
    assert allowed in message
    assert "\n" not in message


def test_other_variables_are_ignored():
    assert OffloadConfig.from_env({"PATH": "/bin", "TPU_NAME": "x", "XTPU_OFFLOAD_Y": "1"}) == OffloadConfig.create()


def test_reads_the_process_environment_by_default(monkeypatch):
    monkeypatch.setenv("TPU_OFFLOAD_BLOCKS_PER_CHUNK", "8")
    assert OffloadConfig.from_env().blocks_per_chunk == 8


@pytest.mark.parametrize(
    ("name", "suggestion"),
    [
        ("TPU_OFFLOAD_COPY_PATH", "TPU_OFFLOAD_(STORAGE_COPY|SAVE|LOAD)_PATH"),
        ("TPU_OFFLOAD_NUM_CPU_CHUNK", "TPU_OFFLOAD_NUM_CPU_CHUNKS"),
        ("TPU_OFFLOAD_STAGING_GB", "TPU_OFFLOAD_STAGING_BUFFER_GB"),
        ("TPU_OFFLOAD_decode_save", "TPU_OFFLOAD_DECODE_SAVE"),
        ("TPU_OFFLOAD_", "TPU_OFFLOAD_"),
    ],
)
def test_unknown_variable_suggests_the_nearest(name, suggestion):
    with pytest.raises(ConfigError, match=rf"^{name} is not a setting .* did you mean {suggestion}"):
        OffloadConfig.from_env({name: "1"})


def test_variables_of_kubernetes_services_are_not_settings():
    """Each pod of a namespace has those of all Services, and `tpu-offload-valkey` is the name for a Valkey server."""
    links = {
        f"{service}_{suffix}": value
        for service in ("TPU_OFFLOAD", "TPU_OFFLOAD_VALKEY")
        for suffix, value in {
            "SERVICE_HOST": "10.0.0.7", "SERVICE_PORT": "6379", "SERVICE_PORT_RESP": "6379",
            "PORT": "tcp://10.0.0.7:6379", "PORT_6379_TCP": "tcp://10.0.0.7:6379", "PORT_6379_TCP_PROTO": "tcp",
            "PORT_6379_TCP_PORT": "6379", "PORT_6379_TCP_ADDR": "10.0.0.7",
        }.items()
    }  # fmt: skip
    assert OffloadConfig.from_env(links | {"TPU_OFFLOAD_HOST_GB": "3"}) == OffloadConfig.create(host_gb=3)
    for name in ("TPU_OFFLOAD_VALKEY_PORTS", "TPU_OFFLOAD_VALKEY", "TPU_OFFLOAD_REDIS_PORT"):
        with pytest.raises(ConfigError, match=f"^{name} is not a setting"):
            OffloadConfig.from_env(links | {name: "1"})
    with pytest.raises(ConfigError, match="TPU_OFFLOAD_VALKEY_PORT is not a setting"):
        OffloadConfig.from_env({"TPU_OFFLOAD_VALKEY_PORT": "6379"})


def test_unknown_keyword_suggests_the_nearest():
    with pytest.raises(ConfigError, match="did you mean host_gb"):
        OffloadConfig.create(host_gib=1)


def test_a_custom_policy_is_not_imported_before_it_is_used():
    name = "nowhere.to_be_found:FIFOPolicy"
    assert from_env(eviction_policy=name).eviction_policy == name
    assert OffloadConfig.create(eviction_policy=EvictionPolicyName.LRU).eviction_policy is EvictionPolicyName.LRU
    with pytest.raises(ConfigError, match=r"^eviction_policy=5: expected 'density', "):
        OffloadConfig.create(eviction_policy=5)


def test_frozen():
    with pytest.raises(ValueError, match="frozen"):
        OffloadConfig.create().blocks_per_chunk = 2


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("staging_buffer_tokens", "num_staging_blocks"),
        ("staging_buffer_tokens", "staging_buffer_gb"),
        ("num_staging_blocks", "staging_buffer_gb"),
        ("num_cpu_chunks", "host_gb"),
    ],
)
def test_two_settings_of_one_size_contradict(one, other):
    with pytest.raises(ConfigError, match="set only one") as caught:
        from_env(**{one: GOOD[one][0], other: GOOD[other][0]})
    assert f"{env_name(one)}=" in str(caught.value)
    assert f"{env_name(other)}=" in str(caught.value)


@pytest.mark.parametrize(
    "field", ["staging_buffer_tokens", "num_staging_blocks", "staging_buffer_gb", "num_cpu_chunks", "host_gb"]
)
def test_zero_turns_offloading_off(field):
    config = from_env(**{field: "0"})
    assert not config.enabled
    assert config.staging_blocks(make_layout()) >= 0  # no error: nothing is ever copied
    assert config.host_chunks(make_layout()) >= 0
    assert from_env(**{field: GOOD[field][0]}).enabled


def test_default_sizes():
    config = OffloadConfig.create()
    assert config.enabled
    assert config.staging_blocks(make_layout(block_size=16)) == DEFAULT_STAGING_BUFFER_TOKENS // 16
    assert config.host_chunks(make_layout()) == DEFAULT_NUM_CPU_CHUNKS


@pytest.mark.parametrize(("tokens", "blocks"), [(16, 1), (31, 1), (32, 2), (47, 2), (8191, 511)])
def test_tokens_round_down_to_blocks(tokens, blocks):
    assert OffloadConfig.create(staging_buffer_tokens=tokens).staging_blocks(make_layout(block_size=16)) == blocks


def test_less_than_one_block_is_an_error():
    with pytest.raises(ConfigError, match=r"TPU_OFFLOAD_STAGING_BUFFER_TOKENS=15 is 0 blocks .*at least 16, or to 0"):
        OffloadConfig.create(staging_buffer_tokens=15, save_path="staged").staging_blocks(make_layout(block_size=16))


def test_less_than_one_chunk_is_an_error():
    for path in ({"save_path": "staged"}, {"load_path": "fused"}):
        config = OffloadConfig.create(num_staging_blocks=3, blocks_per_chunk=4, **path)
        with pytest.raises(ConfigError, match=r"TPU_OFFLOAD_NUM_STAGING_BLOCKS=3 .*at least 4, or to 0"):
            config.staging_blocks(make_layout())
        config = OffloadConfig.create(num_staging_blocks=4, blocks_per_chunk=4, **path)
        assert config.staging_blocks(make_layout()) == 4


def test_direct_copies_need_no_staging_buffer():
    config = OffloadConfig.create(blocks_per_chunk=4096)
    assert config.staging_blocks(make_layout(block_size=16)) == DEFAULT_STAGING_BUFFER_TOKENS // 16
    config = OffloadConfig.create(blocks_per_chunk=4096, staging_buffer_tokens=15)
    with pytest.raises(ConfigError, match=r"=15 is 0 blocks .*at least one block: set it to at least 16, or to 0"):
        config.staging_blocks(make_layout(block_size=16))


def test_staging_gb_counts_the_bytes_of_one_device():
    layout = make_layout(num_layers=32, page_shape=(16, 8, 2, 128), num_shards=4, num_local_devices=4)
    per_device = 32 * 16 * 8 * 2 * 128 * 2 // 4
    assert OffloadConfig.create(staging_buffer_gb=1).staging_blocks(layout) == GB // per_device
    assert OffloadConfig.create(staging_buffer_gb=1).staging_blocks(dataclasses.replace(layout, num_shards=1)) == (
        GB // (4 * per_device)
    )


def test_host_gb_counts_the_bytes_of_one_host():
    layout = make_layout(num_layers=32, page_shape=(16, 8, 2, 128), num_shards=8, num_local_devices=4)
    whole = 32 * 16 * 8 * 2 * 128 * 2
    assert OffloadConfig.create(host_gb=2).host_chunks(layout) == 2 * GB // (whole // 2)
    assert OffloadConfig.create(host_gb=2, blocks_per_chunk=3).host_chunks(layout) == 2 * GB // (3 * (whole // 2))


@given(num_blocks=st.integers(1, 10_000), page=st.integers(1, 5000), num_layers=st.integers(1, 80))
def test_an_exact_fit_in_gb_fits(num_blocks, page, num_layers):
    layout = make_layout(num_layers=num_layers, page_shape=(16, page))
    exact = num_blocks * layout.block_nbytes / GB
    assert OffloadConfig.create(staging_buffer_gb=exact).staging_blocks(layout) == num_blocks
    assert OffloadConfig.create(host_gb=exact).host_chunks(layout) == num_blocks
    assert OffloadConfig.create(host_gb=math.nextafter(exact, 2 * exact)).host_chunks(layout) == num_blocks


@settings(deadline=None, derandomize=True, print_blob=False)
@given(page=st.integers(100, 500_000), num_layers=st.integers(1, 80), blocks_per_chunk=st.integers(1, 16))
def test_the_size_that_an_error_suggests_is_enough(page, num_layers, blocks_per_chunk):
    layout = make_layout(num_layers=num_layers, page_shape=(16, page))
    for field, size in (("staging_buffer_gb", "staging_blocks"), ("host_gb", "host_chunks")):
        config = OffloadConfig.create(**{field: 1e-9}, blocks_per_chunk=blocks_per_chunk, load_path="staged")
        with pytest.raises(ConfigError, match="set it to at least") as caught:
            getattr(config, size)(layout)
        suggested = re.search(r"at least ([0-9.e-]+),", str(caught.value)).group(1)
        enough = OffloadConfig.create(**{field: float(suggested)}, blocks_per_chunk=blocks_per_chunk)
        assert getattr(enough, size)(layout) >= 1


@pytest.mark.parametrize("field", ["batched_save", "save_threads", "use_unpinned_host"])
def test_an_ignored_variable_is_warned_about_once(field, caplog):
    with caplog.at_level(logging.WARNING):
        from_env(**{field: "1"})
    (record,) = caplog.records
    assert env_name(field) in record.getMessage()
    caplog.clear()
    from_env(decode_save="1")
    assert not caplog.records


def test_auto_with_a_profile_is_taken_for_either_direction():
    config = from_env(save_path="auto", copy_profile="p.json")
    assert (config.path_for(Direction.SAVE), config.path_for(Direction.LOAD)) == (CopyPath.AUTO, CopyPath.DIRECT)
    config = from_env(load_path="auto", copy_profile="p.json")
    assert (config.path_for(Direction.SAVE), config.path_for(Direction.LOAD)) == (CopyPath.DIRECT, CopyPath.AUTO)


@pytest.mark.parametrize(("save_path", "is_read"), [("direct", False), ("auto", True)])
def test_an_unused_profile_is_warned_about(save_path, is_read, caplog):
    from_env(copy_profile="p.json", save_path=save_path)
    assert ("but not used" in caplog.text) == (not is_read)


def test_a_size_without_a_storage_tier_is_warned_about(caplog):
    assert not from_env(num_storage_chunks="8").has_storage
    assert "TPU_OFFLOAD_NUM_STORAGE_CHUNKS is set but not used: TPU_OFFLOAD_STORAGE_TIER is empty" in caplog.text


def test_storage_is_off_with_offloading():
    config = from_env(num_storage_chunks="8", storage_tier="a:B")
    assert (config.has_storage, config.storage_chunks(make_layout())) == (True, (8,))
    config = from_env(num_storage_chunks="8", storage_tier="a:B", host_gb="0")
    assert (config.has_storage, config.storage_tiers, config.storage_chunks(make_layout())) == (False, (), ())


@pytest.mark.parametrize(("gb", "num_chunks"), [(1e-9, 2), (4.9, 4), (4, 4)])
def test_chunks_on_their_way_to_and_from_storage_fit_the_bound_or_are_one_each_way(gb, num_chunks):
    layout = make_layout(num_layers=4096 // 16, page_shape=(16, 64, 2, 128))  # 128 MiB a block
    config = OffloadConfig.create(
        storage_tier="a:B", num_storage_chunks=8, max_storage_gb_in_flight=gb, blocks_per_chunk=8
    )
    assert layout.block_nbytes_per_host * 8 == GB
    (tier,) = config.storage_tiers
    assert tier.max_chunks_in_flight(layout, blocks_per_chunk=8) == num_chunks


@pytest.mark.parametrize(
    "name", ["JOB_TIMEOUT_S", "METRICS_LOG_INTERVAL", "HOST_GB", "STAGING_BUFFER_GB", "HOST_SEGMENT_GB"]
)
@pytest.mark.parametrize("value", ["inf", "1e400", "1e308", "nan"])
def test_sizes_and_times_are_finite_and_sane(name, value):
    with pytest.raises(ConfigError, match=f"TPU_OFFLOAD_{name}='{value}': expected"):
        OffloadConfig.from_env({f"TPU_OFFLOAD_{name}": value})


def test_a_very_long_value_is_not_repeated_in_full():
    with pytest.raises(ConfigError) as e:
        OffloadConfig.from_env({"TPU_OFFLOAD_STAGING_BUFFER_TOKENS": "9" * 400})
    assert len(str(e.value)) < 200


# Overrides, for engines with their own configuration.


def test_overrides_take_precedence():
    environ = {"TPU_OFFLOAD_HOST_GB": "3", "TPU_OFFLOAD_DECODE_SAVE": "1", "TPU_OFFLOAD_BLOCKS_PER_CHUNK": "2"}
    config = OffloadConfig.from_env(environ, overrides={"decode_save": False, "host_gb": 1.5})
    assert (config.decode_save, config.host_gb, config.blocks_per_chunk) == (False, 1.5, 2)


def test_a_size_in_another_unit_replaces_the_one_of_the_environment():
    environ = {"TPU_OFFLOAD_HOST_GB": "3", "TPU_OFFLOAD_NUM_STAGING_BLOCKS": "7"}
    config = OffloadConfig.from_env(environ, overrides={"num_cpu_chunks": 5})
    assert (config.host_gb, config.num_cpu_chunks, config.num_staging_blocks) == (None, 5, 7)
    with pytest.raises(ConfigError, match="set the same size"):
        OffloadConfig.from_env(environ, overrides={"num_cpu_chunks": 5, "host_gb": 1})


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"decode_safe": 1}, "decode_safe is not a setting of tpu_offload; did you mean decode_save?"),
        ({"HOST_GB": 1}, "HOST_GB is not a setting of tpu_offload; did you mean host_gb?"),
        ({"host_gb": "lots"}, "host_gb='lots': "),
        ({"blocks_per_chunk": 0}, "blocks_per_chunk=0: "),
    ],
)
def test_an_error_in_an_override_names_the_override(overrides, message):
    with pytest.raises(ConfigError) as e:
        OffloadConfig.from_env({}, overrides=overrides)
    assert str(e.value).startswith(message)


def test_an_error_in_a_variable_names_the_variable():
    with pytest.raises(ConfigError, match=r"^TPU_OFFLOAD_HOST_GB='lots'"):
        OffloadConfig.from_env({"TPU_OFFLOAD_HOST_GB": "lots"}, overrides={"decode_save": True})


@pytest.mark.parametrize(
    ("environ", "overrides", "error"),
    [
        ([], None, "environ and overrides are a list and NoneType; expected mappings"),
        ({}, 5, "environ and overrides are a dict and int; expected mappings"),
        (
            {"TPU_OFFLOAD_NUM_CPU_CHUNKS": 4},
            None,
            "TPU_OFFLOAD_NUM_CPU_CHUNKS=4; expected a string, as in an environment",
        ),
        ({}, {5: 1}, "5 is not a setting of tpu_offload"),
    ],
)
def test_invalid_arguments_are_refused_with_one_line(environ, overrides, error):
    with pytest.raises(ConfigError) as e:
        OffloadConfig.from_env(environ, overrides=overrides)
    assert error in str(e.value)
    assert len(str(e.value).splitlines()) == 1


@pytest.mark.parametrize("field", ["host_gb", "num_cpu_chunks", "storage_wait_s", "storage_gb", "save_path"])
def test_true_is_no_number(field):
    """In JSON it is easily written for what is a switch in another library."""
    with pytest.raises(ConfigError, match=f"^{field}=True: expected a number or text, not true or false"):
        OffloadConfig.from_env({}, overrides={field: True})
    assert OffloadConfig.from_env({}, overrides={"decode_save": True, "sync_load": False}).decode_save
