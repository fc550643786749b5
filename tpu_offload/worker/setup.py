"""Checks what a worker is made with, and describes it to the scheduler."""

from collections.abc import Sequence
from typing import Any

import jax

from tpu_offload.config import OffloadConfig
from tpu_offload.core.workers import setup_fields
from tpu_offload.errors import ConfigError, LayoutError
from tpu_offload.layout import KVLayout
from tpu_offload.types import Direction, WorkerSetup
from tpu_offload.values import as_count, one_line
from tpu_offload.worker.storage.stack import StorageStack
from tpu_offload.worker.tier_copies import TierCopies


def check_caches(layout: KVLayout, kv_caches: Sequence[Any]) -> None:
    """Raises LayoutError unless the layout describes these caches."""
    states = layout.state_group.layer_ids if layout.state_group is not None else ()
    groups = [(group.window, group.layer_ids) for group in layout.groups if group is not layout.state_group]
    num_caches = len(kv_caches) if isinstance(kv_caches, Sequence) else 0  # else `from_caches` says so
    if {i for group in layout.groups for i in group.layer_ids} != set(range(num_caches)):
        groups, states = [], ()  # they differ in any case
    found = KVLayout.from_caches(
        kv_caches,
        block_size=layout.block_size,
        model=layout.model,
        groups=groups,
        states=states,
        null_block=layout.null_block,
        stage_layers=layout.stage_layers,
    )
    if found != layout:
        raise LayoutError(f"the KV caches are {found}, expected {layout}; describe them with KVLayout.from_caches")


def check_count(name: str, value: Any, *, least: int = 0) -> int:
    """The value as a Python integer; raises ConfigError unless it is one from `least` on."""
    count = as_count(value, least=least)
    if count is None:
        raise ConfigError(f"{name}={one_line(value)}; expected an integer from {least} on")
    return count


def describe_setup(
    config: OffloadConfig,
    layout: KVLayout,
    kv_caches: Sequence[Any],
    tier: TierCopies | None,
    storage: StorageStack | None,
) -> WorkerSetup:
    """What the scheduler compares with its own settings and with those of the other workers.

    Args:
      config: the settings.
      layout: what a block is made of.
      kv_caches: the caches; only their sharding is read.
      tier: the host tier; None without one.
      storage: the copies to and from its storage tiers; None without any, or without a host tier.
    """
    num_tiers = len(config.storage_tiers)
    processes = {device.process_index for device in kv_caches[0].sharding.device_set}
    fields = {"segment_slots": tier.pools.segment_slots if tier else ()} | setup_fields(config, layout)
    paths = {direction: tier.pools.paths[direction].value if tier else "" for direction in Direction}
    return WorkerSetup(
        num_processes=len(processes),
        process_index=jax.process_index(),
        save_path=paths[Direction.SAVE],
        load_path=paths[Direction.LOAD],
        # Without a host tier, for lack of memory, what storage has is not known: it must not count as lost.
        stored_keys=storage.stored_keys if storage is not None else (None,) * num_tiers * layout.num_ranks,
        shares_storage=storage.are_shared if storage is not None else (False,) * num_tiers,
        **fields,
    )
