"""Configurations that are refused at start, and the messages."""

import dataclasses
import functools
import importlib.metadata
import logging
import re
from types import SimpleNamespace

import pytest
import torch
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from tests.adapters.engine_config import kv_cache_config, make_config
from tests.adapters.scheduler_stack import BLOCK_SIZE, GB, SMALL, Stack, make_stack
from tests.inside.scheduler import eviction_policy
from tpu_offload import ConfigError
from tpu_offload.adapters.vllm import settings
from tpu_offload.adapters.vllm.hbm import check_hbm
from tpu_offload.adapters.vllm.names import CONNECTOR_NAME
from tpu_offload.adapters.vllm.plugin import register
from tpu_offload.adapters.vllm.settings import (
    check_workers,
    count_workers,
    count_workers_of_ranks,
    group_order,
    holder_id,
    read_config,
    state_groups,
    windows,
)
from tpu_offload.core.policies import LRUPolicy

pytestmark = pytest.mark.vllm


def config(**changes):
    vllm_config = make_config(num_blocks=8, async_scheduling=changes.pop("async_scheduling", False))
    for name, value in changes.pop("transfer", {}).items():
        setattr(vllm_config.kv_transfer_config, name, value)
    for name, value in changes.pop("parallel", {}).items():
        setattr(vllm_config.parallel_config, name, value)
    for name, value in changes.pop("caches", {}).items():
        setattr(vllm_config.cache_config, name, value)
    for name, value in changes.items():
        setattr(vllm_config, name, value)
    return vllm_config


def test_the_extra_config_takes_precedence_over_the_environment(monkeypatch):
    monkeypatch.setenv("TPU_OFFLOAD_NUM_CPU_CHUNKS", "11")
    monkeypatch.setenv("TPU_OFFLOAD_NUM_STAGING_BLOCKS", "7")
    monkeypatch.setenv("TPU_OFFLOAD_DECODE_SAVE", "1")
    extra = {"host_gb": 2.5, "num_staging_blocks": 9}
    found = read_config(config(transfer={"kv_connector_extra_config": extra}), kv_cache_config(8))
    assert (found.host_gb, found.num_cpu_chunks, found.num_staging_blocks, found.decode_save) == (2.5, None, 9, True)


def test_a_policy_that_cannot_be_imported_ends_the_engine_at_start():
    with pytest.raises(ConfigError, match="TPU_OFFLOAD_EVICTION_POLICY=nowhere_at_all:P: nowhere_at_all cannot be imp"):
        Stack(num_blocks=8, eviction_policy="nowhere_at_all:P", **SMALL)


def test_a_custom_policy_is_used():
    stack = make_stack(eviction_policy="tpu_offload.core.policies.lru:LRUPolicy")
    assert type(eviction_policy(stack.offload)._base) is LRUPolicy


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"host_gigabytes": 3}, "host_gigabytes is not a setting of tpu_offload; did you mean host_gb"),
        ({"host_gb": 1, "num_cpu_chunks": 3}, "set the same size"),
        ({"host_gb": -1}, "host_gb=-1"),
        ({"load_path": "teleport"}, "load_path='teleport'"),
        ({"save_on": "never"}, "save_on='never'"),
        (
            {"blocks_per_chunk": 1000},
            "TPU_OFFLOAD_BLOCKS_PER_CHUNK=1000: a chunk has ",
        ),
        ({"save_on": "eviction"}, "TPU_OFFLOAD_SAVE_ON=eviction: vLLM has no connector hook before prefix-cache"),
        ({"save_on": "compute,preemption"}, "before preemption; unset it"),
    ],
)
def test_an_invalid_setting_is_one_line(extra, message):
    with pytest.raises(ConfigError) as e:
        read_config(config(transfer={"kv_connector_extra_config": extra}), kv_cache_config(8))
    assert message in str(e.value)
    assert "\n" not in str(e.value)


@pytest.mark.parametrize(
    ("extra", "async_scheduling", "policy", "sync"),
    [
        ({}, False, "recompute", True),
        ({}, True, "recompute", True),
        ({}, True, "fail", True),
        ({"load_path": "staged"}, False, "recompute", False),
        ({"sync_load": False}, False, "recompute", False),
        ({"sync_load": True, "load_path": "staged"}, False, "recompute", True),
        ({"sync_load": True}, True, "recompute", True),
        ({"sync_load": False}, True, "recompute", False),
        ({"load_path": "staged"}, True, "recompute", False),
    ],
)
def test_whether_loads_are_synchronous(extra, async_scheduling, policy, sync):
    transfer = {"kv_connector_extra_config": extra, "kv_load_failure_policy": policy}
    found = read_config(config(async_scheduling=async_scheduling, transfer=transfer), kv_cache_config(8))
    assert found.sync_load is sync


