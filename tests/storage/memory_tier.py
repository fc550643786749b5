"""A storage tier in memory, which is all that adding one takes, and one that fails as a test says."""

import threading
from collections.abc import Sequence
from typing import ClassVar

from tpu_offload.storage import StorageSpec, StorageTier, UndeletedError

NAME = f"{__name__}:MemoryTier"
FAULTY = f"{__name__}:FaultyTier"
SHARED = f"{__name__}:SharedTier"


class MemoryTier(StorageTier):
    """A dict."""

    def __init__(self, spec: StorageSpec) -> None:
        super().__init__(spec)
        self.values: dict[bytes, bytes] = {}
        self.most_values = 0
        self.num_closed = 0

    def write(self, key: bytes, record: memoryview) -> None:
        self.values[key] = bytes(record)
        self.most_values = max(self.most_values, len(self.values))

    def read(self, key: bytes, record: memoryview) -> None:
        record[:] = self.values[key]

    def delete(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            self.values.pop(key, None)

    def clear(self) -> None:
        self.values.clear()

    def close(self) -> None:
        self.num_closed += 1
        self.values.clear()


class FaultyTier(MemoryTier):
    """Fails as it is told.

    Attributes:
      failing: calls that raise: "write", "read", "delete", "clear", "close", of a shared tier also "find".
      error: what they raise.
      damage: what a read does to the bytes after it has filled them.
      kept: keys that cannot be deleted.
      gates: by call, an event that it waits for before it does anything.
      began: set when a call begins to wait at its gate.
      threads: names of the threads that have called.
    """

    def __init__(self, spec: StorageSpec) -> None:
        super().__init__(spec)
        self.failing: set[str] = set()
        self.error: BaseException = OSError("injected")
        self.damage = ""
        self.kept: set[bytes] = set()
        self.gates: dict[str, threading.Event] = {}
        self.began = threading.Event()
        self.threads: set[str] = set()

    def _enter(self, call: str) -> None:
        self.threads.add(threading.current_thread().name)
        if call in self.gates:
            self.began.set()
            assert self.gates[call].wait(60), "a test has not opened the gate"
        if call in self.failing:
            raise self.error

    def write(self, key: bytes, record: memoryview) -> None:
        self._enter("write")
        super().write(key, record)

    def read(self, key: bytes, record: memoryview) -> None:
        self._enter("read")
        if self.damage == "short":
            half = len(record) // 2
            record[:half] = self.values[key][:half]
            record[half:] = b"\xee" * (len(record) - half)  # not, by chance, the right bytes of an earlier buffer
            return
        super().read(key, record)
        if self.damage == "one bit":
            record[4096 + 5] ^= 4
        elif self.damage == "another chunk":
            record[:] = next(value for other, value in self.values.items() if other != key)

    def delete(self, keys: Sequence[bytes]) -> None:
        self._enter("delete")
        super().delete([key for key in keys if key not in self.kept])
        if kept := self.kept.intersection(keys):
            raise UndeletedError("held", kept)

    def clear(self) -> None:
        self._enter("clear")
        super().clear()

    def close(self) -> None:
        self._enter("close")
        super().close()


class SharedTier(FaultyTier):
    """All tiers with the same options, model and worker have the same values, as those of one server.

    Attributes:
      asked: the prefixes of each lookup.
      answer: what `find` returns instead of the truth.
    """

    is_shared = True
    servers: ClassVar[dict[tuple[str, str, int], dict[bytes, bytes]]] = {}

    def __init__(self, spec: StorageSpec) -> None:
        super().__init__(spec)
        self.values = self.servers.setdefault((spec.options, spec.fingerprint, spec.worker_id), {})
        self.asked: list[list[list[bytes]]] = []
        self.answer: Sequence[int] | None = None

    def find(self, prefixes: Sequence[Sequence[bytes]]) -> Sequence[int]:
        self._enter("find")
        self.asked.append([list(prefix) for prefix in prefixes])
        if self.answer is not None:
            return self.answer
        return [next((i for i, k in enumerate(p) if k not in self.values), len(p)) for p in prefixes]

    def close(self) -> None:
        self._enter("close")
        self.num_closed += 1
