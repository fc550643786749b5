"""From computed blocks to save jobs: which chunks are worth saving, are not in the host tier yet, and have room.

Most blocks are saved after the step that computes them, or in a later one, while their request holds them. Blocks that
the coming step takes from their request are saved before that step, or never (`core.early_saves`).
"""

import logging
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from typing import final

from tpu_offload.core.block_tables import Ids, read_changes
from tpu_offload.core.checkpoint_saves import CheckpointSaves, Tail
from tpu_offload.core.context import TierContext
from tpu_offload.core.early_saves import EarlySaves, num_worth_saving
from tpu_offload.core.engine_api import ScheduledRequest
from tpu_offload.core.host_writes import ChunkWrites
from tpu_offload.core.jobs import host_blocks
from tpu_offload.core.policies import Use
from tpu_offload.core.request_state import RequestState
from tpu_offload.core.save_jobs import SaveBatch, SaveJobs
from tpu_offload.core.save_policy import SaveEvent, SavePolicy
from tpu_offload.core.tier_groups import CHUNK_GROUP
from tpu_offload.core.validate import check_iterable, check_scheduled
from tpu_offload.errors import RequestError
from tpu_offload.types import BlockHash, ChunkKey, CopyPart, Direction, JobKind

_logger = logging.getLogger(__name__)

_ACCOUNT = "saves"  # holds the staging blocks of all saves; accounts of requests have a # in them
MAX_CHUNKS_PER_PLAN = 2048
"""Chunks that one plan saves, apart from early saves; 2 us each, 5 ms in all. Prefill computes fewer in a step: with
blocks of 16 tokens these are 32,768 tokens."""


@final
class Offer:
    """A validated `ScheduledRequest`.

    Attributes:
      num_chunks: how many leading chunks should be in the host tier after the coming step.
      hashes: those that name the chunks whose keys are not known yet.
      num_same: how many leading blocks are unchanged.
      block_ids: the blocks after those, up to the end of the chunks.
      tails: windows and states at the boundaries of its checkpoints.
    """

    def __init__(
        self, num_chunks: int, hashes: list[BlockHash], num_same: int, block_ids: Ids, tails: list[Tail]
    ) -> None:
        self.num_chunks = num_chunks
        self.hashes = hashes
        self.num_same = num_same
        self.block_ids = block_ids
        self.tails = tails


Offers = Mapping[str, tuple[RequestState, Offer]]
"""The offers of a step, by request id."""

NO_OFFERS: Offers = {}


