"""Baselines of the copy measurements: the machine's limit, jax's floor, and the peer's method.

`Memcpy` is the limit on a CPU, where "HBM" is host memory; `BusCopies` is the limit on an accelerator. `ProgramCopies`
are the programs of the direct path without the library around them, and with nothing to copy: below that no jax program
comes. `PeerCopies` is the method of tpu-inference's connector.
"""

import functools
from collections.abc import Sequence
from typing import Any, Protocol, final

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from tpu_offload.kernels import BlockMoves, Copier, Flight, TransferSpec
from tpu_offload.measure.compiling import compile_in_background
from tpu_offload.types import Direction

Caches = list[jax.Array]

_BUS_ROW = 1024  # u32 elements in a row: 4 KiB, the tile of a TPU


class Method(Protocol):
    """A way to move blocks without jobs."""

    def dispatch(self, direction: Direction, caches: Caches, block_ids: list[int]) -> Caches:
        """Starts a copy, as far as the method can without waiting; may donate the caches."""

    def finish(self, caches: Caches) -> Caches:
        """Waits for the copy that `dispatch` started."""


@final
class Memcpy:
    """The limit on a CPU: `np.copyto` between two reused buffers, walked through so that they are not in the CPU's
    cache.

    Args:
      nbytes: size of each buffer.
      job_nbytes: bytes to copy per block.

    Attributes:
      source: u8[nbytes].
      target: u8[nbytes].
    """

    def __init__(self, *, nbytes: int, job_nbytes: int) -> None:
        self.source, self.target = np.ones(nbytes, np.uint8), np.ones(nbytes, np.uint8)
        self._job_nbytes = job_nbytes
        self._start = 0

    def dispatch(self, direction: Direction, caches: Caches, block_ids: list[int]) -> Caches:
        """See `Method`; both directions are equal."""
        nbytes = len(block_ids) * self._job_nbytes
        if self._start + nbytes > len(self.source):
            self._start = 0
        part = slice(self._start, self._start + nbytes)
        np.copyto(self.target[part], self.source[part])
        self._start += nbytes
        return caches

    def finish(self, caches: Caches) -> Caches:
        """See `Method`; the copy has finished already."""
        return caches


@final
class BusCopies:
    """The limit on an accelerator: one contiguous copy of the same size, from or to donated pinned memory.

    Args:
      caches: the copies use their devices.
      block_nbytes_per_device: bytes of one block on each device.
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

        # The target is unused in the program, but must stay an argument: the output is written to its memory.
        return jax.jit(copy, donate_argnums=0, keep_unused=True, out_shardings=self._sharding(kind))


@final
class ProgramCopies:
    """The program of a copier by itself, without jobs: their checks, their bookkeeping and their reports.

    It is called once for each portion of a job that is larger than its capacity.

    It cycles through the positions of the segment, as `WorkerCopies` does.

    Args:
      copier: the one whose copies are measured, so that the programs and their arguments are the same.
      segment_blocks: blocks in its first segment; 0 copies no blocks. What is left then is what jax takes to start a
        program with all of its arguments, and to tell that it has ended.
    """

    def __init__(self, copier: Copier, *, segment_blocks: int) -> None:
        self._copier = copier
        self._segment_blocks = segment_blocks
        self._next_place = 0
        self._flight: Flight | None = None

    def dispatch(self, direction: Direction, caches: Caches, block_ids: list[int]) -> Caches:
        """See `Method`."""
        moves = self._moves(block_ids if self._segment_blocks else [])
        for portion in self._copier.split(moves) or [moves]:  # programs of a device end in their order
            if direction is Direction.SAVE:
                self._flight = self._copier.save(0, portion, caches)
            else:
                self._flight, caches = self._copier.load(0, portion, list(caches))
        return caches

    def _moves(self, block_ids: list[int]) -> BlockMoves:
        num_blocks = len(block_ids)
        if self._next_place + num_blocks > self._segment_blocks:
            self._next_place = 0
        places = np.arange(self._next_place, self._next_place + num_blocks, dtype=np.int32)
        self._next_place += num_blocks
        return BlockMoves(np.zeros(num_blocks, np.int64), np.array(block_ids, np.int32), places)

    def finish(self, caches: Caches) -> Caches:
        """See `Method`."""
        assert self._flight is not None, "nothing was dispatched"
        self._flight.waiting_on.block_until_ready()
        return caches


@final
class PeerCopies:
    """Saves by a gather, a split and one `device_put` per block; loads by one `device_put` per block and a scatter.

    Its programs are compiled on background threads from the start: for jobs of 64 blocks and 32 layers the TPU compiler
    takes half a minute for each, and a few seconds for a program of the library.

    Args:
      caches: per layer, dtype[num_blocks, *page_shape]; only shapes and shardings are kept.
      sizes: all job sizes that will be measured, in blocks.
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
        """Blocks until all programs are compiled; re-raises a compilation's exception."""
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
        """See `Method`; a load copies what the last save of the same size saved, and waits for it, as the peer does."""
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