class Sharding:
    total_dp_size = 4


STAGES = {"parallel": {"pipeline_parallel_size": 2}}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"transfer": {"kv_role": "kv_producer"}}, 'set it to "kv_both"'),
        ({"transfer": {"kv_connector_extra_config": {"swap_gb": "auto"}}}, "set TPU_OFFLOAD_DECODE_SAVE=1"),
        (STAGES | {"async_scheduling": True}, "pipeline_parallel_size=2 with async scheduling: .*; set --no-async-sch"),
        (
            STAGES | {"speculative_config": object()},
            "pipeline_parallel_size=2 with speculative decoding: .*; remove --spec",
        ),
        (
            STAGES | {"transfer": {"kv_connector_extra_config": {"patch_runner": False}}},
            "pipeline_parallel_size=2 with TPU_OFFLOAD_PATCH_RUNNER=0: tpu-inference 0.32 drops .*; unset it",
        ),
        ({"parallel": {"decode_context_parallel_size": 2}}, "decode_context_parallel_size=2"),
        ({"parallel": {"prefill_context_parallel_size": 2}}, "prefill_context_parallel_size=2"),
        (
            {"sharding_config": Sharding(), "transfer": {"kv_connector_extra_config": {"sync_load": True}}},
            "TPU_OFFLOAD_SYNC_LOAD=1 with 4 data-parallel ranks",
        ),
        (
            {"sharding_config": Sharding(), "caches": {"enable_prefix_caching": False}},
            "prefix caching is off with 4 data-parallel ranks .*; set --enable-prefix-caching",
        ),
        ({"additional_config": {"enable_continue_decode": True}}, "enable_continue_decode"),
    ],
)
@pytest.mark.parametrize("role", list(KVConnectorRole))
def test_a_setup_that_is_not_supported_is_refused_by_both_roles(changes, message, role):
    changes = {k: dict(v) if isinstance(v, dict) else v for k, v in changes.items()}
    with pytest.raises(ConfigError) as e:
        KVConnectorFactory.create_connector(config(**changes), role, kv_cache_config(8))
    assert re.search(message, str(e.value))
    assert "\n" not in str(e.value)


def test_the_scheduler_of_ranks_still_has_no_connector():
    """Why ranks need prefix caching. If this fails, vLLM may hash blocks for them without."""
    import inspect

    from tpu_inference.core.sched.dp_scheduler import DPScheduler

    assert "self.connector = None" in inspect.getsource(DPScheduler.__init__)
    assert "get_kv_connector" not in vars(DPScheduler)


def sliding(block_size=BLOCK_SIZE):
    return SlidingWindowSpec(block_size=block_size, num_kv_heads=1, head_size=8, dtype=torch.float32, sliding_window=32)


def grouped(*specs):
    groups = [KVCacheGroupSpec([f"layer {i}"], spec) for i, spec in enumerate(specs)]
    return KVCacheConfig(num_blocks=8, kv_cache_tensors=[], kv_cache_groups=groups)


def test_windows_beside_full_attention_are_loaded_asynchronously():
    full = kv_cache_config(8).kv_cache_groups[0].kv_cache_spec
    caches = grouped(sliding(), sliding(), full)
    assert read_config(config(), caches).sync_load is False
    given = config(transfer={"kv_connector_extra_config": {"sync_load": True}})
    with pytest.raises(ConfigError, match=r"TPU_OFFLOAD_SYNC_LOAD=1: .* 3 KV cache groups.*; unset it"):
        read_config(given, caches)
    # The library has the group with full attention first.
    assert group_order(caches) == (2, 0, 1)
    assert windows(caches) == (0, 32, 32)


def test_several_groups_with_full_attention_are_refused_with_a_remedy():
    full = kv_cache_config(8).kv_cache_groups[0].kv_cache_spec
    with pytest.raises(ConfigError, match=r"2 KV cache groups with full attention.*--disable-hybrid-kv-cache-manager"):
        read_config(config(), grouped(full, full, sliding()))


