"""The staged path: copies between host and device run beside the model, and cost HBM while they do.

A save gathers its blocks into a staging array in HBM, in program order, which takes as long as reading
and writing HBM once. The array then goes to host memory by a transfer that the device's programs do
not wait for. When it is there, at a later step, the host's CPU writes it into the pool. A load goes the
other way. The model never waits for PCIe, but the staging arrays of all jobs in flight take HBM: the
staging budget counts exactly them, as they are cut into sizes that add up to the job.

On hosts that share one model every program must be dispatched in the same order. When a transfer is
ready differs from host to host, so there the worker resumes it at the next step whether or not it is
ready; the device then waits for it. (The worker decides; here nothing asks.)
"""

from collections.abc import Callable, Collection
from typing import Any, final

import jax
import numpy as np

from tpu_offload.kernels import programs
from tpu_offload.kernels.buckets import split_into_buckets, usable_buckets
from tpu_offload.kernels.compiled import CompiledPrograms
from tpu_offload.kernels.copier import ArenaView, Caches, Copier, Flight, Ids, Phase, Rows, fetch_early
from tpu_offload.kernels.spec import DEVICE_MEMORY_KIND, HOST_MEMORY_KIND, TransferSpec
from tpu_offload.types import Direction

_PROGRAMS = {
    Direction.SAVE: (programs.gather, programs.land),
    Direction.LOAD: (programs.pick, programs.scatter),
}


@final
class StagedCopier(Copier):
    """Copies through staging arrays, with two compiled programs a bucket and direction.

    Args:
      spec: what is copied.
      arena: the segments.
      allocate: makes an array of zeros in pinned host memory that can be donated.
      buckets: sizes of staging arrays, as in `usable_buckets`.
      directions: what `compile` compiles for; a direction that another copier serves costs nothing here.
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
        # Host staging arrays of loads, kept because fresh pinned memory costs more than the copy.
        self._free: dict[int, list[jax.Array]] = {bucket: [] for bucket in self._buckets}
        self._free_blocks = 0

    @property
    def hbm_nbytes(self) -> int:
        """See `Copier`; the staging arrays, and the temporaries of the one program that runs."""
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

    def split(self, rows: Rows) -> list[Rows]:
        """See `Copier`; pieces are buckets, the largest first."""
        pieces, start = [], 0
        for size in split_into_buckets(len(rows), self._buckets):
            pieces.append(rows.take(slice(start, start + size)))
            start += size
        return pieces

    def save(self, segment_id: int, rows: Rows, kv_caches: Caches) -> Flight:
        """See `Copier`."""
        staging, _ = self._program(programs.gather, len(rows))(kv_caches, rows.block_ids)
        # The runtime keeps the HBM staging array until the transfer has read it; this reference ends here.
        in_transit = jax.device_put(staging, self._host_sharding)
        return Flight(Direction.SAVE, segment_id, rows, Phase.TRANSIT, in_transit, num_staged=len(rows))

    def load(self, segment_id: int, rows: Rows, kv_caches: Caches) -> tuple[Flight, Caches]:
        """See `Copier`; the caches come back as they were, `resume_load` writes them."""
        segment = self._arena.segment(segment_id)
        host_staging = self._host_staging(len(rows))
        host_staging, _ = self._program(programs.pick, len(rows))(host_staging, segment, rows.host_block_ids)
        in_transit = jax.device_put(host_staging, self._device_sharding)
        flight = Flight(Direction.LOAD, segment_id, rows, Phase.TRANSIT, in_transit, host_staging, num_staged=len(rows))
        return flight, kv_caches

    def resume_save(self, flight: Flight) -> None:
        """See `Copier`."""
        program = self._program(programs.land, len(flight.rows))
        segment = self._arena.segment(flight.segment_id)
        segment, token = program(segment, flight.waiting_on, flight.rows.host_block_ids)
        self._arena.replace(flight.segment_id, segment)
        self._await_token(flight, token)

    def resume_load(self, flight: Flight, live: Rows, kv_caches: Caches) -> Caches:
        """See `Copier`."""
        bucket = len(flight.rows)
        live_rows: Ids = np.flatnonzero(np.isin(flight.rows.job_ids, live.job_ids)).astype(np.int32)
        moves = programs.pack_moves(live.block_ids, live_rows, capacity=bucket)
        kv_caches, token = self._program(programs.scatter, bucket)(kv_caches, flight.waiting_on, moves)
        flight.rows = live
        self._await_token(flight, token)
        return kv_caches

    def release(self, flight: Flight) -> None:
        """See `Copier`; the host staging array is kept for a later load while it fits the budget."""
        staging = flight.host_staging
        if staging is None or staging.is_deleted() or self._free_blocks + len(staging) > self._spec.capacity:
            return
        self._free[len(staging)].append(staging)
        self._free_blocks += len(staging)

    def _program(self, build: Any, bucket: int) -> Any:
        return self._programs.get((build, bucket), lambda: build(self._spec, bucket))

    def _host_staging(self, bucket: int) -> jax.Array:
        if self._free[bucket]:
            self._free_blocks -= bucket
            return self._free[bucket].pop()
        return self._allocate(self._spec.pool_struct(bucket, HOST_MEMORY_KIND))

    def _await_token(self, flight: Flight, token: jax.Array) -> None:
        flight.phase = Phase.COPYING
        flight.waiting_on = fetch_early(token, self._spec)
