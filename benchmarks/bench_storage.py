"""The file tier against raw pwritev and preadv with direct I/O, and against the files of other caches, on one disk.

    python benchmarks/bench_storage.py --directory /mnt/disk --json storage.json

Each round writes and then reads the same amount in every way, in records of 1, 4 and 16 MiB. `tier` is what the
worker's I/O threads do with a record: seal, write, read, verify; three threads, as in the worker, so that two keep the
disk busy while one computes a checksum. `raw` is the same number of bytes by two threads with one system call a record,
into a file that is preallocated likewise; `raw, 3 threads` by three. `raw and checksum` computes the checksum of the
same bytes beside these system calls, by three threads: what is left if nothing else costs anything. The others are
`peer_files`, by three threads. What is buffered is synced and dropped from the page cache before and after each pass,
which is not timed. The stall is the longest gap of a main thread that does nothing but look at the clock.

Each record has memory of its own, the same for all ways, or with `--few-buffers` each thread has one buffer. The disk
of a virtual machine may be a thread of the host that copies memory. Into few buffers it copies faster as long as no
other core touches them, and raw calls never do; memory in few pieces is faster than other memory.
"""

import concurrent.futures
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, final

import numpy as np
from common import Spread, count, in_turn, make_parser, print_table, write_json
from peer_files import FilePerChunk

from tpu_offload.storage import RecordFormat, StorageSpec
from tpu_offload.storage.file import FileTier
from tpu_offload.storage.format import PAGE_NBYTES, checksum_of

_MIB = 2**20
_NUM_THREADS = 3  # as `worker.storage.threads`
_KEYS_FINGERPRINT = bytes(16)
_HUGE_PAGE_NBYTES = 2**21


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

    def settle(self) -> None:
        """Direct I/O leaves nothing to write."""

    def close(self) -> None:
        self._tier.close()


