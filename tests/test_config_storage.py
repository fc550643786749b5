"""The settings of several storage tiers: one value for each, sizes in GB, and what is refused."""

import dataclasses

import pytest

from tests.test_config import GB, from_env, make_layout
from tpu_offload import ConfigError, KVLayout, OffloadConfig
from tpu_offload.config import LoadMode, StorageAdmission, StorageWriteEvent

TWO = {"storage_tier": "file; valkey", "storage_options": "/mnt/kv;valkey://host:6379", "num_storage_chunks": "20;200"}


def test_each_tier_has_its_own_values_and_one_value_is_for_all():
    config = from_env(**TWO, storage_write_on="save;eviction", max_storage_gb_in_flight="0.5")
    near, far = config.storage_tiers
    assert (near.tier_id, near.name, near.options, near.num_chunks) == (0, "file", "/mnt/kv", 20)
    assert (far.tier_id, far.name, far.options, far.num_chunks) == (1, "valkey", "valkey://host:6379", 200)
    assert (near.label, far.label) == ("0:file", "1:valkey")
    assert (near.write_on, far.write_on) == (StorageWriteEvent.SAVE, StorageWriteEvent.HOST_EVICTION)
    assert near.admission is far.admission is StorageAdmission.ALL
    assert near.max_gb_in_flight == far.max_gb_in_flight == 0.5
    assert config.storage_chunks(make_layout()) == (20, 200)


def test_one_tier_takes_single_values():
    config = OffloadConfig.create(storage_tier="file", storage_options="/a", num_storage_chunks=7)
    assert [(tier.name, tier.options, tier.num_chunks) for tier in config.storage_tiers] == [("file", "/a", 7)]
    assert from_env(storage_tier="  ").storage_tiers == ()


def test_kv_in_storage_is_compared_with_computing_unless_a_mode_is_set():
    assert OffloadConfig.create().effective_load_mode is LoadMode.LOAD
    assert OffloadConfig.create(load_mode="auto").effective_load_mode is LoadMode.AUTO
    tier = {"storage_tier": "file", "storage_options": "/a", "num_storage_chunks": 7}
    assert OffloadConfig.create(**tier).effective_load_mode is LoadMode.AUTO
    assert OffloadConfig.create(**tier, load_mode="load").effective_load_mode is LoadMode.LOAD
    assert OffloadConfig.create(**tier, host_gb=0).effective_load_mode is LoadMode.LOAD, "offloading is off"


@pytest.mark.parametrize("page_shape", [(16, 4, 2, 64), (16, 1, 2, 66)])
@pytest.mark.parametrize("num_devices", [1, 4])
def test_a_size_in_gb_has_room_for_headers_padding_and_the_directory(page_shape, num_devices):
    layout = make_layout(page_shape=page_shape, num_shards=1, num_local_devices=num_devices)
    config = from_env(storage_tier="a:B;c:D", storage_gb="1;0.25", blocks_per_chunk="3")
    payload = 3 * layout.block_nbytes_per_host
    chunk_nbytes = 4096 + -(-payload // 4096) * 4096 + 64
    sizes = config.storage_chunks(layout)
    for num_chunks, gb in zip(sizes, (1, 0.25), strict=True):
        assert 0.999 * gb * GB - 2 * chunk_nbytes < num_chunks * chunk_nbytes < gb * GB


def test_with_pipeline_stages_a_size_in_gb_is_for_the_worker_that_stores_most():
    small, large = make_layout(num_layers=2), dataclasses.replace(make_layout(num_layers=6), stage_layers="2 to 7")
    config = from_env(storage_tier="a:B", storage_gb="1")
    assert config.storage_chunks(KVLayout.of_stages([small, large])) == config.storage_chunks(large)
    assert config.storage_chunks(small) > config.storage_chunks(large)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            {"storage_options": "/mnt/kv"},
            r"STORAGE_OPTIONS='/mnt/kv' has 1 value\(s\), and .*names 2 tier\(s\); exp.* 2,",
        ),
        ({"num_storage_chunks": "20"}, r"NUM_STORAGE_CHUNKS='20' has 1 value\(s\).* expected 2, separated by ';'"),
        ({"storage_write_on": "save;save;save"}, r"STORAGE_WRITE_ON='save;save;save' .* expected one for all, or 2"),
        ({"storage_admission": "all;most"}, "STORAGE_ADMISSION='most': expected 'all', 'second_sighting' or"),
        ({"storage_eviction_policy": "lru;fifo"}, "STORAGE_EVICTION_POLICY='fifo': expected 'auto', 'density', 'lru'"),
        ({"max_storage_gb_in_flight": "1;0"}, "MAX_STORAGE_GB_IN_FLIGHT='0': expected greater than 0"),
        ({"storage_gb": "1;2"}, r"NUM_STORAGE_CHUNKS=20;200 and .*STORAGE_GB=1\.0;2\.0 set the same size"),
        ({"num_storage_chunks": ""}, "STORAGE_TIER='file;valkey' needs a size; set TPU_OFFLOAD_STORAGE_GB, or"),
        ({"storage_tier": "file;"}, "STORAGE_TIER=file; has an empty name; expected names separated by ';'"),
        ({"storage_tier": "file;;valkey"}, "STORAGE_TIER=file;;valkey has an empty name"),
    ],
)
def test_what_does_not_match_is_one_line(settings, said):
    with pytest.raises(ConfigError, match=f"^TPU_OFFLOAD_{said}") as caught:
        from_env(**(TWO | settings))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("field", "value"),
    [("storage_options", "/cache"), ("storage_write_on", "save"), ("storage_eviction_policy", "lru")],
)
def test_what_is_set_for_tiers_that_are_not_there_is_warned_about(field, value, caplog):
    assert not from_env(**{field: value}).has_storage
    assert f"TPU_OFFLOAD_{field.upper()} is set but not used: TPU_OFFLOAD_STORAGE_TIER is empty" in caplog.text
    caplog.clear()
    assert from_env(storage_tier="file", storage_options="/cache", num_storage_chunks="8").has_storage
    assert not caplog.text