FULL = kv_cache_config(8).kv_cache_groups[0].kv_cache_spec
STATE = MambaSpec(block_size=BLOCK_SIZE, shapes=((2, 3),), dtypes=(torch.float32,), mamba_cache_mode="align")


def config_of_states(*, mode="align", **changes):
    found = config(**changes)
    found.cache_config.mamba_cache_mode = mode
    return found


def test_states_beside_full_attention_are_loaded_asynchronously():
    caches = grouped(STATE, FULL, STATE)
    assert read_config(config_of_states(), caches).sync_load is False
    # The library has one group of states, the last.
    assert (group_order(caches), state_groups(caches), windows(caches)) == ((1, 0), (0, 2), (0,))


def without_prefix_caching():
    found = config_of_states(mode="none")
    found.cache_config.enable_prefix_caching = False
    return found


@pytest.mark.parametrize(
    ("given", "specs", "message"),
    [
        (without_prefix_caching, (STATE, FULL), "prefix caching is off: .*; set --enable-prefix-caching"),
        (
            lambda: config_of_states(mode="all"),
            (STATE, FULL),
            "mamba_cache_mode is 'all', .*; unset --mamba-cache-mode",
        ),
        (config_of_states, (STATE,), "MambaSpec, expected layers with full attention: .* without the connector"),
        (config_of_states, (STATE, FULL, sliding()), "either sliding windows or states; run .* without the connector"),
        (config_of_states, (STATE, FULL, FULL), "2 KV cache groups with full .*: run this model without the connector"),
    ],
)
def test_states_that_cannot_be_saved_are_refused(given, specs, message):
    with pytest.raises(ConfigError, match=message) as e:
        read_config(given(), grouped(*specs))
    assert "\n" not in str(e.value)


def test_groups_of_states_with_rows_of_their_own_are_refused():
    """In tpu-inference all groups of states have the same rows."""
    side = make_stack(num_rows=8).side
    with pytest.raises(ConfigError, match="the 2 KV cache groups of states have rows of their own"):
        side.bind(SimpleNamespace(coordinator=None))


@pytest.mark.parametrize("specs", [(STATE, FULL), (FULL,)])
def test_states_inside_chunks_are_warned_about(caplog, specs):
    caplog.set_level(logging.WARNING, logger="tpu_offload")
    logging.getLogger("tpu_offload").propagate = True
    found = config_of_states(transfer={"kv_connector_extra_config": {"blocks_per_chunk": 2}})
    for role in KVConnectorRole:
        KVConnectorFactory.create_connector(found, role, grouped(*specs))
    warned = caplog.text.count("TPU_OFFLOAD_BLOCKS_PER_CHUNK=2: vLLM keeps the states")
    assert warned == (STATE in specs)


def on_several_hosts(monkeypatch):
    from tpu_inference import envs

    monkeypatch.setattr(envs, "TPU_MULTIHOST_BACKEND", "ray", raising=False)
    return config(**STAGES)


def with_compiled_graphs(monkeypatch):
    monkeypatch.setenv("VLLM_USE_RAY_V2_EXECUTOR_BACKEND", "0")
    return on_several_hosts(monkeypatch)


@pytest.mark.parametrize(
    ("make", "specs", "message"),
    [
        (
            on_several_hosts,
            (FULL,),
            "with TPU_MULTIHOST_BACKEND=ray: .* on which host .*; set --pipeline-parallel-size",
        ),
        (with_compiled_graphs, (FULL,), "with TPU_MULTIHOST_BACKEND=ray: .* only the output of the last stage .*; set"),
        (lambda _: config(**STAGES), (FULL, sliding()), "and 2 KV cache groups: .*; set --pipeline-parallel-size 1"),
        (lambda _: config_of_states(**STAGES), (STATE, FULL), "and 2 KV cache groups: stages with sliding windows or"),
    ],
)
def test_stages_that_cannot_work_are_refused(monkeypatch, make, specs, message):
    with pytest.raises(ConfigError, match=f"pipeline_parallel_size=2 {message}") as e:
        read_config(make(monkeypatch), grouped(*specs))
    assert "\n" not in str(e.value)


