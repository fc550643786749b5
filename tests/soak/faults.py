"""Fault injection for the soak: failing copies, lost messages, resets, aborts, and failing storage (`storage`).

Faults are injected through an argument of the library (`Seams`), which has no code for them. A failing copy has the
effects of a real failure: memory donated to a failed program is lost, and skipped blocks keep their old contents.
Copies inside the engine's own step (the `fused` path) do not fail.
"""

import collections
import enum
import random
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

import numpy as np

from tpu_offload.engine import Seams
from tpu_offload.kernels import ArenaView, BlockMoves, Copier, DirectCopier, Flight
from tpu_offload.types import StepReport


class Fault(enum.Enum):
    """Kinds of faults."""

    SAVE_RAISES = "save raises"
    LOAD_RAISES = "load raises"
    SEGMENT_LOST = "save raises and takes its segment of host memory"
    CACHES_LOST = "load raises and takes the KV caches"
    SHORT_SAVE = "save leaves out a block"
    SHORT_LOAD = "load leaves out a block"
    LATE = "copy is late"
    OVERDUE = "copy takes longer than a job may"
    REPORT_LOST = "report is lost"
    REPORT_DOUBLED = "report comes twice"
    SILENCE = "worker is silent for longer than a job may take"
    RESET = "cache is reset"
    ABORT = "request is aborted and asked again"
    IO_RAISES = "storage call raises"
    SHORT_READ = "storage returns half a record"
    FLIPPED_BIT = "storage returns a flipped bit"
    TORN_WRITE = "storage keeps half a record"
    LATE_IO = "storage call is late"
    SERVER_FROZEN = "storage server is frozen and thawed"
    SERVER_KILLED = "storage server is killed and started again"


RATES: Mapping[Fault, float] = {
    # Faults of copies.
    Fault.SAVE_RAISES: 0.01,
    Fault.LOAD_RAISES: 0.02,
    Fault.SEGMENT_LOST: 0.002,
    Fault.CACHES_LOST: 0.02,
    Fault.SHORT_SAVE: 0.002,
    Fault.SHORT_LOAD: 0.02,
    Fault.LATE: 0.03,
    Fault.OVERDUE: 0.002,
    # Faults of reports that are not empty.
    Fault.REPORT_LOST: 0.005,
    Fault.REPORT_DOUBLED: 0.05,
    Fault.SILENCE: 0.001,
    # Faults of steps.
    Fault.RESET: 0.0005,
    Fault.ABORT: 0.005,
    Fault.SERVER_FROZEN: 0.0005,
    Fault.SERVER_KILLED: 0.0005,
    # Faults of calls of the storage tier.
    Fault.IO_RAISES: 0.02,
    Fault.SHORT_READ: 0.01,
    Fault.FLIPPED_BIT: 0.01,
    Fault.TORN_WRITE: 0.01,
    Fault.LATE_IO: 0.01,
}
"""Probability of each fault, per opportunity."""

STORAGE_FAULTS = frozenset(
    {
        Fault.IO_RAISES,
        Fault.SHORT_READ,
        Fault.FLIPPED_BIT,
        Fault.TORN_WRITE,
        Fault.LATE_IO,
        Fault.SERVER_FROZEN,
        Fault.SERVER_KILLED,
    }
)
"""Those that only a soak with storage has."""


@final
class Faults:
    """Decides which faults happen when, from a seed.

    Args:
      seed: random seed.
      job_timeout_s: the job timeout.
      clock: monotonic seconds.
      rates: probability of each fault; a fault without a rate never happens.
      certain: faults too rare for a short soak, each with the number of the opportunity (from 1) at which it happens
        regardless of its rate.

    Attributes:
      counts: how often each fault has happened.
      rates: the probability of each fault, at each occasion.
      active: while False no new faults are injected; delayed copies and reports still arrive.
    """

    def __init__(
        self,
        seed: int,
        *,
        job_timeout_s: float,
        clock: Callable[[], float],
        rates: Mapping[Fault, float] = RATES,
        certain: Mapping[Fault, int] = types.MappingProxyType({}),
    ) -> None:
        self.counts: collections.Counter[Fault] = collections.Counter()
        self.active = False
        self.random = random.Random(seed)
        self.clock = clock
        self.rates = rates
        self._until_certain = dict(certain)
        self._job_timeout_s = job_timeout_s

    def happens(self, fault: Fault) -> bool:
        """Whether this fault happens now; counts it."""
        happens = self.active and self.random.random() < self.rates.get(fault, 0.0)
        if self.active and fault in self._until_certain:
            self._until_certain[fault] -= 1
            happens |= self._until_certain[fault] == 0
        self.counts[fault] += happens
        return happens

    def delay_s(self) -> float:
        """Seconds to delay a copy by; mostly 0."""
        if self.happens(Fault.OVERDUE):
            return self._job_timeout_s * self.random.uniform(1.0, 2.5)
        return self._job_timeout_s * self.random.uniform(0.0, 0.5) if self.happens(Fault.LATE) else 0.0

    def io_delay_s(self) -> float:
        """Seconds to delay a call of the storage tier by; mostly 0."""
        return self._job_timeout_s * self.random.uniform(0.1, 1.5) if self.happens(Fault.LATE_IO) else 0.0

    def outage_s(self) -> float:
        """Seconds for which a server that fails does not answer."""
        return self._job_timeout_s * self.random.uniform(0.2, 6.0)

    def silence_s(self) -> float:
        """Seconds for which a worker sends no reports; mostly 0."""
        return self._job_timeout_s * self.random.uniform(1.0, 2.0) if self.happens(Fault.SILENCE) else 0.0

    def seams(self) -> Seams:
        """Seams of one engine."""
        return Seams(lambda copier, arena: FaultyCopier(copier, arena, self), FaultyRelay(self))