def test_a_size_without_a_tier_and_one_below_a_chunk(caplog):
    assert not from_env(storage_gb="8").has_storage
    assert "TPU_OFFLOAD_STORAGE_GB is set but not used: TPU_OFFLOAD_STORAGE_TIER is empty" in caplog.text
    config = from_env(storage_tier="file", storage_gb="0.0001")
    with pytest.raises(ConfigError, match=r"^TPU_OFFLOAD_STORAGE_GB=0\.0001 for 'file' is less than one chunk of") as e:
        config.storage_chunks(make_layout(num_layers=64))
    least = str(e.value).rsplit(" ", 1)[1]
    assert from_env(storage_tier="file", storage_gb=least).storage_chunks(make_layout(num_layers=64)) == (1,)


def test_a_size_in_gb_set_in_code_replaces_one_in_chunks_of_the_environment():
    environ = {"TPU_OFFLOAD_STORAGE_TIER": "a:B", "TPU_OFFLOAD_NUM_STORAGE_CHUNKS": "8"}
    config = OffloadConfig.from_env(environ, overrides={"storage_gb": 2})
    assert (config.num_storage_chunks, config.storage_gb) == ((), (2.0,))


@pytest.mark.parametrize(
    ("name", "first", "second", "is_one_place"),
    [
        ("file", "/mnt/kv", "/mnt/kv/../kv,min_free_gb=5", True),
        ("file", "/mnt/a", "/mnt/b", False),
        ("object", "s3://bucket/p?region=x", "s3://bucket/p/?region=y", True),
        ("object", "s3://bucket/p?endpoint=http://a", "s3://bucket/p?endpoint=http://b", False),
        ("object", "s3://bucket/p", "gs://bucket/p", False),
        ("valkey", "valkey://Host:6379/0", "rediss://host:6379/0?timeout_s=1", True),
        ("valkey", "valkey://host:6379/0", "valkey://host:6379/1", False),
        ("a:B", "", "", False),
    ],
)
def test_two_tiers_of_a_kind_need_a_place_each(name, first, second, is_one_place):
    settings = {"storage_tier": f"{name};{name}", "storage_options": f"{first};{second}", "num_storage_chunks": "1;1"}
    if not is_one_place:
        assert len(from_env(**settings).storage_tiers) == 2
        return
    with pytest.raises(ConfigError, match=rf"^TPU_OFFLOAD_STORAGE_TIER: tiers 0:{name} and 1:{name} would use one pl"):
        from_env(**settings)
