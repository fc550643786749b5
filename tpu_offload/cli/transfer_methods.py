"""Ways to move blocks that can be timed side by side.

`WorkerCopies` is the library itself. `PeerCopies` is the method of tpu-inference's connector. What the
machine can do at all is in `transfer_limits`.
"""

import contextlib
import dataclasses
import math
import time
from collections.abc import Sequence
from typing import Any, Protocol, final

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from tpu_offload.cli.compiling import compile_in_background
from tpu_offload.config import OffloadConfig
from tpu_offload.errors import InputError, TransferError
from tpu_offload.kernels import TransferSpec
from tpu_offload.layout import KVLayout
from tpu_offload.types import CopyJob, CopyPart, Direction, JobKind, JobState, StepPlan
from tpu_offload.worker import OffloadWorker

Caches = list[jax.Array]

_ALLOCATION_TIMEOUT_S = 60.0


@dataclasses.dataclass(frozen=True, slots=True)
class Geometry:
    """What the KV caches look like.

    Attributes:
      num_layers: arrays in the list of caches.
      page_shape: one layer's slice of a block, `[block_size, kv_heads, ...]`, over all devices.
      dtype: element type.
      num_devices: local devices, which split axis 1 of a page.
    """

    num_layers: int
    page_shape: tuple[int, ...]
    dtype: str = "bfloat16"
    num_devices: int = 1

    @property
    def page_nbytes(self) -> int:
        """Bytes of one page over all devices."""
        return math.prod(self.page_shape) * np.dtype(self.dtype).itemsize

    @property
    def block_nbytes(self) -> int:
        """Bytes of one block, all layers, over all devices."""
        return self.num_layers * self.page_nbytes

    def sharding(self) -> Sharding:
        """The sharding of each cache.

        Raises:
          InputError: there are too few devices, or they cannot split a page evenly.
        """
        devices = jax.local_devices()
        if self.num_devices > len(devices):
            raise InputError(f"{self.num_devices} devices wanted and {len(devices)} found")
        if self.num_devices > 1 and (len(self.page_shape) < 2 or self.page_shape[1] % self.num_devices):
            raise InputError(
                f"pages of shape {list(self.page_shape)} cannot be split over {self.num_devices} devices; expected a "
                f"multiple of {self.num_devices} as their second number"
            )
        if self.num_devices == 1:
            return SingleDeviceSharding(devices[0])
        mesh = Mesh(np.array(devices[: self.num_devices]), ("model",))
        return NamedSharding(mesh, PartitionSpec(None, None, "model"))

    def make_caches(self, num_blocks: int) -> Caches:
        """Caches of zeros in device memory, per layer dtype[num_blocks, *page_shape]; raises as `sharding` does."""
        shape = (num_blocks, *self.page_shape)
        make = jax.jit(lambda: jnp.zeros(shape, self.dtype), out_shardings=self.sharding())
        return [make() for _ in range(self.num_layers)]


class Method(Protocol):
    """A way to move blocks that does not know of jobs."""

    def dispatch(self, direction: Direction, caches: Caches, block_ids: list[int]) -> Caches:
        """Starts a copy, as far as the method does without waiting; the caches may be donated."""

    def finish(self, caches: Caches) -> Caches:
        """Waits for the end of what `dispatch` started."""


