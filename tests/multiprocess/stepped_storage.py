"""Storage tiers of the rig: what they do, and in which step, follows from the seed and not from threads.

A process has values of its own, also of a shared tier, since each worker has names of its own there. They outlive the
worker, as on a disk, and end with the run.
"""

import hashlib
import random
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any, ClassVar, final

from tests.inside.worker import worker_storage
from tpu_offload import OffloadWorker
from tpu_offload.storage import StorageSpec, StorageTier
from tpu_offload.worker.arrays import is_ready

PRIVATE = f"{__name__}:PrivateTier"
SHARED = f"{__name__}:SharedTier"
_MAX_FROZEN = 36  # steps; some jobs time out
_WAIT_S = 120.0


class _Calls:
    """What the tiers of this process share.

    Attributes:
      values: by class, options, fingerprint and worker id, the records.
      gate: every call waits for it.
      rate: probability that a call fails.
    """

    def __init__(self) -> None:
        self.values: defaultdict[tuple[Any, ...], dict[bytes, bytes]] = defaultdict(dict)
        self.gate = threading.Event()
        self.gate.set()
        self.rate = 0.0
        self.seed = ""
        self._num_calls: Counter[tuple[str, bytes]] = Counter()
        self._lock = threading.Lock()

    def draw(self, call: str, key: bytes) -> int:
        """From 1 on if this call fails, a number by which it may choose how; else 0.

        All calls of one kind and key are made by one thread, so they have an order.
        """
        assert self.gate.wait(_WAIT_S), "nobody has opened the gate"
        with self._lock:
            self._num_calls[call, key] += 1
            name = f"{self.seed} {call} {self._num_calls[call, key]}".encode() + key
        drawn = int.from_bytes(hashlib.blake2b(name, digest_size=8).digest())
        return 1 + drawn % 1000 if drawn < self.rate * 2**64 else 0


class PrivateTier(StorageTier):
    """Records in memory that the scheduler bounds and lists."""

    calls: ClassVar = _Calls()

    def __init__(self, spec: StorageSpec) -> None:
        super().__init__(spec)
        self._values = self.calls.values[type(self), spec.options, spec.fingerprint, spec.worker_id]

    def write(self, key: bytes, record: memoryview) -> None:
        how = self.calls.draw("write", key)
        self._values[key] = bytes(record) if not how else bytes(record[: len(record) // 2]).ljust(len(record), b"\0")
        if how % 2:
            raise OSError("injected: a write, of which half is there")
        assert self.is_shared or len(self._values) <= self.spec.num_chunks, "more than its size"

    def read(self, key: bytes, record: memoryview) -> None:
        how = self.calls.draw("read", key)
        if how % 3 == 1:
            raise OSError("injected: a read")
        if how % 3 == 2:
            del self._values[key]
        record[:] = self._values[key]
        if how:
            record[how * 5 % len(record)] ^= 1 << how % 8

    def delete(self, keys: Sequence[bytes]) -> None:
        how = self.calls.draw("delete", keys[0])
        for key in keys:
            self._values.pop(key, None)
        if how:
            raise OSError("injected: a deletion")

    def clear(self) -> None:
        self.calls.draw("clear", b"")
        self._values.clear()

    def stored_keys(self) -> Sequence[bytes]:
        return list(self._values)

    def close(self) -> None:
        pass


class SharedTier(PrivateTier):
    """Likewise, one that is asked what it has."""

    is_shared = True

    def find(self, prefixes: Sequence[Sequence[bytes]]) -> Sequence[int]:
        if self.calls.draw("find", prefixes[0][0]):
            raise OSError("injected: a lookup")
        return [next((i for i, key in enumerate(p) if key not in self._values), len(p)) for p in prefixes]


@final
class SteppedStorage:
    """Storage of one process in one run; only one is used at a time.

    Args:
      rate: probability that a call fails, or finds a record damaged or gone.
      frozen: probability that a step is the first of some in which no call ends.
      seed: decides both.
    """

    def __init__(self, rate: float, frozen: float, *, seed: str) -> None:
        self._calls = PrivateTier.calls = SharedTier.calls = _Calls()
        self._calls.rate, self._calls.seed = rate, seed
        self._frozen = frozen
        self._rng = random.Random(f"{seed} frozen")
        self._num_steps_frozen = 0

    def step(self, worker: OffloadWorker) -> None:
        """Before a worker reports: waits until its calls and copies have ended, if they are to end in this step."""
        stack = worker_storage(worker)
        if stack is None:
            return
        if self._num_steps_frozen:
            self._num_steps_frozen -= 1
        elif self._frozen and self._rng.random() < self._frozen:
            self._num_steps_frozen = self._rng.randint(1, _MAX_FROZEN)
        if self._num_steps_frozen:
            self._calls.gate.clear()
            return
        self._calls.gate.set()
        until_s = time.monotonic() + _WAIT_S
        while not all(map(is_ready, stack.waiting_on(all_of_them=True))):
            assert time.monotonic() < until_s, "storage never comes to rest"
            time.sleep(0.0005)

    @property
    def is_frozen(self) -> bool:
        """Whether no call ends, so that waiting for one is in vain."""
        return bool(self._num_steps_frozen)

    def end(self) -> None:
        """Before the worker is closed: nothing is frozen any more."""
        self._num_steps_frozen = 0
        self._calls.gate.set()