@pytest.mark.parametrize("size", [{"host_gb": 3.0}, {"num_cpu_chunks": 9}, {}])
def test_stages_share_the_memory_of_their_host(size):
    transfer = {"kv_connector_extra_config": size}
    alone = read_config(config(transfer=transfer), kv_cache_config(8))
    found = read_config(config(transfer=transfer, parallel={"pipeline_parallel_size": 3}), kv_cache_config(8))
    assert found.host_memory_fraction == alone.host_memory_fraction / 3
    assert found.host_gb == (1.0 if "host_gb" in size else None)
    assert found.num_cpu_chunks == alone.num_cpu_chunks


def test_pooling_models_are_refused(monkeypatch):
    """Once a load had failed, an embedding was computed on the blocks that it had not filled."""
    found = config()
    monkeypatch.setattr(found.model_config, "runner_type", "pooling")
    with pytest.raises(ConfigError, match=r"a pooling model: .* drops .*; run this model without the connector"):
        read_config(found, kv_cache_config(8))


def test_windows_without_full_attention_are_refused():
    groups = [KVCacheGroupSpec(["layer"], sliding())]
    with pytest.raises(ConfigError, match="SlidingWindowSpec, expected layers with full attention"):
        read_config(config(), KVCacheConfig(num_blocks=8, kv_cache_tensors=[], kv_cache_groups=groups))


def test_chunked_local_attention_is_refused():
    """As a group of its own; tpu-inference makes none, its layers with chunked attention keep full-length KV."""
    local = ChunkedLocalAttentionSpec(
        block_size=BLOCK_SIZE, num_kv_heads=1, head_size=8, dtype=torch.float32, attention_chunk_size=32
    )
    with pytest.raises(ConfigError, match="FullAttentionSpec, ChunkedLocalAttentionSpec, expected full attention and"):
        read_config(config(), grouped(FULL, local))


def of_two_head_sizes(spec):
    specs = {"a": spec, "b": dataclasses.replace(spec, head_size=16)}
    groups = [KVCacheGroupSpec(["a", "b"], UniformTypeKVCacheSpecs(block_size=BLOCK_SIZE, kv_cache_specs=specs))]
    return KVCacheConfig(num_blocks=8, kv_cache_tensors=[], kv_cache_groups=groups)


def test_layers_with_heads_of_two_sizes_are_served_if_their_attention_is_full():
    full = kv_cache_config(8).kv_cache_groups[0].kv_cache_spec
    assert read_config(config(), of_two_head_sizes(full)).enabled
    with pytest.raises(ConfigError, match="is SlidingWindowSpec, expected layers with full attention"):
        read_config(config(), of_two_head_sizes(sliding()))


def test_blocks_of_another_size_are_refused():
    group = kv_cache_config(8).kv_cache_groups[0]
    spec = dataclasses.replace(group.kv_cache_spec, block_size=16)
    groups = [KVCacheGroupSpec(group.layer_names, spec)]
    with pytest.raises(ConfigError, match="set --block-size to 16"):
        read_config(config(), KVCacheConfig(num_blocks=8, kv_cache_tensors=[], kv_cache_groups=groups))


def test_blocks_of_latent_attention_have_whole_packs(monkeypatch):
    """With others, tpu-inference writes the tokens of several blocks into one."""
    caches = grouped(MLAAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=1, head_size=256, dtype=torch.bfloat16))
    monkeypatch.delenv("MLA_KV_PACKING_SIZE", raising=False)
    monkeypatch.delenv("MLA_TRANSPOSE_KV_CACHE", raising=False)
    for role in KVConnectorRole:
        with pytest.raises(ConfigError, match=r"blocks of 8 tokens.*; set --block-size to a multiple of 32"):
            KVConnectorFactory.create_connector(config(), role, caches)
    monkeypatch.setenv("MLA_KV_PACKING_SIZE", "4")
    assert read_config(config(), caches).enabled
    monkeypatch.setenv("MLA_KV_PACKING_SIZE", "32")
    monkeypatch.setenv("MLA_TRANSPOSE_KV_CACHE", "1")
    assert read_config(config(), caches).enabled


def test_hashes_of_parts_of_a_block_are_refused():
    vllm_config = config()
    vllm_config.cache_config.prefix_match_unit = vllm_config.cache_config.block_size
    read_config(vllm_config, kv_cache_config(8))
    vllm_config.cache_config.prefix_match_unit //= 2
    with pytest.raises(ConfigError, match=r"prefix_match_unit=.*; unset --prefix-match-unit"):
        read_config(vllm_config, kv_cache_config(8))


def test_loads_of_data_parallel_ranks_are_asynchronous():
    assert read_config(config(), kv_cache_config(8)).sync_load
    assert not read_config(config(sharding_config=Sharding()), kv_cache_config(8)).sync_load


