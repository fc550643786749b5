"""The scheduler's state as others see it: statistics, events of the host tier, and consistency checks for tests."""

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

from tpu_offload import hashing
from tpu_offload.core.context import TierContext
from tpu_offload.core.engine_api import TierEvent, TierEventKind
from tpu_offload.core.index import Changes, Checkpoint, ChunkState
from tpu_offload.core.jobs import Job
from tpu_offload.core.load_queue import LoadQueue
from tpu_offload.core.promises import WaitingLoad
from tpu_offload.core.saving import SavePlanner
from tpu_offload.core.storage.stack import StorageStackPlanner
from tpu_offload.core.swap.manager import RequestSwap
from tpu_offload.core.tier_groups import CHUNK_GROUP
from tpu_offload.core.transfers import TRANSFERS
from tpu_offload.metrics import OffloadStats
from tpu_offload.piece_keys import PieceKey, chunk_of, group_of
from tpu_offload.types import BlockHash, ChunkKey, Direction, Pool

_MAX_EVENT_CHUNKS = 10_000


def take_events(context: TierContext) -> list[TierEvent]:
    """See `OffloadScheduler.take_events`."""
    if not context.index.has_changes:
        return []
    events, piece_groups = [], [group.group_id for group in context.checkpoint_groups]
    for kind, changes in itertools.groupby(context.index.take_changes(_MAX_EVENT_CHUNKS), key=_event_kind):
        if kind is TierEventKind.CLEARED:
            events.append(TierEvent(kind=kind, block_hashes=(), group_id=None))
            continue
        for group_id, hashes in _hashes_by_group(changes, piece_groups).items():
            events.append(TierEvent(kind=kind, block_hashes=tuple(hashes), group_id=group_id))
    return events


def _event_kind(changes: Changes) -> TierEventKind:
    if changes.keys is None:
        return TierEventKind.CLEARED
    return TierEventKind.STORED if changes.found else TierEventKind.REMOVED


def _hashes_by_group(several: Iterable[Changes], piece_groups: Sequence[int]) -> dict[int, list[BlockHash]]:
    """Per layer group, the block hashes that name these chunks and pieces. Full attention comes first."""
    chunks: list[BlockHash] = []
    by_group: dict[int, list[BlockHash]] = {}
    for changes in several:
        keys = changes.keys or ()
        if not changes.of_pieces:
            chunks += map(hashing.last_block_hash, keys)
            continue
        for piece in map(PieceKey, keys):
            hashes = by_group.setdefault(piece_groups[group_of(piece)], [])
            hashes.append(hashing.last_block_hash(chunk_of(piece)))
    return ({CHUNK_GROUP: chunks} if chunks else {}) | by_group


def snapshot(
    context: TierContext, *, queue: LoadQueue, swap: RequestSwap, storage: StorageStackPlanner
) -> OffloadStats:
    """See `OffloadScheduler.stats`."""
    index, buffer, breakers = context.index, context.staging.buffer, context.breakers.values()
    counts: dict[str, Any] = context.counts.as_dict()
    counts.update(
        staging_budget_blocks=buffer.num_blocks,
        staging_reserved_blocks=buffer.num_reserved,
        staging_peak_blocks=buffer.peak_num_reserved,
        num_host_chunks=index.num_slots(Pool.CHUNKS),
        num_resident_chunks=len(index),
        num_evicted_chunks=index.num_evicted,
        num_checkpoints=len(index.checkpoints),
        num_window_chunks=index.checkpoints.num_window_chunks,
        num_host_states=index.num_slots(Pool.STATES) if context.has_states else 0,
        num_states=index.checkpoints.num_states,
        num_evicted_checkpoints=index.checkpoints.num_evicted,
        num_jobs_in_flight=len(context.jobs) + len(queue),
        num_quarantined_chunks=index.num_quarantined_slots,
        num_breaker_openings=sum(breaker.num_opened for breaker in breakers),
        num_open_breakers=sum(not breaker.closed for breaker in breakers),
    )
    swap.add_stats(counts)
    storage.add_stats(counts)
    return OffloadStats(**counts)


def check_invariants(
    context: TierContext, *, queue: LoadQueue, saves: SavePlanner, swap: RequestSwap, storage: StorageStackPlanner
) -> None:
    """See `OffloadScheduler.check_invariants`."""
    index, buffer, requests = context.index, context.staging.buffer, context.requests
    buffer.check_invariants()
    index.check_invariants()
    swap.check_invariants()
    storage.check_invariants()
    saves.check_invariants(requests.all())
    held: dict[tuple[str, Direction], int] = {}  # staging blocks by account
    pins: dict[ChunkKey, int] = dict(swap.pins())
    pending: list[ChunkKey] = storage.pending()
    loads: list[Job | WaitingLoad] = [*queue]
    piece_slots = storage.pending_pieces()  # and of pieces of checkpoints that are being saved
    num_late, late_slots = 0, storage.late_slots()
    for job in context.jobs.of(*TRANSFERS):
        account = job.held.account, job.direction
        held[account] = held.get(account, 0) + job.held.num_staging_blocks
        if job.writes is None:
            loads.append(job)
        else:
            chunks, pieces = job.writes.pending(job.held)
            pending += chunks
            piece_slots.update(pieces)
    for waiting in queue:
        held[waiting.held.account, Direction.LOAD] = waiting.held.num_staging_blocks
        assert requests[waiting.request_id].load is waiting, "a queued load that no request waits for"
    for job in context.jobs.late(*TRANSFERS):
        num_late += job.held.num_staging_blocks
        assert buffer.held(job.held.account, job.direction) == job.held.num_staging_blocks
        if job.direction is Direction.SAVE:
            late_slots += job.slots
    holds: dict[Checkpoint, int] = {}
    promises = [(request, request.promise) for request in requests.all() if request.promise]
    for request, promise in promises:
        held[request.account, Direction.LOAD] = promise.held.num_staging_blocks
    for reads in (*(load.held for load in loads), *(promise.held for _, promise in promises)):
        keys, checkpoint = reads.keys, reads.checkpoint
        pins[keys[-1]] = pins.get(keys[-1], 0) + 1
        assert not any(index.state(key) is ChunkState.PENDING for key in keys), "a load of a chunk that is not saved"
        assert (checkpoint is None) == (not context.checkpoint_groups), "a load with windows or states has a checkpoint"
        if checkpoint is not None:
            holds[checkpoint] = holds.get(checkpoint, 0) + 1
    index.checkpoints.check_holds(holds=holds, pending=piece_slots)
    assert sum(held.values()) + num_late == buffer.num_reserved
    assert all(buffer.held(account, direction) == n for (account, direction), n in held.items())
    index.check_holds(pins=pins, pending=set(pending), quarantined=late_slots)
    counts = context.counts
    assert counts.matched_tokens <= counts.found_tokens <= counts.looked_up_tokens, "found what was not looked up"
