"""Ways to move blocks that can be timed side by side, and a model step for them to get in the way of.

`WorkerCopies` is the library itself. `PeerCopies` is the method of tpu-inference's connector. `Memcpy` and
`BusCopies` are what the machine can do at all: the former on a CPU, where "HBM" is memory of the host,
the latter on an accelerator.
"""

import concurrent.futures
import dataclasses
import functools
import math
import time
from collections.abc import Sequence
from typing import Any, Protocol, final

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from tpu_offload.config import OffloadConfig
from tpu_offload.errors import InputError, TransferError
from tpu_offload.kernels import TransferSpec
from tpu_offload.layout import KVLayout
from tpu_offload.types import Direction, JobState, StepPlan, TransferJob
from tpu_offload.worker import OffloadWorker

Caches = list[jax.Array]

_ALLOCATION_TIMEOUT_S = 60.0
_BUS_ROW = 1024  # u32 of one row; 4 KiB, the tile of a TPU


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
    """

    def __init__(self, config: OffloadConfig, caches: Caches) -> None:
        layout = KVLayout.from_caches(caches, block_size=caches[0].shape[1])
        self.worker = OffloadWorker(config, layout, caches)
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
        jobs = (TransferJob(self._next_id, direction, 0, tuple(block_ids), tuple(places)),)
        return StepPlan(self._next_id, saves=jobs) if direction is Direction.SAVE else StepPlan(self._next_id, jobs)

    def idle_plan(self) -> StepPlan:
        """A plan with nothing in it."""
        self._next_id += 1
        return StepPlan(self._next_id)

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
        self._on_device, self._on_host = spec.pool_sharding("device"), spec.pool_sharding("pinned_host")
        self._saved: list[jax.Array] = []
        self._pending: list[jax.Array] = []
        self._spec = spec
        self._threads = concurrent.futures.ThreadPoolExecutor(2 * len(sizes), "peer-compile")
        self._gather = {size: self._threads.submit(self._compile_gather, size) for size in sizes}
        self._scatter = {size: self._threads.submit(self._compile_scatter, size) for size in sizes}

    def wait_until_compiled(self) -> None:
        """Blocks until every program is compiled; raises what compiling one raised."""
        for future in [*self._gather.values(), *self._scatter.values()]:
            future.result()
        self._threads.shutdown()

    def _compile_gather(self, size: int) -> Any:
        gather = jax.jit(_gather_and_split, out_shardings=self._on_device)
        return gather.lower(self._spec.cache_structs(), self._spec.ids_struct(size)).compile()

    def _compile_scatter(self, size: int) -> Any:
        spec = self._spec
        shape = (1, spec.num_layers, *spec.page_shape)
        block = jax.ShapeDtypeStruct(shape, spec.dtype, sharding=self._on_device)
        structs = spec.cache_structs()
        scatter = jax.jit(_scatter, donate_argnums=0, out_shardings=[struct.sharding for struct in structs])
        return scatter.lower(structs, [block] * size, spec.ids_struct(size)).compile()

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


@final
class Memcpy:
    """The limit on a CPU: `np.copyto` between two old buffers that are walked, so that they are not hot.

    Args:
      nbytes: size of each buffer.
      job_nbytes: bytes to copy for one block.
    """

    def __init__(self, *, nbytes: int, job_nbytes: int) -> None:
        self._source, self._target = np.ones(nbytes, np.uint8), np.ones(nbytes, np.uint8)
        self._job_nbytes = job_nbytes
        self._start = 0

    def dispatch(self, direction: Direction, caches: Caches, block_ids: list[int]) -> Caches:
        """See `Method`; both directions are the same."""
        nbytes = len(block_ids) * self._job_nbytes
        if self._start + nbytes > len(self._source):
            self._start = 0
        part = slice(self._start, self._start + nbytes)
        np.copyto(self._target[part], self._source[part])
        self._start += nbytes
        return caches

    def finish(self, caches: Caches) -> Caches:
        """See `Method`; nothing is left to wait for."""
        return caches


@final
class BusCopies:
    """The limit on an accelerator: one copy of as many contiguous bytes, from or to donated pinned memory.

    Args:
      caches: their devices are used.
      block_nbytes_per_device: bytes of one block on each of them.
    """

    def __init__(self, caches: Caches, *, block_nbytes_per_device: int) -> None:
        self._mesh = Mesh(np.array(list(caches[0].sharding.device_set)), ("device",))
        self._block_nbytes = block_nbytes_per_device
        self._buffers: dict[int, dict[str, jax.Array]] = {}
        self._pending: jax.Array | None = None

    def dispatch(self, direction: Direction, caches: Caches, block_ids: list[int]) -> Caches:
        """See `Method`; the caches are not touched."""
        num_rows = -(-len(block_ids) * self._block_nbytes // (4 * _BUS_ROW))
        if num_rows not in self._buffers:
            self._buffers = {num_rows: {kind: self._make(kind, num_rows) for kind in ("device", "pinned_host")}}
        buffers = self._buffers[num_rows]
        source, target = ("device", "pinned_host") if direction is Direction.SAVE else ("pinned_host", "device")
        buffers[target] = self._pending = self._copy(target)(buffers[target], buffers[source])
        return caches

    def finish(self, caches: Caches) -> Caches:
        """See `Method`."""
        jax.block_until_ready(self._pending)
        return caches

    def _sharding(self, kind: str) -> Sharding:
        return NamedSharding(self._mesh, PartitionSpec("device"), memory_kind=kind)

    def _make(self, kind: str, num_rows: int) -> jax.Array:
        shape = (self._mesh.size * num_rows, _BUS_ROW)
        make = jax.jit(lambda: jnp.zeros(shape, jnp.uint32), out_shardings=self._sharding("device"))
        zeros: jax.Array = jax.device_put(make(), self._sharding(kind))
        return zeros

    @functools.cache  # noqa: B019  (two entries, and the instance lives as long as the command)
    def _copy(self, kind: str) -> Any:
        space = jax.memory.Space.Device if kind == "device" else jax.memory.Space.Host

        def copy(target: Any, source: Any) -> Any:
            return jax.device_put(source, space)

        # Unused as it is, the target has to stay an argument to be the memory that is written.
        return jax.jit(copy, donate_argnums=0, keep_unused=True, out_shardings=self._sharding(kind))


@final
class ModelStep:
    """Stands for a forward pass: a chain of matmuls of some milliseconds that reads and writes the caches.

    Args:
      caches: what a step is compiled for.
      target_s: how long a step is to take, about.
    """

    def __init__(self, caches: Caches, *, target_s: float) -> None:
        spec = TransferSpec.from_caches(caches, segment_blocks=1, capacity=1)
        shardings = [cache.sharding for cache in caches]
        self._run = jax.jit(_chain, donate_argnums=3, out_shardings=(spec.replicated, shardings))
        width = 256 if spec.platform == "cpu" else 2048  # one matmul is well under a millisecond
        self._weights = jax.device_put(jnp.full((width, width), 1 / width, jnp.bfloat16), spec.replicated)
        self._x = self._weights
        self._num_matmuls = 1
        self._target_s = target_s

    def calibrate(self, caches: Caches) -> Caches:
        """Finds out how many matmuls take as long as wanted; compiles the step."""
        caches = self(caches)  # compiles
        for _ in range(8):
            start_s = time.perf_counter()
            caches = self(caches)
            seconds = time.perf_counter() - start_s
            if seconds >= self._target_s / 2:
                self._num_matmuls = max(1, round(self._num_matmuls * self._target_s / seconds))
                break
            self._num_matmuls *= 4
        return caches

    def dispatch(self, caches: Caches) -> Caches:
        """Starts one step; donates the caches."""
        self._x, caches = self._run(self._num_matmuls, self._x, self._weights, caches)
        return caches

    def wait(self) -> None:
        """Waits for what the last step computed, as an engine does for its tokens."""
        self._x.block_until_ready()

    def __call__(self, caches: Caches) -> Caches:
        """Runs one step and waits for it; donates the caches."""
        caches = self.dispatch(caches)
        self.wait()
        return caches


def _chain(num_matmuls: Any, x: Any, weights: Any, caches: Any) -> Any:
    x = lax.fori_loop(0, num_matmuls, lambda _, x: jnp.tanh(x @ weights), x)
    out = []
    for cache in caches:
        page = lax.dynamic_slice_in_dim(cache, 0, 1, axis=0)
        page = (page.astype(jnp.float32) + x[0, 0].astype(jnp.float32)).astype(cache.dtype)
        out.append(lax.dynamic_update_slice_in_dim(cache, page, 0, axis=0))
    return x, out
