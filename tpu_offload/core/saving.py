"""From computed blocks to save jobs: what is worth saving, is not there yet, and fits.

Most blocks are saved after the step that computes them, or any later one, while their request holds them. Those that
are about to be granted to somebody else (`core.leaving`) are saved before the step, or never.
"""

import dataclasses
import logging
from collections.abc import Collection, Container, Iterable, Sequence

from tpu_offload.core.block_tables import Ids, plain, read_changes
from tpu_offload.core.context import TierContext
from tpu_offload.core.engine_api import ScheduledRequest
from tpu_offload.core.jobs import host_blocks
from tpu_offload.core.leaving import LeavingBlocks, num_worth_saving
from tpu_offload.core.request_state import RequestState
from tpu_offload.core.save_policy import SaveEvent, SavePolicy
from tpu_offload.errors import RequestError
from tpu_offload.types import BlockHash, ChunkKey, CopyPart, Direction, JobKind

_logger = logging.getLogger(__name__)

_ACCOUNT = "saves"  # holds the staging blocks of all saves; accounts of requests have a # in them
MAX_AT_ONCE = 2048
"""Chunks that one plan saves of blocks that their requests hold on to; 2 us each, 5 ms in all. Prefill computes fewer
in a step: with blocks of 16 tokens these are 32,768 tokens."""


@dataclasses.dataclass(slots=True)
class _Save:
    """What goes into one job, chunk after chunk.

    Attributes:
      tables: per layer group, blocks of HBM.
      keys: the chunks that they make.
      slots: where those go.
      request_ids: whose they are.
    """

    tables: list[list[int]]
    keys: list[ChunkKey] = dataclasses.field(default_factory=list)
    slots: list[int] = dataclasses.field(default_factory=list)
    request_ids: list[str] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(slots=True)
class SaveCounts:
    """What of the saves of a step found no room.

    Attributes:
      num_dropped_chunks: chunks for which it was now or never, and that found no room.
      num_refused_chunks: chunks that found no room and will be tried again.
    """

    num_dropped_chunks: int = 0
    num_refused_chunks: int = 0


NO_SAVES = SaveCounts()


Offer = tuple[int, list[BlockHash], list[tuple[int, Ids]]]
"""What an engine says of a request, read and found to make sense: how many leading chunks of it should be in the host
tier after the coming step; the hashes that name its chunks after those whose keys are known; and, per layer group, how
many of its blocks, from the first on, are those that it was last said to have, with the blocks after those, up to the
end of the chunks."""