@pytest.mark.parametrize(("engine", "stages", "worker_id", "expected"), [(0, 1, 0, 0), (1, 1, 0, 1), (1, 2, 1, 3)])
def test_workers_of_engines_side_by_side_are_numbered(engine, stages, worker_id, expected):
    """`--data-parallel-size 2` has the same settings for both, which so have the same place in storage."""
    vllm_config = config(parallel={"data_parallel_index": engine, "pipeline_parallel_size": stages})
    assert holder_id(vllm_config, worker_id) == expected


def test_engines_of_several_hosts_side_by_side(monkeypatch):
    monkeypatch.setattr(settings, "count_hosts", lambda: 2)
    assert holder_id(config(parallel={"data_parallel_index": 3}), 1) == 7


def test_hosts_are_counted_under_ray_only(monkeypatch):
    from tpu_inference import envs

    assert count_workers(config()) == 1
    monkeypatch.setattr(envs, "TPU_MULTIHOST_BACKEND", "carrier-pigeon", raising=False)
    with pytest.raises(ConfigError, match="expected ray"):
        count_workers(config())


def test_forked_schedulers_of_data_parallel_ranks_do_not_ask_ray(monkeypatch):
    import ray
    from tpu_inference import envs
    from vllm.platforms import current_platform

    with_ranks = config(sharding_config=Sharding())
    assert count_workers(with_ranks) == 1
    monkeypatch.setattr(envs, "TPU_MULTIHOST_BACKEND", "ray", raising=False)
    monkeypatch.setattr(settings, "_num_workers_of_ranks", None)
    node = {"Alive": True, "Resources": {current_platform.ray_device_key: 1.0}}
    monkeypatch.setattr(ray, "nodes", lambda: [node] * 3)
    with pytest.raises(ConfigError, match="need vLLM's plugin tpu_offload, which has not counted the processes"):
        count_workers(with_ranks)
    assert count_workers_of_ranks(with_ranks) == 3
    monkeypatch.setattr(ray, "nodes", lambda: pytest.fail("asked in a forked process"))
    assert count_workers(with_ranks) == 3


def test_data_parallel_ranks_in_stages_need_the_plugin(monkeypatch):
    with_ranks = config(sharding_config=Sharding(), **STAGES)
    monkeypatch.setattr(settings, "_num_workers_of_ranks", None)
    with pytest.raises(
        ConfigError, match="data-parallel ranks with several hosts or pipeline stages need vLLM's plugin"
    ):
        count_workers(with_ranks)
    assert count_workers_of_ranks(with_ranks) == 2
    assert count_workers(with_ranks) == 2


# HBM.


def hbm(used_gb, limit_gb=32):
    return int(used_gb * GB), limit_gb * GB


def check(usage, needed_gb, *, stages=True):
    check_hbm(
        usage,
        needed=int(needed_gb * GB),
        staging_nbytes=int(needed_gb * GB) - (8 << 20) if stages else 0,
        block_nbytes=4 << 20,
        utilization=0.9,
    )


def test_the_number_of_workers_must_match():
    check_workers(4, num_processes=4)
    with pytest.raises(ConfigError, match=r"reports of 4 processes .* runs in 2; use a Ray cluster of just"):
        check_workers(4, num_processes=2)


def test_enough_hbm_is_accepted():
    check([hbm(28), hbm(29)], 3.0)


@pytest.mark.parametrize("order", [1, -1])
def test_the_fullest_device_counts_and_the_message_names_values_that_work(order):
    with pytest.raises(ConfigError) as e:
        check([hbm(28), hbm(31)][::order], 3.0)
    text = str(e.value)
    assert "copies need 3 GB of HBM on each device and 1 GB are free" in text
    assert "--gpu-memory-utilization to at most 0.837 (it is 0.9)" in text  # 2 of 32 GB less
    assert "TPU_OFFLOAD_STAGING_BUFFER_GB to at most 0.988" in text
    assert "\n" not in text
    check([hbm(28), hbm(31 - 0.063 * 32)], 3.0)  # with 0.837
    check([hbm(28), hbm(31)], 0.988 + 12 / 1024)  # with that staging buffer, its block, and direct copies the other way


