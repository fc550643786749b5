"""The budget of the HBM staging buffer: who holds how many of its blocks, and whose turn it is when there are too few.

Staged copies between HBM and host pass through HBM that the engine granted once. A staged job holds staging blocks from
the moment it is planned until every worker has reported it, so the device never holds more blocks in transit than the
budget: a save one for each of its blocks, a load at most that many, for it can go through fewer in pieces. Copies that
are not staged take none, and nothing here limits them. All calls come from the thread of the scheduler.

When more is wanted than is free:

- A load takes what is free if that is a quarter of the buffer or all that it needs; else it waits. One that is larger
  than the buffer takes half of it at most, for it holds that for long. Loads that wait get theirs in their order, and
  none passes them.
- Saves and loads that both wait take turns. What comes free is kept for the side whose turn it is until that has got
  some, then it is the other's. A job that waits holds nothing, and whatever holds something ends, in time or late, so
  every turn ends as well.
"""

import dataclasses
import sys
from collections.abc import Hashable, Mapping
from typing import final

from tpu_offload.config import CopyPath
from tpu_offload.errors import StagingError
from tpu_offload.types import Direction


@dataclasses.dataclass(slots=True)
class _Account:
    num_save_blocks: int = 0
    num_load_blocks: int = 0


class StagingBufferManager:
    """Reserves and releases staging blocks per request and direction, in O(1) a call.

    A request may hold several saves at once, which add up, but only one load.

    Args:
      num_blocks: the budget; 0 grants nothing.
    Raises:
      StagingError: the budget is negative.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 0:
            raise StagingError(f"staging budget of {num_blocks} blocks; expected 0 or more")
        self._num_blocks = num_blocks
        self._accounts: dict[Hashable, _Account] = {}
        self._num_save_blocks = 0
        self._num_load_blocks = 0
        self._num_free = num_blocks
        self._peak_num_reserved = 0

    @property
    def num_blocks(self) -> int:
        """The budget."""
        return self._num_blocks

    @property
    def num_reserved(self) -> int:
        """Blocks held by saves and loads together."""
        return self._num_blocks - self._num_free

    @property
    def num_free(self) -> int:
        """Blocks that a reservation made now could get."""
        return self._num_free

    @property
    def peak_num_reserved(self) -> int:
        """The most blocks that were ever held at once."""
        return self._peak_num_reserved

    def total(self, direction: Direction) -> int:
        """Blocks held by all requests in one direction."""
        return self._num_save_blocks if direction is Direction.SAVE else self._num_load_blocks

    def held(self, request_id: Hashable, direction: Direction) -> int:
        """Blocks held by one request in one direction; 0 for a request that holds none."""
        account = self._accounts.get(request_id)
        if account is None:
            return 0
        return account.num_save_blocks if direction is Direction.SAVE else account.num_load_blocks

    def reserve(self, request_id: Hashable, num_blocks: int, direction: Direction, *, partial: bool = False) -> int:
        """Takes staging blocks for a request.

        Args:
          request_id: who will hold them.
          num_blocks: how many are wanted, at least 1.
          direction: what for.
          partial: take what is free when that is less than wanted.
        Returns:
          The blocks granted: `num_blocks` when they fit, exactly or with room to spare; otherwise what
          is free with `partial`, and 0 without. A grant of 0 leaves no trace.
        Raises:
          StagingError: `num_blocks` is under 1, or the request has a load pending and wants another.
        """
        if num_blocks < 1:
            raise StagingError(f"request {request_id!r} reserves {num_blocks} staging blocks; expected at least 1")
        if direction is Direction.LOAD and self.held(request_id, Direction.LOAD):
            raise StagingError(
                f"request {request_id!r} reserves a load while its load of {self.held(request_id, Direction.LOAD)} "
                "staging blocks is pending; release that one first"
            )
        granted = num_blocks
        if num_blocks > self._num_free:
            granted = self._num_free if partial else 0
        if granted == 0:
            return 0
        self._add(request_id, granted, direction)
        num_reserved = self._num_blocks - self._num_free
        if num_reserved > self._peak_num_reserved:
            self._peak_num_reserved = num_reserved
        return granted

    def release(self, request_id: Hashable, num_blocks: int, direction: Direction) -> None:
        """Gives staging blocks back.

        Raises:
          StagingError: the request holds none, or fewer than `num_blocks`, or `num_blocks` is under 1.
        """
        if num_blocks < 1:
            raise StagingError(f"request {request_id!r} releases {num_blocks} staging blocks; expected at least 1")
        if request_id not in self._accounts:
            raise StagingError(f"request {request_id!r} releases {num_blocks} staging blocks but holds none")
        held = self.held(request_id, direction)
        if num_blocks > held:
            raise StagingError(
                f"request {request_id!r} releases {num_blocks} staging blocks of its {direction.value} but holds {held}"
            )
        self._add(request_id, -num_blocks, direction)

    def _add(self, request_id: Hashable, num_blocks: int, direction: Direction) -> None:
        account = self._accounts.get(request_id)
        if account is None:
            account = self._accounts[request_id] = _Account()
        if direction is Direction.SAVE:
            account.num_save_blocks += num_blocks
            self._num_save_blocks += num_blocks
        else:
            account.num_load_blocks += num_blocks
            self._num_load_blocks += num_blocks
        self._num_free -= num_blocks
        if account.num_save_blocks == 0 and account.num_load_blocks == 0:
            del self._accounts[request_id]

    def check_invariants(self) -> None:
        """Raises AssertionError unless totals, accounts, peak and budget agree. O(requests)."""
        accounts = self._accounts.values()
        assert sum(a.num_save_blocks for a in accounts) == self._num_save_blocks
        assert sum(a.num_load_blocks for a in accounts) == self._num_load_blocks
        assert all(a.num_save_blocks >= 0 and a.num_load_blocks >= 0 for a in accounts)
        assert all(a.num_save_blocks or a.num_load_blocks for a in accounts), "an empty account was kept"
        assert self._num_save_blocks + self._num_load_blocks == self.num_reserved
        assert 0 <= self.num_reserved <= self._peak_num_reserved <= self._num_blocks


_LEAST_SHARE, _LARGE_SHARE = (
    4,
    2,
)  # parts of the buffer that a load starts with at least, or has at most if it is larger


@final
class Staging:
    """What the planners ask of the staging buffer, for the directions that use it.

    Args:
      buffer: the budget.
      paths: how each direction moves blocks, as far as the settings say.
    """

    def __init__(self, buffer: StagingBufferManager, paths: Mapping[Direction, CopyPath]) -> None:
        self.buffer = buffer
        self._stages: dict[Direction, bool] = {}
        self._turn = Direction.LOAD
        self._saves_wait = False
        self._queued_loads_wait = False
        self._matches_wait = False
        self.use(paths)

    def use(self, paths: Mapping[Direction, CopyPath]) -> None:
        """From now on jobs are planned for these paths; `auto` counts as staged."""
        self._stages.update((direction, path.stages) for direction, path in paths.items())

    def stages(self, direction: Direction) -> bool:
        """Whether jobs in this direction hold staging blocks."""
        return self._stages[direction]

    def reserve_load(self, account: str, num_blocks: int, *, next_in_line: bool = False) -> int:
        """Takes what a load of so many blocks can go through.

        Args:
          account: who will hold it.
          num_blocks: blocks of the load.
          next_in_line: it has waited, longest of all.
        Returns:
          Staging blocks, 0 if it has to wait. Loads that come later wait as well then, until the next plan.
        """
        budget = self.buffer.num_blocks
        least = min(num_blocks, max(1, budget // _LEAST_SHARE))
        passes_others = self._loads_wait and not next_in_line
        if passes_others or (self._saves_wait and self._turn is Direction.SAVE) or self.buffer.num_free < least:
            self._matches_wait = True
            return 0
        most = num_blocks if num_blocks <= budget else max(least, budget // _LARGE_SHARE)
        granted = self.buffer.reserve(account, min(most, self.buffer.num_free), Direction.LOAD)
        if self._saves_wait:
            self._turn = Direction.SAVE
        return granted

    def room_for_saves(self) -> int:
        """Blocks that may be saved by the coming plan."""
        if not self._stages[Direction.SAVE]:
            return sys.maxsize
        return 0 if self._loads_wait and self._turn is Direction.LOAD else self.buffer.num_free

    def reserve_save(self, account: str, num_blocks: int) -> int:
        """Takes the staging blocks of a save that there is room for; returns how many, 0 if it needs none."""
        if not self._stages[Direction.SAVE]:
            return 0
        if self._loads_wait:
            self._turn = Direction.LOAD
        return self.buffer.reserve(account, num_blocks, Direction.SAVE)

    def release(self, account: str, num_blocks: int, direction: Direction) -> None:
        """Gives staging blocks back; none is fine."""
        if num_blocks:
            self.buffer.release(account, num_blocks, direction)

    def wait_for_loads(self, *, queued: bool) -> None:
        """The coming plan takes all loads, or leaves some in the queue."""
        self._queued_loads_wait = queued

    def end_plan(self, *, saves_wait: bool) -> None:
        """A plan is made; `saves_wait` says whether there was too little room for its saves."""
        self._saves_wait = saves_wait
        self._matches_wait = False

    @property
    def _loads_wait(self) -> bool:
        return self._queued_loads_wait or self._matches_wait
