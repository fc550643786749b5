"""The staged path: copies between host and device overlap with the model and hold HBM while they do.

A save gathers its blocks into a staging array in HBM, in program order, for the cost of reading and writing HBM once.
The array is then transferred to host memory asynchronously. Once it has arrived, in a later step, the host's CPU writes
it into the pool. A load does the reverse. The model never waits for PCIe, but the staging arrays of all jobs in flight
hold HBM. The staging budget counts exactly these: array sizes add up to the job, without padding.

Hosts that share a model must dispatch every program in the same order, but a transfer becomes ready at a different time
on each host. There the worker resumes it in the next step whether it is ready or not, and the device waits for it. The
worker decides that; this module never polls.
"""

from collections.abc import Callable, Collection
from typing import Any, final

import jax
import numpy as np

from tpu_offload.kernels import programs
from tpu_offload.kernels.buckets import split_into_buckets, usable_buckets
from tpu_offload.kernels.compiled import CompiledPrograms
from tpu_offload.kernels.copier import ArenaView, BlockMoves, Caches, Copier, Flight, Ids, Phase, fetch_early
from tpu_offload.kernels.spec import DEVICE_MEMORY_KIND, HOST_MEMORY_KIND, TransferSpec
from tpu_offload.types import Direction

_PROGRAMS = {
    Direction.SAVE: (programs.gather, programs.land),
    Direction.LOAD: (programs.pick, programs.scatter),
}


@final
class StagedCopier(Copier):
    """Copies through staging arrays, with two compiled programs per bucket and direction.

    Args:
      spec: what is copied.
      arena: the segments.
      allocate: allocates zeros in pinned host memory that can be donated.
      buckets: staging array sizes, as in `usable_buckets`.
      directions: the directions that `compile` compiles.
    """

    def __init__(
        self,
        spec: TransferSpec,
        arena: ArenaView,
        *,
        allocate: Callable[[jax.ShapeDtypeStruct], jax.Array],
        buckets: tuple[int, ...] = (),
        directions: Collection[Direction] = tuple(Direction),
    ) -> None:
        self._spec = spec
        self._arena = arena
        self._allocate = allocate
        self._directions = directions
        self._buckets = usable_buckets(spec.capacity, buckets)
        self._device_sharding = spec.pool_sharding(DEVICE_MEMORY_KIND)
        self._host_sharding = spec.pool_sharding(HOST_MEMORY_KIND)
        self._programs = CompiledPrograms(spec, num_blocks=1)
        # Free host staging arrays of loads, reused: fresh pinned memory costs more than the copy.
        self._free: dict[int, list[jax.Array]] = {bucket: [] for bucket in self._buckets}
        self._free_blocks = 0

    @property
    def hbm_nbytes(self) -> int:
        """See `Copier`; the staging arrays, and the temporaries of one running program."""
        return self._spec.capacity * self._spec.block_nbytes_per_device + self._programs.hbm_nbytes

    @property
    def stages(self) -> bool:
        """See `Copier`."""
        return True

    def compile(self) -> None:
        """See `Copier`."""
        for bucket in self._buckets:
            for direction in self._directions:
                for build in _PROGRAMS[direction]:
                    self._program(build, bucket)

    def split(self, moves: BlockMoves) -> list[BlockMoves]:
        """See `Copier`; pieces are buckets, the largest first."""
        pieces, start = [], 0
        for size in split_into_buckets(len(moves), self._buckets):
            pieces.append(moves.take(slice(start, start + size)))
            start += size
        return pieces

    def save(self, segment_id: int, moves: BlockMoves, kv_caches: Caches) -> Flight:
        """See `Copier`."""
        staging, _ = self._program(programs.gather, len(moves))(kv_caches, moves.block_ids)
        # The runtime keeps the HBM staging array alive until the transfer has read it.
        in_transit = jax.device_put(staging, self._host_sharding)
        return Flight(Direction.SAVE, segment_id, moves, Phase.TRANSIT, in_transit, num_staged=len(moves))

    def load(self, segment_id: int, moves: BlockMoves, kv_caches: Caches) -> tuple[Flight, Caches]:
        """See `Copier`; returns the caches unchanged, `resume_load` writes them."""
        segment = self._arena.segment(segment_id)
        host_staging = self._host_staging(len(moves))
        host_staging, _ = self._program(programs.pick, len(moves))(host_staging, segment, moves.host_block_ids)
        in_transit = jax.device_put(host_staging, self._device_sharding)
        flight = Flight(
            Direction.LOAD, segment_id, moves, Phase.TRANSIT, in_transit, host_staging, num_staged=len(moves)
        )
        return flight, kv_caches

    def resume_save(self, flight: Flight) -> None:
        """See `Copier`."""
        program = self._program(programs.land, len(flight.moves))
        segment = self._arena.segment(flight.segment_id)
        segment, token = program(segment, flight.waiting_on, flight.moves.host_block_ids)
        self._arena.replace(flight.segment_id, segment)
        self._await_token(flight, token)

    def resume_load(self, flight: Flight, live: BlockMoves, kv_caches: Caches) -> Caches:
        """See `Copier`."""
        bucket = len(flight.moves)
        live_rows: Ids = np.flatnonzero(np.isin(flight.moves.job_ids, live.job_ids)).astype(np.int32)
        packed = programs.pack_moves(live.block_ids, live_rows, capacity=bucket)
        kv_caches, token = self._program(programs.scatter, bucket)(kv_caches, flight.waiting_on, packed)
        flight.moves = live
        self._await_token(flight, token)
        return kv_caches

    def release(self, flight: Flight) -> None:
        """See `Copier`; the host staging array is kept for later loads, up to the staging budget."""
        staging = flight.host_staging
        if staging is None or staging.is_deleted() or self._free_blocks + len(staging) > self._spec.capacity:
            return
        self._free[len(staging)].append(staging)
        self._free_blocks += len(staging)

    def _program(self, build: Any, bucket: int) -> Any:
        return self._programs.get((build, bucket), lambda spec: build(spec, bucket))

    def _host_staging(self, bucket: int) -> jax.Array:
        if self._free[bucket]:
            self._free_blocks -= bucket
            return self._free[bucket].pop()
        return self._allocate(self._spec.pool_struct(bucket, HOST_MEMORY_KIND))

    def _await_token(self, flight: Flight, token: jax.Array) -> None:
        flight.phase = Phase.COPYING
        flight.waiting_on = fetch_early(token, self._spec)
