"""KV events of the host tier as vLLM publishes them, for routers.

A router finds in them what it finds in vLLM's events for HBM: hashes, parent and tokens of vLLM's own blocks, adapter
and extra keys, the number of the KV cache group, what kind it is and its window.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from vllm.distributed.kv_events import MEDIUM_CPU, AllBlocksCleared, BlockRemoved, BlockStored, KVCacheEvent
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash, to_event_extra_keys
from vllm.v1.kv_cache_interface import get_kv_cache_spec_kind, get_kv_cache_spec_sliding_window

from tpu_offload import BlockHash, TierEvent, TierEventKind
from tpu_offload.adapters.vllm.event_sources import BlockSource, BlockSources
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
    events: Iterable[TierEvent],
    groups: Sequence[Sequence[EventGroup]],
    *,
    sources: BlockSources,
    block_size: int,
    blocks_per_chunk: int,
) -> Iterator[KVCacheEvent]:
    """Translates the events of a host tier.

    Args:
      events: those of one scheduler.
      groups: as `event_groups`.
      sources: the blocks of requests, for tokens and parents. A chunk of which they know nothing has neither: a router
        then knows it only if it has had an event for HBM with the same hash.
      block_size: tokens of a block.
      blocks_per_chunk: blocks of a chunk.
    """
    for event in events:
        if event.group_id is None:
            # The event has no medium. After a reset, or the loss of a worker, HBM is empty as well.
            yield AllBlocksCleared()
            continue
        if event.kind is TierEventKind.REMOVED:
            hashes = [maybe_convert_block_hash(block_hash) for block_hash in event.block_hashes]
            for group in groups[event.group_id]:
                yield BlockRemoved(block_hashes=hashes, medium=MEDIUM_CPU, group_idx=group.group_idx)
            continue
        runs = list(_runs(event.block_hashes, sources, blocks_per_chunk))
        for group in groups[event.group_id]:
            for run in runs:
                yield _stored(run, group, block_size, blocks_per_chunk)


type _Run = list[tuple[BlockHash, BlockSource | None]]


def _runs(hashes: Iterable[BlockHash], sources: BlockSources, blocks_per_chunk: int) -> Iterator[_Run]:
    """Chunks that follow each other in a prompt, together: each is the parent of the next one."""
    run: _Run = []
    for block_hash in hashes:
        source = sources.get(block_hash)
        if run and (source is None or run[-1][1] is None or source.hash_before(blocks_per_chunk) != run[-1][0]):
            yield run
            run = []
        run.append((block_hash, source))
    if run:
        yield run


def _stored(run: _Run, group: EventGroup, block_size: int, blocks_per_chunk: int) -> BlockStored:
    known = [source for _, source in run if source is not None]
    first = known[0] if known else None
    parent = first.hash_before(blocks_per_chunk) if first else None
    lora = first.request.lora_request if first else None
    tokens: list[int] = []
    for source in known:
        tokens += source.token_ids(blocks_per_chunk, block_size)
    return BlockStored(
        block_hashes=[maybe_convert_block_hash(block_hash) for block_hash, _ in run],
        parent_block_hash=maybe_convert_block_hash(parent) if parent is not None else None,
        token_ids=tokens,
        block_size=block_size * blocks_per_chunk,
        lora_id=lora.adapter_id if lora else None,
        medium=MEDIUM_CPU,
        lora_name=lora.name if lora else None,
        extra_keys=to_event_extra_keys([source.extra_keys(blocks_per_chunk, block_size) for source in known]),
        group_idx=group.group_idx,
        kv_cache_spec_kind=group.kind,
        kv_cache_spec_sliding_window=group.sliding_window,
    )
