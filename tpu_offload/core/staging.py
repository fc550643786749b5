"""The budget of the HBM staging buffer: which job holds how many blocks, and whose turn it is when there are too few.

Staged copies between HBM and host pass through HBM that the engine granted once. A staged save holds staging blocks
from its plan, a staged load from its promise, until every worker has finished with it, even if it times out before. So
the blocks in transit never exceed the budget. A save holds one for each of its blocks; a load holds at most that many,
because it can be copied in portions. Other copies hold none and are not limited here. All calls come from the thread of
the scheduler.

When demand exceeds the free blocks:

- A load takes the free blocks if they are a quarter of the buffer or all that it needs; otherwise it waits. A load
  larger than the buffer takes half of the buffer at most, because it holds it for long. Waiting loads are served in
  order, and none overtakes them.
- When saves and loads both wait, they take turns. Free blocks are kept for the side whose turn it is until it has got
  some, then for the other. A waiting job holds nothing, and every job that holds blocks ends, so every turn ends as
  well, unless a worker hangs; then nothing is copied until it has finished or is restarted.
"""

import dataclasses
import sys
from collections.abc import Hashable, Mapping
from typing import final

from tpu_offload.config import CopyPath
from tpu_offload.errors import StagingError
from tpu_offload.types import Direction


@dataclasses.dataclass(slots=True)
class _Balance:
    num_save_blocks: int = 0
    num_load_blocks: int = 0


