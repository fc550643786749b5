"""The segments of a simulated worker's host tier: its own idea of what `worker.pool_division` does.

Segments are freed some steps after a division has taken them away, and allocated one after another. Both pools together
never have more than the worker's memory.
"""

from collections.abc import Callable, Sequence
from typing import final

from tests.simulation.memory import mix
from tests.simulation.trace import Setup
from tpu_offload import HostDivision


@final
class SimSegments:
    """The segments of both pools; indices are 0 for chunks and 1 for states.

    Args:
      worker_id: the worker.
      setup: sizes.
      num_missing: segments that it has less than the settings say.
      on_free: called with the pool, its first slot that is gone, and the end of those.
      in_use: whether a copy in flight uses a pool's slots from this one on.
    """

    def __init__(
        self,
        worker_id: int,
        setup: Setup,
        *,
        num_missing: int,
        on_free: Callable[[int, int, int], None],
        in_use: Callable[[int, int], bool],
    ) -> None:
        self.size = setup.segment_slots
        self.capacity = max(2, setup.num_segments - num_missing)
        self.num_allocated = [0, 0]
        num_states = max(1, min(self.capacity - 1, round(self.capacity * setup.state_share)))
        self.wanted: Sequence[int] = (self.capacity - num_states, num_states)
        self.division_id = 0
        self.fails = False  # the next allocation
        self._worker_id = worker_id
        self._on_free, self._in_use = on_free, in_use

    def begin(self, division: HostDivision | None) -> None:
        """A plan has this division."""
        if division is not None and division.division_id > self.division_id:
            self.division_id = division.division_id
            self.wanted = division.segments

    def advance(self, growth: int, step: int) -> None:
        """A step: frees and allocates."""
        size = self.size
        for pool, wanted in enumerate(self.wanted):
            num = self.num_allocated[pool]
            late = mix(step, self._worker_id + 20) % 3  # other workers free it in other steps
            if num > wanted and not late and not self._in_use(pool, wanted * size):
                self._on_free(pool, wanted * size, num * size)
                self.num_allocated[pool] = wanted
        for pool, wanted in enumerate(self.wanted):
            room = min(wanted - self.num_allocated[pool], self.capacity - sum(self.num_allocated))
            if room > 0 and self.fails:
                self.fails = False
                # Never less than one segment for each pool: without them nothing is offloaded.
                self.capacity = max(2, sum(self.num_allocated))
                return
            self.num_allocated[pool] += max(0, min(room, max(1, growth // size)))

    @property
    def num_slots(self) -> tuple[int, int]:
        """Slots of both pools that are allocated."""
        return self.num_allocated[0] * self.size, self.num_allocated[1] * self.size
