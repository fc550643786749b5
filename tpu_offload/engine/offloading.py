"""How an engine uses tpu_offload: all calls to the library in one place.

The scheduler calls `look_up` and `start_load` when it admits a sequence, `preempt` or `finish` when it takes the
sequence's blocks, and `can_swap_in` and `swap_in` to resume one that `preempt` has swapped out. Its block pool calls
`evict` before it grants cached blocks. The engine calls the following once a step, even if nothing is computed:

    plan, kv_caches = offloading.before_forward(batch, kv_caches)
    ... dispatch the forward pass with offloading.fused_step() ...
    offloading.after_forward(plan, kv_caches, copied)
    update = offloading.poll(wait=...)
"""

import dataclasses
import functools
import math
import operator
from collections.abc import Callable, Collection
from collections.abc import Sequence as List
from typing import Any

import jax

from tpu_offload import (
    BlockHash,
    CachedPrefix,
    FusedOutcome,
    FusedStep,
    KVLayout,
    MatchState,
    OffloadConfig,
    OffloadScheduler,
    OffloadStats,
    OffloadWorker,
    SaveEvent,
    ScheduledRequest,
    StepPlan,
    StepReport,
    TierStats,
    Update,
)
from tpu_offload.engine.hosts import HostWorkers
from tpu_offload.engine.kv_blocks import num_skipped_blocks
from tpu_offload.engine.sequence import Phase, ScheduledTokens, Sequence

_NEVER = 2**30 - 1  # more tokens than any request has; integers of this size compare fastest


@dataclasses.dataclass(frozen=True, slots=True)
class Seams:
    """Hooks between the parts of the library, for tests that inject faults into copies and messages.

    Attributes:
      wrap_copier: see `OffloadWorker`.
      relay: given the report of each step, returns those that reach the scheduler now, in order.
    """

    wrap_copier: Callable[[Any, Any], Any] = lambda copier, store: copier
    relay: Callable[[StepReport], List[StepReport]] = lambda report: (report,)


