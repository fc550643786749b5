"""Chooses the path of chunks and states between the host tier and payloads; nothing else does.

Which one is faster depends on the machine: a call of the host's CPU in the device's queue, or two DMAs over the bus. So
off the CPU backend each path that may be used is tried at the start, on a small segment: every bit has to be right, and
the path that takes the least time is used.
"""

import dataclasses
import itertools
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from tpu_offload.config import StorageCopyPath
from tpu_offload.errors import CompileError, ConfigError, TransferError
from tpu_offload.kernels.copier import ArenaView, Segment
from tpu_offload.kernels.payload_paths import SLOT_PATHS, SlotPath
from tpu_offload.kernels.payloads import SlotCopier
from tpu_offload.kernels.spec import TransferSpec

_logger = logging.getLogger(__name__)

_PROBED_SLOTS = 3  # one that is written again, between two that must not change
NUM_TIMED = 5
_CANNOT = "chunks cannot go to and from storage by the %s path: %s"

Allocate = Callable[[jax.ShapeDtypeStruct], jax.Array]
Clock = Callable[[], float]


def make_slot_copiers(
    wanted: StorageCopyPath,
    pools: Sequence[Sequence[tuple[TransferSpec, ArenaView, int]]],
    *,
    allocate: Allocate,
    precompile: bool,
) -> list[list[SlotCopier]]:
    """Chooses the path, and makes the copiers of a process; logs the choice.

    On the CPU backend, and without `precompile`, nothing is tried: `auto` is `host` then.

    Args:
      wanted: the setting.
      pools: per data-parallel rank and page group, what a segment holds, the segments, and the blocks in a slot; of
        states, one row. What is tried is the first rank's.
      allocate: allocates zeros in pinned host memory that can be donated.
      precompile: whether to compile now; else on first use.
    Returns:
      The copiers, per rank and page group.
    Raises:
      ConfigError: none of the paths that may be used compiles and copies every bit.
      CompileError: where nothing is tried, the compiler rejects the programs.
    """

    def make(path: type[SlotPath]) -> list[list[SlotCopier]]:
        copiers = [
            [SlotCopier(spec, arena, blocks_per_slot=size, path=path) for spec, arena, size in of_rank]
            for of_rank in pools
        ]
        if precompile:
            for copier in itertools.chain.from_iterable(copiers):
                copier.compile()
        return copiers

    paths = [path for path in SLOT_PATHS if wanted in (StorageCopyPath.AUTO, path.path)]
    tried = [(spec, size) for spec, _, size in pools[0]]
    if not precompile or tried[0][0].platform == "cpu":
        return make(paths[0])
    seconds = rank_slot_paths(paths, tried, allocate=allocate)
    times = ", ".join(f"{path.path.value} {1e3 * seconds[path]:.3g} ms" for path in seconds)
    for path in seconds:
        try:
            copiers = make(path)
        except CompileError as e:  # for the full size; what was tried is smaller
            _logger.warning(_CANNOT, path.path.value, e)
            continue
        _logger.info("storage copies use the %s path; measured times of a round trip: %s", path.path.value, times)
        return copiers
    raise ConfigError(
        f"TPU_OFFLOAD_STORAGE_COPY_PATH={wanted.value}: no such path copies chunks of the host tier on this device, "
        "see the warnings before; expected auto, host or hbm: set another, or leave TPU_OFFLOAD_STORAGE_TIER empty"
    )


def rank_slot_paths(
    paths: Sequence[type[SlotPath]],
    specs: Sequence[tuple[TransferSpec, int]],
    *,
    allocate: Allocate,
    clock: Clock = time.perf_counter,
) -> dict[type[SlotPath], float]:
    """Tries the paths on small segments.

    Args:
      paths: what to try.
      specs: per page group, what a segment holds, and the blocks in a slot; the times are added.
      allocate: allocates zeros in pinned host memory that can be donated.
      clock: seconds.
    Returns:
      Those that copy every bit, the fastest first, with the seconds that one slot of each page group takes out of a
      segment and back.
    """
    seconds: dict[type[SlotPath], float] = {}
    for path in paths:
        try:
            seconds[path] = sum(_try(path, spec, size, allocate, clock) for spec, size in specs)
        except Exception as e:  # a path that fails in any way is not used; the other may do
            _logger.warning(_CANNOT, path.path.value, next(iter(str(e).splitlines()), type(e).__name__))
    return dict(sorted(seconds.items(), key=lambda item: item[1]))


class _OneSegment:
    """An arena with one segment."""

    def __init__(self, segment: Segment) -> None:
        self._segment = segment

    def segment(self, segment_id: int) -> Segment:
        return self._segment

    def replace(self, segment_id: int, segment: Segment) -> None:
        self._segment = segment


def _try(path: type[SlotPath], spec: TransferSpec, size: int, allocate: Allocate, clock: Clock) -> float:
    """Seconds of a slot's way out of a segment and back; TransferError unless all bits are as they should be."""
    spec = dataclasses.replace(spec, segment_blocks=_PROBED_SLOTS * size)
    arena = _OneSegment([allocate(struct) for struct in spec.segment_structs()])
    copier = SlotCopier(spec, arena, blocks_per_slot=size, path=path)
    rng = np.random.default_rng(0)
    expected = [rng.integers(0, 256, copier.payload_nbytes, dtype=np.uint8) for _ in range(_PROBED_SLOTS)]

    def write(slot: int, data: Any) -> None:
        token = int(copier.write(0, slot * size, copier.unpack(data)))
        if token != (slot + 1) * size:
            raise TransferError(f"a copy into the host tier ended at block {token}")

    for slot in (1, *range(_PROBED_SLOTS)):  # slot 1 is written again, between its neighbours
        write(slot, expected[slot] if slot != 1 else expected[1] ^ np.uint8(255))
    write(1, expected[1])
    payload = copier.read(0, size)
    write(1, expected[0])  # it must not change what was read before
    found = [copier.read(0, slot * size) for slot in (0, 2)]
    data = np.empty_like(expected[0])
    for which, got in ((1, payload), (0, found[0]), (2, found[1])):
        copier.pack(got, data)
        if not np.array_equal(data, expected[which]):
            raise TransferError("the bytes of a slot changed on their way")
    return min(_time(copier, size, clock) for _ in range(NUM_TIMED))


def _time(copier: SlotCopier, first: int, clock: Clock) -> float:
    start_s = clock()
    payload = copier.read(0, first)
    copier.write(0, first, payload).block_until_ready()
    return clock() - start_s
