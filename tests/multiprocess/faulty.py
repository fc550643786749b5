"""A copier that randomly fails or is slow, and records all dispatched copies."""

import random
from typing import Any, cast

import jax
import numpy as np

from tests.multiprocess.messages import Faults
from tpu_offload.kernels import ArenaView, BlockMoves, Copier, Flight, Phase


class DispatchLog:
    """The copies that one process dispatches, and the faults injected into them.

    Attributes:
      dispatched: (kind, segment, blocks, step) of each copy.
      step: the current step.
    """

    def __init__(self, faults: Faults, rng: random.Random) -> None:
        self.faults = faults
        self.dispatched: list[tuple[str, int, int, int]] = []
        self.step = 0
        self._rng = rng

    def wrap(self, copier: Copier, arena: ArenaView) -> Copier:
        """The argument `wrap_copier` of `OffloadWorker`."""
        return cast(Copier, _FaultyCopier(copier, arena, self))

    def happens(self, rate: float) -> bool:
        """Whether a fault of this rate happens now."""
        return rate > 0 and self._rng.random() < rate

    def num_looks(self) -> int:
        """The number of polls until a token is ready."""
        return self._rng.randint(1, 3) if self.happens(self.faults.slow) else 0


class _FaultyCopier:
    """Wraps a copier; delegates all other attributes to it."""

    def __init__(self, copier: Copier, arena: ArenaView, log: DispatchLog) -> None:
        self._copier = copier
        self._arena = arena
        self._log = log

    def __getattr__(self, name: str) -> Any:
        return getattr(self._copier, name)

    def save(self, segment_id: int, moves: BlockMoves, kv_caches: list[jax.Array]) -> Flight:
        self._note("save", segment_id, moves)
        self._maybe_fail_save(segment_id)
        return self._slow(self._copier.save(segment_id, moves, kv_caches))

    def load(self, segment_id: int, moves: BlockMoves, kv_caches: list[jax.Array]) -> tuple[Flight, list[jax.Array]]:
        self._note("load", segment_id, moves)
        self._maybe_fail_load(kv_caches)
        if self._log.happens(self._log.faults.misplaced):
            moves = BlockMoves(moves.job_ids, moves.block_ids, np.roll(moves.host_block_ids, 1), moves.ranks)
        flight, kv_caches = self._copier.load(segment_id, moves, kv_caches)
        return self._slow(flight), kv_caches

    def resume_save(self, flight: Flight) -> None:
        self._note("second half of save", flight.segment_id, flight.moves)
        self._maybe_fail_save(flight.segment_id)
        self._copier.resume_save(flight)
        self._slow(flight)

    def resume_load(self, flight: Flight, live: BlockMoves, kv_caches: list[jax.Array]) -> list[jax.Array]:
        self._note("second half of load", flight.segment_id, live)
        self._maybe_fail_load(kv_caches)
        kv_caches = self._copier.resume_load(flight, live, kv_caches)
        self._slow(flight)
        return kv_caches

    def _note(self, what: str, segment_id: int, moves: BlockMoves) -> None:
        self._log.dispatched.append((what, segment_id, len(moves), self._log.step))

    def _maybe_fail_save(self, segment_id: int) -> None:
        faults = self._log.faults
        if self._log.happens(faults.segment):
            for part in self._arena.segment(segment_id):
                part.delete()
            raise RuntimeError("injected: a save has destroyed its segment")
        if self._log.happens(faults.save):
            raise RuntimeError("injected: a save")

    def _maybe_fail_load(self, kv_caches: list[jax.Array]) -> None:
        faults = self._log.faults
        if kv_caches and self._log.happens(faults.caches):
            for cache in kv_caches:
                cache.delete()
            raise RuntimeError("injected: a load has destroyed the KV caches")
        if self._log.happens(faults.load):
            raise RuntimeError("injected: a load")

    def _slow(self, flight: Flight) -> Flight:
        """Makes a token ready after a number of polls that the seed determines, not the speed of the machine."""
        if flight.phase is Phase.COPYING:
            flight.waiting_on = cast(jax.Array, _Token(flight.waiting_on, self._log.num_looks()))
        return flight


class _Token:
    """Replaces the token of a copy: ready after a number of polls."""

    def __init__(self, token: jax.Array, num_looks: int) -> None:
        self._token = token
        self._num_looks = num_looks

    def __getattr__(self, name: str) -> Any:
        return getattr(self._token, name)

    def is_ready(self) -> bool:
        self._num_looks -= 1
        if self._num_looks >= 0:
            return False
        self._token.block_until_ready()
        return True

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        return np.asarray(self._token, dtype)
