"""The host tier's memory as the scheduler sees it: slots that every worker has, and its division into pools.

Without states there is one pool, whose slots the workers allocate after start. With states there are two, and segments
of memory move between them (`core.index.pool_balance` decides when). A move:

1. The index hands out no slots of the last segments of one pool, and evicts what is there. What is pinned or being
   copied is waited for; after `_MAX_TIMEOUTS` job timeouts the move is given up, and the slots are used again.
2. Nothing uses the slots: the plan has the new `HostDivision`. Each worker frees the segments, then allocates as many
   of the other pool, and reports it.
3. Every worker has reported it: the slots of the other pool are used. Only then another move may begin.

A worker can have fewer segments than the settings say, because it has less memory or an allocation has failed. Then
the pools are cut to what every worker can have, in the same way, and raised again when a restart brings more.
"""

import logging
import operator
from collections.abc import Callable
from typing import final

from tpu_offload.config import HostSegments
from tpu_offload.core.context import TierContext
from tpu_offload.core.index import PoolBalance
from tpu_offload.core.save_policy import SavePolicy
from tpu_offload.types import HostDivision, Pool, StepReport

_logger = logging.getLogger(__name__)

_GB = 2**30
_MAX_TIMEOUTS = 2.0

type _Sizes = tuple[int, ...]
"""Segments, or slots, by pool."""


@final
class HostPools:
    """Slots of the host tier.

    Args:
      context: the scheduler's shared state.
      num_workers: how many report each step.
      save_policy: is told the capacity of the pool of chunks.
    """

    def __init__(self, context: TierContext, *, num_workers: int, save_policy: SavePolicy) -> None:
        config, layout = context.config, context.layout
        self._index = context.index
        self._save_policy = save_policy
        self._max_slots = config.host_slots(layout)
        self._first_slots = config.first_slots(layout)
        self._none: _Sizes = (0,) * context.num_pools
        self._num_slots: dict[int, _Sizes] = dict.fromkeys(range(num_workers), self._none)
        segments = config.host_segments(layout) if context.has_states else None
        self._moves: SegmentMoves | None = None
        # Data-parallel ranks share one worker, and each of their schedulers would divide its memory; pipeline stages
        # have segments of other sizes.
        moves = layout.num_ranks == 1 and not layout.stages
        if segments is not None and context.balance is not None and moves:
            self._moves = SegmentMoves(
                context,
                segments,
                balance=context.balance,
                num_workers=num_workers,
                num_slots=self._num_slots,
                on_change=self._grow,
            )

    @property
    def end_slot(self) -> int:
        """After the last slot of all pools."""
        return sum(self._max_slots)

    def slot_range(self, pool: int, first: int, end: int) -> range:
        """The slots of a pool that workers count from `first` to `end - 1`; those that it cannot have are left out."""
        most, before = self._max_slots[pool], self._first_slots[pool]
        return range(before + min(first, most), before + min(end, most))

    def plan(self, now_s: float) -> HostDivision | None:
        """Continues or begins a move; returns the division for the coming plan. O(1) while nothing is vacated."""
        return self._moves.plan(now_s) if self._moves is not None else None

    def apply(self, report: StepReport) -> None:
        """A worker reports its memory. A slot is usable once every worker has it."""
        if self._moves is not None and not self._moves.accepts(report):
            return
        known = self._num_slots[report.worker_id]
        reported = report.num_host_slots
        if self._moves is not None:
            reported = self._moves.within_limits(reported)
        if reported == known:  # nearly always
            return
        largest = tuple(map(max, known, reported))
        if largest != known:
            self._num_slots[report.worker_id] = largest
            self._grow()
            if self._moves is not None:
                self._moves.reconsider()

    def restart(self, report: StepReport) -> None:
        """A worker has restarted; `apply` follows with what it has."""
        self._num_slots[report.worker_id] = self._none
        reported = report.num_host_slots
        if self._moves is not None and not self._moves.accepts(report):
            reported = self._none
        for pool, num_slots in enumerate(reported):
            self._index.shrink(pool, num_slots)

    def _grow(self) -> None:
        """Raises the slots of the index to what every worker has and the division allows."""
        num_before = self._index.num_slots(Pool.CHUNKS)
        sizes = _smallest(self._max_slots, *self._num_slots.values())
        if self._moves is not None:
            sizes = _smallest(sizes, self._moves.num_slots)
        for pool, num_slots in enumerate(sizes):
            self._index.grow(pool, num_slots)
        if sizes[Pool.CHUNKS] > num_before:
            self._save_policy.resize(sizes[Pool.CHUNKS])

    def check_invariants(self) -> None:
        """Raises AssertionError unless the index uses slots only that every worker has. For tests."""
        if self._moves is not None:
            self._moves.check_invariants()


