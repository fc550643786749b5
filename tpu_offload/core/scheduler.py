"""Turns engine events into step plans, and step reports into what the engine should know.

The life of a request, as the engine tells it:

    n = match(...)            how many tokens past those in HBM can come from the host tier;
                              pins the chunks and reserves staging blocks for them
    admit(...)                the engine granted blocks: the promise becomes a load job
      (or release(...))       it could not: the promise is given back
    plan = plan_step(...)     every step: loads to start, blocks to save, loads to cancel
    update = apply(report)    every step, one report a worker: which requests are loaded or must recompute
    preempt(...)/finish(...)  the request gives its blocks back, at any time

The engine may free and grant a request's blocks again as soon as `preempt` or `finish` returns, also
under pending copies. A save planned in step k reads its blocks right after the forward pass of step k,
in program order before anything that a later step writes (see `OffloadWorker.end_step`). A load of a
request that is gone is cancelled by the next plan, which every worker sees before it lets that step
write into the blocks.

Staging blocks, pins and slots of a job are released at one place (`_end`), once, when every worker has
reported the job. Until then the bytes may still be moving, whatever became of the request.
"""

import dataclasses
import logging
import time
from collections.abc import Callable, Hashable, Iterable, Sequence

from tpu_offload import hashing
from tpu_offload.config import OffloadConfig
from tpu_offload.core.index import ChunkIndex, NewChunk
from tpu_offload.core.jobs import Job, JobTable
from tpu_offload.core.policies import EvictionPolicy, LRUPolicy
from tpu_offload.core.requests import FailedLoad, ScheduledRequest, Update
from tpu_offload.core.save_policy import SaveAll, SavePolicy, SavePrompt
from tpu_offload.core.staging import StagingBufferManager
from tpu_offload.errors import RequestError
from tpu_offload.layout import KVLayout
from tpu_offload.metrics import OffloadStats, StatsLogger
from tpu_offload.types import BlockHash, ChunkKey, Direction, JobState, StepPlan, StepReport

_logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class _Promise:
    """What `match` granted: blocks `first_block` to `first_block + num_blocks`, whose chunks are pinned."""

    first_block: int
    num_blocks: int
    num_tokens: int
    keys: tuple[ChunkKey, ...]


@dataclasses.dataclass(slots=True)
class _Request:
    """What the scheduler remembers of a request from its first match until it gives its blocks back.

    Attributes:
      account: holder of its staging blocks; unlike the request id it is never used twice, so a request
        that comes back after a preemption does not meet its own old load.
      keys: keys of its chunks, as far as they were needed.
      num_saved_chunks: leading chunks that are in the host tier or on the way, as last seen.
      num_refused_chunks: chunks after those that found no room in the last step.
      num_cut_load_blocks: blocks that its last match found but had no staging blocks for; they become
        drops when the request ends, because until then it may be matched again.
      saving: False once a reset has made the KV in its blocks worthless to others.
    """

    account: Hashable
    keys: list[ChunkKey] = dataclasses.field(default_factory=list)
    promise: _Promise | None = None
    load: Job | None = None
    num_saved_chunks: int = 0
    num_refused_chunks: int = 0
    num_cut_load_blocks: int = 0
    saving: bool = True