class StagingBufferManager:
    """Reserves and releases staging blocks per account and direction, in O(1) a call.

    An account is any key that its user chooses: the scheduler has one for each request and one for all saves. It may
    hold several saves at once, which add up, but only one load.

    Args:
      num_blocks: the budget; 0 grants nothing.
    Raises:
      StagingError: the budget is negative.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 0:
            raise StagingError(f"staging budget of {num_blocks} blocks; expected 0 or more")
        self._num_blocks = num_blocks
        self._accounts: dict[Hashable, _Balance] = {}
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
        """Blocks held by all accounts in one direction."""
        return self._num_save_blocks if direction is Direction.SAVE else self._num_load_blocks

    def held(self, account: Hashable, direction: Direction) -> int:
        """Blocks held by one account in one direction; 0 for one that holds none."""
        balance = self._accounts.get(account)
        if balance is None:
            return 0
        return balance.num_save_blocks if direction is Direction.SAVE else balance.num_load_blocks

    def reserve(self, account: Hashable, num_blocks: int, direction: Direction) -> int:
        """Takes staging blocks.

        Args:
          account: their holder.
          num_blocks: the blocks wanted, at least 1.
          direction: of the job.
        Returns:
          The blocks granted: `num_blocks` if that many are free, else 0.
        Raises:
          StagingError: `num_blocks` is under 1, or the account has a load pending and wants another.
        """
        if num_blocks < 1:
            raise StagingError(f"account {account!r} reserves {num_blocks} staging blocks; expected at least 1")
        if direction is Direction.LOAD and self.held(account, Direction.LOAD):
            raise StagingError(
                f"account {account!r} reserves a load while its load of {self.held(account, Direction.LOAD)} "
                "staging blocks is pending; release that one first"
            )
        if num_blocks > self._num_free:
            return 0
        self._add(account, num_blocks, direction)
        num_reserved = self._num_blocks - self._num_free
        if num_reserved > self._peak_num_reserved:
            self._peak_num_reserved = num_reserved
        return num_blocks

    def release(self, account: Hashable, num_blocks: int, direction: Direction) -> None:
        """Releases staging blocks.

        Raises:
          StagingError: the account holds none, or fewer than `num_blocks`, or `num_blocks` is under 1.
        """
        if num_blocks < 1:
            raise StagingError(f"account {account!r} releases {num_blocks} staging blocks; expected at least 1")
        if account not in self._accounts:
            raise StagingError(f"account {account!r} releases {num_blocks} staging blocks but holds none")
        held = self.held(account, direction)
        if num_blocks > held:
            raise StagingError(
                f"account {account!r} releases {num_blocks} staging blocks of its {direction.value} but holds {held}"
            )
        self._add(account, -num_blocks, direction)

    def _add(self, account: Hashable, num_blocks: int, direction: Direction) -> None:
        balance = self._accounts.get(account)
        if balance is None:
            balance = self._accounts[account] = _Balance()
        if direction is Direction.SAVE:
            balance.num_save_blocks += num_blocks
            self._num_save_blocks += num_blocks
        else:
            balance.num_load_blocks += num_blocks
            self._num_load_blocks += num_blocks
        self._num_free -= num_blocks
        if balance.num_save_blocks == 0 and balance.num_load_blocks == 0:
            del self._accounts[account]

    def check_invariants(self) -> None:
        """Raises AssertionError unless totals, accounts, peak and budget agree. O(accounts)."""
        accounts = self._accounts.values()
        assert sum(a.num_save_blocks for a in accounts) == self._num_save_blocks
        assert sum(a.num_load_blocks for a in accounts) == self._num_load_blocks
        assert all(a.num_save_blocks >= 0 and a.num_load_blocks >= 0 for a in accounts)
        assert all(a.num_save_blocks or a.num_load_blocks for a in accounts), "an empty account was kept"
        assert self._num_save_blocks + self._num_load_blocks == self.num_reserved
        assert 0 <= self.num_reserved <= self._peak_num_reserved <= self._num_blocks


# A load starts with 1/4 of the buffer at least; one larger than the buffer gets 1/2 at most.
_LEAST_SHARE, _LARGE_SHARE = 4, 2


@final
class Staging:
    """Reservations of the planners, for the directions that are staged; see the top of this module.

    Args:
      buffer: the budget.
      paths: the copy path of each direction, as far as the settings say.
    """

    def __init__(self, buffer: StagingBufferManager, paths: Mapping[Direction, CopyPath]) -> None:
        self.buffer = buffer
        self._stages_saves = self._stages_loads = False
        self._turn = Direction.LOAD
        self._saves_wait = False
        self._queued_loads_wait = False
        self._matches_wait = False
        self.use(paths)

    def use(self, paths: Mapping[Direction, CopyPath]) -> None:
        """Sets the copy paths that jobs are planned for; `auto` counts as staged."""
        for direction, path in paths.items():
            if direction is Direction.SAVE:
                self._stages_saves = path.stages
            else:
                self._stages_loads = path.stages

    def stages(self, direction: Direction) -> bool:
        """Whether jobs in this direction hold staging blocks."""
        return self._stages_saves if direction is Direction.SAVE else self._stages_loads

    def reserve_load(self, account: str, num_blocks: int, *, next_in_line: bool = False) -> int:
        """Reserves staging blocks for a load.

        Args:
          account: their holder.
          num_blocks: blocks of the load.
          next_in_line: it has waited longest.
        Returns:
          The staging blocks; 0 if the load has to wait. Later loads then wait as well, until the next plan.
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
        """How many blocks the coming plan may save."""
        if not self._stages_saves:
            return sys.maxsize
        return 0 if self._loads_wait and self._turn is Direction.LOAD else self.buffer.num_free

    def reserve_save(self, account: str, num_blocks: int) -> int:
        """Reserves the staging blocks of a save within `room_for_saves`; returns how many, 0 if it needs none."""
        if not self._stages_saves:
            return 0
        if self._loads_wait:
            self._turn = Direction.LOAD
        return self.buffer.reserve(account, num_blocks, Direction.SAVE)

    def reserve_late(self, account: str, num_blocks: int, direction: Direction) -> None:
        """Reserves the blocks that a job which timed out has just released; 0 is fine."""
        if num_blocks:
            self.buffer.reserve(account, num_blocks, direction)

    def release(self, account: str, num_blocks: int, direction: Direction) -> None:
        """Releases staging blocks; 0 is fine."""
        if num_blocks:
            self.buffer.release(account, num_blocks, direction)

    def wait_for_loads(self, *, queued: bool) -> None:
        """Whether the coming plan leaves loads in the queue."""
        self._queued_loads_wait = queued

    def end_plan(self, *, saves_wait: bool) -> None:
        """A plan is complete; `saves_wait` if there was too little room for its saves."""
        self._saves_wait = saves_wait
        self._matches_wait = False

    @property
    def _loads_wait(self) -> bool:
        return self._queued_loads_wait or self._matches_wait