class Offloading:
    """Glue between this engine and the library.

    The `OffloadScheduler` is here, beside the engine's scheduler. The `OffloadWorker` is in the process that has the
    caches: this one, or those of `hosts`, each with its own.

    Args:
      config: the library's settings.
      layout: the geometry of the caches.
      kv_caches: the HBM caches; empty with `workers`.
      clock: monotonic seconds.
      seams: for tests.
      workers: the workers on several hosts, in place of one in this process.
    """

    def __init__(
        self,
        config: OffloadConfig,
        layout: KVLayout,
        kv_caches: list[jax.Array],
        *,
        clock: Callable[[], float],
        seams: Seams | None = None,
        workers: HostWorkers | None = None,
    ) -> None:
        seams = seams or Seams()
        self._relay = seams.relay
        self._block_size = layout.block_size
        self._chunk_tokens = layout.block_size * config.blocks_per_chunk
        self._has_states = layout.state_group is not None
        self._windows = [group.window for group in layout.groups if group is not layout.state_group]
        self._decode_save = config.decode_save
        self._saves_on_compute = SaveEvent.COMPUTE in config.save_on
        self._saves_on_eviction = SaveEvent.HBM_EVICTION in config.save_on and config.enabled
        # Sequences that may complete blocks to save. Generating ones are included only if generated tokens are saved;
        # then finding the few that complete a block costs one comparison each.
        self._watched: set[Sequence] = set()
        num_workers = workers.num_hosts if workers is not None else 1
        self._scheduler = OffloadScheduler(config, layout, num_workers=num_workers, clock=clock)
        self._has_storage = config.has_storage
        self._clock = clock
        self._arriving_until_s = math.inf  # the earliest end of a wait for storage since the last `poll`
        self._worker = workers or OffloadWorker(
            config, layout, kv_caches, clock=clock, fused=True, wrap_copier=seams.wrap_copier
        )
        if self._has_storage:  # what it holds is known before the first lookup
            self.poll(wait=False)

    def look_up(self, sequence: Sequence, *, num_computed_tokens: int) -> int | None:
        """Looks up the host tier beyond the blocks found in HBM. Then call `start_load` or `release`.

        Args:
          sequence: not admitted yet.
          num_computed_tokens: its leading tokens that are in HBM.
        Returns:
          Tokens that can be loaded. None if more are arriving, so that the sequence should wait for a bounded time.
          Only with a storage tier: otherwise this engine does not wait for blocks that are being saved.
        """
        found = self._scheduler.match(
            sequence.sequence_id,
            sequence.block_hashes,
            num_tokens=len(sequence.tokens),
            num_computed_tokens=num_computed_tokens,
            limits=sequence.request.limits,
        )
        if self._has_storage and found.state is MatchState.ARRIVING:
            assert found.until_s is not None, "ARRIVING ends at some time"
            self._arriving_until_s = min(self._arriving_until_s, found.until_s)
            self.release(sequence)
            return None
        if found.junction_tokens and self._has_states:
            sequence.junctions.add(found.junction_tokens)
        return found.num_tokens

    def release(self, sequence: Sequence) -> None:
        """There are no blocks for the sequence: it is looked up again later."""
        self._scheduler.release(sequence.sequence_id)

    def start_load(self, sequence: Sequence, num_tokens: int) -> None:
        """Starts the load of tokens that `look_up` has found.

        Args:
          sequence: has its blocks.
          num_tokens: tokens to load. If not 0, the sequence must not run before `poll` names it.
        """
        self._scheduler.admit(sequence.sequence_id, self._tables(sequence), num_loaded_tokens=num_tokens)
        self._add_junctions(sequence)
        self._watch(sequence)

    @property
    def saves_on_eviction(self) -> bool:
        """Whether `evict` does anything."""
        return self._saves_on_eviction

    def evict(self, prefix: CachedPrefix) -> None:
        """Call it before the last block of a cached prefix is granted to another request."""
        self._scheduler.evict(prefix)

    def _add_junctions(self, sequence: Sequence) -> None:
        """Has a state at the last chunk boundaries below the ends of what the sequence computes now."""
        if self._chunk_tokens > self._block_size and self._has_states:
            for end in (sequence.num_prompt_tokens, len(sequence.tokens)):
                sequence.junctions.add((end - 1) // self._chunk_tokens * self._chunk_tokens)

    def _watch(self, sequence: Sequence) -> None:
        """From now on the sequence's blocks are offered for saving."""
        sequence.next_offer_tokens = 0
        if self._saves_on_compute:
            self._watched.add(sequence)

    def preempt(self, sequence: Sequence) -> bool:
        """Preempts a sequence. Its blocks may be granted again at once, even with copies in flight.

        Returns:
          Whether it is swapped out; otherwise it must be recomputed.
        """
        self._watched.discard(sequence)
        name = sequence.sequence_id
        if sequence.phase is Phase.RETURNING:
            self._scheduler.swap.abort_swap_in(name)
            return True
        swapped = sequence.phase is Phase.RUNNING and self._scheduler.swap.swap_out(
            name,
            self._in_use(sequence),
            () if sequence.is_stale else sequence.block_hashes,
            num_computed_tokens=sequence.num_computed_tokens,
        )
        held = None if swapped or sequence.is_stale else self._held(sequence, sequence.num_computed_tokens)
        self._scheduler.preempt(name, held=held)
        return swapped

    def abandon(self, sequence: Sequence) -> None:
        """The sequence's blocks are lost: it is recomputed, in any phase."""
        self._watched.discard(sequence)
        if sequence.phase is Phase.RETURNING:
            # Not swapped in again: that may be the very copy that destroyed the caches.
            self._scheduler.swap.discard([sequence.sequence_id])
        self._scheduler.preempt(sequence.sequence_id)

    def mark_caches_lost(self) -> None:
        """The KV caches were lost and replaced. Then call `abandon` for every sequence that holds blocks."""
        worker = self._worker
        for epoch in worker.cache_epochs if isinstance(worker, HostWorkers) else (worker.cache_epoch,):
            self._scheduler.mark_caches_lost(epoch)

    def reset(self) -> None:
        """Invalidates everything in host memory. The next updates name the sequences whose loads or swaps are lost."""
        self._scheduler.reset()

    def can_swap_in(self, sequence: Sequence) -> bool:
        """Whether a swapped-out sequence can be swapped in; if not, its KV is lost and the next update says so."""
        return self._scheduler.swap.can_swap_in(sequence.sequence_id)

    def swap_in(self, sequence: Sequence, *, present: Collection[int]) -> bool:
        """Starts to swap a sequence into the blocks that it has been granted.

        Args:
          sequence: one for which `can_swap_in` is true.
          present: numbers of its blocks of full attention that already hold their KV.
        Returns:
          Whether it has to wait until `poll` names it.
        """
        self._watch(sequence)
        return self._scheduler.swap.swap_in(sequence.sequence_id, self._in_use(sequence), present=present)

    def observe_prefill(self, num_tokens: int, seconds: float, num_attended: float) -> None:
        """Reports the cost of recompute: a step that computed mostly prompts.

        Args:
          num_tokens: its prompt tokens.
          seconds: its duration.
          num_attended: tokens that these attend to, summed over them.
        """
        self._scheduler.swap.observe_prefill(num_tokens, seconds, num_attended)

    def finish(self, sequences: Collection[Sequence]) -> None:
        """The sequences have ended, in any phase; their blocks may be granted again at once."""
        for sequence in sequences:
            self._watched.discard(sequence)
            self._scheduler.finish(sequence.sequence_id)
        self._scheduler.swap.discard(sequence.sequence_id for sequence in sequences)

    def before_forward(
        self, batch: Collection[ScheduledTokens], kv_caches: list[jax.Array]
    ) -> tuple[StepPlan, list[jax.Array]]:
        """Plans the step and dispatches its loads.

        Args:
          batch: what the step computes.
          kv_caches: donated.
        Returns:
          The plan, for `after_forward`, and the caches to run the step on.
        Raises:
          CachesLostError: the caches are lost. Skip this step and continue with new caches.
        """
        changed: list[ScheduledRequest] = []
        if self._watched:
            changed = [
                self._offer(run.sequence, run.end)
                for run in batch
                if run.end >= run.sequence.next_offer_tokens and not run.sequence.is_stale
            ]
        plan = self._scheduler.plan_step(changed)
        return plan, self._worker.begin_step(plan, kv_caches, fuse=bool(batch))

    def fused_step(self) -> FusedStep:
        """The copies to run inside the forward pass; none unless a copy path is `fused`."""
        return self._worker.fused_step()

    def fused_shapes(self) -> list[FusedStep]:
        """Every shape of `fused_step` that copies anything, to compile for."""
        return self._worker.fused_shapes()

    def after_forward(self, plan: StepPlan, kv_caches: list[jax.Array], copied: FusedOutcome | None = None) -> None:
        """Dispatches the step's saves, which read the caches before any later step can write them.

        Args:
          plan: from `before_forward`.
          kv_caches: the caches after the forward pass.
          copied: what the forward pass returned for its fused copies.
        """
        self._worker.end_step(plan, kv_caches, copied)

    def poll(self, *, wait: bool) -> Update:
        """Sequences whose loads and swaps have ended since the last call.

        Args:
          wait: block until a copy ends, because the engine has nothing else to do.
        """
        worker, wait_s = self._worker, math.inf
        if self._arriving_until_s < math.inf:  # a sequence that waits for storage computes what has not arrived by then
            wait_s = max(0.0, self._arriving_until_s - self._clock())
            self._arriving_until_s = math.inf
        if isinstance(worker, HostWorkers):
            reports: List[StepReport] = worker.poll(wait=wait, wait_s=wait_s)
        else:
            reports = self._relay(worker.poll(wait=wait, wait_s=wait_s))
        if len(reports) == 1:
            return self._scheduler.apply(reports[0])
        if not reports:
            return self._scheduler.take_update()
        return functools.reduce(operator.add, map(self._scheduler.apply, reports))

    def _offer(self, sequence: Sequence, num_computed_tokens: int) -> ScheduledRequest:
        held = self._held(sequence, num_computed_tokens)
        next_offer = held.num_computed_tokens - held.num_computed_tokens % self._block_size + self._block_size
        # Without decode_save the library takes blocks of the prompt only.
        if not self._decode_save and next_offer > held.num_prompt_tokens:
            next_offer = _NEVER
            self._watched.discard(sequence)
        sequence.next_offer_tokens = next_offer
        return held

    def _in_use(self, sequence: Sequence) -> list[list[int]]:
        """Per layer group, the blocks with computed tokens that it still needs, in token order: no null blocks."""
        num_tokens, block_size = sequence.num_computed_tokens, self._block_size
        end = -(-num_tokens // block_size)
        starts = [num_skipped_blocks(num_tokens, window=window, block_size=block_size) for window in self._windows]
        in_use = [table[start:end] for table, start in zip(sequence.block_tables, starts, strict=True)]
        # Of states the last one only: that at the block boundary before it is for other requests.
        return [*in_use, [sequence.states[end - 1]] if end else []] if self._has_states else in_use

    def _tables(self, sequence: Sequence) -> list[list[int]]:
        return [*sequence.block_tables, sequence.state_table] if self._has_states else sequence.block_tables

    def _held(self, sequence: Sequence, num_computed_tokens: int) -> ScheduledRequest:
        return ScheduledRequest(
            request_id=sequence.sequence_id,
            block_tables=self._tables(sequence),
            block_hashes=sequence.block_hashes,
            num_prompt_tokens=sequence.num_prompt_tokens,
            num_computed_tokens=min(num_computed_tokens, len(sequence.tokens)),  # without a token that is in flight
            retained_tokens=tuple(sequence.junctions),
        )

    def wait_until_allocated(self) -> None:
        """Blocks until all host memory is allocated, and reports it to the scheduler."""
        self._worker.wait_until_allocated()
        self.poll(wait=False)

    @property
    def has_jobs(self) -> bool:
        """Whether copies are in flight or to be planned."""
        return self._scheduler.has_jobs

    def stored_block_hashes(self) -> frozenset[BlockHash]:
        """Of each chunk in storage, the hash of its last block."""
        return self._scheduler.stored_block_hashes()

    def stats(self) -> OffloadStats:
        """The library's counters."""
        return self._scheduler.stats()

    def tier_stats(self) -> tuple[TierStats, ...]:
        """The library's counters of each storage tier."""
        return self._scheduler.tier_stats()

    def check_invariants(self) -> None:
        """Raises AssertionError if the library's state is inconsistent. For tests."""
        self._scheduler.check_invariants()

    def close(self) -> None:
        """Waits for copies in flight and frees the host tier."""
        self._worker.close()