class OffloadScheduler:
    """Plans saves and loads for one engine. All calls come from the thread of the engine's scheduler.

    Args:
      config: the settings. With a size of zero nothing is ever matched or saved.
      layout: what a block is made of.
      num_workers: workers that report each step; a job ends when all have reported it.
      policy: eviction policy of the host tier, LRU by default.
      clock: monotonic seconds.
    Raises:
      ConfigError: the staging buffer or the host tier is smaller than one chunk.
    """

    def __init__(
        self,
        config: OffloadConfig,
        layout: KVLayout,
        *,
        num_workers: int = 1,
        policy: EvictionPolicy | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._layout = layout
        self._block_size = layout.block_size
        self._blocks_per_chunk = config.blocks_per_chunk
        config.host_chunks(layout)  # raises what is wrong with it here rather than in a worker
        self._staging = StagingBufferManager(config.staging_blocks(layout) if config.enabled else 0)
        self._index = ChunkIndex(policy or LRUPolicy())
        self._save_policy: SavePolicy = SaveAll() if config.decode_save else SavePrompt()
        self._jobs = JobTable(num_workers=num_workers)
        self._num_host_chunks = dict.fromkeys(range(num_workers), 0)
        self._requests: dict[str, _Request] = {}
        self._num_requests_seen = 0
        self._num_steps = 0
        self._num_resets = 0
        self._loads_to_send: list[Job] = []
        self._job_ids_to_cancel: list[int] = []
        self._failed_loads: list[FailedLoad] = []
        self._counts = OffloadStats()
        self._clock = clock
        self._stats_logger = StatsLogger(config.metrics_log_interval)

    # Engine events.

    def match(
        self, request_id: str, block_hashes: Sequence[BlockHash], *, num_tokens: int, num_computed_tokens: int
    ) -> int:
        """Finds how much of a request the host tier can load, and holds it ready.

        Pins the chunks and reserves staging blocks until `admit` or `release`. Asking again replaces
        the earlier answer. A load that does not fit the free staging blocks is cut to what fits.

        Args:
          request_id: the request.
          block_hashes: hashes of its full blocks, from the first on.
          num_tokens: tokens that it needs before it can sample the next one.
          num_computed_tokens: leading tokens that are in HBM already.
        Returns:
          Tokens past `num_computed_tokens` that can be loaded. One token is always left to compute, so
          a request whose every block is here gets one less; its last block is loaded all the same.
          0 if `num_computed_tokens` is not at a block boundary.
        Raises:
          RequestError: the request is waiting for a load, or the numbers make no sense.
        """
        if not 0 <= num_computed_tokens <= num_tokens:
            raise RequestError(
                f"request {request_id}: {num_computed_tokens=} of {num_tokens=}; expected 0 to num_tokens"
            )
        if not self._config.enabled:
            return 0
        request = self._request(request_id)
        if request.load is not None:
            raise RequestError(f"request {request_id} is matched while its load is in flight; wait for its update")
        self._release(request)
        if num_computed_tokens % self._block_size:
            return 0
        first_block = num_computed_tokens // self._block_size
        wanted = self._num_loadable_blocks(request, block_hashes, first_block=first_block, num_tokens=num_tokens)
        if wanted < 1:
            return 0
        num_blocks = self._staging.reserve(request.account, wanted, Direction.LOAD, partial=True)
        request.num_cut_load_blocks = wanted - num_blocks
        if num_blocks == 0:
            return 0
        end_tokens = min((first_block + num_blocks) * self._block_size, num_tokens - 1)
        keys = tuple(request.keys[self._chunk(first_block) : self._chunk(first_block + num_blocks - 1) + 1])
        self._index.pin(keys)
        request.promise = _Promise(first_block, num_blocks, end_tokens - num_computed_tokens, keys)
        return request.promise.num_tokens

    def release(self, request_id: str) -> None:
        """Gives back what `match` promised; without a promise it does nothing."""
        if request_id in self._requests:
            self._release(self._requests[request_id])

    def admit(self, request_id: str, block_ids: Sequence[int], *, num_loaded_tokens: int) -> None:
        """The engine granted blocks. With `num_loaded_tokens` the request now waits for its load.

        Args:
          request_id: the request.
          block_ids: all of its blocks so far, in token order.
          num_loaded_tokens: how many of the promised tokens the engine takes; 0 takes none.
        Raises:
          RequestError: more tokens than promised, or too few blocks for them; the promise stands.
        """
        request = self._requests.get(request_id)
        promise = request.promise if request else None
        if num_loaded_tokens == 0:
            self.release(request_id)
            return
        if request is None or promise is None or not 0 < num_loaded_tokens <= promise.num_tokens:
            promised = promise.num_tokens if promise else 0
            raise RequestError(
                f"request {request_id} admits {num_loaded_tokens} loaded tokens; expected 0 to the {promised} promised"
            )
        num_blocks = -(-num_loaded_tokens // self._block_size)
        end_block = promise.first_block + num_blocks
        if len(block_ids) < end_block:
            raise RequestError(f"request {request_id} has {len(block_ids)} blocks; its load needs {end_block}")
        if num_blocks < promise.num_blocks:
            self._staging.release(request.account, promise.num_blocks - num_blocks, Direction.LOAD)
        num_keys = self._chunk(end_block - 1) - self._chunk(promise.first_block) + 1
        self._index.unpin(promise.keys[num_keys:])
        request.promise = None
        request.load = self._jobs.add(
            Direction.LOAD,
            block_ids=tuple(block_ids[promise.first_block : end_block]),
            host_block_ids=tuple(self._host_block_id(request, b) for b in range(promise.first_block, end_block)),
            request_id=request_id,
            account=request.account,
            keys=promise.keys[:num_keys],
            num_valid_tokens=promise.first_block * self._block_size,
            deadline_s=self._clock() + self._config.job_timeout_s,
        )
        self._loads_to_send.append(request.load)
        self._index.touch(request.keys[: self._chunk(end_block - 1) + 1])
        self._counts.matched_tokens += num_loaded_tokens

    def preempt(self, request_id: str) -> None:
        """The engine takes a request's blocks; it may be matched again later. Unknown requests are fine."""
        self._forget(request_id)

    def finish(self, request_id: str) -> None:
        """A request ended, in whatever state it was. Unknown requests are fine."""
        self._forget(request_id)

    def reset(self) -> None:
        """Forgets every chunk, because what they hold is no longer what the model would compute.

        Promises are taken back; loads in flight count as failed; saves in flight are not published. Blocks
        that requests hold at this moment are not saved any more, unless the request is preempted and
        computed again.
        """
        for request in self._requests.values():
            self._release(request)
            request.keys.clear()
            request.num_saved_chunks = request.num_refused_chunks = 0
            request.saving = False
        for job in self._jobs:
            job.doom("the cache was reset")
        self._index.clear()
        # Chunks that a load in flight has pinned stay until it ends. New keys make them unreachable now.
        self._num_resets += 1

    # Once a step.

    def plan_step(self, scheduled: Iterable[ScheduledRequest]) -> StepPlan:
        """Plans the copies of the coming step.

        Args:
          scheduled: the requests that hold computed blocks and run in this step.
        Returns:
          The plan for every worker: loads first, saves after the forward pass.
        """
        now_s = self._clock()
        self._fail_overdue(now_s)
        saves = []
        if self._config.enabled:
            for request in scheduled:
                job = self._plan_save(request, now_s)
                if job is not None:
                    saves.append(job)
        for job in (*self._loads_to_send, *saves):
            job.state = JobState.SENT
        plan = StepPlan(
            step_id=self._num_steps,
            loads=tuple(job.transfer for job in self._loads_to_send),
            saves=tuple(job.transfer for job in saves),
            cancelled_job_ids=tuple(self._job_ids_to_cancel),
        )
        self._num_steps += 1
        self._loads_to_send.clear()
        self._job_ids_to_cancel.clear()
        self._stats_logger.maybe_log(now_s, self.stats)
        return plan

    def apply(self, report: StepReport) -> Update:
        """Takes one worker's report.

        Results that fit no job in flight (late, doubled, unknown) change nothing and are counted.
        """
        if report.worker_id not in self._num_host_chunks:
            self._counts.num_ignored_results += len(report.results)
            return Update()
        # A slot is usable once every worker has it.
        self._num_host_chunks[report.worker_id] = report.num_host_chunks
        self._index.grow(min(self._num_host_chunks.values()))
        loaded = []
        for result in report.results:
            if not self._jobs.expects(report.worker_id, result):
                self._counts.num_ignored_results += 1
                continue
            job = self._jobs.report(report.worker_id, result)
            if job is not None and self._end(job):
                loaded.append(job.request_id)
        failed, self._failed_loads = tuple(self._failed_loads), []
        return Update(tuple(loaded), failed)

    # State.

    @property
    def has_jobs(self) -> bool:
        """Whether any job is planned or in flight, so that plans and reports should go on."""
        return len(self._jobs) > 0

    def stats(self) -> OffloadStats:
        """A snapshot of the counters; may be taken from another thread."""
        return dataclasses.replace(
            self._counts,
            staging_budget_blocks=self._staging.num_blocks,
            staging_reserved_blocks=self._staging.num_reserved,
            staging_peak_blocks=self._staging.peak_num_reserved,
            num_host_chunks=self._index.num_slots,
            num_resident_chunks=len(self._index),
            num_evicted_chunks=self._index.num_evicted,
            num_jobs_in_flight=len(self._jobs),
        )

    def check_invariants(self) -> None:
        """Raises AssertionError unless accounts, pins and jobs agree. For tests; O(everything)."""
        self._staging.check_invariants()
        self._index.check_invariants()
        held: dict[tuple[Hashable, Direction], int] = {}
        pins: dict[ChunkKey, int] = {}
        pending: list[ChunkKey] = []
        for job in self._jobs:
            held[job.account, job.direction] = held.get((job.account, job.direction), 0) + job.transfer.num_blocks
            if job.direction is Direction.SAVE:
                pending += job.keys
        for request in self._requests.values():
            if request.promise:
                held[request.account, Direction.LOAD] = request.promise.num_blocks
        for keys in (
            *(job.keys for job in self._jobs if job.direction is Direction.LOAD),
            *(request.promise.keys for request in self._requests.values() if request.promise),
        ):
            for key in keys:
                pins[key] = pins.get(key, 0) + 1
        assert sum(held.values()) == self._staging.num_reserved
        assert all(self._staging.held(account, direction) == n for (account, direction), n in held.items())
        self._index.check_holds(pins=pins, pending=set(pending))

    # Inside.

    def _request(self, request_id: str) -> _Request:
        request = self._requests.get(request_id)
        if request is None:
            request = self._requests[request_id] = _Request(account=(request_id, self._num_requests_seen))
            self._num_requests_seen += 1
        return request

    def _chunk(self, block: int) -> int:
        return block // self._blocks_per_chunk

    def _host_block_id(self, request: _Request, block: int) -> int:
        slot = self._index.slot(request.keys[self._chunk(block)])
        return slot * self._blocks_per_chunk + block % self._blocks_per_chunk

    def _extend_keys(self, request: _Request, block_hashes: Sequence[BlockHash]) -> None:
        request.keys.extend(
            hashing.chunk_keys(
                block_hashes,
                blocks_per_chunk=self._blocks_per_chunk,
                first_chunk=len(request.keys),
                epoch=self._num_resets,
            )
        )

    def _num_loadable_blocks(
        self, request: _Request, block_hashes: Sequence[BlockHash], *, first_block: int, num_tokens: int
    ) -> int:
        """Blocks from `first_block` on that are READY and hold a token that needs no computing."""
        self._extend_keys(request, block_hashes)
        first_chunk = self._chunk(first_block)
        num_ready = self._index.num_ready(request.keys[first_chunk:])
        end_tokens = min((first_chunk + num_ready) * self._blocks_per_chunk * self._block_size, num_tokens - 1)
        return -(-(end_tokens - first_block * self._block_size) // self._block_size) if num_ready else 0

    def _release(self, request: _Request) -> None:
        promise, request.promise = request.promise, None
        if promise is not None:
            self._index.unpin(promise.keys)
            self._staging.release(request.account, promise.num_blocks, Direction.LOAD)
        request.num_cut_load_blocks = 0

    def _forget(self, request_id: str) -> None:
        request = self._requests.pop(request_id, None)
        if request is None:
            return
        self._counts.dropped_save_blocks += request.num_refused_chunks * self._blocks_per_chunk
        self._counts.dropped_load_blocks += request.num_cut_load_blocks
        self._release(request)
        self._index.touch(request.keys)
        if request.load is not None:
            self._detach(request.load)

    def _detach(self, job: Job) -> None:
        """Nobody waits for this load any more, and its blocks are about to be used for something else."""
        job.detached = True
        if job.state is JobState.PLANNED:  # never told to a worker: it ends here
            self._loads_to_send.remove(job)
            self._jobs.end(job)
            self._give_back(job)
        else:
            self._job_ids_to_cancel.append(job.transfer.job_id)

    def _plan_save(self, scheduled: ScheduledRequest, now_s: float) -> Job | None:
        num_tokens = self._save_policy.num_tokens_to_save(
            num_prompt_tokens=scheduled.num_prompt_tokens, num_computed_tokens=scheduled.num_computed_tokens
        )
        num_blocks = min(num_tokens // self._block_size, len(scheduled.block_hashes), len(scheduled.block_ids))
        num_chunks = num_blocks // self._blocks_per_chunk
        if num_chunks == 0:
            return None
        request = self._request(scheduled.request_id)
        if num_chunks <= request.num_saved_chunks or not request.saving:
            return None
        self._extend_keys(request, scheduled.block_hashes)
        missing = self._missing_chunks(request, num_chunks)
        fitting = missing[: self._staging.num_free // self._blocks_per_chunk]
        new_chunks = [NewChunk(request.keys[i], request.keys[i - 1] if i else None) for i in fitting]
        slots = self._index.allocate(new_chunks, protected=request.keys)
        self._index.touch(request.keys[:num_chunks])
        saved = missing[: len(slots)]
        refused = missing[len(slots) :]
        request.num_saved_chunks = refused[0] if refused else num_chunks
        request.num_refused_chunks = len(refused)
        self._counts.deferred_save_blocks += len(refused) * self._blocks_per_chunk
        if not saved:
            return None
        blocks = [b for i in saved for b in range(i * self._blocks_per_chunk, (i + 1) * self._blocks_per_chunk)]
        self._staging.reserve(request.account, len(blocks), Direction.SAVE)
        return self._jobs.add(
            Direction.SAVE,
            block_ids=tuple(scheduled.block_ids[b] for b in blocks),
            host_block_ids=tuple(self._host_block_id(request, b) for b in blocks),
            request_id=scheduled.request_id,
            account=request.account,
            keys=tuple(request.keys[i] for i in saved),
            num_valid_tokens=0,
            deadline_s=now_s + self._config.job_timeout_s,
        )

    def _missing_chunks(self, request: _Request, num_chunks: int) -> list[int]:
        """Chunks of the first `num_chunks` that the host tier does not hold, in order.

        What was saved earlier may have been evicted since, from the tail on: going back to the last
        chunk that is still there closes the gap, because the request still holds those blocks too.
        """
        first = request.num_saved_chunks
        while first > 0 and self._index.state(request.keys[first - 1]) is None:
            first -= 1
        return [i for i in range(first, num_chunks) if self._index.state(request.keys[i]) is None]

    def _fail_overdue(self, now_s: float) -> None:
        for job in self._jobs.overdue(now_s):
            _logger.warning(
                "%s of %d blocks of request %s timed out after %g s; %s",
                job.direction.value, job.transfer.num_blocks, job.request_id, self._config.job_timeout_s,
                "the request computes them" if job.direction is Direction.LOAD else "they are not published",
            )  # fmt: skip
            self._counts.num_timed_out_jobs += 1
            job.doom("timed out")
            if job.direction is Direction.LOAD and not job.detached:
                # The cancellation goes down with this very plan, before the engine hears of the failure
                # and lets a step compute into these blocks.
                self._tell_failed(job)
                self._detach(job)

    def _tell_failed(self, job: Job) -> None:
        self._requests[job.request_id].load = None
        self._failed_loads.append(FailedLoad(job.request_id, job.num_valid_tokens))

    def _end(self, job: Job) -> bool:
        """Releases what a reported job held. True when it is a load that its request can use."""
        self._give_back(job)
        failed = job.state is JobState.FAILED
        if not failed:
            self._count_moved(job)
        elif not job.detached:
            self._counts.num_failed_jobs += 1
            _logger.warning("%s of request %s failed: %s", job.direction.value, job.request_id, job.error)
        if job.direction is Direction.SAVE:
            self._index.complete(job.keys, success=not failed)
            if failed:
                self._rewind_saves(set(job.keys))
            return False
        if job.detached:
            return False
        if failed:
            # What could not be read once is not offered again; whoever computes it saves it anew.
            self._index.drop(reversed(job.keys))
            self._tell_failed(job)
            return False
        self._requests[job.request_id].load = None
        self._counts.loaded_tokens += job.transfer.num_blocks * self._block_size
        return True

    def _give_back(self, job: Job) -> None:
        self._staging.release(job.account, job.transfer.num_blocks, job.direction)
        if job.direction is Direction.LOAD:
            self._index.unpin(job.keys)

    def _count_moved(self, job: Job) -> None:
        num_blocks, counts = job.transfer.num_blocks, self._counts
        nbytes = num_blocks * self._layout.block_nbytes
        if job.direction is Direction.SAVE:
            counts.saved_blocks += num_blocks
            counts.saved_nbytes += nbytes
            counts.save_s += job.duration_s
        else:
            counts.loaded_blocks += num_blocks
            counts.loaded_nbytes += nbytes
            counts.load_s += job.duration_s

    def _rewind_saves(self, lost: set[ChunkKey]) -> None:
        """Offers again what a failed save lost, to every request that counted on it. Rare, so O(requests)."""
        for request in self._requests.values():
            for i, key in enumerate(request.keys[: request.num_saved_chunks]):
                if key in lost:
                    request.num_saved_chunks = i
                    break
