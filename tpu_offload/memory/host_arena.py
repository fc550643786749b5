"""Pinned host memory, allocated once, in segments, in the background. Holds the host tier, or the swap pool.

Pinning runs at a few GB/s and a host tier has hundreds of GB, so allocating it up front would delay engine start by
minutes. A background thread allocates one segment after another; the dispatch thread uses those that are ready and
reports how many chunks they hold. Before `close` nothing is freed but the last segments, where two pools share memory
by use (`HostArena.grow`, `HostArena.free_from`). A program that fails may destroy the segment that
was donated to it: that segment is allocated again, and its chunks are lost.
"""

import dataclasses
import logging
import math
import sys
import threading
import weakref
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from tpu_offload.errors import MORE_THREADS, TransferError

_logger = logging.getLogger(__name__)

_GB = 2**30
_MAX_WAIT_S = 60.0  # `close` waits this long for the segment being allocated; one takes a second or less

Segment = list[jax.Array]


def plan_segments(num_chunks: int, *, chunk_nbytes: int, segment_gb: float) -> tuple[int, int]:
    """Splits the pool into segments of equal size, so that one compiled program serves all of them.

    Args:
      num_chunks: chunks in the pool.
      chunk_nbytes: bytes of host memory of one chunk in this process.
      segment_gb: maximum size of a segment; a segment holds at least one chunk.
    Returns:
      The number of segments, and the chunks in each. The last segment may have unused slots, fewer than there are
      segments.
    """
    if num_chunks == 0:
        return 0, 1
    most = max(1, int(segment_gb * _GB) // chunk_nbytes)
    num_segments = -(-num_chunks // most)
    chunks_per_segment = -(-num_chunks // num_segments)
    return -(-num_chunks // chunks_per_segment), chunks_per_segment


def plan_shared_segments(num_chunks: int, num_fitting: int, *, chunk_nbytes: int, segment_gb: float) -> tuple[int, int]:
    """Splits the pool on hosts that run the same programs: equal segments on all hosts, even if one has less memory.

    The segment size is that of the full pool; a host with less memory has fewer segments.

    Args:
      num_chunks: configured chunks, the same on every host.
      num_fitting: chunks that fit into this host's memory.
      chunk_nbytes: bytes of host memory of one chunk in this process.
      segment_gb: as in `plan_segments`.
    Returns:
      The number of segments on this host (may be 0), and the chunks in each.
    """
    num_segments, chunks_per_segment = plan_segments(num_chunks, chunk_nbytes=chunk_nbytes, segment_gb=segment_gb)
    if num_fitting < num_chunks:
        num_segments = num_fitting // chunks_per_segment
    if num_chunks and not num_segments:
        _warn_of_less_than_a_segment(num_fitting, chunks_per_segment, chunk_nbytes=chunk_nbytes)
    return num_segments, chunks_per_segment


def _warn_of_less_than_a_segment(num_fitting: int, chunks_per_segment: int, *, chunk_nbytes: int) -> None:
    _logger.warning(
        "host memory for %d chunks is less than one segment of %d chunks (%.3g GB), and hosts that share a model must "
        "have equal segments: nothing is offloaded; set TPU_OFFLOAD_HOST_SEGMENT_GB to less than %.3g on all of them",
        num_fitting, chunks_per_segment, chunks_per_segment * chunk_nbytes / _GB, num_fitting * chunk_nbytes / _GB,
    )  # fmt: skip


def pinned_zeros(struct: jax.ShapeDtypeStruct) -> jax.Array:
    """Allocates zeros in pinned host memory that later programs can update in place.

    Each device's shard is put there from host zeros: a jitted `zeros` would fill HBM first, and a sharded `device_put`
    would compare the value across hosts. The source is one shard of untouched pages, which take no memory.

    Args:
      struct: shape, dtype, and a sharding with memory kind `pinned_host`.
    """
    sharding = struct.sharding
    shard = unshareable_zeros(sharding.shard_shape(struct.shape), struct.dtype)
    shards = [
        jax.device_put(shard, SingleDeviceSharding(device, memory_kind=sharding.memory_kind))
        for device in sorted(sharding.addressable_devices, key=lambda device: device.id)
    ]
    array = jax.make_array_from_single_device_arrays(struct.shape, sharding, shards)
    array.block_until_ready()
    return array


def unshareable_zeros(shape: tuple[int, ...], dtype: Any) -> np.ndarray[Any, Any]:
    """Zeros at an address that is not a multiple of 64, so that the CPU backend copies them.

    The CPU backend aliases numpy arrays that are aligned to 64 bytes, even with `may_alias=False` (jax 0.11.2). An
    aliased array cannot be donated: the first program that tries copies all of it.
    """
    nbytes = math.prod(shape) * np.dtype(dtype).itemsize
    raw = np.zeros(nbytes + 128, np.uint8)
    start = -raw.ctypes.data % 64 + 16
    zeros: np.ndarray[Any, Any] = raw[start : start + nbytes].view(dtype).reshape(shape)
    return zeros


@dataclasses.dataclass(slots=True)
class SegmentLimit:
    """How many segments arenas that belong together may have; lowered when memory or threads run out.

    Attributes:
      num_segments: that many.
      has_failed: a segment could not be allocated; nothing allocates any more then.
    """

    num_segments: int = sys.maxsize
    has_failed: bool = False


class HostArena:
    """Segments of pinned host memory, each a list of arrays that programs take by donation and replace.

    All calls must come from the dispatch thread; the allocating threads only append.

    Args:
      segment: shapes, dtypes and shardings of the stripes of one segment, each `[blocks, layers, *page_shape]`.
      num_segments: segments to allocate; `grow` adds more.
      chunks_per_segment: chunks in one segment.
      num_chunks: chunks in total, those that `grow` may add included.
      limit: shared by arenas that are only usable together: where one cannot allocate, the others stop.
    """

    def __init__(
        self,
        segment: Sequence[jax.ShapeDtypeStruct],
        *,
        num_segments: int,
        chunks_per_segment: int,
        num_chunks: int,
        limit: SegmentLimit | None = None,
    ) -> None:
        self._chunks_per_segment = chunks_per_segment
        self._num_chunks = num_chunks
        self._structs = tuple(segment)
        self._segments: list[Segment] = []
        self._lost: set[int] = set()
        self._unreported_losses: list[tuple[int, int]] = []
        self._rebuilt: dict[int, Segment] = {}  # written by the rebuilding threads
        self._rebuilds: dict[int, threading.Thread] = {}  # the last one of each segment
        self._stop = threading.Event()
        self._limit = limit or SegmentLimit()
        self._threads: list[threading.Thread] = []  # the one that allocates, or has; none if it could not start
        self._finalizer = weakref.finalize(self, _end, self._threads, self._stop, self._segments)
        self.grow(num_segments)

    @property
    def num_chunks_ready(self) -> int:
        """Chunks whose memory is allocated; grows to `num_chunks`."""
        return min(len(self._segments) * self._chunks_per_segment, self._num_chunks)

    @property
    def num_segments_ready(self) -> int:
        """Segments that are allocated."""
        return len(self._segments)

    @property
    def growing(self) -> bool:
        """Whether more memory is still being allocated."""
        return any(thread.is_alive() for thread in self._threads)

    def wait_until_allocated(self) -> None:
        """Blocks until every segment is allocated or allocation has failed; for benchmarks and tests."""
        for thread in self._threads:
            thread.join()

    def grow(self, num_segments: int) -> None:
        """Allocates segments in the background until there are `num_segments`. Not while it is `growing`."""
        if len(self._segments) >= num_segments:
            return
        # The thread holds no reference to the arena, so that an arena that was never closed stops it when collected.
        # It is a daemon, so that an exiting engine does not wait for memory that it will not use.
        thread = threading.Thread(
            target=_allocate,
            args=(self._structs, num_segments, self._segments, self._stop, self._limit),
            name="tpu_offload-host-pool",
            daemon=True,
        )
        try:
            thread.start()
        except RuntimeError as e:  # the limit of threads, on which no engine should end
            _stop_growing(self._limit, len(self._segments), num_segments, RuntimeError(f"{e}: {MORE_THREADS}"))
        else:
            self._threads[:] = [thread]

    def can_free(self, first: int) -> bool:
        """Whether no thread is allocating a segment, nor one from `first` on again."""
        return not (self.growing or any(i >= first and t.is_alive() for i, t in self._rebuilds.items()))

    def free_from(self, first: int) -> None:
        """Frees all segments from `first` on. `can_free` holds, and no copy in flight uses them."""
        for segment in (*self._segments[first:], *(s for i, s in self._rebuilt.items() if i >= first)):
            for stripe in segment:
                stripe.delete()
        del self._segments[first:]
        self._lost = {i for i in self._lost if i < first}
        for of_segment in (self._rebuilt, self._rebuilds):
            for i in [i for i in of_segment if i >= first]:
                del of_segment[i]

    def segment(self, segment_id: int) -> Segment:
        """The current arrays of a segment. They may be donated if their successors are passed to `replace`.

        Raises:
          TransferError: the segment is not allocated, or lost.
        """
        if segment_id in self._lost:
            if segment_id not in self._rebuilt:
                raise TransferError(
                    f"host pool segment {segment_id} was lost to a failed save; chunks {self._range(segment_id)} "
                    "cannot be used until it is allocated again"
                )
            self._segments[segment_id] = self._rebuilt.pop(segment_id)
            self._lost.remove(segment_id)
        if not 0 <= segment_id < len(self._segments):
            raise TransferError(
                f"host pool segment {segment_id} (chunks {self._range(segment_id)}) is not allocated; "
                f"{self.num_chunks_ready} chunks are ready"
            )
        return self._segments[segment_id]

    def replace(self, segment_id: int, segment: Segment) -> None:
        """Stores the arrays that a program returned for a donated segment."""
        self._segments[segment_id] = segment

    def mark_lost(self, segment_id: int) -> None:
        """Drops a segment whose arrays were donated to a program that failed, and allocates it again.

        The new segment holds zeros. `take_lost` reports the loss once, before anything may read them.
        """
        if segment_id in self._lost:
            return
        _logger.error("host pool segment %d (chunks %s) is lost", segment_id, self._range(segment_id))
        self._lost.add(segment_id)
        first = segment_id * self._chunks_per_segment
        self._unreported_losses.append((first, min(first + self._chunks_per_segment, self._num_chunks)))
        self._rebuilds[segment_id] = thread = threading.Thread(
            target=_rebuild, args=(self._structs, segment_id, self._rebuilt), name="tpu_offload-rebuild", daemon=True
        )
        try:
            thread.start()
        except RuntimeError as e:  # as in `grow`
            _log_lost(segment_id, RuntimeError(f"{e}: {MORE_THREADS}"))

    def take_lost(self) -> tuple[tuple[int, int], ...]:
        """Ranges (first, end) of chunks lost since the last call."""
        lost, self._unreported_losses = tuple(self._unreported_losses), []
        return lost

    def stop_growing(self) -> None:
        """Stops allocation after the current segment, without waiting for it."""
        self._stop.set()

    def close(self) -> None:
        """Stops allocation, waits for the current segment, and frees the memory. Idempotent."""
        self._finalizer()

    def _range(self, segment_id: int) -> str:
        first = segment_id * self._chunks_per_segment
        return f"{first} to {min(first + self._chunks_per_segment, self._num_chunks) - 1}"


def _allocate(
    structs: Sequence[jax.ShapeDtypeStruct],
    num_segments: int,
    segments: list[Segment],
    stop: threading.Event,
    limit: SegmentLimit,
) -> None:
    """Appends segments until all are allocated, an allocation fails here or at the same limit, or `stop` is set."""
    for i in range(len(segments), num_segments):
        if stop.is_set() or i >= limit.num_segments:
            return
        try:
            segments.append([pinned_zeros(struct) for struct in structs])
        except (MemoryError, RuntimeError) as e:  # JaxRuntimeError is a RuntimeError
            _stop_growing(limit, i, num_segments, e)
            return


def _stop_growing(limit: SegmentLimit, num_ready: int, num_segments: int, error: Exception) -> None:
    limit.num_segments, limit.has_failed = min(limit.num_segments, num_ready), True
    _logger.warning(
        "host pool: segment %d of %d could not be allocated (%s); continuing with %d",
        num_ready + 1,
        num_segments,
        _reason(error),
        num_ready,
    )


def _rebuild(structs: Sequence[jax.ShapeDtypeStruct], segment_id: int, rebuilt: dict[int, Segment]) -> None:
    try:
        rebuilt[segment_id] = [pinned_zeros(struct) for struct in structs]
    except (MemoryError, RuntimeError) as e:
        _log_lost(segment_id, e)


def _log_lost(segment_id: int, error: Exception) -> None:
    _logger.error(
        "host pool: segment %d could not be allocated again (%s): its copies fail until the engine restarts",
        segment_id,
        _reason(error),
    )


def _reason(error: Exception) -> str:
    """The first line of an error; its type if it has no text, like a MemoryError."""
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def _end(threads: list[threading.Thread], stop: threading.Event, segments: list[Segment]) -> None:
    stop.set()
    for thread in threads:
        if thread is not threading.current_thread():
            thread.join(_MAX_WAIT_S)
            if thread.is_alive():
                _logger.error("host pool: closed after %g s; a segment is still being allocated", _MAX_WAIT_S)
    segments.clear()
