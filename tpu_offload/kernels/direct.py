"""The direct path: one program moves blocks between the caches and the host pool, in device order.

It needs about one block of HBM for a job of any size, but programs of a device run one after another, so the
next step waits for it. (The staged path makes the opposite trade.) What limits direct copies is therefore not HBM but
how long a step may wait: the worker's load backlog bounds that.
"""

import dataclasses
import functools
from collections.abc import Collection
from typing import Any, final

import jax
import numpy as np

from tpu_offload.kernels import programs
from tpu_offload.kernels.compiled import CompiledPrograms
from tpu_offload.kernels.copier import ArenaView, BlockMoves, Caches, Copier, Flight, Ids, Phase, fetch_early
from tpu_offload.kernels.spec import TransferSpec
from tpu_offload.types import Direction

_MAX_BLOCKS = 512  # per dispatch. Ids are padded to it; another dispatch costs 0.3 ms, little beside 512 blocks


def direct_spec(spec: TransferSpec) -> TransferSpec:
    """The spec for direct copies of the same caches, whose dispatches the staging budget does not limit."""
    return dataclasses.replace(spec, capacity=min(_MAX_BLOCKS, spec.num_blocks))


@final
class DirectCopier(Copier):
    """Copies with `programs.direct_save` and `programs.direct_load`, one compiled program each.

    Args:
      spec: what is copied.
      arena: the segments.
      directions: the directions that `compile` compiles.
    """

    def __init__(
        self, spec: TransferSpec, arena: ArenaView, *, directions: Collection[Direction] = tuple(Direction)
    ) -> None:
        self._spec = spec
        self._arena = arena
        self._directions = directions
        self._programs = CompiledPrograms(spec, num_blocks=2)

    @functools.cached_property
    def _save(self) -> Any:
        return self._programs.get(Direction.SAVE, programs.direct_save)

    @functools.cached_property
    def _load(self) -> Any:
        return self._programs.get(Direction.LOAD, programs.direct_load)

    @property
    def hbm_nbytes(self) -> int:
        """See `Copier`; temporaries of the one program that runs."""
        return self._programs.hbm_nbytes

    @property
    def stages(self) -> bool:
        """See `Copier`."""
        return False

    def compile(self) -> None:
        """See `Copier`."""
        for direction in self._directions:
            _ = self._save if direction is Direction.SAVE else self._load

    def split(self, moves: BlockMoves) -> list[BlockMoves]:
        """See `Copier`; more than 512 blocks of a rank are split."""
        capacity = self._spec.capacity
        if 0 < len(moves) <= capacity:
            return [moves]
        if moves.ranks is None:
            return [moves.take(slice(start, start + capacity)) for start in range(0, len(moves), capacity)]
        piece_of = np.empty(len(moves), np.int32)
        for rank in np.unique(moves.ranks):
            own = np.flatnonzero(moves.ranks == rank)
            piece_of[own] = np.arange(len(own)) // capacity
        return [moves.take(piece_of == piece) for piece in range(piece_of.max() + 1)]

    def save(self, segment_id: int, moves: BlockMoves, kv_caches: Caches) -> Flight:
        """See `Copier`."""
        segment, token = self._save(self._arena.segment(segment_id), kv_caches, self._packed(moves))
        self._arena.replace(segment_id, segment)
        return self._flight(Direction.SAVE, segment_id, moves, token)

    def load(self, segment_id: int, moves: BlockMoves, kv_caches: Caches) -> tuple[Flight, Caches]:
        """See `Copier`; donates the caches."""
        kv_caches, token = self._load(kv_caches, self._arena.segment(segment_id), self._packed(moves))
        return self._flight(Direction.LOAD, segment_id, moves, token), kv_caches

    def resume_save(self, flight: Flight) -> None:
        """Never called: nothing of this path is ever in TRANSIT."""
        raise AssertionError(f"a direct copy has one phase, got {flight.phase}")

    def resume_load(self, flight: Flight, live: BlockMoves, kv_caches: Caches) -> Caches:
        """Never called: nothing of this path is ever in TRANSIT."""
        raise AssertionError(f"a direct copy has one phase, got {flight.phase}")

    def release(self, flight: Flight) -> None:
        """See `Copier`; a direct flight holds no buffers."""

    def _packed(self, moves: BlockMoves) -> Ids | jax.Array:
        spec, ids, places = self._spec, moves.block_ids, moves.host_block_ids
        if moves.ranks is None:
            return programs.pack_moves(ids, places, capacity=spec.capacity)
        packed = programs.pack_rank_moves(moves.ranks, ids, places, num_ranks=spec.num_ranks, capacity=spec.capacity)
        if spec.by_rank.is_fully_addressable:
            return packed
        # jax takes a numpy array for the devices of several hosts only if all of them get all of it.
        return jax.make_array_from_callback(packed.shape, spec.by_rank, packed.__getitem__)

    def _flight(self, direction: Direction, segment_id: int, moves: BlockMoves, token: jax.Array) -> Flight:
        return Flight(direction, segment_id, moves, Phase.COPYING, fetch_early(token, self._spec))
