"""Loads that a worker was sent and has not begun with, or only in part: they go in pieces, some before each step.

Two things bound a piece. A staged load takes at most the staging blocks that were reserved for it. Loads that are not
staged take no HBM, but the step that follows waits for them: all of them together move so many blocks before one step.
Of these the load that came first gets half, so that it ends; the others share the rest, the shortest first, so that a
small load does not wait for a large one; what they leave is the first one's as well. Loads that the coming step needs
go before all of that, whole; the others get what the bound leaves, and at least a quarter of it.

What goes before which step follows from plans and counts alone, so that hosts that share one model agree on it.
"""

import dataclasses
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, final

import numpy as np

from tpu_offload.types import CopyJob, CopyPart


@dataclasses.dataclass(slots=True, eq=False)
class BackloggedLoad:
    """A load that has blocks left to dispatch.

    Attributes:
      job: all of it.
      host_block_ids: those of its parts.
      num_dispatched: so many of its leading blocks have been dispatched.
      pieces: step and size of each piece of it.
      error: what has gone wrong with one of them, so that no other follows.
    """

    job: CopyJob
    host_block_ids: Sequence[np.ndarray[Any, np.dtype[np.int32]]]
    num_dispatched: int = 0
    pieces: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    error: str = ""

    @property
    def num_left(self) -> int:
        """Blocks that are left."""
        return self.job.num_blocks - self.num_dispatched

    def parts_left(self) -> tuple[CopyPart, ...]:
        """What is left of its parts."""
        return _cut(self.job.parts, self.num_dispatched, self.job.num_blocks)

    def places_left(self) -> Iterator[tuple[int, np.ndarray[Any, np.dtype[np.int32]]]]:
        """Where that is in the host tier: per part, the layer group and the places."""
        first = self.num_dispatched
        for part, places in zip(self.job.parts, self.host_block_ids, strict=True):
            yield part.group_id, places[max(0, first) :]
            first -= len(places)

    def cut(self, num_blocks: int, *, step_id: int) -> CopyJob:
        """Takes the next blocks, as a job of their own."""
        first, end = self.num_dispatched, self.num_dispatched + num_blocks
        self.num_dispatched = end
        self.pieces.append((step_id, num_blocks))
        return dataclasses.replace(self.job, parts=_cut(self.job.parts, first, end))


@final
class LoadBacklog:
    """The loads of one worker that have blocks left, first come first.

    Args:
      max_blocks_per_step: for loads that are not staged; 0 for no bound.
    """

    def __init__(self, *, max_blocks_per_step: int) -> None:
        self._max_blocks = max_blocks_per_step or sys.maxsize
        self._loads: dict[int, BackloggedLoad] = {}

    def __len__(self) -> int:
        return len(self._loads)

    def __iter__(self) -> Iterator[BackloggedLoad]:
        return iter(list(self._loads.values()))

    def __contains__(self, job_id: int) -> bool:
        return job_id in self._loads

    def fail(self, job_id: int, error: str) -> None:
        """Something has gone wrong with a load; if there are blocks left of it, they are of no use."""
        load = self._loads.get(job_id)
        if load is not None:
            load.error = load.error or error

    def take_failed(self) -> list[BackloggedLoad]:
        """Takes out those with which something has gone wrong."""
        failed = [load for load in self._loads.values() if load.error]
        for load in failed:
            del self._loads[load.job.job_id]
        return failed

    def drop(self, job_id: int) -> BackloggedLoad | None:
        """Nothing more of a load is to be dispatched; returns what there was of it."""
        return self._loads.pop(job_id, None)

    def clear(self) -> None:
        """Forgets all of them."""
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
        """What is dispatched before the coming step.

        Args:
          new: loads that came with its plan.
          step_id: the step.
          room: for staged loads, how many blocks of one may be dispatched now; None if they are not staged.
          staging_room: likewise, of all of them together.
          urgent: ids of those that the step needs, if they are not staged.
        Returns:
          Jobs with the blocks to dispatch, each a part or all of one; and the ids of those that have none left.
        """
        if not self._loads and room is None and sum(job.num_blocks for job in new) <= self._max_blocks:
            return list(new), [job.job_id for job in new]  # nearly always
        for job in new:
            self._loads[job.job_id] = BackloggedLoad(
                job, [np.array(part.host_block_ids, np.int32) for part in job.parts]
            )
        loads = list(self._loads.values())
        sizes = self._shares(loads, urgent) if room is None else _staged_sizes(loads, room, staging_room)
        pieces = [load.cut(size, step_id=step_id) for load, size in zip(loads, sizes, strict=True) if size > 0]
        done = [load.job.job_id for load in loads if not load.num_left]
        for job_id in done:
            del self._loads[job_id]
        return pieces, done

    def _shares(self, loads: Sequence[BackloggedLoad], urgent: Collection[int]) -> list[int]:
        """Blocks of each load that go before the coming step, for loads that are not staged."""
        sizes = [load.num_left if load.job.job_id in urgent else 0 for load in loads]
        others = [i for i, load in enumerate(loads) if load.job.job_id not in urgent]
        if not others:
            return sizes
        left = max(self._max_blocks - sum(sizes), -(-self._max_blocks // 4))
        first = others[0]
        sizes[first] = min(loads[first].num_left, -(-left // 2))
        left -= sizes[first]
        for i in sorted(others[1:], key=lambda i: loads[i].num_left):
            sizes[i] = min(loads[i].num_left, left)
            left -= sizes[i]
        sizes[first] += min(loads[first].num_left - sizes[first], left)
        return sizes


def _staged_sizes(
    loads: Sequence[BackloggedLoad], room: Callable[[BackloggedLoad], int], staging_room: int
) -> list[int]:
    sizes = []
    for load in loads:
        sizes.append(max(0, min(load.num_left, room(load), staging_room)))
        staging_room -= sizes[-1]
    return sizes


def _cut(parts: Sequence[CopyPart], first: int, end: int) -> tuple[CopyPart, ...]:
    """Blocks `first` to `end` of all that these parts have."""
    cut = []
    for part in parts:
        if first < len(part.block_ids) and end > 0:
            which = slice(max(0, first), end)
            cut.append(
                dataclasses.replace(part, block_ids=part.block_ids[which], host_block_ids=part.host_block_ids[which])
            )
        first, end = first - len(part.block_ids), end - len(part.block_ids)
    return tuple(cut)