@final
class WorkerCopies:
    """Jobs through an `OffloadWorker` of its own, from the plan to the report.

    Places in the host pool are used in turn, so that they are not in the CPU's caches.

    Args:
      config: the settings; their staging budget bounds the size of a job.
      caches: per layer, dtype[num_blocks, *page_shape]; only shapes and shardings are kept.
    Raises:
      InputError: there is not enough memory for the host pool.

    Without a model step, which is how `dispatch` and `finish` use it, what the fused path would have taken
    goes by the direct path.
    """

    def __init__(self, config: OffloadConfig, caches: Caches) -> None:
        layout = KVLayout.from_caches(caches, block_size=caches[0].shape[1])
        self.worker = OffloadWorker(config, layout, caches, fused=True)
        give_up_s = time.monotonic() + _ALLOCATION_TIMEOUT_S
        while (num_ready := self.worker.poll().num_host_chunks) < self.worker.num_host_chunks:
            if time.monotonic() > give_up_s:
                break
            time.sleep(0.001)
        self.num_host_blocks = num_ready * config.blocks_per_chunk
        self.max_job_blocks = config.staging_blocks(layout)
        if not self.num_host_blocks:
            self.worker.close()
            raise InputError("no memory for a host pool; make the blocks or their number smaller")
        self._next_place = 0
        self._next_id = 0
        with contextlib.suppress(TransferError):  # a path that fails does so again when it is measured
            self._fill(caches)

    def _fill(self, caches: Caches) -> None:
        """Saves to every place once: a worker loads nothing that it has not saved."""
        most = min(self.max_job_blocks, caches[0].shape[0])
        for first in range(0, self.num_host_blocks, most):
            num_blocks = min(most, self.num_host_blocks - first)
            self.finish(self.dispatch(self.plan(Direction.SAVE, list(range(num_blocks))), caches))
        self._next_place = 0

    def plan(self, direction: Direction, block_ids: list[int]) -> StepPlan:
        """A plan with one job.

        Raises:
          InputError: it has more blocks than the host pool.
        """
        num_blocks = len(block_ids)
        if num_blocks > self.num_host_blocks:
            raise InputError(f"host memory holds {self.num_host_blocks} blocks, a job of {num_blocks} was asked for")
        if self._next_place + num_blocks > self.num_host_blocks:
            self._next_place = 0
        places = range(self._next_place, self._next_place + num_blocks)
        self._next_place += num_blocks
        self._next_id += 1
        kind = JobKind.SAVE if direction is Direction.SAVE else JobKind.LOAD
        part = CopyPart(block_ids=tuple(block_ids), host_block_ids=tuple(places))
        return StepPlan(step_id=self._next_id, jobs=(CopyJob(job_id=self._next_id, kind=kind, parts=(part,)),))

    def idle_plan(self) -> StepPlan:
        """A plan with nothing in it."""
        self._next_id += 1
        return StepPlan(step_id=self._next_id)

    def dispatch(self, plan: StepPlan, caches: Caches) -> Caches:
        """Hands a plan to the worker, with no model step in it."""
        caches = self.worker.begin_step(plan, caches)
        self.worker.end_step(plan, caches)
        return caches

    def finish(self, caches: Caches) -> Caches:
        """Steps until the job is reported and the caches are there.

        Raises:
          TransferError: it failed.
        """
        while not self.poll(wait=True):
            caches = self.worker.begin_step(self.idle_plan(), caches)
        jax.block_until_ready(caches)
        return caches

    def poll(self, *, wait: bool = False) -> bool:
        """Whether the job has been reported.

        Raises:
          TransferError: it failed.
        """
        results = self.worker.poll(wait=wait).results
        if results and results[0].state is not JobState.FINISHED:
            raise TransferError(f"a copy failed: {results[0].error}")
        return bool(results)


@final
class PeerCopies:
    """Gather, split, one `device_put` a block; load by one `device_put` a block, wait, scatter, wait.

    Its programs are compiled on threads of their own, from the start: for jobs of 64 blocks and 32 layers
    the TPU compiler takes half a minute for each of them, and a few seconds for any of ours.

    Args:
      caches: per layer, dtype[num_blocks, *page_shape]; only shapes and shardings are kept.
      sizes: blocks in a job, for all that it will be asked for.
    """

    def __init__(self, caches: Caches, *, sizes: Sequence[int]) -> None:
        spec = TransferSpec.from_caches(caches, segment_blocks=1, capacity=1)
        self._on_device, self._on_host = spec.block_sharding("device"), spec.block_sharding("pinned_host")
        self._saved: list[jax.Array] = []
        self._pending: list[jax.Array] = []
        self._spec = spec
        self._gather = {size: compile_in_background(self._lower_gather, size) for size in sizes}
        self._scatter = {size: compile_in_background(self._lower_scatter, size) for size in sizes}

    def wait_until_compiled(self) -> None:
        """Blocks until every program is compiled; raises what compiling one raised."""
        for future in [*self._gather.values(), *self._scatter.values()]:
            future.result()

    def _lower_gather(self, size: int) -> Any:
        gather = jax.jit(_gather_and_split, out_shardings=self._on_device)
        return gather.lower(self._spec.cache_structs(), self._spec.ids_struct(size))

    def _lower_scatter(self, size: int) -> Any:
        spec = self._spec
        shape = (1, spec.num_layers, *spec.page_shape)
        block = jax.ShapeDtypeStruct(shape, spec.dtype, sharding=self._on_device)
        structs = spec.cache_structs()
        scatter = jax.jit(_scatter, donate_argnums=0, out_shardings=[spec.cache_format] * len(structs))
        return scatter.lower(structs, [block] * size, spec.ids_struct(size))

    def dispatch(self, direction: Direction, caches: Caches, block_ids: list[int]) -> Caches:
        """See `Method`; a load takes what the last save of as many blocks left, and waits, as the peer does."""
        ids = np.array(block_ids, np.int32)
        if direction is Direction.SAVE:
            blocks = self._gather[len(ids)].result()(caches, ids)
            self._saved = self._pending = [jax.device_put(block, self._on_host) for block in blocks]
            return caches
        blocks = [jax.device_put(block, self._on_device) for block in self._saved]
        jax.block_until_ready(blocks)
        caches = self._scatter[len(ids)].result()(caches, blocks, ids)
        jax.block_until_ready(caches)
        return caches

    def finish(self, caches: Caches) -> Caches:
        """See `Method`."""
        jax.block_until_ready(self._pending)
        self._pending = []
        return caches


def _gather_and_split(caches: Any, ids: Any) -> Any:
    return jnp.split(jnp.stack([cache[ids] for cache in caches], axis=1), len(ids))


def _scatter(caches: Any, blocks: Any, ids: Any) -> Any:
    stacked = jnp.concatenate(blocks)
    return [cache.at[ids].set(stacked[:, i]) for i, cache in enumerate(caches)]