class SavePlanner:
    """The save half of the scheduler.

    The requests of a step share one job: it is what the workers copy in one dispatch anyway, and a step of
    64 requests that complete a block each costs a third of what it does with a job for each.

    Chunks of a request are saved in order, and only whole. Those that find no room, in the staging
    buffer, in the host tier or in the plan (`MAX_AT_ONCE`), are tried again in every later step until the
    request gives up its blocks, so a saved prefix never has a hole. Until then, what was on offer once may be
    read at any step: its KV is computed, and nobody else can have been granted its blocks.

    A plan that cannot take all begins with the requests that offer least. So a long prompt that HBM has and the host
    tier does not, or a host tier that was lost under many requests, delays nothing that is computed meanwhile.
    """

    def __init__(self, context: TierContext, policy: SavePolicy) -> None:
        self._index = context.index
        self._staging = context.staging
        self._jobs = context.jobs
        self._policy = policy
        self._breaker = context.breakers[Direction.SAVE]
        self._backoff = context.backoff
        self._block_size = context.block_size
        self._blocks_per_chunk = context.blocks_per_chunk
        self._num_groups = context.num_groups
        # Requests with something to save, by account. All others cost a step nothing.
        self._to_look_at: dict[str, RequestState] = {}
        self.leaving = LeavingBlocks(
            self._index,
            policy,
            block_size=self._block_size,
            blocks_per_chunk=self._blocks_per_chunk,
            num_groups=self._num_groups,
        )
        self._num_seen: dict[str, int] = {}  # by request id: chunks of it that the policy was told of
        self._saves_on_compute = policy.saves_on(SaveEvent.COMPUTE)
        self._num_unchained = 0  # requests whose block hashes say nothing of the tokens before

    def read(self, request: RequestState, scheduled: ScheduledRequest) -> Offer | None:
        """Reads what is said of a request and changes nothing; None if it is no news.

        Raises:
          RequestError: it makes no sense.
        """
        size = self._blocks_per_chunk
        num_tokens = self._policy.num_tokens_to_save(
            num_prompt_tokens=scheduled.num_prompt_tokens, num_computed_tokens=scheduled.num_computed_tokens
        )
        num_full_blocks = request.limits.num_savable_tokens(num_tokens) // self._block_size
        tables = scheduled.block_tables
        num_chunks = min(num_full_blocks, len(scheduled.block_hashes), *map(len, tables)) // size
        changes: list[tuple[int, Ids]] = []
        if self._saves_on_compute:
            num_blocks, known = num_chunks * size, request.block_tables or [[]] * self._num_groups
            changes = [
                read_changes(request.request_id, old, new, num_blocks) for old, new in zip(known, tables, strict=True)
            ]
            is_old = num_chunks == request.num_offered_chunks == request.num_saved_chunks
            if is_old and all(num_same == num_blocks for num_same, _ in changes):
                return None
        block_hashes, num_known = scheduled.block_hashes, len(request.keys)
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
        return num_chunks, hashes, changes

    def offer(self, request: RequestState, offer: Offer) -> None:
        """Takes note of what was read.

        It stays on offer until the engine says something else of the request, or it is forgotten.
        """
        num_chunks, hashes, changes = offer
        if hashes:
            request.add_keys(hashes)
        tables = request.block_tables
        if tables and changes:
            for group_id, (num_same, block_ids) in enumerate(changes):
                table = tables[group_id]
                if num_same and type(table) is list:
                    table[num_same:] = block_ids
                else:
                    tables[group_id] = block_ids
        else:
            request.block_tables = [block_ids for _, block_ids in changes]
        self.see(request, num_chunks)
        worth = num_worth_saving(self._policy, request, num_chunks) if self._saves_on_compute else 0
        request.num_offered_chunks = worth
        self._look_at(request)

    def see(self, request: RequestState, num_chunks: int) -> None:
        """A request comes by with these leading chunks; their keys are known. Each is told of once, however often."""
        num_seen = self._num_seen.get(request.request_id, 0)
        if num_chunks > num_seen and request.limits.cache:
            keys = request.keys if len(request.keys) == num_chunks else request.keys[:num_chunks]
            self._policy.see(request.use, keys, num_seen)
            self._num_seen[request.request_id] = num_chunks

    def forget(self, request_id: str) -> None:
        """A request ended. The next one of this id is another one."""
        self._num_seen.pop(request_id, None)

    def reset(self) -> None:
        """What was to be saved is worthless, and so are the keys that the policy was told of."""
        self.leaving.clear()
        self._num_seen.clear()

    def withdraw(self, request: RequestState) -> None:
        """Nothing of the request is read any more, unless it is offered again."""
        request.block_tables = []
        request.num_offered_chunks = 0
        self._to_look_at.pop(request.account, None)

    def preempt(self, request: RequestState, held: ScheduledRequest) -> None:
        """A request gives its blocks back and will return: what it holds is saved now or never, if that is done."""
        if self.leaving.preempt(request, held):
            request.num_refused_chunks = 0  # not dropped yet
            self.withdraw(request)

    def plan(self, *, deadline_s: float) -> SaveCounts:
        """Plans the saves of what is on offer and not saved: what leaves first, then what has waited longest.

        What has a higher priority goes before what has a lower one. O(1) when there is nothing to save. Of what their
        requests hold on to at most `MAX_AT_ONCE` chunks; all that leaves, for which it is now or never.
        """
        if not self._to_look_at and not self.leaving:
            self._staging.end_plan(saves_wait=False)
            return NO_SAVES
        counts = SaveCounts()
        staging_room = self._staging.room_for_saves() // (self._blocks_per_chunk * self._num_groups)
        room = staging_room if self._breaker.closed else min(staging_room, 1)
        admitted = self._breaker.admits(_ACCOUNT)
        num_early = num_saved = 0
        if self.leaving:
            leaving = _by_priority(self.leaving.take())
            num_early = self._plan_all(JobKind.EARLY_SAVE, leaving, room if admitted else 0, deadline_s=deadline_s)
            counts.num_dropped_chunks = sum(request.num_refused_chunks for request in leaving)
        if self._to_look_at and admitted:
            room = min(room - num_early, MAX_AT_ONCE)
            requests = _by_priority(self._in_turn(room))
            num_saved = self._plan_all(JobKind.SAVE, requests, room, deadline_s=deadline_s)
            for request in requests:
                counts.num_refused_chunks += request.num_refused_chunks
                if not request.num_refused_chunks:
                    del self._to_look_at[request.account]
        is_short = counts.num_refused_chunks > 0 and num_early + num_saved == staging_room
        self._staging.end_plan(saves_wait=is_short)
        return counts

    def num_dropped(self, request: RequestState) -> int:
        """Chunks of a request that are on offer and would not be saved if it ended now."""
        if self._breaker.closed or request.account not in self._to_look_at:
            return request.num_refused_chunks
        return max(request.num_refused_chunks, request.num_offered_chunks - request.num_saved_chunks)

    def rewind(self, requests: Iterable[RequestState], lost: set[ChunkKey]) -> None:
        """Offers again what is lost, for each request that counted on it. O(requests + chunks behind the lost ones)."""
        for request in requests:
            missing, end = self._index.missing(request.keys, 0, request.num_saved_chunks)
            first = missing[0] if missing else end  # those before it are there
            for i, key in enumerate(request.keys[first : request.num_saved_chunks], first):
                if key in lost:
                    request.num_saved_chunks = i
                    request.num_looked_at_chunks = 0
                    self._look_at(request)
                    break

    def rewind_all(self, requests: Iterable[RequestState]) -> None:
        """Offers again all that requests counted on: the host tier is empty."""
        for request in requests:
            if request.num_saved_chunks:
                request.num_saved_chunks = request.num_looked_at_chunks = 0
                self._look_at(request)

    def check_invariants(self, requests: Iterable[RequestState]) -> None:
        """Raises AssertionError unless exactly the requests with something to save are looked at. For tests."""
        waiting = {r.account for r in requests if r.saving and r.num_offered_chunks > r.num_saved_chunks}
        assert waiting <= self._to_look_at.keys(), "a request that has something to save would be forgotten"
        assert self._to_look_at.keys() <= {r.account for r in requests}, "a request that is gone is looked at"
        for request in requests:
            num_blocks = request.num_offered_chunks * self._blocks_per_chunk
            known = request.block_tables or [[]]
            assert all(len(table) >= num_blocks for table in known), "chunks are on offer whose blocks are not known"
            assert len(request.keys) >= request.num_offered_chunks, "chunks are on offer whose keys are not known"

    def _plan_all(self, kind: JobKind, requests: Iterable[RequestState], room: int, *, deadline_s: float) -> int:
        """Plans the saves of these in this order, at most `room` chunks; returns how many."""
        is_use = kind is JobKind.SAVE
        shared, num_saved = self._new_save(), 0
        some_back_off = len(self._backoff) > 0
        try:
            for request in requests:
                # One with chunks that failed gets a job of its own, so that it takes no other down again.
                save = self._new_save() if some_back_off and self._backs_off(request) else shared
                num_saved += self._plan_one(request, save, room - num_saved, is_use=is_use)
                if save is not shared and save.slots:
                    self._plan_job(kind, save, deadline_s=deadline_s)
        finally:  # also if an eviction policy has raised: what has slots is a job's, which gives them back
            if shared.slots:
                self._plan_job(kind, shared, deadline_s=deadline_s)
        return num_saved

    def _in_turn(self, room: int) -> Collection[RequestState]:
        """The requests with something to save, those first that have waited longest, or offer least."""
        waiting = self._to_look_at.values()
        if room < MAX_AT_ONCE or sum([r.num_offered_chunks - r.num_saved_chunks for r in waiting]) <= MAX_AT_ONCE:
            return waiting
        return sorted(waiting, key=lambda request: request.num_offered_chunks - request.num_saved_chunks)

    def _look_at(self, request: RequestState) -> None:
        if request.num_offered_chunks > request.num_saved_chunks and request.saving:
            self._to_look_at[request.account] = request

    def _backs_off(self, request: RequestState) -> bool:
        keys = request.keys[request.num_saved_chunks : request.num_offered_chunks]
        return any(key in self._backoff for key in keys)

    def _plan_one(self, request: RequestState, save: _Save, room: int, *, is_use: bool) -> int:
        """Adds to `save` what is missing of a request, at most `room` chunks of it; returns how many.

        What is there already counts as used, if this `is_use`.
        """
        num_chunks, keys, size = request.num_offered_chunks, request.keys, self._blocks_per_chunk
        if num_chunks <= request.num_saved_chunks or not request.saving:
            request.num_refused_chunks = 0
            return 0
        resting = request.rests_until_s and self._backoff.now_s() < request.rests_until_s
        if (not room or resting) and request.num_refused_chunks and request.num_looked_at_chunks == num_chunks:
            return 0  # nothing new, and still no room or a chunk that rests: waiting costs no more than this
        # What was saved earlier may have been evicted since, from the tail on: going back to the last
        # chunk that is still there closes the gap, because the request still holds those blocks too.
        first = request.num_saved_chunks
        if first and keys[first - 1] not in self._index:
            gone, end = self._index.missing(keys, 0, first)
            if end == first and len(gone) == first - gone[0]:
                first = gone[0]
            else:  # chunks in between were lost
                while first > 0 and keys[first - 1] not in self._index:
                    first -= 1
        if first < request.num_gone_chunks:
            return 0  # its head is nowhere: no lookup could reach it
        copyable = self._backoff.num_copyable(keys, first, num_chunks)
        request.rests_until_s = self._backoff.until_s(keys[copyable]) if copyable < num_chunks else 0.0
        missing, end = self._index.missing(keys, first, copyable)
        saved = missing[:room]
        if len(saved) > 1 and self._repeat([keys[i] for i in saved]):
            self._refuse(request)
            return 0
        own: Container[ChunkKey] = ()
        has_holes = len(missing) < end - first
        if (first or has_holes) and len(saved) > self._index.num_free_slots:
            # Keeps what this request has in the host tier from being evicted for its own save: the chunk
            # before those that are missing holds on to all before it.
            own = set(keys[max(0, first - 1) : end]) if has_holes else (keys[first - 1],)
        slots = self._index.allocate(request.use, keys, saved, protected=own)
        request.num_looked_at_chunks = num_chunks
        num_saved = len(slots)
        request.num_saved_chunks = end if num_saved == len(missing) else missing[num_saved]
        request.num_refused_chunks = len(missing) - num_saved + num_chunks - end
        if not num_saved:
            if is_use:
                self._index.touch(request.use, keys, num_chunks)
            return 0
        first = saved[0]
        follow = saved[num_saved - 1] - first == num_saved - 1
        for blocks, table in zip(save.tables, request.block_tables, strict=True):
            if num_saved == size == 1:  # a request that generates
                blocks.append(int(table[first]))
            elif follow:
                blocks += plain(table[first * size : (first + num_saved) * size])
            else:
                block_ids = plain(table)
                blocks += [block_ids[i * size + j] for i in saved[:num_saved] for j in range(size)]
        save.keys += keys[first : first + num_saved] if follow else [keys[i] for i in saved[:num_saved]]
        save.slots += slots
        save.request_ids.append(request.request_id)
        return num_saved

    def _repeat(self, missing: Sequence[ChunkKey]) -> bool:
        """Whether chunks that follow each other, the first of which is missing, are not what chained hashes name."""
        return len(set(missing)) < len(missing) or any(key in self._index for key in missing)

    def _refuse(self, request: RequestState) -> None:
        """Nothing more of a request is saved: what was would be found by prompts that begin otherwise."""
        request.saving, request.num_refused_chunks = False, 0
        self._num_unchained += 1
        if self._num_unchained.bit_count() == 1:  # 1, 2, 4, 8, ...: an engine that hashes so does it for each request
            _logger.error(
                "request %s: one block hash stands for blocks with different tokens before them; expected hashes of "
                "all tokens up to the end of each block (BlockHasher makes them). Nothing more of it is saved (%d "
                "requests so far)",
                request.request_id,
                self._num_unchained,
            )

    def _new_save(self) -> _Save:
        return _Save([[] for _ in range(self._num_groups)])

    def _plan_job(self, kind: JobKind, save: _Save, *, deadline_s: float) -> None:
        num_blocks, others = len(save.tables[0]), len(save.request_ids) - 1
        host_ids = host_blocks(save.slots, blocks_per_chunk=self._blocks_per_chunk, num_blocks=num_blocks)
        job = self._jobs.plan(
            kind,
            tuple(
                [
                    CopyPart(group_id=group_id, block_ids=tuple(block_ids), host_block_ids=host_ids)
                    for group_id, block_ids in enumerate(save.tables)
                ]
            ),
            who=save.request_ids[0] + (f" and {others} more" if others else ""),
            account=_ACCOUNT,
            keys=tuple(save.keys),
            slots=tuple(save.slots),
            num_staging_blocks=self._staging.reserve_save(_ACCOUNT, num_blocks * self._num_groups),
            breaker=self._breaker,
            deadline_s=deadline_s,
        )
        self._breaker.begin(job.job_id)


def _by_priority(requests: Iterable[RequestState]) -> list[RequestState]:
    """The highest first, equals in their order."""
    ordered = list(requests)
    if len({request.limits.priority for request in ordered}) > 1:
        ordered.sort(key=lambda request: -request.limits.priority)
    return ordered
