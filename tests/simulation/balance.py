"""The rule by which memory moves, with moves that a trace asks for."""

import itertools
from collections.abc import Sequence
from typing import final

from tpu_offload.core.index import PoolBalance, PoolMove
from tpu_offload.types import Pool


@final
class DrawnBalance(PoolBalance):
    """Moves what a trace asks for, and otherwise what the library's rule wants.

    Attributes:
      wanted: the pool that gets memory next, as soon as a move may begin.
      is_even: from now on memory moves only until both pools have the same.
    """

    def __init__(self, rule: PoolBalance) -> None:
        super().__init__((1, 1), unit=1)
        self._rule = rule
        self.wanted: Pool | None = None
        self.is_even = False
        self._numbers = itertools.count(start=-1, step=-1)  # never as the rule's

    @property
    def num_evicted(self) -> int:
        """As the rule says; while a trace asks for something another number each time, so that `choose` is called."""
        asks = self.is_even or self.wanted is not None
        return next(self._numbers) if asks else self._rule.num_evicted

    def restart(self, now: int) -> None:
        self._rule.restart(now)

    def choose(self, *, now: int, num_segments: Sequence[int], num_free: Sequence[int]) -> PoolMove | None:
        if self.is_even:
            if abs(num_segments[0] - num_segments[1]) < 2:
                return None
            return _move(Pool.CHUNKS if num_segments[0] < num_segments[1] else Pool.STATES)
        wanted, self.wanted = self.wanted, None
        if wanted is not None:
            move = _move(wanted)
            return move if num_segments[move.giver] > 1 else None
        return self._rule.choose(now=now, num_segments=num_segments, num_free=num_free)


def _move(taker: Pool) -> PoolMove:
    return PoolMove(taker, Pool(1 - taker), 1)