def test_what_other_copies_take_is_no_staging_buffer():
    """Direct copies of large rows of states beside staged ones of blocks."""
    check = functools.partial(check_hbm, [hbm(31)], block_nbytes=4 << 20, utilization=0.9)
    with pytest.raises(ConfigError, match=r"TPU_OFFLOAD_STAGING_BUFFER_GB to at most 0\.246"):
        check(needed=2 * GB, staging_nbytes=2 * GB - int(0.75 * GB))
    check(needed=int(0.246 * GB) + int(0.75 * GB), staging_nbytes=int(0.246 * GB))
    with pytest.raises(ConfigError) as e:
        check(needed=2 * GB, staging_nbytes=GB // 2)
    assert "STAGING" not in str(e.value), "no size would do"


def test_direct_copies_have_no_staging_buffer_to_make_smaller():
    with pytest.raises(ConfigError) as e:
        check([hbm(32)], 1.0, stages=False)  # however much: small blocks have bounds of 4 MiB
    assert "STAGING" not in str(e.value)


# Logging and the plugin.


@pytest.mark.parametrize("role", list(KVConnectorRole))
@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_a_policy_that_fails_requests_is_warned_about_once(caplog, role, policy):
    caplog.set_level(logging.WARNING, logger="tpu_offload")
    logging.getLogger("tpu_offload").propagate = True
    vllm_config = config(transfer={"kv_load_failure_policy": policy})
    KVConnectorFactory.create_connector(vllm_config, role, kv_cache_config(8))
    warned = '"kv_load_failure_policy": "recompute"' in caplog.text
    assert warned == (policy == "fail" and role is KVConnectorRole.SCHEDULER)


def test_the_plugin_registers_the_connector_once():
    (entry,) = [e for e in importlib.metadata.entry_points(group="vllm.general_plugins") if e.name == "tpu_offload"]
    assert entry.load() is register
    register()
    register()
    assert CONNECTOR_NAME != "TPUOffloadConnector"
    transfer = make_config(num_blocks=8).kv_transfer_config
    transfer.kv_connector, transfer.kv_connector_module_path = CONNECTOR_NAME, None
    assert KVConnectorFactory.get_connector_class(transfer).__name__ == "TPUOffloadConnector"


class DPScheduler:
    """In place of tpu-inference's, which forks."""

    def __init__(self, vllm_config):
        self.connector = None
        self.dp_size = 2
        self.num_workers = count_workers(vllm_config)  # what its forked schedulers ask


@pytest.mark.parametrize(
    ("is_ours", "num_hosts", "num_stages"), [(True, 3, 1), (True, 1, 1), (False, 3, 1), (True, 0, 2), (True, 0, 1)]
)
def test_reports_of_all_hosts_or_stages_are_joined_for_ranks_with_this_connector(
    monkeypatch, is_ours, num_hosts, num_stages
):
    """No hosts: one without a backend for several."""
    import ray
    from tpu_inference import envs
    from vllm.platforms import current_platform

    register()
    num_workers = (num_hosts or 1) * num_stages
    monkeypatch.setattr(envs, "TPU_MULTIHOST_BACKEND", "ray" if num_hosts else "", raising=False)
    monkeypatch.setattr(settings, "_num_workers_of_ranks", None if is_ours else num_workers)
    node = {"Alive": True, "Resources": {current_platform.ray_device_key: 1.0}}
    monkeypatch.setattr(ray, "nodes", lambda: [node] * num_hosts)
    vllm_config = make_config(num_blocks=8, num_stages=num_stages)
    vllm_config.scheduler_config.scheduler_cls = DPScheduler
    vllm_config.sharding_config = Sharding()
    if not is_ours:
        vllm_config.kv_transfer_config.kv_connector_module_path = "another"
    scheduler = vllm_config.scheduler_config.get_scheduler_cls()(vllm_config=vllm_config)
    assert scheduler.num_workers == num_workers
    is_joined = is_ours and (num_hosts, num_stages) != (0, 1)
    assert (scheduler.connector and scheduler.connector.get_finished_count()) == (num_workers if is_joined else None)


def test_tpu_inference_accepts_only_its_own_names():
    """Why TPU needs the module path. If this fails, docs/vllm.md can be updated."""
    import inspect

    from tpu_inference.platforms.tpu_platform import TpuPlatform

    source = inspect.getsource(TpuPlatform.check_and_update_config)
    assert '"TPUOffloadConnector"' in source
    assert "Unsupported kv_connector" in source
    assert CONNECTOR_NAME not in source
