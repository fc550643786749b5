"""The host tier's memory: pinned arrays that are allocated once, in segments, in the background.

Pinning runs at a few GB a second, and a host tier has hundreds, so it would hold up the start by
minutes. A thread of its own allocates one segment after the other; the thread that dispatches uses
those that are there, and reports how many chunks that makes. Nothing is freed before `close`, but a
program that fails may take a segment with it: that one is allocated again, and its chunks are lost.
"""

import logging
import math
import threading
import weakref
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from tpu_offload.errors import TransferError

_logger = logging.getLogger(__name__)

_GB = 2**30
_MAX_WAIT_S = 60.0  # for the segment at hand when the pool is closed; one takes a second or less

Segment = list[jax.Array]


def plan_segments(num_chunks: int, *, chunk_nbytes: int, segment_gb: float) -> tuple[int, int]:
    """Cuts the pool into segments of one size, so that one compiled program serves them all.

    Args:
      num_chunks: chunks in the pool.
      chunk_nbytes: bytes of host memory of one chunk in this process.
      segment_gb: a segment takes at most this much, but always holds one chunk.
    Returns:
      The number of segments, and the chunks in each. The last segment may have a few places more than
      the pool has chunks: fewer than there are segments.
    """
    if num_chunks == 0:
        return 0, 1
    most = max(1, int(segment_gb * _GB) // chunk_nbytes)
    num_segments = -(-num_chunks // most)
    chunks_per_segment = -(-num_chunks // num_segments)
    return -(-num_chunks // chunks_per_segment), chunks_per_segment


def plan_shared_segments(num_chunks: int, num_fitting: int, *, chunk_nbytes: int, segment_gb: float) -> tuple[int, int]:
    """Cuts the pool of one of several hosts that run the same programs: all cut it alike, whatever memory they have.

    The segments are those of the whole pool; a host with less memory has fewer of them.

    Args:
      num_chunks: chunks that the settings ask for, the same on every host.
      num_fitting: chunks that fit into this host's memory.
      chunk_nbytes: bytes of host memory of one chunk in this process.
      segment_gb: as in `plan_segments`.
    Returns:
      The number of segments on this host, which may be 0, and the chunks in each.
    """
    num_segments, chunks_per_segment = plan_segments(num_chunks, chunk_nbytes=chunk_nbytes, segment_gb=segment_gb)
    if num_fitting < num_chunks:
        num_segments = num_fitting // chunks_per_segment
    if num_chunks and not num_segments:
        _logger.warning(
            "host memory for %d chunks is less than one segment of %d chunks (%.3g GB), and hosts that share a model "
            "cut their host pools alike: nothing is offloaded; set TPU_OFFLOAD_HOST_SEGMENT_GB to less than %.3g on "
            "all of them",
            num_fitting, chunks_per_segment,
            chunks_per_segment * chunk_nbytes / _GB, num_fitting * chunk_nbytes / _GB,
        )  # fmt: skip
    return num_segments, chunks_per_segment


def pinned_zeros(struct: jax.ShapeDtypeStruct) -> jax.Array:
    """A new array of zeros in host memory that later programs can update in place.

    Every device's shard is put from host zeros to that device's pinned memory: a jitted `zeros` would
    fill HBM first, and a sharded `device_put` would compare the value across hosts. The source is one
    shard of untouched pages, which take no memory.

    Args:
      struct: shape, dtype, and a sharding of the memory kind `pinned_host`.
    """
    sharding = struct.sharding
    shard = _unshareable_zeros(sharding.shard_shape(struct.shape), struct.dtype)
    shards = [
        jax.device_put(shard, SingleDeviceSharding(device, memory_kind=sharding.memory_kind))
        for device in sorted(sharding.addressable_devices, key=lambda device: device.id)
    ]
    array = jax.make_array_from_single_device_arrays(struct.shape, sharding, shards)
    array.block_until_ready()
    return array


def _unshareable_zeros(shape: tuple[int, ...], dtype: Any) -> np.ndarray[Any, Any]:
    """Zeros at an address that is no multiple of 64, so that the CPU backend copies them.

    It shares memory with a numpy array that is aligned to 64 bytes, `may_alias=False` or not (jax
    0.11.2), and then the first program that is given the array to donate copies all of it instead.
    """
    nbytes = math.prod(shape) * np.dtype(dtype).itemsize
    raw = np.zeros(nbytes + 128, np.uint8)
    start = -raw.ctypes.data % 64 + 16
    zeros: np.ndarray[Any, Any] = raw[start : start + nbytes].view(dtype).reshape(shape)
    return zeros


class HostPool:
    """Segments of pinned host memory, each a list of arrays that programs donate and replace.

    Only the dispatch thread may call; the threads that allocate only add.

    Args:
      segment: shapes, dtypes and shardings of the parts of one segment, each `[blocks, layers, *page_shape]`.
      num_segments: how many to allocate.
      chunks_per_segment: whole chunks in one segment.
      num_chunks: chunks in all; at most `num_segments * chunks_per_segment`.
    """

    def __init__(
        self, segment: Sequence[jax.ShapeDtypeStruct], *, num_segments: int, chunks_per_segment: int, num_chunks: int
    ) -> None:
        self._chunks_per_segment = chunks_per_segment
        self._num_chunks = num_chunks
        self._structs = tuple(segment)
        self._segments: list[Segment] = []
        self._lost: set[int] = set()
        self._lost_untold: list[tuple[int, int]] = []
        self._rebuilt: dict[int, Segment] = {}  # written by the thread that rebuilds
        self._stop = threading.Event()
        # The thread holds no reference to the pool, so that a pool that nobody closed ends it when it is
        # collected; a daemon, so that an engine that exits does not first wait for memory it will not use.
        self._thread = threading.Thread(
            target=_allocate,
            args=(self._structs, num_segments, self._segments, self._stop),
            name="tpu_offload-host-pool",
            daemon=True,
        )
        self._finalizer = weakref.finalize(self, _end, self._thread, self._stop, self._segments)
        self._thread.start()

    @property
    def num_chunks_ready(self) -> int:
        """Chunks whose memory is there; grows to the size of the pool."""
        return min(len(self._segments) * self._chunks_per_segment, self._num_chunks)

    @property
    def growing(self) -> bool:
        """Whether more memory is still being allocated."""
        return self._thread.is_alive()

    def wait_until_allocated(self) -> None:
        """Blocks until every segment is there or allocation has failed; for benchmarks and tests."""
        self._thread.join()

    def segment(self, segment_id: int) -> Segment:
        """The current arrays of a segment; they may be donated if their successors go to `replace`.

        Raises:
          TransferError: it is not allocated, or lost.
        """
        if segment_id in self._lost:
            if segment_id not in self._rebuilt:
                raise TransferError(
                    f"host pool segment {segment_id} was lost to a save that failed; chunks {self._range(segment_id)} "
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
        """Puts the arrays that a program made of a donated segment in their place."""
        self._segments[segment_id] = segment

    def mark_lost(self, segment_id: int) -> None:
        """Gives a segment up whose arrays were donated to a program that failed, and allocates it anew.

        Zeros stand where its bytes were; `take_lost` says so once, before anyone may read them.
        """
        if segment_id in self._lost:
            return
        _logger.error("host pool segment %d (chunks %s) is lost", segment_id, self._range(segment_id))
        self._lost.add(segment_id)
        first = segment_id * self._chunks_per_segment
        self._lost_untold.append((first, min(first + self._chunks_per_segment, self._num_chunks)))
        threading.Thread(
            target=_rebuild, args=(self._structs, segment_id, self._rebuilt), name="tpu_offload-rebuild", daemon=True
        ).start()

    def take_lost(self) -> tuple[tuple[int, int], ...]:
        """Ranges (first, end) of chunks lost since the last call."""
        lost, self._lost_untold = tuple(self._lost_untold), []
        return lost

    def close(self) -> None:
        """Stops allocating, after the segment at hand, and frees the memory. Calling it again does nothing."""
        self._finalizer()

    def _range(self, segment_id: int) -> str:
        first = segment_id * self._chunks_per_segment
        return f"{first} to {min(first + self._chunks_per_segment, self._num_chunks) - 1}"


def _allocate(
    structs: Sequence[jax.ShapeDtypeStruct], num_segments: int, segments: list[Segment], stop: threading.Event
) -> None:
    """Appends segments until all are there, one cannot be had, or `stop` is set."""
    for i in range(num_segments):
        if stop.is_set():
            return
        try:
            segments.append([pinned_zeros(struct) for struct in structs])
        except (MemoryError, RuntimeError) as e:  # jax's errors of the runtime are RuntimeErrors
            reason = str(e).splitlines()[0] if str(e) else type(e).__name__
            _logger.warning(
                "host pool: segment %d of %d could not be allocated (%s); going on with %d",
                i + 1,
                num_segments,
                reason,
                i,
            )
            return


def _rebuild(structs: Sequence[jax.ShapeDtypeStruct], segment_id: int, rebuilt: dict[int, Segment]) -> None:
    try:
        rebuilt[segment_id] = [pinned_zeros(struct) for struct in structs]
    except (MemoryError, RuntimeError) as e:
        _logger.error("host pool: segment %d could not be allocated again (%s)", segment_id, e)


def _end(thread: threading.Thread, stop: threading.Event, segments: list[Segment]) -> None:
    stop.set()
    if thread is not threading.current_thread():
        thread.join(_MAX_WAIT_S)
        if thread.is_alive():
            _logger.error("host pool: closed while a segment is being allocated for more than %g s", _MAX_WAIT_S)
    segments.clear()
