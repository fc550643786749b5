"""A copy path that fails at times, is slow at times, and writes down what it was asked for."""

import random
from typing import Any, cast

import jax
import numpy as np

from tests.multiprocess.messages import Faults
from tpu_offload.kernels import ArenaView, BlockMoves, Copier, Flight, Phase


class Diary:
    """What one process dispatches, and what goes wrong with it.

    Attributes:
      dispatched: (what, segment, blocks, step) of each copy.
      step: the step at hand.
    """

    def __init__(self, faults: Faults, rng: random.Random) -> None:
        self.faults = faults
        self.dispatched: list[tuple[str, int, int, int]] = []
        self.step = 0
        self._rng = rng

    def wrap(self, copier: Copier, arena: ArenaView) -> Copier:
        """For `OffloadWorker(wrap_copier=...)`."""
        return cast(Copier, _FaultyCopier(copier, arena, self))

    def strikes(self, rate: float) -> bool:
        """Whether a fault of this rate happens now."""
        return rate > 0 and self._rng.random() < rate

    def num_looks(self) -> int:
        """How often a token is asked before it says that it is ready."""
        return self._rng.randint(1, 3) if self.strikes(self.faults.slow) else 0


class _FaultyCopier:
    """Stands before a copier; what it does not know it leaves to that."""

    def __init__(self, copier: Copier, arena: ArenaView, diary: Diary) -> None:
        self._copier = copier
        self._arena = arena
        self._diary = diary

    def __getattr__(self, name: str) -> Any:
        return getattr(self._copier, name)

    def save(self, segment_id: int, moves: BlockMoves, kv_caches: list[jax.Array]) -> Flight:
        self._note("save", segment_id, moves)
        self._maybe_fail_save(segment_id)
        return self._slow(self._copier.save(segment_id, moves, kv_caches))

    def load(self, segment_id: int, moves: BlockMoves, kv_caches: list[jax.Array]) -> tuple[Flight, list[jax.Array]]:
        self._note("load", segment_id, moves)
        self._maybe_fail_load(kv_caches)
        if self._diary.strikes(self._diary.faults.misplaced):
            moves = BlockMoves(moves.job_ids, moves.block_ids, np.roll(moves.host_block_ids, 1))
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
        self._diary.dispatched.append((what, segment_id, len(moves), self._diary.step))

    def _maybe_fail_save(self, segment_id: int) -> None:
        faults = self._diary.faults
        if self._diary.strikes(faults.segment):
            for part in self._arena.segment(segment_id):
                part.delete()
            raise RuntimeError("injected: a save has taken its segment along")
        if self._diary.strikes(faults.save):
            raise RuntimeError("injected: a save")

    def _maybe_fail_load(self, kv_caches: list[jax.Array]) -> None:
        faults = self._diary.faults
        if kv_caches and self._diary.strikes(faults.caches):
            for cache in kv_caches:
                cache.delete()
            raise RuntimeError("injected: a load has taken the KV caches along")
        if self._diary.strikes(faults.load):
            raise RuntimeError("injected: a load")

    def _slow(self, flight: Flight) -> Flight:
        """Has a token ready at a look that the seed decides, not the speed of the machine."""
        if flight.phase is Phase.COPYING:
            flight.waiting_on = cast(jax.Array, _Token(flight.waiting_on, self._diary.num_looks()))
        return flight


class _Token:
    """Stands for the token of a copy: ready after so many looks, whenever that is."""

    def __init__(self, token: jax.Array, num_looks: int) -> None:
        self._token = token
        self._num_looks = num_looks

    def is_ready(self) -> bool:
        self._num_looks -= 1
        if self._num_looks >= 0:
            return False
        self._token.block_until_ready()
        return True

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        return np.asarray(self._token, dtype)