class _Token:
    """Replaces a copy's token: ready at a given time, with a count reduced by `missing`."""

    def __init__(self, array: Any, *, due_s: float, clock: Callable[[], float], missing: bool) -> None:
        self.array = array
        self._due_s = due_s
        self._clock = clock
        self._missing = missing

    def is_ready(self) -> bool:
        return self._clock() >= self._due_s and bool(self.array.is_ready())

    def block_until_ready(self) -> None:
        self.array.block_until_ready()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        return np.asarray(np.asarray(self.array) - self._missing, dtype)


@final
class FaultyCopier(Copier):
    """Wraps a copier and injects faults.

    Args:
      copier: the real copier.
      arena: the arena of its segments.
      faults: decide when.
    """

    def __init__(self, copier: Copier, arena: ArenaView, faults: Faults) -> None:
        self._copier = copier
        self._arena = arena
        self._faults = faults

    @property
    def hbm_nbytes(self) -> int:
        """See `Copier`."""
        return self._copier.hbm_nbytes

    @property
    def stages(self) -> bool:
        """See `Copier`."""
        return self._copier.stages

    def compile(self) -> None:
        """See `Copier`."""
        self._copier.compile()

    def split(self, moves: BlockMoves) -> list[BlockMoves]:
        """See `Copier`."""
        return self._copier.split(moves)

    def save(self, segment_id: int, moves: BlockMoves, kv_caches: list[Any]) -> Flight:
        """See `Copier`."""
        self._maybe_fail_save(segment_id)
        left_out = self._leaves_out(Fault.SHORT_SAVE)
        flight = self._copier.save(segment_id, moves.take(slice(len(moves) - left_out)), kv_caches)
        flight.moves = moves
        self._delay(flight)
        return flight

    def load(self, segment_id: int, moves: BlockMoves, kv_caches: list[Any]) -> tuple[Flight, list[Any]]:
        """See `Copier`."""
        # The first half of a staged load has no caches to destroy.
        self._maybe_fail_load(kv_caches if isinstance(self._copier, DirectCopier) else ())
        left_out = self._leaves_out(Fault.SHORT_LOAD)
        flight, kv_caches = self._copier.load(segment_id, moves.take(slice(len(moves) - left_out)), kv_caches)
        flight.moves = moves
        self._delay(flight)
        return flight, kv_caches

    def resume_save(self, flight: Flight) -> None:
        """See `Copier`."""
        self._unwrap(flight)
        self._maybe_fail_save(flight.segment_id)
        self._copier.resume_save(flight)
        self._delay(flight, missing=self._faults.happens(Fault.SHORT_SAVE))

    def resume_load(self, flight: Flight, live: BlockMoves, kv_caches: list[Any]) -> list[Any]:
        """See `Copier`."""
        self._unwrap(flight)
        self._maybe_fail_load(kv_caches)
        kv_caches = self._copier.resume_load(flight, live, kv_caches)
        self._delay(flight, missing=self._faults.happens(Fault.SHORT_LOAD))
        return kv_caches

    def release(self, flight: Flight) -> None:
        """See `Copier`."""
        self._copier.release(flight)

    def _maybe_fail_save(self, segment_id: int) -> None:
        if self._faults.happens(Fault.SEGMENT_LOST):
            for part in self._arena.segment(segment_id):
                part.delete()
            raise RuntimeError("injected: the save destroyed its segment")
        if self._faults.happens(Fault.SAVE_RAISES):
            raise RuntimeError("injected: the save was not dispatched")

    def _maybe_fail_load(self, kv_caches: Sequence[Any]) -> None:
        if kv_caches and self._faults.happens(Fault.CACHES_LOST):
            for cache in kv_caches:
                cache.delete()
            raise RuntimeError("injected: the load destroyed the caches")
        if self._faults.happens(Fault.LOAD_RAISES):
            raise RuntimeError("injected: the load was not dispatched")

    def _leaves_out(self, fault: Fault) -> bool:
        """Whether a one-phase copy skips a block. Staged copies have fixed sizes, and can only report fewer blocks."""
        return isinstance(self._copier, DirectCopier) and self._faults.happens(fault)

    def _delay(self, flight: Flight, *, missing: bool = False) -> None:
        """Delays a dispatched flight, or makes it report one block less, at random."""
        delay_s = self._faults.delay_s()
        if delay_s or missing:
            clock = self._faults.clock
            token: Any = _Token(flight.waiting_on, due_s=clock() + delay_s, clock=clock, missing=missing)
            flight.waiting_on = token

    @staticmethod
    def _unwrap(flight: Flight) -> None:
        """The original flight, for the second half of a staged copy."""
        token: Any = flight.waiting_on
        if isinstance(token, _Token):
            flight.waiting_on = token.array


@final
class FaultyRelay:
    """Carries reports from worker to scheduler, in order; loses, duplicates or delays some.

    Args:
      faults: decide when.
    """

    def __init__(self, faults: Faults) -> None:
        self._faults = faults
        self._held: list[StepReport] = []
        self._silent_until_s = 0.0

    def __call__(self, report: StepReport) -> list[StepReport]:
        """The reports that arrive now, given the report that is sent."""
        faults = self._faults
        if report.results:
            # The content of a lost report is not repeated in later ones.
            self._silent_until_s = max(self._silent_until_s, faults.clock() + faults.silence_s())
            if not faults.happens(Fault.REPORT_LOST):
                self._held += [report] * (2 if faults.happens(Fault.REPORT_DOUBLED) else 1)
        elif not self._held or self._held[-1] is not report:
            self._held.append(report)
        if faults.clock() < self._silent_until_s:
            return []
        arrived, self._held = self._held, []
        return arrived
