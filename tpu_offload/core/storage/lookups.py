"""Lookups in shared storage: which chunks of waiting prompts other engines have stored.

A private tier is known: the scheduler has written all that is there. A shared tier has to be asked, which takes a round
trip, so `match` cannot wait for it. A request whose prompt goes on past the chunks known here is ARRIVING for a short
time. The next plan has one lookup for all such requests, a job like any other, which every worker answers for its own
shards. What all of them have counts as stored from then on, and the next match promotes it.

With windows or states, the request asks for checkpoints once all chunks before them are known: for the last few
boundaries up to there, the records of each like a prefix, which is of use only if all of it is found.

What is known is asked for again now and then, if requests use it, by a lookup that no request waits for
(`core.storage.confirmations`).

An answer is a hint. It makes a chunk known until its first failed read, and missing for a second. What bounds the cost:

- A request asks at most once for each of its chunks, and only while it may still wait.
- Requests with a common prefix ask once: a prefix is known by its first key, and keys are chained, so that one key in
  common is all keys before it in common.
- While a lookup is late, no request waits or asks. It has a deadline, and lookups have a circuit breaker: a server that
  is frozen or dead costs a few short waits, then none until one lookup has succeeded.
- Keys in flight and all tables are bounded. What does not fit is computed.

After a reset nothing is asked any more: the keys have a suffix then that no other engine has
(`request_table.KeySpace`).
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import final

from tpu_offload.config import StorageTierConfig
from tpu_offload.core.breaker import CircuitBreaker
from tpu_offload.core.context import TierContext
from tpu_offload.core.holdings import Holdings
from tpu_offload.core.jobs import Job
from tpu_offload.core.request_state import RequestState
from tpu_offload.core.storage.confirmations import MAX_ASKED, Confirmations
from tpu_offload.types import ChunkKey, JobKind, JobState

_ACCOUNT = "lookups"  # for the circuit breaker
_MAX_PREFIX_KEYS = 4096  # of one request; what follows is asked for once these have been found
_MAX_KEYS = 16384  # to be asked for, and in flight
_MAX_JOBS = 8  # in flight
_TIMEOUT_S = 5.0  # a step may take seconds, and the answer comes in a report
_MISSING_S = 1.0  # a negative answer holds for so long
_MAX_MISSING = 4096


@final
class LookupPlanner:
    """Plans lookups; does nothing until `enable`.

    Args:
      context: the scheduler's shared state.
      tier: the settings of the tier.
      capacity: most chunks that may count as stored.
      breaker: suspends lookups while they fail.
      is_readable: whether a chunk is resident, on its way to a tier, or in one that can be read.
      add_found: called with leading chunks of a prefix that storage has.
      confirmations: what is asked for again.
    """

    def __init__(
        self,
        context: TierContext,
        tier: StorageTierConfig,
        *,
        capacity: int,
        breaker: CircuitBreaker,
        is_readable: Callable[[ChunkKey], bool],
        add_found: Callable[[Sequence[ChunkKey]], None],
        confirmations: Confirmations,
    ) -> None:
        config, layout = context.config, context.layout
        self._tier_id = tier.tier_id
        self._jobs = context.jobs
        self._counts = context.counts
        self._costs = context.costs
        self._clock = context.clock
        self._is_readable = is_readable
        self._num_failed_reads = 0  # of any tier
        self._add_found = add_found
        self._confirmations = confirmations
        self._wait_s = config.storage_lookup_wait_s
        self._timeout_s = min(config.job_timeout_s, max(_TIMEOUT_S, 2 * self._wait_s))
        self._max_keys = min(_MAX_PREFIX_KEYS, capacity)
        self._chunk_tokens = config.blocks_per_chunk * layout.block_size
        self._chunk_nbytes = config.blocks_per_chunk * layout.block_nbytes
        self.breaker = breaker
        # By their first keys, prefixes that the next plan asks for, and those in flight.
        self._wanted: dict[ChunkKey, tuple[ChunkKey, ...]] = {}
        self._asked: dict[ChunkKey, tuple[ChunkKey, ...]] = {}
        self._num_keys = 0  # in both
        self._planned_s: dict[int, float] = {}  # by job in flight, when it was planned
        self._confirming: int | None = None  # the job in flight that asks again
        self._missing: OrderedDict[ChunkKey, float] = OrderedDict()  # until when, the earliest first
        self._is_enabled = self._was_reset = False

    def enable(self) -> None:
        """Storage is shared, as a worker has reported."""
        self._is_enabled = self._wait_s > 0 and not self._was_reset
        if self._is_enabled:
            self._confirmations.enable()

    def look_again(self) -> None:
        """A read has failed: requests whose chunks were all known may have to ask after all."""
        self._num_failed_reads += 1

    def reset(self) -> None:
        """The keys have changed: no other engine has stored any of them."""
        self._was_reset, self._is_enabled = True, False
        self._drop_wanted()
        self._missing.clear()
        self._confirmations.reset()

    def ask(self, request: RequestState) -> None:
        """Decides, after a match, whether the request waits for a lookup; asks storage if need be.

        Sets `Arrival.lookup_wait_s`. O(1) once the request has asked, before that O(chunks that are known).
        """
        awaited, request.arrival.awaited_lookup = request.arrival.awaited_lookup, None
        wait_s, request.arrival.lookup_wait_s = request.arrival.lookup_wait_s, 0.0
        if not self._is_enabled or request.last_match.at_load_limit or self._is_late:
            return
        if awaited is not None and (awaited in self._wanted or awaited in self._asked):
            request.arrival.awaited_lookup, request.arrival.lookup_wait_s = awaited, wait_s
            return
        first, end = self._unknown(request)
        if first >= end or not self.breaker.admits(_ACCOUNT) or self._is_missing(request.keys[first]):
            return
        wait_s = self._estimate_s(max(first, request.last_match.num_found_chunks), end)
        since_s = request.arrival.since_s
        if not wait_s or (since_s is not None and self._clock() >= since_s + wait_s):
            return
        if self._want(request, first, end):
            request.arrival.awaited_lookup, request.arrival.lookup_wait_s = request.keys[first], wait_s

    def ask_pieces(
        self, request: RequestState, checkpoints: Sequence[Sequence[ChunkKey]], *, first: int, end: int
    ) -> None:
        """As `ask`, after it: whether storage has checkpoints of a prefix whose chunks are known.

        Args:
          request: the request, which asks once for each.
          checkpoints: the records of each that are not known here.
          first: where the request can continue without them, in chunks.
          end: where with the first of them.
        """
        if (
            not self._is_enabled
            or request.last_match.at_load_limit
            or self._is_late
            or not self.breaker.admits(_ACCOUNT)
        ):
            return
        wait_s = self._estimate_s(first, end)
        since_s = request.arrival.since_s
        if not wait_s or (since_s is not None and self._clock() >= since_s + wait_s):
            return
        is_probe = not self.breaker.closed
        for names in checkpoints:
            key = names[0]
            if key not in self._wanted and key not in self._asked:
                if self._is_missing(key):
                    continue
                if self._num_keys + len(names) > _MAX_KEYS or (is_probe and (self._wanted or self._asked)):
                    return
                self._wanted[key] = tuple(names)
                self._num_keys += len(names)
            if request.arrival.awaited_lookup is None:
                request.arrival.awaited_lookup, request.arrival.lookup_wait_s = key, wait_s

    def _unknown(self, request: RequestState) -> tuple[int, int]:
        """The chunks to ask for: the first one that is not known here, and the end. Empty if it has asked for it.

        One that is in HBM only, such as tokens that were generated here, has to be known for those after it to be read.
        """
        keys, last, arrival = request.keys, len(request.keys), request.arrival
        settled = last, self._num_failed_reads
        if arrival.settled_at == settled:  # not to be looked through again in each step
            return last, last
        if request.limits.max_load_tokens is not None:
            last = min(last, request.use.num_in_hbm - (-request.limits.max_load_tokens // self._chunk_tokens))
        if request.last_match.num_found_chunks >= last:
            return last, last
        first = 0 if request.use.num_in_hbm else request.last_match.num_found_chunks
        while first < last and self._is_readable(keys[first]):
            first += 1
        if first == last:
            arrival.settled_at = settled
        if arrival.first_asked_chunk <= first < arrival.num_asked_chunks:  # it is missing, or its read has failed
            if arrival.num_asked_chunks >= len(keys):
                arrival.settled_at = settled
            return last, last
        end = min(last, first + self._max_keys)
        if first < arrival.first_asked_chunk:  # what was known has gone; what follows was asked for
            end = min(end, arrival.first_asked_chunk)
        return first, end

    def _estimate_s(self, first: int, end: int) -> float:
        """How long a request waits to learn whether storage has these chunks; 0 if it would not read them."""
        load_s = self._costs.promotion_s(self._tier_id, (end - first) * self._chunk_nbytes, num_jobs=1)
        recompute_s = self._costs.recompute_s(first * self._chunk_tokens, end * self._chunk_tokens)
        return self._costs.lookup_wait_s(self._tier_id, load_s, recompute_s, default_s=self._wait_s)

    def _want(self, request: RequestState, first: int, end: int) -> bool:
        """Has the next plan ask for these chunks; False if there is no room.

        Another request may have asked for a prefix that begins with the same chunk. If it ends with other chunks, this
        one asks for its own when that is answered.
        """
        key = request.keys[first]
        other = self._wanted.get(key) or self._asked.get(key)
        if other is not None:
            num_both = min(len(other), end - first)
            if request.keys[first + num_both - 1] != other[num_both - 1]:
                return True
            if num_both == end - first or key in self._asked:
                request.arrival.note_asked(first, first + num_both)
                return True
        num_more = end - first - len(other or ())
        is_probe = not self.breaker.closed
        if self._num_keys + num_more > _MAX_KEYS or (is_probe and (self._wanted or self._asked)):
            return other is not None
        self._wanted[key] = tuple(request.keys[first:end])
        self._num_keys += num_more
        request.arrival.note_asked(first, end)
        return True

    def _is_missing(self, key: ChunkKey) -> bool:
        return self._clock() < self._missing.get(key, 0.0)

    @property
    def _is_late(self) -> bool:
        """Whether the oldest lookup in flight takes longer than a request would wait for it."""
        return bool(self._planned_s) and self._clock() >= next(iter(self._planned_s.values())) + self._wait_s

    @property
    def has_plans(self) -> bool:
        """Whether `plan` would plan a lookup."""
        is_wanted = bool(self._wanted) or (self._confirming is None and self._confirmations.has_wanted)
        return is_wanted and len(self._planned_s) < _MAX_JOBS

    def plan(self, now_s: float) -> None:
        """Plans one lookup for all that is wanted, and one for some of what is to be confirmed."""
        if not self.has_plans:
            return
        if not self.breaker.admits(_ACCOUNT):
            self._drop_wanted()
            self._confirmations.drop_wanted()
            return
        if self._wanted:
            wanted, self._wanted = self._wanted, {}
            self._asked |= wanted
            prefixes = tuple(wanted.values())
            self._plan_job(prefixes, now_s)
            self._counts.looked_up_storage_chunks += sum(map(len, prefixes))
        if self._confirming is None and self.breaker.admits(_ACCOUNT):
            names = self._confirmations.take(MAX_ASKED if self.breaker.closed else 1)
            if names:
                self._confirming = self._plan_job(tuple([(name,) for name in names]), now_s)

    def _plan_job(self, prefixes: tuple[tuple[ChunkKey, ...], ...], now_s: float) -> int:
        job = self._jobs.plan(
            JobKind.LOOKUP,
            (),
            Holdings(JobKind.LOOKUP.direction, self.breaker),
            request=f"{sum(map(len, prefixes))} chunks",
            prefixes=prefixes,
            tier_id=self._tier_id,
            deadline_s=now_s + self._timeout_s,
        )
        self._planned_s[job.job_id] = now_s
        return job.job_id

    def _drop_wanted(self) -> None:
        self._num_keys -= sum(map(len, self._wanted.values()))
        self._wanted.clear()

    def ended(self, job: Job) -> None:
        """A lookup of this tier has ended: takes what was found as stored.

        The answer of a job that a reset or a restart has failed is ignored.
        """
        del self._planned_s[job.job_id]
        if job.job_id == self._confirming:
            self._confirming = None
            self._confirmations.answered(job.num_found if job.state is JobState.FINISHED else ())
            self._counts.num_failed_storage_lookups += job.copy_failed
            return
        for prefix in job.wire.prefixes:
            self._num_keys -= len(self._asked.pop(prefix[0]))
        if job.state is not JobState.FINISHED:
            self._counts.num_failed_storage_lookups += job.copy_failed
            return
        for prefix, num_found in zip(job.wire.prefixes, job.num_found, strict=True):
            self._counts.found_storage_chunks += num_found
            if num_found:
                self._add_found(prefix[:num_found])
            if num_found < len(prefix):
                self._note_missing(prefix[num_found])

    def _note_missing(self, key: ChunkKey) -> None:
        self._missing[key] = self._clock() + _MISSING_S
        self._missing.move_to_end(key)
        if len(self._missing) > _MAX_MISSING:
            self._missing.popitem(last=False)

    def check_invariants(self) -> None:
        """Raises AssertionError unless the tables agree with the jobs in flight. For tests."""
        jobs = [job for job in self._jobs.of(JobKind.LOOKUP) if job.wire.tier_id == self._tier_id]
        prefixes = [prefix for job in jobs if job.job_id != self._confirming for prefix in job.wire.prefixes]
        assert {prefix[0]: prefix for prefix in prefixes} == self._asked, "a lookup in flight that is not known"
        assert len(prefixes) == len(self._asked), "a prefix is asked for twice"
        assert not self._wanted.keys() & self._asked.keys(), "what is in flight is asked for again"
        assert [job.job_id for job in jobs] == list(self._planned_s)
        assert self._confirming is None or self._confirming in self._planned_s
        self._confirmations.check_invariants()
        assert self._num_keys == sum(map(len, (*self._wanted.values(), *self._asked.values()))) <= _MAX_KEYS
        assert len(jobs) <= _MAX_JOBS
        assert len(self._missing) <= _MAX_MISSING
