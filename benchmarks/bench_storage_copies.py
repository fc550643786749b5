"""Ways of a chunk between a segment of the host pool and a page-aligned buffer for I/O, against one memcpy.

    python benchmarks/bench_storage_copies.py --sizes 1 4 16 --json copies.json

- `host`, `hbm`: the paths of `kernels.payload_paths`. The main thread dispatches a program that copies the slot to or
  from a payload, an I/O thread copies between the payload and its buffer.
- `address`: an I/O thread copies between its buffer and the memory of the segment, by its address; no program. The
  library does not do that (docs/transfers.md says why).
- `memcpy`: an I/O thread copies between two buffers.

Each round has every way in turn, in both directions. The stall is the longest gap of a main thread that does nothing
but dispatch and look at the clock.
"""

import ctypes
import queue
import statistics
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from common import Spread, count, in_turn, make_parser, print_table, write_json

from tpu_offload.kernels import SLOT_PATHS, SlotCopier, TransferSpec
from tpu_offload.memory import pinned_zeros

_MIB = 2**20
_NUM_SLOTS = 4
_PAGE_NBYTES = 4096
_DIRECTIONS = ("out", "in")

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Step = Callable[[int], Any]
"""A part of a copy of chunk `slot`; what it returns goes to the next part."""


class Arena:
    """One segment."""

    def __init__(self, spec: TransferSpec) -> None:
        self.now = [pinned_zeros(struct) for struct in spec.segment_structs()]

    def segment(self, segment_id: int) -> list[jax.Array]:
        return self.now

    def replace(self, segment_id: int, segment: list[jax.Array]) -> None:
        self.now = segment


class Way:
    """How a chunk is copied: what the main thread does before and after the I/O thread, in each direction."""

    def __init__(self, name: str, mib: int) -> None:
        cache = jax.ShapeDtypeStruct((4, 16, 8, 2, 128), np.dtype(jnp.bfloat16), sharding=_sharding())  # 64 KiB a page
        spec = TransferSpec.from_caches([cache] * 16, segment_blocks=_NUM_SLOTS * mib, capacity=1)
        self.name, self._mib = name, mib
        self._arena = Arena(spec)
        self._buffer, self._other = _aligned(mib * _MIB), _aligned(mib * _MIB)
        self._buffer[:] = np.random.default_rng(0).integers(0, 256, mib * _MIB, dtype=np.uint8)
        paths = {path.path.value: path for path in SLOT_PATHS}
        self._copier: SlotCopier | None = None
        if name in paths:
            self._copier = SlotCopier(spec, self._arena, blocks_per_slot=mib, path=paths[name])
            self._copier.compile()
        self._memory = [_view(shard.data) for shard in self._arena.now[0].addressable_shards]

    def check(self) -> None:
        """Raises unless a chunk comes back, and the segment is where it was."""
        expected = self._buffer.copy()
        self.run("in", 1)
        self._buffer[:] = 0
        self.run("out", 1)
        if not np.array_equal(self._buffer, expected) and self.name != "memcpy":
            raise AssertionError(f"{self.name}: other bytes came back")
        now = [shard.data.unsafe_buffer_pointer() for shard in self._arena.now[0].addressable_shards]
        if now != [memory.ctypes.data for memory in self._memory]:
            raise AssertionError(f"{self.name}: the segment has moved")
        self._buffer[:] = expected

    def run(self, direction: str, slot: int) -> None:
        """One chunk, on this thread."""
        before, io, after = self.steps(direction)
        token = after(slot, io(slot, before(slot)))
        if token is not None:
            token.block_until_ready()

    def steps(self, direction: str) -> tuple[Step, Callable[[int, Any], Any], Callable[[int, Any], Any]]:
        """What the main thread, the I/O thread, and the main thread again do."""
        copier, buffer = self._copier, self._buffer
        if copier is not None:
            if direction == "out":
                return (
                    lambda slot: copier.read(0, slot * self._mib),
                    lambda _, payload: copier.pack(payload, buffer),
                    lambda *_: None,
                )
            return (
                lambda _: None,
                lambda *_: copier.unpack(buffer),
                lambda slot, payload: copier.write(0, slot * self._mib, payload),
            )
        nbytes = self._mib * _MIB

        def copy(slot: int, _: Any) -> None:
            in_place = self.name == "address"
            there = self._memory[0][slot * nbytes : (slot + 1) * nbytes] if in_place else self._other
            np.copyto(*((buffer, there) if direction == "out" else (there, buffer)))

        return lambda _: None, copy, lambda *_: None


