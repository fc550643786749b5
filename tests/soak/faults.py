"""Faults for a soak: what can go wrong with copies, with messages, and with what an engine is asked.

They are put where the library takes an argument for it (`Seams`), so that it does not know of them. A copy that
fails here leaves what a real one would: memory donated to a program that failed is gone, blocks that a copy has left
out hold what they held before. Copies inside the engine's own step (the `fused` path) are left alone.
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
    """What goes wrong."""

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


RATES: Mapping[Fault, float] = {
    # A copy.
    Fault.SAVE_RAISES: 0.01,
    Fault.LOAD_RAISES: 0.02,
    Fault.SEGMENT_LOST: 0.002,
    Fault.CACHES_LOST: 0.02,
    Fault.SHORT_SAVE: 0.002,
    Fault.SHORT_LOAD: 0.02,
    Fault.LATE: 0.03,
    Fault.OVERDUE: 0.002,
    # A report that says something.
    Fault.REPORT_LOST: 0.005,
    Fault.REPORT_DOUBLED: 0.05,
    Fault.SILENCE: 0.001,
    # A step.
    Fault.RESET: 0.0005,
    Fault.ABORT: 0.005,
}
"""How likely each is, each time that it may happen."""


@final
class Faults:
    """Decides what goes wrong and when, from a seed.

    Args:
      seed: of all that is drawn.
      job_timeout_s: what a job may take.
      clock: monotonic seconds.
      rates: how likely each fault is; one that is not there never happens.
      certain: faults that are too rare for a short soak, and the chance, counted from 1, at which each happens
        whatever its rate.

    Attributes:
      counts: how often each has happened.
      active: while False nothing new goes wrong; what is late or held back still comes.
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
        self._rates = rates
        self._until_certain = dict(certain)
        self._job_timeout_s = job_timeout_s

    def strikes(self, fault: Fault) -> bool:
        """Whether this one happens now; counts it."""
        happens = self.active and self.random.random() < self._rates.get(fault, 0.0)
        if self.active and fault in self._until_certain:
            self._until_certain[fault] -= 1
            happens |= self._until_certain[fault] == 0
        self.counts[fault] += happens
        return happens

    def delay_s(self) -> float:
        """Seconds by which a copy is late; mostly 0."""
        if self.strikes(Fault.OVERDUE):
            return self._job_timeout_s * self.random.uniform(1.0, 2.5)
        return self._job_timeout_s * self.random.uniform(0.0, 0.5) if self.strikes(Fault.LATE) else 0.0

    def silence_s(self) -> float:
        """Seconds for which a worker falls silent; mostly 0."""
        return self._job_timeout_s * self.random.uniform(1.0, 2.0) if self.strikes(Fault.SILENCE) else 0.0

    def seams(self) -> Seams:
        """For one engine."""
        return Seams(lambda copier, arena: FaultyCopier(copier, arena, self), FaultyRelay(self))


class _Token:
    """Stands for an array that a copy is waiting on: ready at some time, and with a value of `missing` less."""

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
    """A copy path that fails at times.

    Args:
      copier: the real one.
      arena: where its segments are.
      faults: say when.
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
        # The first half of a staged load has no caches to take.
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
        self._delay(flight, missing=self._faults.strikes(Fault.SHORT_SAVE))

    def resume_load(self, flight: Flight, live: BlockMoves, kv_caches: list[Any]) -> list[Any]:
        """See `Copier`."""
        self._unwrap(flight)
        self._maybe_fail_load(kv_caches)
        kv_caches = self._copier.resume_load(flight, live, kv_caches)
        self._delay(flight, missing=self._faults.strikes(Fault.SHORT_LOAD))
        return kv_caches

    def release(self, flight: Flight) -> None:
        """See `Copier`."""
        self._copier.release(flight)

    def _maybe_fail_save(self, segment_id: int) -> None:
        if self._faults.strikes(Fault.SEGMENT_LOST):
            for part in self._arena.segment(segment_id):
                part.delete()
            raise RuntimeError("injected: the save took its segment along")
        if self._faults.strikes(Fault.SAVE_RAISES):
            raise RuntimeError("injected: the save was not dispatched")

    def _maybe_fail_load(self, kv_caches: Sequence[Any]) -> None:
        if kv_caches and self._faults.strikes(Fault.CACHES_LOST):
            for cache in kv_caches:
                cache.delete()
            raise RuntimeError("injected: the load took the caches along")
        if self._faults.strikes(Fault.LOAD_RAISES):
            raise RuntimeError("injected: the load was not dispatched")

    def _leaves_out(self, fault: Fault) -> bool:
        """Whether a copy of one phase does less than asked. Staged ones are cut to size, and can only say so."""
        return isinstance(self._copier, DirectCopier) and self._faults.strikes(fault)

    def _delay(self, flight: Flight, *, missing: bool = False) -> None:
        """Has a flight that is dispatched come late at times, and say that it copied one block less."""
        delay_s = self._faults.delay_s()
        if delay_s or missing:
            clock = self._faults.clock
            token: Any = _Token(flight.waiting_on, due_s=clock() + delay_s, clock=clock, missing=missing)
            flight.waiting_on = token

    @staticmethod
    def _unwrap(flight: Flight) -> None:
        """The second half of a staged copy reads what the first one made."""
        token: Any = flight.waiting_on
        if isinstance(token, _Token):
            flight.waiting_on = token.array


@final
class FaultyRelay:
    """Carries reports from worker to scheduler: loses some, brings some twice, holds some back; in order.

    Args:
      faults: say when.
    """

    def __init__(self, faults: Faults) -> None:
        self._faults = faults
        self._held: list[StepReport] = []
        self._silent_until_s = 0.0

    def __call__(self, report: StepReport) -> list[StepReport]:
        """The reports that arrive now, given the one that was sent."""
        faults = self._faults
        if report.results:
            # What is lost is lost: a later report has nothing of it.
            self._silent_until_s = max(self._silent_until_s, faults.clock() + faults.silence_s())
            if not faults.strikes(Fault.REPORT_LOST):
                self._held += [report] * (2 if faults.strikes(Fault.REPORT_DOUBLED) else 1)
        elif not self._held or self._held[-1] is not report:
            self._held.append(report)
        if faults.clock() < self._silent_until_s:
            return []
        arrived, self._held = self._held, []
        return arrived