class SavePlanner:
    """The save half of the scheduler.

    The requests of a step share one job: the workers copy it in one dispatch anyway, and a step of 64 requests that
    complete a block each costs a third of what it does with a job for each.

    Chunks of a request are saved in order, and only whole. Chunks without room, in the staging buffer, in the host tier
    or in the plan (`MAX_CHUNKS_PER_PLAN`), are retried in every later step until the request gives up its blocks, so a
    saved prefix never has a hole. Until then, blocks that were offered once may be read at any step: their KV is
    computed, and no other request can have been granted them.

    A plan that has no room for all begins with the requests that offer least. So a long prompt that HBM has and the
    host tier does not, or a host tier that was lost under many requests, delays nothing that is computed meanwhile.
    """

    def __init__(self, context: TierContext, policy: SavePolicy) -> None:
        self._index = context.index
        self._staging = context.staging
        self._jobs = SaveJobs(context, _ACCOUNT, ChunkWrites(context.index))
        self._policy = policy
        self._breaker = context.breakers[Direction.SAVE]
        self._backoff = context.backoff
        self._block_size = context.block_size
        self._blocks_per_chunk = context.blocks_per_chunk
        self._num_groups = context.num_groups
        self._checkpoints = CheckpointSaves(context)
        # Requests with something to save, by account. All others cost a step nothing.
        self._unsaved: dict[str, RequestState] = {}
        self.early = EarlySaves(context, policy)
        self._requests = context.requests
        self._counts = context.counts
        self._num_observed: dict[str, int] = {}  # by request id: its leading chunks that the policy has observed
        self._saves_on_compute = bool(policy.saves_on(SaveEvent.COMPUTE))
        self._on_observed: Callable[[Use, Sequence[ChunkKey], int], None] | None = None
        self._num_unchained = 0  # requests whose block hashes do not depend on the tokens before

    def on_observed(self, call: Callable[[Use, Sequence[ChunkKey], int], None]) -> None:
        """Registers the one callback for what the policy observes: chunks of a request, and how many it knew."""
        self._on_observed = call

    def read(self, changed: Iterable[ScheduledRequest]) -> Offers:
        """Validates all requests of a step, and changes nothing.

        Raises:
          RequestError: one of them is invalid.
        """
        if type(changed) is list or type(changed) is tuple:
            if not changed:  # nearly always
                return NO_OFFERS
        else:
            check_iterable(changed, "a step names", "ScheduledRequests")
        offers: dict[str, tuple[RequestState, Offer]] = {}
        for named in changed:
            scheduled = check_scheduled(named, num_groups=self._num_groups)
            request_id = scheduled.request_id
            request = self._requests.get_or_new(request_id)
            offer = self._read(request, scheduled)
            if offer is not None:
                offers[request_id] = request, offer
            elif offers:
                offers.pop(request_id, None)
        return offers

    def _read(self, request: RequestState, scheduled: ScheduledRequest) -> Offer | None:
        """What is new about a request; None if nothing is."""
        size = self._blocks_per_chunk
        num_tokens = int(
            self._policy.num_tokens_to_save(
                num_prompt_tokens=scheduled.num_prompt_tokens, num_computed_tokens=scheduled.num_computed_tokens
            )
        )
        block_hashes, table = scheduled.block_hashes, scheduled.block_tables[CHUNK_GROUP]
        num_savable_blocks = request.limits.num_savable_tokens(num_tokens) // self._block_size
        num_chunks = min(num_savable_blocks, len(block_hashes), len(table)) // size
        num_same = 0
        block_ids: Ids = []
        if self._saves_on_compute:
            num_blocks = num_chunks * size
            num_same, block_ids = read_changes(request.request_id, request.block_table, table, num_blocks)
            if num_same == num_blocks and num_chunks == request.num_offered_chunks == request.num_saved_chunks:
                return None
        num_known = len(request.keys)
        hashes: list[BlockHash] = []
        if num_known:
            request.check_same(block_hashes, blocks_per_chunk=size)
        if num_chunks > num_known:
            hashes = request.new_hashes(block_hashes, blocks_per_chunk=size)
            if num_chunks > num_known + len(hashes):
                raise RequestError(
                    f"request {request.request_id} has {len(block_hashes)} block hashes, of which "
                    f"{num_known + len(hashes)} chunks of {size} could be read; expected {num_chunks}"
                )
        has_tails = self._saves_on_compute and self._checkpoints.enabled
        tails = self._checkpoints.read(request, scheduled, num_chunks) if has_tails else []
        return Offer(num_chunks, hashes, num_same, block_ids, tails)

    def offer(self, offers: Offers, *, step_id: int) -> None:
        """Takes the offers of a step. Each stands until its request is named again or gone, or the step is aborted."""
        for request, offer in offers.values():
            request.offered_in_step = step_id
            self._offer(request, offer)
            self._requests.add(request)

    def _offer(self, request: RequestState, offer: Offer) -> None:
        num_chunks, table = offer.num_chunks, request.block_table
        if offer.hashes:
            request.add_keys(offer.hashes)
        if offer.num_same and type(table) is list:
            table[offer.num_same :] = offer.block_ids
        else:
            request.block_table = offer.block_ids
        self.observe(request, num_chunks)
        worth = num_worth_saving(self._policy, request, num_chunks) if self._saves_on_compute else 0
        request.num_offered_chunks = worth
        self._mark_unsaved(request)
        if offer.tails:
            self._checkpoints.add(JobKind.SAVE, request, [tail for tail in offer.tails if tail.boundary <= worth])

    def observe(self, request: RequestState, num_chunks: int) -> None:
        """Has the policy observe the leading chunks of a request, each once; their keys are known."""
        num_observed = self._num_observed.get(request.request_id, 0)
        if num_chunks > num_observed and request.limits.cache:
            keys = request.keys if len(request.keys) == num_chunks else request.keys[:num_chunks]
            self._policy.observe(request.use, keys, num_observed)
            if self._on_observed is not None:
                self._on_observed(request.use, keys, num_observed)
            self._num_observed[request.request_id] = num_chunks

    def num_used(self, request: RequestState) -> int:
        """How many leading chunks a request has used: saved, found, or computed though they are not saved (yet)."""
        num_used = max(request.num_saved_chunks, request.last_match.num_found_chunks)
        return min(max(num_used, self._num_observed.get(request.request_id, 0)), len(request.keys))

    def forget(self, request_id: str) -> None:
        """A request ended; the next one of this id counts as another request."""
        self._num_observed.pop(request_id, None)

    def abandon_plan(self) -> None:
        """Drops what only the coming plan could have saved: its blocks are lost, not computed or soon to be written."""
        self.early.clear()
        self._checkpoints.clear()

    def reset(self) -> None:
        """Drops the early saves, and what the policy has observed: keys change."""
        self.early.clear()
        self._checkpoints.clear()
        self._num_observed.clear()

    def clear_offer(self, request: RequestState) -> None:
        """Nothing of the request is saved unless it is offered again."""
        request.block_table = []
        request.num_offered_chunks = 0
        self._unsaved.pop(request.account, None)

    def abort_step(self, requests: Iterable[RequestState], step_id: int) -> None:
        """This step and those after it have computed nothing of what they were to: drops what was offered for them."""
        self.abandon_plan()
        for request in requests:
            if request.offered_in_step >= step_id:
                self.clear_offer(request)
                request.num_deferred_chunks = 0  # not dropped: there is no KV of it
                request.num_checkpoint_chunks = 0  # those that were saved before are merely used again

    def preempt(self, request: RequestState, held: ScheduledRequest) -> None:
        """A request gives up its blocks and will return: saves them early, if the policy saves at preemption."""
        saved = self.early.preempt(request, held)
        if saved is not None:
            if self._checkpoints.enabled:
                tails = self._checkpoints.read_end(saved, held, saved.num_offered_chunks)
                self._checkpoints.add(JobKind.EARLY_SAVE, saved, tails)
            self.early.add(saved)
            request.num_deferred_chunks = 0  # not dropped yet
            self.clear_offer(request)

    def plan(self, *, deadline_s: float) -> None:
        """Plans the saves of all chunks on offer: early saves first, then those that have waited longest.

        Higher priorities come before lower ones. O(1) when there is nothing to save. Plans all early saves, which
        cannot be retried, and of the others at most `MAX_CHUNKS_PER_PLAN` chunks; if there are more, those of the
        smallest requests.
        """
        if not self._unsaved and not self.early and not self._checkpoints:
            self._staging.end_plan(saves_wait=False)
            return
        chunk_blocks = self._blocks_per_chunk
        room_blocks = self._staging.room_for_saves()
        staging_room = room_blocks // chunk_blocks
        room = staging_room if self._breaker.closed else min(staging_room, 1)
        admitted = self._breaker.admits(_ACCOUNT)
        num_early = num_saved = num_deferred = 0
        if self.early:
            requests = _by_priority(self.early.take())
            num_early = self._plan_all(JobKind.EARLY_SAVE, requests, room if admitted else 0, deadline_s=deadline_s)
            num_dropped = sum([request.num_deferred_chunks for request in requests])
            self._counts.dropped_save_blocks += num_dropped * self._blocks_per_chunk
        if self._unsaved and admitted:
            room = min(room - num_early, MAX_CHUNKS_PER_PLAN)
            requests = _by_priority(self._in_turn(room))
            num_saved = self._plan_all(JobKind.SAVE, requests, room, deadline_s=deadline_s)
            for request in requests:
                if request.num_deferred_chunks:
                    num_deferred += request.num_deferred_chunks
                else:
                    del self._unsaved[request.account]
            self._counts.deferred_save_blocks += num_deferred * self._blocks_per_chunk
        if self._checkpoints:
            self._checkpoints.plan(room_blocks - (num_early + num_saved) * chunk_blocks, deadline_s=deadline_s)
        is_short = num_deferred > 0 and num_early + num_saved == staging_room
        self._staging.end_plan(saves_wait=is_short)

    def num_dropped(self, request: RequestState) -> int:
        """Chunks that are on offer and would not be saved if the request ended now."""
        if self._breaker.closed or request.account not in self._unsaved:
            return request.num_deferred_chunks
        return max(request.num_deferred_chunks, _num_unsaved(request))

    def rewind(self, requests: Iterable[RequestState], lost: set[ChunkKey]) -> None:
        """Offers lost chunks again, for each request that had saved them. O(requests).

        And O(their saved chunks) while a chunk is INVALID, or follows a lost one.
        """
        for request in requests:
            missing, end = self._index.missing(request.keys, 0, request.num_saved_chunks)
            first = missing[0] if missing else end  # those before it are there
            for i, key in enumerate(request.keys[first : request.num_saved_chunks], first):
                if key in lost:
                    request.num_saved_chunks = i
                    request.num_tried_chunks = 0
                    self._mark_unsaved(request)
                    break

    def rewind_all(self, requests: Iterable[RequestState]) -> None:
        """Offers all saved chunks again: the host tier is empty."""
        for request in requests:
            if request.num_saved_chunks:
                request.num_saved_chunks = request.num_tried_chunks = 0
                self._mark_unsaved(request)

    def check_invariants(self, requests: Iterable[RequestState]) -> None:
        """Raises AssertionError unless the unsaved requests are those with something to save. For tests."""
        waiting = {r.account for r in requests if r.can_save and r.num_offered_chunks > r.num_saved_chunks}
        assert waiting <= self._unsaved.keys(), "a request that has something to save would be forgotten"
        assert self._unsaved.keys() <= {r.account for r in requests}, "a request that is gone is still to be saved"
        for request in requests:
            num_blocks = request.num_offered_chunks * self._blocks_per_chunk
            assert len(request.block_table) >= num_blocks, "chunks are on offer whose blocks are not known"
            assert len(request.keys) >= request.num_offered_chunks, "chunks are on offer whose keys are not known"

    def _plan_all(self, kind: JobKind, requests: Iterable[RequestState], room: int, *, deadline_s: float) -> int:
        """Plans saves for these requests, in their order, of at most `room` chunks; returns how many."""
        is_use = kind is JobKind.SAVE
        shared, num_saved = SaveBatch(), 0
        some_back_off = len(self._backoff) > 0
        try:
            for request in requests:
                # Chunks that failed get a job of their own, so that they fail no others again.
                batch = SaveBatch() if some_back_off and self._backs_off(request) else shared
                num_saved += self._plan_one(request, batch, room - num_saved, is_use=is_use)
                if batch is not shared and batch.slots:
                    self._plan_job(kind, batch, deadline_s=deadline_s)
        finally:  # also if an eviction policy raises: a job releases the slots that the batch holds
            if shared.slots:
                self._plan_job(kind, shared, deadline_s=deadline_s)
        return num_saved

    def _in_turn(self, room: int) -> Collection[RequestState]:
        """The unsaved requests: those that have waited longest first, or if a plan cannot take all, the smallest."""
        waiting = self._unsaved.values()
        if room < MAX_CHUNKS_PER_PLAN:
            return waiting
        num_chunks = sum([r.num_offered_chunks - r.num_saved_chunks for r in waiting])
        return waiting if num_chunks <= MAX_CHUNKS_PER_PLAN else sorted(waiting, key=_num_unsaved)

    def _mark_unsaved(self, request: RequestState) -> None:
        if request.num_offered_chunks > request.num_saved_chunks and request.can_save:
            self._unsaved[request.account] = request

    def _backs_off(self, request: RequestState) -> bool:
        keys = request.keys[request.num_saved_chunks : request.num_offered_chunks]
        return any(key in self._backoff for key in keys)

    def _plan_one(self, request: RequestState, batch: SaveBatch, room: int, *, is_use: bool) -> int:
        """Adds missing chunks of a request to `batch`, at most `room`; returns how many.

        With `is_use`, chunks that are in the host tier already count as used.
        """
        num_chunks, keys = request.num_offered_chunks, request.keys
        if num_chunks <= request.num_saved_chunks or not request.can_save:
            request.num_deferred_chunks = 0
            return 0
        backs_off = request.backoff_until_s and self._backoff.now_s() < request.backoff_until_s
        if (not room or backs_off) and request.num_deferred_chunks and request.num_tried_chunks == num_chunks:
            return 0  # nothing new, and still no room or a chunk that backs off: the fast path while it waits
        first = request.num_saved_chunks
        if first and keys[first - 1] not in self._index:
            first = self._num_still_saved(keys, first)
        if first < request.num_gone_chunks:
            return 0  # its prefix is neither in HBM nor in the host tier: no lookup could reach it
        copyable = self._backoff.copyable_end(keys, first, num_chunks)
        request.backoff_until_s = self._backoff.until_s(keys[copyable]) if copyable < num_chunks else 0.0
        missing, end = self._index.missing(keys, first, copyable)
        saved = missing[:room]
        if len(saved) > 1:
            are_consecutive = saved[-1] - saved[0] == len(saved) - 1
            new = list(keys[saved[0] : saved[-1] + 1]) if are_consecutive else [keys[i] for i in saved]
            if self._has_repeats(new):
                self._stop_saving(request)
                return 0
        own: Container[ChunkKey] = ()
        has_holes = len(missing) < end - first
        if (first or has_holes) and len(saved) > self._index.num_free_slots:
            # The save must not evict the request's own chunks. Protecting the chunk before the missing ones is enough:
            # no chunk is evicted before those that follow it.
            own = set(keys[max(0, first - 1) : end]) if has_holes else (keys[first - 1],)
        slots = self._index.allocate(request.use, keys, saved, protected=own)
        request.num_tried_chunks = num_chunks
        num_saved = len(slots)
        request.num_saved_chunks = end if num_saved == len(missing) else missing[num_saved]
        request.num_deferred_chunks = len(missing) - num_saved + num_chunks - end
        if num_saved:
            batch.add(request, saved[:num_saved], slots, self._blocks_per_chunk)
        elif is_use:
            self._index.touch(request.use, keys, num_chunks)
        return num_saved

    def _num_still_saved(self, keys: Sequence[ChunkKey], num_saved: int) -> int:
        """How many of the leading chunks that were saved are in the host tier, when the last one is not.

        Eviction removes them from the tail on; the request still holds their blocks, so the gap can be closed.
        """
        gone, end = self._index.missing(keys, 0, num_saved)
        if end == num_saved and len(gone) == num_saved - gone[0]:
            return gone[0]
        while num_saved > 0 and keys[num_saved - 1] not in self._index:  # chunks in between were lost
            num_saved -= 1
        return num_saved

    def _has_repeats(self, missing: Sequence[ChunkKey]) -> bool:
        """Whether the keys of consecutive chunks, the first of which is missing, cannot come from chained hashes."""
        return len(set(missing)) < len(missing) or self._index.has_any(missing)

    def _stop_saving(self, request: RequestState) -> None:
        """Saves nothing more of a request whose keys are not chained: prompts that begin otherwise would find it."""
        request.can_save, request.num_deferred_chunks = False, 0
        self._num_unchained += 1
        if self._num_unchained.bit_count() == 1:  # 1, 2, 4, 8, ...: such an engine would log it for each request
            _logger.error(
                "request %.100r: the same block hash is used for blocks with different prefixes; expected hashes of "
                "all tokens up to the end of each block (BlockHasher makes them). Nothing more of this request is "
                "saved (%d requests so far)",
                request.request_id,
                self._num_unchained,
            )

    def _plan_job(self, kind: JobKind, batch: SaveBatch, *, deadline_s: float) -> None:
        num_blocks = len(batch.block_ids)
        host_ids = host_blocks(batch.slots, blocks_per_chunk=self._blocks_per_chunk, num_blocks=num_blocks)
        part = CopyPart(group_id=CHUNK_GROUP, block_ids=tuple(batch.block_ids), host_block_ids=host_ids)
        self._jobs.plan(
            kind,
            [part],
            batch.keys,
            batch.slots,
            num_staged_blocks=num_blocks,
            request_ids=batch.request_ids,
            deadline_s=deadline_s,
            uses=batch.uses,
        )


def _by_priority(requests: Iterable[RequestState]) -> list[RequestState]:
    """The highest first, equals in their order."""
    ordered = list(requests)
    if len({request.limits.priority for request in ordered}) > 1:
        ordered.sort(key=lambda request: -request.limits.priority)
    return ordered


def _num_unsaved(request: RequestState) -> int:
    return request.num_offered_chunks - request.num_saved_chunks
