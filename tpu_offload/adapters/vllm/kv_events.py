"""KV events of the host tier as vLLM publishes them, for routers.

A router that knows vLLM's layer groups from its events for HBM finds the same in ours: the number of the KV cache
group, what kind it is and its window, and as hashes those of vLLM's own blocks.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from vllm.distributed.kv_events import MEDIUM_CPU, AllBlocksCleared, BlockRemoved, BlockStored, KVCacheEvent
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash
from vllm.v1.kv_cache_interface import get_kv_cache_spec_kind, get_kv_cache_spec_sliding_window

from tpu_offload import TierEvent, TierEventKind
from tpu_offload.adapters.vllm.settings import group_order, state_groups

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig


class EventGroup(NamedTuple):
    """How vLLM's events name a KV cache group.

    Attributes:
      group_idx: its number in vLLM.
      kind: of its layers, as in `KVCacheSpecKind`.
      sliding_window: in tokens; None without one.
    """

    group_idx: int
    kind: str
    sliding_window: int | None


def event_groups(kv_cache_config: "KVCacheConfig") -> tuple[tuple[EventGroup, ...], ...]:
    """Per layer group of the library, those of vLLM that it is: one, or all that have states."""
    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    groups = [
        EventGroup(i, get_kv_cache_spec_kind(spec).value, get_kv_cache_spec_sliding_window(spec))
        for i, spec in enumerate(specs)
    ]
    states = state_groups(kv_cache_config)
    return tuple(
        tuple(groups[i] for i in (states if group in states else (group,))) for group in group_order(kv_cache_config)
    )


def to_kv_events(
    events: Iterable[TierEvent], groups: Sequence[Sequence[EventGroup]], *, block_size: int
) -> Iterator[KVCacheEvent]:
    """Translates the events of a host tier.

    Args:
      events: those of one scheduler.
      groups: as `event_groups`.
      block_size: tokens of a chunk.
    """
    for event in events:
        if event.group_id is None:
            # The event has no medium. After a reset, or the loss of a worker, HBM is empty as well.
            yield AllBlocksCleared()
            continue
        hashes = [maybe_convert_block_hash(block_hash) for block_hash in event.block_hashes]
        for group in groups[event.group_id]:
            if event.kind is TierEventKind.REMOVED:
                yield BlockRemoved(block_hashes=hashes, medium=MEDIUM_CPU, group_idx=group.group_idx)
            else:
                yield BlockStored(
                    block_hashes=hashes,
                    parent_block_hash=None,
                    token_ids=[],
                    block_size=block_size,
                    lora_id=None,
                    medium=MEDIUM_CPU,
                    lora_name=None,
                    group_idx=group.group_idx,
                    kv_cache_spec_kind=group.kind,
                    kv_cache_spec_sliding_window=group.sliding_window,
                )