@final
class SegmentMoves:
    """Moves segments between the pools.

    Args:
      context: the scheduler's shared state.
      segments: those of the settings.
      balance: decides when.
      num_workers: how many report each step.
      num_slots: by worker, the slots that it has reported since the last change of the division, or still has of those
        before.
      on_change: called when more slots may be used.

    Attributes:
      limits: segments, by pool, of the present division.
      goal: those of the division that slots are vacated for; the same while nothing moves.
    """

    def __init__(
        self,
        context: TierContext,
        segments: HostSegments,
        *,
        balance: PoolBalance,
        num_workers: int,
        num_slots: dict[int, _Sizes],
        on_change: Callable[[], None],
    ) -> None:
        self._index = context.index
        self._counts = context.counts
        self._balance = balance
        self._segments = segments
        self._known = num_slots
        self._on_change = on_change
        self._patience_s = _MAX_TIMEOUTS * context.config.job_timeout_s
        self._capacity = dict.fromkeys(range(num_workers), segments.num_segments)
        self.limits: _Sizes = segments.divide(segments.num_segments, (context.config.state_share,))
        self.goal = self.limits
        self._id = 0
        self._division: HostDivision | None = None
        # What a decision depends on, when a move was last considered.
        self._seen: tuple[tuple[int, list[int]], int] | None = None
        self._gives_up_at_s: float | None = None

    @property
    def num_slots(self) -> _Sizes:
        """Most slots that the index may use."""
        return self._num_slots_in(_smallest(self.limits, self.goal))

    def accepts(self, report: StepReport) -> bool:
        """Notes how many segments a worker can have; whether its slots are those of the present division."""
        capacity = min(report.num_host_segments, self._segments.num_segments)
        if capacity and capacity != self._capacity[report.worker_id]:
            self._capacity[report.worker_id] = capacity
            self.reconsider()
        return report.division_id == self._id

    def reconsider(self) -> None:
        """What the workers have has changed: the next plan considers a move, even if nothing else has."""
        self._seen = None

    def within_limits(self, num_slots: _Sizes) -> _Sizes:
        """Those of a worker's slots that it will keep: it may have segments that it has not freed yet."""
        return _smallest(num_slots, self._num_slots_in(self.limits))

    def plan(self, now_s: float) -> HostDivision | None:
        """Continues or begins a move; returns the division for the coming plan, None for the first one."""
        if self.goal != self.limits:
            self._vacate(now_s)
            return self._division
        # In most steps nothing has changed that a decision depends on.
        seen = self._index.use_counts(), self._balance.num_evicted
        if seen != self._seen:
            self._seen = seen
            self._consider(now_s)
        return self._division

    def _consider(self, now_s: float) -> None:
        """Begins a move: to what the workers can have, or as the rule wants it."""
        if sum(self.limits) != (capacity := min(self._capacity.values())) and capacity > 1:
            shares = [num_segments / sum(self.limits) for num_segments in self.limits[1:]]
            self._begin(self._segments.divide(capacity, shares), gives_up_at_s=None)
        elif self._is_settled():
            self._move(now_s)

    def _is_settled(self) -> bool:
        """Whether every worker has all segments of the present division."""
        needed = self._num_slots_in(self.limits)
        return all(_smallest(known, needed) == needed for known in self._known.values())

    def _move(self, now_s: float) -> None:
        """Begins a move if the rule wants one."""
        now, num_free = self._index.use_counts()
        move = self._balance.choose(now=now, num_segments=self.limits, num_free=num_free)
        if move is None:
            return
        goal = [*self.limits]
        goal[move.taker] += move.num_segments
        goal[move.giver] -= move.num_segments
        self._begin(tuple(goal), gives_up_at_s=now_s + self._patience_s)

    def _begin(self, goal: _Sizes, *, gives_up_at_s: float | None) -> None:
        self.goal, self._gives_up_at_s = goal, gives_up_at_s
        for pool, num_slots in enumerate(self.num_slots):
            self._index.shrink(pool, num_slots)

    def _vacate(self, now_s: float) -> None:
        """Vacates the slots of the segments that move; at last changes the division."""
        sizes = zip(self.limits, self.goal, self._num_slots_in(self.goal), strict=True)
        is_vacated = [
            new >= old or self._index.vacate(pool, num_slots) for pool, (old, new, num_slots) in enumerate(sizes)
        ]
        if all(is_vacated):
            self._change()
        elif self._gives_up_at_s is not None and now_s >= self._gives_up_at_s:
            _logger.info(
                "gave up moving %d segments of the host tier: some of their slots stayed in use for %g s; a later move "
                "may succeed",
                self._num_moving(),
                self._patience_s,
            )
            self.goal = self.limits
            self.reconsider()
            self._on_change()
            self._balance.restart(self._index.num_requests)

    def _num_moving(self) -> int:
        """The segments that pools give."""
        return sum(max(0, old - new) for old, new in zip(self.limits, self.goal, strict=True))

    def _change(self) -> None:
        moved = self._num_moving()
        self.limits = self.goal
        self._id += 1
        self._division = HostDivision(division_id=self._id, segments=self.limits)
        self.reconsider()
        self._balance.restart(self._index.num_requests)
        self._counts.num_moved_segments += moved
        for worker_id, known in self._known.items():
            self._known[worker_id] = self.within_limits(known)
        _logger.info(
            "%d segments of the host tier moved; it has memory for %d chunks and %d states now (%d and %d segments of "
            "%.3g GB)",
            moved, *self._num_slots_in(self.limits), *self.limits, self._segments.segment_nbytes / _GB,
        )  # fmt: skip

    def _num_slots_in(self, num_segments: _Sizes) -> _Sizes:
        return tuple(map(operator.mul, num_segments, self._segments.segment_slots))

    def check_invariants(self) -> None:
        """Raises AssertionError unless the index uses slots only that every worker has. For tests."""
        for pool, most in enumerate(_smallest(self.num_slots, *self._known.values())):
            assert self._index.num_slots(pool) <= most
        assert min(*self.limits, *self.goal) > 0, "a pool without a segment"
        assert sum(self.limits) <= self._segments.num_segments
        assert sum(self.goal) <= self._segments.num_segments


def _smallest(*sizes: _Sizes) -> _Sizes:
    """By pool, the smallest of these."""
    return tuple(map(min, *sizes))