def measure(way: Way, direction: str, num_chunks: int, *, watch: bool) -> dict[str, float]:
    """Copies chunks one after another, with an I/O thread; with `watch` the main thread never sleeps.

    Returns:
      Seconds, CPU seconds, and the longest gap of the main thread in seconds.
    """
    before, io, after = way.steps(direction)
    asked: queue.SimpleQueue[Any] = queue.SimpleQueue()
    done: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def work() -> None:
        while (task := asked.get()) is not None:
            done.put(io(*task))

    thread = threading.Thread(target=work)
    thread.start()
    gap = 0.0
    start_s, cpu_s = time.perf_counter(), time.process_time()
    last_s = start_s

    def look() -> None:
        nonlocal gap, last_s
        now_s = time.perf_counter()
        gap, last_s = max(gap, now_s - last_s), now_s

    for i in range(num_chunks):
        slot = i % _NUM_SLOTS
        asked.put((slot, before(slot)))
        while watch and done.empty():
            look()
        token = after(slot, done.get())
        while watch and token is not None and not token.is_ready():
            look()
        if token is not None:
            token.block_until_ready()
        look()
    seconds, cpu_s = time.perf_counter() - start_s, time.process_time() - cpu_s
    asked.put(None)
    thread.join()
    return {"seconds": seconds, "cpu_s": cpu_s, "gap_s": gap}


def bench(mib: int, *, total_mib: int, num_rounds: int) -> list[dict[str, Any]]:
    """All ways and directions, round by round."""
    names = [*(path.path.value for path in SLOT_PATHS), "address", "memcpy"]
    ways = [Way(name, mib) for name in names]
    for way in ways:
        way.check()
    num_chunks = max(_NUM_SLOTS, total_mib // mib)
    found: dict[tuple[str, str], list[dict[str, float]]] = {}
    for i in range(num_rounds + 1):  # the first one warms up
        for direction in _DIRECTIONS:
            for way in in_turn(ways, i):
                result = measure(way, direction, num_chunks, watch=False)
                result["gap_s"] = measure(way, direction, num_chunks, watch=True)["gap_s"]
                if i:
                    found.setdefault((direction, way.name), []).append(result)
    gib = num_chunks * mib / 1024
    return [
        {
            "chunk_mib": mib,
            "direction": direction,
            "way": name,
            "of_memcpy": Spread.of(
                memcpy["seconds"] / result["seconds"]
                for memcpy, result in zip(found[direction, "memcpy"], results, strict=True)
            ),
            "gib_per_s": statistics.median(gib / result["seconds"] for result in results),
            "cpu_s_per_gib": Spread.of(result["cpu_s"] / gib for result in results),
            "stall_ms": Spread.of((result["gap_s"] for result in results), scale=1e3),
        }
        for (direction, name), results in found.items()
    ]


def _sharding() -> Any:
    return jax.sharding.SingleDeviceSharding(jax.devices()[0])


def _aligned(nbytes: int) -> Bytes:
    memory = np.zeros(nbytes + _PAGE_NBYTES, np.uint8)
    start = -memory.ctypes.data % _PAGE_NBYTES
    return memory[start : start + nbytes]


def _view(array: Any) -> Bytes:
    """The memory of an array, whatever becomes of the array."""
    at = (ctypes.c_uint8 * array.nbytes).from_address(array.unsafe_buffer_pointer())
    return np.frombuffer(at, np.uint8)


def main(argv: Sequence[str]) -> int:
    """Prints a table, and writes the figures."""
    parser = make_parser(__doc__)
    parser.add_argument("--sizes", type=count, nargs="+", default=[1, 4, 16], help="chunks, MiB (1 4 16)")
    parser.add_argument("--mib", type=count, default=128, help="copied in each pass (128)")
    parser.add_argument("--rounds", type=count, default=7, help="rounds after the first (7)")
    args = parser.parse_args(argv)
    results: list[dict[str, Any]] = []
    for mib in args.sizes:
        results += bench(mib, total_mib=args.mib, num_rounds=args.rounds)
    rows = [
        (
            f"{row['chunk_mib']} MiB {row['direction']}",
            row["way"],
            f"{row['gib_per_s']:.1f}",
            row["of_memcpy"].text(),
            row["cpu_s_per_gib"].text(),
            row["stall_ms"].range(),
        )
        for row in results
    ]
    headers = ["chunk", "way", "GiB/s", "of memcpy", "CPU s/GiB", "longest stall, ms (min-max)"]
    print_table("Chunks between a segment and a buffer", headers, rows, num_labels=2)
    write_json(args, question="ways between a segment and an I/O buffer", results=results)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
