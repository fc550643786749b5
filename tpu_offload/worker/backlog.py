"""Loads that are not fully dispatched yet: they are dispatched in portions, some before each step.

Two limits bound a portion. A staged load takes at most the staging blocks that were reserved for it. Loads that are not
staged take no HBM, but the next step waits for them, so together they copy at most `max_blocks_per_step` before one
step. Of these the oldest load gets half, so that it ends; the others share the rest, the shortest first, so that a
small load does not wait for a large one; what they leave goes to the oldest. Urgent loads, which the coming step reads,
are dispatched first and whole; the others get the rest of the limit, and at least a quarter of it.

A row of states counts as the blocks that take as long to copy. It is copied whole: where the rest of a step is
too short for it, it waits for the next one, in which it is the first of the oldest load, whatever the limit. In staged
loads rows count nothing, because they are not staged: a row goes with the last block. The portions depend on plans and
counts only, so hosts that share one model choose the same ones.
"""

import dataclasses
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, final

import numpy as np

from tpu_offload.types import CopyJob, CopyPart


@dataclasses.dataclass(slots=True, eq=False)
class BackloggedLoad:
    """A load that has blocks left to dispatch.

    Attributes:
      job: the whole load.
      host_block_ids: per part of the job, its places in the host tier.
      sizes: per part of the job, how many blocks each of its blocks counts as.
      num_dispatched: number of its leading blocks that have been dispatched, counted so.
      portions: step and size of each dispatched portion.
      error: the error of a portion, after which no other is dispatched; empty without one.
    """

    job: CopyJob
    host_block_ids: Sequence[np.ndarray[Any, np.dtype[np.int32]]]
    sizes: Sequence[int]
    num_dispatched: int = 0
    portions: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    error: str = ""

    @property
    def num_left(self) -> int:
        """Blocks left to dispatch."""
        return self._num_blocks - self.num_dispatched

    @property
    def _num_blocks(self) -> int:
        return sum(len(part.block_ids) * size for part, size in zip(self.job.parts, self.sizes, strict=True))

    def parts_left(self) -> tuple[CopyPart, ...]:
        """The parts of the job, without the dispatched blocks."""
        return _cut(self.job.parts, self.sizes, self.num_dispatched, self._num_blocks)

    def places_left(self) -> Iterator[tuple[int, np.ndarray[Any, np.dtype[np.int32]]]]:
        """Per part, the layer group and the places in the host tier of the blocks left."""
        first = self.num_dispatched
        for part, places, size in zip(self.job.parts, self.host_block_ids, self.sizes, strict=True):
            yield part.group_id, places[_num_before(first, size) :]
            first -= len(places) * size

    def fitting(self, room: int, *, at_least_one: bool = False) -> int:
        """Blocks to take now: at most `room`, and no part of a row; with `at_least_one` a row that is next anyway."""
        start, end, first = self.num_dispatched, self.num_dispatched + min(room, self.num_left), 0
        for part, size in zip(self.job.parts, self.sizes, strict=True):
            length = len(part.block_ids) * size
            if size > 1 and first < end < first + length:
                end = first + (end - first) // size * size
                if end == start and at_least_one:
                    end += size
                break
            first += length
        return end - start

    def cut(self, num_blocks: int, *, step_id: int) -> CopyJob:
        """Takes the next blocks, as a smaller job with the same id."""
        first, end = self.num_dispatched, self.num_dispatched + num_blocks
        self.num_dispatched = end
        self.portions.append((step_id, num_blocks))
        return dataclasses.replace(self.job, parts=_cut(self.job.parts, self.sizes, first, end))