@final
class Raw:
    """One system call a record, and a checksum if wanted."""

    def __init__(self, directory: Path, payload_nbytes: int, num_records: int, *, checksum: bool = False) -> None:
        self.record_nbytes = payload_nbytes
        self._checksum = checksum
        self._fd = os.open(directory / "raw.bin", os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
        os.posix_fallocate(self._fd, 0, num_records * payload_nbytes)

    def write(self, number: int, record: memoryview) -> None:
        if self._checksum:
            checksum_of(record)
        if os.pwritev(self._fd, [record], number * self.record_nbytes) != len(record):
            raise OSError("a short write")

    def read(self, number: int, record: memoryview) -> None:
        if os.preadv(self._fd, [record], number * self.record_nbytes) != len(record):
            raise OSError("a short read")
        if self._checksum:
            checksum_of(record)

    def settle(self) -> None:
        """Direct I/O leaves nothing to write."""

    def close(self) -> None:
        os.close(self._fd)


Way = Tier | Raw | FilePerChunk
WAYS = ("tier", "raw", "raw, 3 threads", "raw and checksum", "vLLM fs", "LMCache fs, direct", "LMCache disk")


def make_ways(directory: Path, payload_nbytes: int, num_records: int) -> dict[str, tuple[Way, int]]:
    """All of them, by name, and the number of threads of each."""
    raw = Raw(directory, payload_nbytes, num_records)
    peers = {
        "vLLM fs": FilePerChunk(directory / "vllm", payload_nbytes, direct=False, renamed=True),
        "LMCache fs, direct": FilePerChunk(directory / "direct", payload_nbytes, direct=True, renamed=True),
        "LMCache disk": FilePerChunk(directory / "in-place", payload_nbytes, direct=False, renamed=False),
    }
    return {
        "tier": (Tier(directory, payload_nbytes, num_records), _NUM_THREADS),
        "raw": (raw, _NUM_THREADS - 1),
        "raw, 3 threads": (raw, _NUM_THREADS),
        "raw and checksum": (Raw(directory, payload_nbytes, num_records, checksum=True), _NUM_THREADS),
        **{name: (peer, _NUM_THREADS) for name, peer in peers.items()},
    }


def measure(way: Way, num_threads: int, what: str, buffers: Sequence[memoryview], num_records: int) -> dict[str, float]:
    """Reads or writes every record with some threads; seconds, CPU seconds and the longest stall.

    Each record has a buffer, or if there are only `_NUM_THREADS`, each thread.
    """
    call: Callable[[int, memoryview], None] = getattr(way, what)

    def work(thread: int) -> None:
        for number in range(thread, num_records, num_threads):
            buffer = buffers[number if len(buffers) == num_records else thread]
            call(number, buffer[: way.record_nbytes])

    stop, gaps = threading.Event(), [0.0]

    def look() -> None:
        last = time.perf_counter()
        while not stop.is_set():
            now = time.perf_counter()
            gaps[0] = max(gaps[0], now - last)
            last = now

    watcher = threading.Thread(target=look)
    with concurrent.futures.ThreadPoolExecutor(num_threads) as pool:
        way.settle()
        start_s, cpu_s = time.perf_counter(), time.process_time()
        list(pool.map(work, range(num_threads)))
        seconds, cpu_s = time.perf_counter() - start_s, time.process_time() - cpu_s
        way.settle()
        watcher.start()  # a pass of its own: it takes a core
        list(pool.map(work, range(num_threads)))
        stop.set()
        watcher.join()
        way.settle()  # or the next way would share the disk with what is still being written
    return {"seconds": seconds, "cpu_s": cpu_s, "stall_ms": 1e3 * gaps[0]}


def bench(
    directory: Path,
    wanted: Sequence[str],
    *,
    payload_nbytes: int,
    total_nbytes: int,
    num_rounds: int,
    few_buffers: bool,
) -> list[dict[str, Any]]:
    """The ways that are wanted, round by round; `raw` is one of them."""
    num_records = max(_NUM_THREADS, total_nbytes // payload_nbytes)
    ways = {name: way for name, way in make_ways(directory, payload_nbytes, num_records).items() if name in wanted}
    num_buffers = _NUM_THREADS if few_buffers else num_records
    buffers = _random_buffers(num_buffers, max(way.record_nbytes for way, _ in ways.values()))
    found: dict[tuple[str, str], list[dict[str, float]]] = {}
    try:
        for i in range(num_rounds + 1):  # the first one warms up: it writes blocks for the first time
            for what in ("write", "read"):
                for name in in_turn(list(ways), i):
                    result = measure(*ways[name], what, buffers, num_records)
                    if i:
                        found.setdefault((what, name), []).append(result)
    finally:
        for way in {way for way, _ in ways.values()}:
            way.close()
    gib = num_records * payload_nbytes / 2**30
    return [
        {
            "record_mib": payload_nbytes // _MIB,
            "what": what,
            "way": name,
            "mib_per_s": Spread.of(1024 * gib / r["seconds"] for r in results),
            "of_raw": Spread.of(
                raw["seconds"] / r["seconds"] for raw, r in zip(found[what, "raw"], results, strict=True)
            ),
            "cpu_s_per_gib": Spread.of(r["cpu_s"] / gib for r in results),
            "stall_ms": Spread.of(r["stall_ms"] for r in results),
        }
        for (what, name), results in found.items()
    ]


def _random_buffers(num_buffers: int, nbytes: int) -> list[memoryview]:
    """Page-aligned random bytes, in huge pages as far as the kernel has them."""
    nbytes = -(-nbytes // PAGE_NBYTES) * PAGE_NBYTES
    memory = np.empty(num_buffers * nbytes + _HUGE_PAGE_NBYTES, np.uint8)  # numpy asks for huge pages
    memory = memory[-memory.ctypes.data % _HUGE_PAGE_NBYTES :]
    random = np.random.default_rng(0).integers(0, 256, nbytes, dtype=np.uint8)
    buffers = [memory[i * nbytes : (i + 1) * nbytes] for i in range(num_buffers)]
    for buffer in buffers:
        buffer[:] = random
    return [memoryview(buffer) for buffer in buffers]


def main(argv: Sequence[str]) -> int:
    """Prints a table, and writes the figures."""
    parser = make_parser(__doc__)
    parser.add_argument("--directory", type=Path, default=Path(), help="on the disk to measure (here)")
    parser.add_argument("--mib", type=count, default=256, help="written and read in each pass (256)")
    parser.add_argument("--rounds", type=count, default=5, help="rounds after the first (5)")
    parser.add_argument("--sizes", type=count, nargs="+", default=[1, 4, 16], help="records, MiB (1 4 16)")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS, help="beside raw (all)")
    parser.add_argument("--few-buffers", action="store_true", help="one for each thread (one for each record)")
    args = parser.parse_args(argv)
    results: list[dict[str, Any]] = []
    for size in args.sizes:
        with tempfile.TemporaryDirectory(dir=args.directory) as directory:
            results += bench(
                Path(directory),
                ["raw", *args.ways],
                payload_nbytes=size * _MIB,
                total_nbytes=args.mib * _MIB,
                num_rounds=args.rounds,
                few_buffers=args.few_buffers,
            )
    rows = [
        (
            f"{row['record_mib']} MiB {row['what']}",
            row["way"],
            row["mib_per_s"].text(0),
            row["of_raw"].text(),
            row["cpu_s_per_gib"].text(),
            row["stall_ms"].range(1),
        )
        for row in results
    ]
    headers = ["record", "way", "MiB/s", "of raw", "CPU s/GiB", "longest stall, ms (min-max)"]
    print_table("Records in files", headers, rows, num_labels=2)
    write_json(args, question="file tier, raw system calls and other caches' files", results=results)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
