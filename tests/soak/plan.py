"""The workload and sizes of a soak: too little of everything, and short timeouts."""

import dataclasses
import itertools
from collections.abc import Sequence

from tests.soak.storage import StorageKind
from tpu_offload.config import CopyPath, LoadMode, OffloadConfig, StorageWriteEvent, SwapMode
from tpu_offload.engine import ModelConfig
from tpu_offload.errors import InputError
from tpu_offload.replay.setup import (
    ServingOptions,
    Setup,
    blocks_per_request,
    build_setup,
    build_workload,
    host_sizes,
    layout_of,
)
from tpu_offload.replay.workloads import Workload, chat_workload, decode_workload
from tpu_offload.storage.format import PAGE_NBYTES

DEFAULT_NUM_REQUESTS, DEFAULT_NUM_TURNS = 32, 4
DEFAULT_CONCURRENCY = 6
ENGINE = {"block_size": 16, "max_num_batched_tokens": 128, "num_spare_blocks": 0, "async_scheduling": 1}
MODEL = ModelConfig(num_layers=2, d_model=64, num_heads=4, num_kv_heads=2, head_dim=16, d_ff=128)

_HBM_PER_PROMPTS = 0.5  # size of HBM by the prompts in flight; they share some blocks
# Settings that no variable sets. Everything is too small, and timeouts are short.
_PRESSURE = {
    "num_staging_blocks": 48,
    "decode_save": True,
    "swap_mode": SwapMode.SWAP,
    "job_timeout_s": 0.25,
    "breaker_failures": 3,
    "breaker_retry_s": 0.02,
    "metrics_log_interval": 0.0,
    "storage_wait_s": 0.1,
}
_STORED_SHARE = 0.6  # of the unique blocks that storage has room for; what a server has, for the engines together
_CHECKPOINT_SHARE = 0.25  # of the chunks, those with a checkpoint after them that storage has room for
_CHUNKS_IN_FLIGHT = 16  # to and from storage
_PATHS = (
    (CopyPath.DIRECT, CopyPath.DIRECT),
    (CopyPath.STAGED, CopyPath.STAGED),
    (CopyPath.FUSED, CopyPath.DIRECT),
)


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """Workload, settings and duration of a soak.

    Attributes:
      setup: workload and sizes.
      configs: settings of each engine, by its name in the report.
      seconds: duration.
      seed: seed of the faults.
      storage: what is below the host tiers; None for nothing, or for what the settings name.
      stored_nbytes: size of storage, if it is a server.
    """

    setup: Setup
    configs: dict[str, OffloadConfig]
    seconds: int
    seed: int
    storage: StorageKind | None = None
    stored_nbytes: int = 0


def build_plan(
    options: ServingOptions, offload: OffloadConfig, *, seconds: int, storage: StorageKind | None = None
) -> Plan:
    """Checks flags and settings, and makes everything too small.

    Raises:
      InputError: a flag is invalid.
      ConfigError: a setting is invalid.
    """
    workload = _mixed_workload(options)
    concurrency = options.concurrency or DEFAULT_CONCURRENCY
    needed = blocks_per_request(workload, options)
    in_flight = min(concurrency, len(workload.conversations))
    num_prompt_tokens = in_flight * sum(workload.prompt_lens) / workload.num_requests
    num_blocks = options.num_blocks or max(needed, int(_HBM_PER_PROMPTS * num_prompt_tokens / options.block_size))
    setup = build_setup(options, offload, workload=workload, concurrency=concurrency, num_blocks=num_blocks)
    small = _make_small(offload, setup)
    layout = layout_of(setup.model, setup.engine)
    if storage is not None:
        _check_storage(storage, setup)
        small = _with_storage(small, storage, setup)
    for size in (small.staging_blocks, small.host_chunks, small.host_states):
        size(layout)
    configs = _by_path(small, fused=len(setup.model.layer_groups) == 1)
    record_nbytes = layout.block_nbytes * small.blocks_per_chunk + 2 * PAGE_NBYTES
    return Plan(setup, configs, seconds, options.seed, storage, sum(small.num_storage_chunks) * record_nbytes)