@final
class LoadBacklog:
    """The loads of one worker that have blocks left to dispatch, oldest first.

    Args:
      max_blocks_per_step: limit for loads of one rank that are not staged; 0 for none.
      sizes: by layer group of states, how many blocks a row counts as in loads that are not staged.
    """

    def __init__(self, *, max_blocks_per_step: int, sizes: Mapping[int, int] | None = None) -> None:
        self._max_blocks = max_blocks_per_step or sys.maxsize
        self._sizes = sizes or {}
        self._loads: dict[int, BackloggedLoad] = {}

    def __len__(self) -> int:
        return len(self._loads)

    def __iter__(self) -> Iterator[BackloggedLoad]:
        return iter(list(self._loads.values()))

    def __contains__(self, job_id: int) -> bool:
        return job_id in self._loads

    def fail(self, job_id: int, error: str) -> None:
        """Marks a load as failed, if it has blocks left: they are not dispatched."""
        load = self._loads.get(job_id)
        if load is not None:
            load.error = load.error or error

    def take_failed(self) -> list[BackloggedLoad]:
        """Removes and returns the loads that failed."""
        failed = [load for load in self._loads.values() if load.error]
        for load in failed:
            del self._loads[load.job.job_id]
        return failed

    def drop(self, job_id: int) -> BackloggedLoad | None:
        """Removes and returns a load; None if it has nothing left to dispatch."""
        return self._loads.pop(job_id, None)

    def clear(self) -> None:
        """Removes all loads."""
        self._loads.clear()

    def take(
        self,
        new: Sequence[CopyJob],
        *,
        step_id: int,
        room: Callable[[BackloggedLoad], int] | None,
        staging_room: int = sys.maxsize,
        urgent: Collection[int] = (),
    ) -> tuple[list[CopyJob], list[int]]:
        """Takes the blocks to dispatch before the coming step.

        Args:
          new: the loads of its plan.
          step_id: the step.
          room: for staged loads, the number of blocks of a load that may be dispatched now; None if loads are not
            staged.
          staging_room: likewise, for all loads together.
          urgent: ids of the loads that the step reads, if they are not staged.
        Returns:
          Jobs with the blocks to dispatch, each all or some of a load; and the ids of the loads that have none left.
        """
        if not self._loads and room is None and self._fit_in_one_step(new):
            return list(new), [job.job_id for job in new]  # nearly always
        for job in new:
            places = [np.array(part.host_block_ids, np.int32) for part in job.parts]
            sizes = self._sizes_of(job, staged=room is not None)
            self._loads[job.job_id] = BackloggedLoad(job, places, sizes)
        loads = list(self._loads.values())
        sizes = self._shares_by_rank(loads, urgent) if room is None else _staged_sizes(loads, room, staging_room)
        portions = [load.cut(size, step_id=step_id) for load, size in zip(loads, sizes, strict=True) if size > 0]
        done = [load.job.job_id for load in loads if not load.num_left]
        for job_id in done:
            del self._loads[job_id]
        return portions, done

    def _sizes_of(self, job: CopyJob, *, staged: bool = False) -> list[int]:
        return [0 if staged and p.group_id in self._sizes else self._sizes.get(p.group_id, 1) for p in job.parts]

    def _fit_in_one_step(self, jobs: Sequence[CopyJob]) -> bool:
        return self._max_blocks == sys.maxsize or sum(map(self._num_blocks, jobs)) <= self._max_blocks

    def _num_blocks(self, job: CopyJob) -> int:
        if not self._sizes:
            return job.num_blocks
        return sum(len(part.block_ids) * size for part, size in zip(job.parts, self._sizes_of(job), strict=True))

    def _shares_by_rank(self, loads: Sequence[BackloggedLoad], urgent: Collection[int]) -> list[int]:
        """As `_shares`; the limit is that of each rank, because the devices of one do not wait for another's."""
        sizes = [0] * len(loads)
        for rank in {load.job.rank for load in loads}:
            own = [i for i, load in enumerate(loads) if load.job.rank == rank]
            for i, size in zip(own, self._shares([loads[i] for i in own], urgent), strict=True):
                sizes[i] = size
        return sizes

    def _shares(self, loads: Sequence[BackloggedLoad], urgent: Collection[int]) -> list[int]:
        """Blocks of each load to dispatch before the coming step, for loads that are not staged."""
        sizes = [load.num_left if load.job.job_id in urgent else 0 for load in loads]
        others = [i for i, load in enumerate(loads) if load.job.job_id not in urgent]
        if not others:
            return sizes
        left = max(self._max_blocks - sum(sizes), -(-self._max_blocks // 4))
        first = others[0]
        sizes[first] = loads[first].fitting(-(-left // 2), at_least_one=True)
        left -= sizes[first]
        for i in sorted(others[1:], key=lambda i: loads[i].num_left):
            sizes[i] = loads[i].fitting(max(0, left))
            left -= sizes[i]
        sizes[first] = max(sizes[first], loads[first].fitting(sizes[first] + max(0, left)))
        return sizes


def _staged_sizes(
    loads: Sequence[BackloggedLoad], room: Callable[[BackloggedLoad], int], staging_room: int
) -> list[int]:
    sizes = []
    for load in loads:
        sizes.append(max(0, min(load.num_left, room(load), staging_room)))
        staging_room -= sizes[-1]
    return sizes


def _num_before(position: int, size: int, *, is_end: bool = False) -> int | None:
    """Blocks of a part before a position in it; those of no size come with what is before them."""
    if size:
        return max(0, position) // size
    return (None if position >= 0 else 0) if is_end else (0 if position < 0 else sys.maxsize)


def _cut(parts: Sequence[CopyPart], sizes: Sequence[int], first: int, end: int) -> tuple[CopyPart, ...]:
    """Those blocks of these parts, one after another, that end after `first` and not after `end`."""
    cut = []
    for part, size in zip(parts, sizes, strict=True):
        which = slice(_num_before(first, size), _num_before(end, size, is_end=True))
        if part.block_ids[which]:
            cut.append(
                dataclasses.replace(part, block_ids=part.block_ids[which], host_block_ids=part.host_block_ids[which])
            )
        first, end = first - len(part.block_ids) * size, end - len(part.block_ids) * size
    return tuple(cut)
