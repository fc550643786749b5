"""How fast are storage tiers on servers, against one raw TCP stream?

The other end of the stream receives into 1 MiB that is always in the processor's caches, and sends from it. That of
another stream ("kept") has memory for all records, as a store must: on some machines that alone is several times
slower. For the same reason, of two tiers on one server the later one of a round can be faster: give each its own.

Each URL is a tier: valkey://, s3://, gs:// or file://, with options as in TPU_OFFLOAD_STORAGE_OPTIONS. The servers must
be running. In each round every tier writes and reads all records with `--threads` threads, in turn with one TCP
connection over the loopback device that moves as many bytes, so that changes in machine load affect all of them. CPU
time is that of this process. A second pass in each round runs beside a main thread that only looks at the clock; its
longest gap is the stall.

  python benchmarks/bench_storage_servers.py --urls valkey://127.0.0.1:6379 --record-mib 1 4 16 --json servers.json
"""

import contextlib
import multiprocessing
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from common import Spread, count, in_turn, make_parser, print_table, write_json

from tpu_offload.storage import RecordFormat, StorageSpec, StorageTier, make_tier

_MIB = 1 << 20
_RAW, _KEPT = "raw TCP", "raw TCP, kept"
_TIERS = {"valkey": "valkey", "valkeys": "valkey", "redis": "valkey", "rediss": "valkey"}

type Pass = Callable[[], None]


def serve_bytes(listener: socket.socket, nbytes: int) -> None:
    """Another process: takes `w` and bytes, or sends bytes on `r`; the 8 bytes after the letter say how many.

    They go to, or come from, `nbytes` of memory, in turn.
    """
    connection, _ = listener.accept()
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    memory, place = memoryview(bytearray(nbytes)), 0
    while request := connection.recv(9, socket.MSG_WAITALL):
        left = int.from_bytes(request[1:])
        while left:
            part = memory[place : place + min(left, _MIB)]
            moved = connection.recv_into(part) if request[:1] == b"w" else connection.send(part)
            left, place = left - moved, (place + moved) % nbytes
        if request[:1] == b"w":
            connection.sendall(b"!")


class RawStream:
    """One TCP connection to a process that takes and gives bytes, and has `nbytes` of memory for them."""

    def __init__(self, nbytes: int) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self._process = multiprocessing.get_context("spawn").Process(target=serve_bytes, args=(listener, nbytes))
            self._process.start()
            self._socket = socket.create_connection(listener.getsockname())
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def write(self, record: memoryview) -> None:
        self._socket.sendall(b"w" + len(record).to_bytes(8))
        self._socket.sendall(record)
        assert self._socket.recv(1) == b"!"

    def read(self, record: memoryview) -> None:
        self._socket.sendall(b"r" + len(record).to_bytes(8))
        done = 0
        while done < len(record):  # with MSG_WAITALL the kernel waits for more than its buffer holds
            done += self._socket.recv_into(record[done:])

    def close(self) -> None:
        self._socket.close()
        self._process.join()