def _check_storage(storage: StorageKind, setup: Setup) -> None:
    storage.check()
    if setup.offload.storage_tier:
        raise InputError(
            f"--storage {storage.value} with TPU_OFFLOAD_STORAGE_TIER={';'.join(setup.offload.storage_tier)}; set one "
            "of them"
        )


def _mixed_workload(options: ServingOptions) -> Workload:
    """The workload of the flags; by default chats, which share prefixes, mixed with long answers, which need room."""
    if options.workload or options.prompts or options.trace:
        return build_workload(options)
    num_requests = options.requests or DEFAULT_NUM_REQUESTS
    num_decode = num_requests // 4
    chat = chat_workload(
        num_requests=num_requests - num_decode, turns=options.turns or DEFAULT_NUM_TURNS, seed=options.seed
    )
    decode = decode_workload(num_requests=num_decode, seed=options.seed).conversations if num_decode else ()
    pairs = itertools.zip_longest(chat.conversations, decode)
    return Workload("chats and long answers", tuple(one for pair in pairs for one in pair if one is not None))


def _make_small(offload: OffloadConfig, setup: Setup) -> OffloadConfig:
    """The settings, with all unset sizes made small."""
    given = offload.model_fields_set
    num_unique = setup.workload.num_unique_blocks(setup.engine.block_size)
    changes = {name: value for name, value in _PRESSURE.items() if name not in given}
    if offload.staging_buffer_tokens is not None or offload.staging_buffer_gb is not None:
        changes.pop("num_staging_blocks", None)
    if offload.num_cpu_chunks is None and offload.host_gb is None:
        num_chunks = max(1, num_unique // 2 // offload.blocks_per_chunk)
        changes |= host_sizes(setup, num_chunks=num_chunks, num_states=max(1, setup.workload.num_requests // 2))
    block_gb = layout_of(setup.model, setup.engine).block_nbytes / 2**30
    if "swap_gb" not in given:
        changes["swap_gb"] = setup.engine.num_blocks / 2 * block_gb
    if "host_segment_gb" not in given:  # a few segments, so that losing one does not lose everything
        changes["host_segment_gb"] = max(1, num_unique // 8) * block_gb
    return offload.model_copy(update=changes)


def _with_storage(small: OffloadConfig, storage: StorageKind, setup: Setup) -> OffloadConfig:
    """The settings with a storage tier, also too small; where it is becomes known when it is opened."""
    layout = layout_of(setup.model, setup.engine)
    chunk_gb = layout.block_nbytes * small.blocks_per_chunk / 2**30
    num_unique = setup.workload.num_unique_blocks(setup.engine.block_size)
    # What storage has is read, however fast this machine computes.
    changes: dict[str, object] = {"storage_tier": (storage.tier,), "load_mode": small.load_mode or LoadMode.LOAD}
    if not small.num_storage_chunks:
        num_records = 1 + _CHECKPOINT_SHARE * (len(layout.window_groups) + small.records_per_state(layout))
        num_chunks = int(_STORED_SHARE * num_unique / small.blocks_per_chunk * num_records)
        changes["num_storage_chunks"] = (max(1, num_chunks),)
    if "max_storage_gb_in_flight" not in small.model_fields_set:
        changes["max_storage_gb_in_flight"] = (_CHUNKS_IN_FLIGHT * chunk_gb,)
    return small.model_copy(update=changes)


def _by_path(offload: OffloadConfig, *, fused: bool) -> dict[str, OffloadConfig]:
    """One engine per copy path, fused ones only for a single layer group; a single one if a variable sets the path.

    With storage, every second engine writes at eviction.
    """
    if {"save_path", "load_path"} & offload.model_fields_set:
        paths: Sequence[tuple[CopyPath, CopyPath]] = [(offload.save_path, offload.load_path)]
    else:
        paths = [path for path in _PATHS if fused or CopyPath.FUSED not in path]
    configs = {}
    for i, (save, load) in enumerate(paths):
        changes: dict[str, object] = {"save_path": save, "load_path": load}
        if i % 2 and offload.storage_tier and "storage_write_on" not in offload.model_fields_set:
            changes["storage_write_on"] = (StorageWriteEvent.HOST_EVICTION,)
        configs[f"{save.value} saves, {load.value} loads"] = offload.model_copy(update=changes)
    return configs
