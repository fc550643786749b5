"""The file tier against raw pwritev and preadv with direct I/O, interleaved, on one disk.

    python benchmarks/bench_storage.py --directory /mnt/disk --json storage.json

Each round writes and then reads the same amount with every way, in records of 1, 4 and 16 MiB, by two threads, as the
worker does. `tier` is what the worker's I/O threads do with a record: seal, write, read, verify. `raw` is the same
number of bytes by the same number of threads with one system call each, into a file that is preallocated likewise.
The stall is the longest gap of a main thread that does nothing but look at the clock.
"""

import concurrent.futures
import mmap
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, final

import numpy as np
from common import count, make_parser, write_json

from tpu_offload.storage import RecordFormat, StorageSpec
from tpu_offload.storage.file import FileTier

_MIB = 2**20
_NUM_THREADS = 2
_KEYS_FINGERPRINT = bytes(16)


@final
class Tier:
    """The file tier, with its format."""

    def __init__(self, directory: Path, payload_nbytes: int, num_records: int) -> None:
        self._format = RecordFormat(
            fingerprint=_KEYS_FINGERPRINT, worker_id=0, num_shards=1, payload_nbytes=payload_nbytes
        )
        spec = StorageSpec(
            record_nbytes=self._format.record_nbytes,
            num_chunks=num_records,
            worker_id=0,
            fingerprint=_KEYS_FINGERPRINT.hex(),
            options=f"{directory},min_free_gb=0",
        )
        self._tier = FileTier(spec)
        self.record_nbytes = spec.record_nbytes

    def write(self, number: int, record: memoryview) -> None:
        key = number.to_bytes(40, "little")
        self._format.seal(record, key, generation=self._tier.generation)
        self._tier.write(key, record)

    def read(self, number: int, record: memoryview) -> None:
        key = number.to_bytes(40, "little")
        self._tier.read(key, record)
        self._format.verify(record, key, generation=self._tier.generation)

    def close(self) -> None:
        self._tier.close()


@final
class Raw:
    """One system call a record."""

    def __init__(self, directory: Path, payload_nbytes: int, num_records: int) -> None:
        self.record_nbytes = payload_nbytes
        self._fd = os.open(directory / "raw.bin", os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
        os.posix_fallocate(self._fd, 0, num_records * payload_nbytes)

    def write(self, number: int, record: memoryview) -> None:
        if os.pwritev(self._fd, [record], number * self.record_nbytes) != len(record):
            raise OSError("a short write")

    def read(self, number: int, record: memoryview) -> None:
        if os.preadv(self._fd, [record], number * self.record_nbytes) != len(record):
            raise OSError("a short read")

    def close(self) -> None:
        os.close(self._fd)


def measure(call: Callable[[int, memoryview], None], buffers: Sequence[memoryview], num_records: int) -> dict[str, Any]:
    """Calls it for every record, from `_NUM_THREADS` threads; seconds, CPU seconds and the longest stall."""

    def work(thread: int) -> None:
        for number in range(thread, num_records, _NUM_THREADS):
            call(number, buffers[thread])

    stop, gaps = threading.Event(), [0.0]

    def look() -> None:
        last = time.perf_counter()
        while not stop.is_set():
            now = time.perf_counter()
            gaps[0] = max(gaps[0], now - last)
            last = now

    watcher = threading.Thread(target=look)
    with concurrent.futures.ThreadPoolExecutor(_NUM_THREADS) as pool:
        start_s, cpu_s = time.perf_counter(), time.process_time()
        list(pool.map(work, range(_NUM_THREADS)))
        seconds, cpu_s = time.perf_counter() - start_s, time.process_time() - cpu_s
        watcher.start()  # a pass of its own: it takes a core
        list(pool.map(work, range(_NUM_THREADS)))
        stop.set()
        watcher.join()
    return {"seconds": seconds, "cpu_s": cpu_s, "stall_ms": 1e3 * gaps[0]}


def bench(directory: Path, *, payload_nbytes: int, total_nbytes: int, num_rounds: int) -> dict[str, Any]:
    """All ways, round by round; medians."""
    num_records = max(_NUM_THREADS, total_nbytes // payload_nbytes)
    ways: dict[str, Tier | Raw] = {
        "tier": Tier(directory, payload_nbytes, num_records),
        "raw": Raw(directory, payload_nbytes, num_records),
    }
    buffers = {name: [_random(way.record_nbytes) for _ in range(_NUM_THREADS)] for name, way in ways.items()}
    found: dict[str, list[dict[str, Any]]] = {}
    try:
        for i in range(num_rounds + 1):  # the first one warms up: it writes blocks for the first time
            for what in ("write", "read"):
                for name in sorted(ways, reverse=bool(i % 2)):
                    result = measure(getattr(ways[name], what), buffers[name], num_records)
                    if i:
                        found.setdefault(f"{name} {what}", []).append(result)
    finally:
        for way in ways.values():
            way.close()
    gib = num_records * payload_nbytes / 2**30
    table = {
        name: {
            "mib_per_s": statistics.median(1024 * gib / r["seconds"] for r in results),
            "cpu_s_per_gib": statistics.median(r["cpu_s"] / gib for r in results),
            "stall_ms": statistics.median(r["stall_ms"] for r in results),
        }
        for name, results in found.items()
    }
    ratios = {
        what: statistics.median(
            raw["seconds"] / tier["seconds"]
            for raw, tier in zip(found[f"raw {what}"], found[f"tier {what}"], strict=True)
        )
        for what in ("write", "read")
    }
    return {"record_mib": payload_nbytes // _MIB, "ways": table, "tier_to_raw": ratios}


def _random(nbytes: int) -> memoryview:
    """Page-aligned random bytes."""
    memory = memoryview(mmap.mmap(-1, nbytes))
    memory[:] = np.random.default_rng(0).integers(0, 256, nbytes, dtype=np.uint8).tobytes()
    return memory


def main(argv: Sequence[str]) -> int:
    """Prints a table, and writes the figures."""
    parser = make_parser(__doc__)
    parser.add_argument("--directory", type=Path, default=Path(), help="on the disk to measure (here)")
    parser.add_argument("--mib", type=count, default=256, help="written and read in each pass (256)")
    parser.add_argument("--rounds", type=count, default=5, help="rounds after the first (5)")
    parser.add_argument("--sizes", type=count, nargs="+", default=[1, 4, 16], help="records, MiB (1 4 16)")
    args = parser.parse_args(argv)
    results = []
    for size in args.sizes:
        with tempfile.TemporaryDirectory(dir=args.directory) as directory:
            result = bench(
                Path(directory), payload_nbytes=size * _MIB, total_nbytes=args.mib * _MIB, num_rounds=args.rounds
            )
        results.append(result)
        for name, numbers in result["ways"].items():
            rate, cpu_s, stall_ms = numbers["mib_per_s"], numbers["cpu_s_per_gib"], numbers["stall_ms"]
            print(f"{size:3} MiB  {name:10}  {rate:7.0f} MiB/s  {cpu_s:5.2f} CPU s/GiB  stall {stall_ms:5.1f} ms")
        print(f"{size:3} MiB  tier / raw  write {result['tier_to_raw']['write']:.2f}, read "
              f"{result['tier_to_raw']['read']:.2f}")  # fmt: skip
    write_json(args, question="file tier and raw system calls", results=results)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