def in_threads(call: Callable[[int], None], num_items: int, num_threads: int) -> None:
    """Calls it with 0 to `num_items` - 1."""
    errors: list[BaseException] = []

    def work(first: int) -> None:
        try:
            for i in range(first, num_items, num_threads):
                call(i)
        except BaseException as e:
            errors.append(e)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(num_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def each(call: Callable[[memoryview], None], records: Sequence[memoryview]) -> None:
    for record in records:
        call(record)


def longest_stall_s(run: Pass) -> float:
    """The longest gap that a busy thread sees while another one runs it."""
    worker = threading.Thread(target=run)
    worker.start()
    longest_s, last_s = 0.0, time.perf_counter()
    while worker.is_alive():
        now_s = time.perf_counter()
        longest_s, last_s = max(longest_s, now_s - last_s), now_s
    worker.join()
    return longest_s


def aligned(num_records: int, nbytes: int) -> list[memoryview]:
    memory = np.zeros(num_records * nbytes + 4096, np.uint8)
    start = -memory.ctypes.data % 4096
    return [memoryview(memory[start + i * nbytes : start + (i + 1) * nbytes]) for i in range(num_records)]


@contextlib.contextmanager
def passes(args: Any, record_mib: int) -> Iterator[dict[str, tuple[Pass, Pass]]]:
    """By name: what writes all records once, and what reads them."""
    form = RecordFormat(
        fingerprint=b"benchmark" + bytes(7), worker_id=0, num_shards=1, payload_nbytes=record_mib * _MIB
    )
    source, target = (aligned(args.num_records, form.record_nbytes) for _ in range(2))
    rng = np.random.default_rng(0)
    keys = [b"key" + i.to_bytes(4) for i in range(args.num_records)]
    for record, key in zip(source, keys, strict=True):
        form.payload_of(record)[:] = rng.integers(0, 256, record_mib * _MIB, dtype=np.uint8).data
        form.seal(record, key, generation=0)

    def with_tier(tier: StorageTier) -> tuple[Pass, Pass]:
        def read(i: int) -> None:
            tier.read(keys[i], target[i])
            form.verify(target[i], keys[i], generation=tier.generation)

        return (
            lambda: in_threads(lambda i: tier.write(keys[i], source[i].toreadonly()), len(keys), args.threads),
            lambda: in_threads(read, len(keys), args.threads),
        )

    def with_stream(stream: RawStream) -> tuple[Pass, Pass]:
        return lambda: each(stream.write, source), lambda: each(stream.read, target)

    found: dict[str, tuple[Pass, Pass]] = {}
    with contextlib.ExitStack() as stack:
        for name, nbytes in ((_RAW, _MIB), (_KEPT, args.num_records * form.record_nbytes)):
            stream = RawStream(nbytes)
            stack.callback(stream.close)
            found[name] = with_stream(stream)
        for url in args.urls:
            scheme = url.split(":")[0]
            spec = StorageSpec(
                record_nbytes=form.record_nbytes,
                num_chunks=args.num_records,
                worker_id=0,
                fingerprint=form.fingerprint.hex(),
                options=url,
            )
            tier = make_tier(_TIERS.get(scheme, "object"), spec)
            stack.callback(tier.close)
            stack.callback(tier.delete, keys)
            found[url.split("?")[0]] = with_tier(tier)
        yield found


def ratios(rates: dict[str, list[float]], others: dict[str, list[float]]) -> Spread:
    """Round by round."""
    return Spread.of(a / b for a, b in zip(rates["mib_per_s"], others["mib_per_s"], strict=True))


def measure(args: Any, record_mib: int) -> list[dict[str, Any]]:
    gib = args.num_records * record_mib / 1024
    figures: dict[tuple[str, str], dict[str, list[float]]] = {}
    with passes(args, record_mib) as found:
        for number in range(-1, args.rounds):  # one to warm up
            for name in in_turn(list(found), max(0, number)):
                for way, run in zip(("write", "read"), found[name], strict=True):
                    start_s, cpu_s = time.perf_counter(), time.process_time()
                    run()
                    took_s, cpu_s = time.perf_counter() - start_s, time.process_time() - cpu_s
                    stall_s = longest_stall_s(run)
                    if number >= 0:
                        values = figures.setdefault((name, way), {"mib_per_s": [], "cpu_s_per_gib": [], "stall_ms": []})
                        values["mib_per_s"].append(gib * 1024 / took_s)
                        values["cpu_s_per_gib"].append(cpu_s / gib)
                        values["stall_ms"].append(stall_s * 1000)
    return [
        {
            "tier": name,
            "way": way,
            "record_mib": record_mib,
            "ratio_to_raw": ratios(values, figures[_RAW, way]),
            "ratio_to_kept": ratios(values, figures[_KEPT, way]),
            **{what: Spread.of(some) for what, some in values.items()},
        }
        for (name, way), values in figures.items()
    ]


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--urls", nargs="+", default=[], help="tiers to compare")
    parser.add_argument("--record-mib", type=count, nargs="+", default=[4], help="payload of a record")
    parser.add_argument("--num-records", type=count, default=16, help="records that a pass moves")
    parser.add_argument("--threads", type=count, default=4, help="threads that call a tier")
    parser.add_argument("--rounds", type=count, default=5)
    args = parser.parse_args(argv)
    results = [row for record_mib in args.record_mib for row in measure(args, record_mib)]
    print_table(
        f"{args.num_records} records, {args.threads} threads: median (10th to 90th percentile)",
        ("tier", "way", "MiB", "MiB/s", "of raw TCP", "of it, kept", "CPU s/GiB", "stall ms, longest"),
        [
            (
                row["tier"],
                row["way"],
                str(row["record_mib"]),
                row["mib_per_s"].text(0),
                row["ratio_to_raw"].text(),
                row["ratio_to_kept"].text(),
                row["cpu_s_per_gib"].text(),
                row["stall_ms"].range(1),
            )
            for row in results
        ],
        num_labels=3,
    )
    write_json(args, question="How fast are storage tiers on servers?", results=results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
