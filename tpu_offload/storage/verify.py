"""Verifies records of any model: what an engine would find if it read them."""

import collections
import enum
import itertools
import random
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import final

from tpu_offload.storage.format import (
    FINGERPRINT_NBYTES,
    PAGE_NBYTES,
    Header,
    RecordError,
    UnknownVersionError,
    check_record,
    read_header,
)
from tpu_offload.storage.inspection import StoredRecord, StoreInspector

NUM_THREADS = 4
_POLL_S = 0.2  # between looks at whether it ends early
_MAX_SUSPECTS = 1000  # that are read again
_MAX_FAILURES = 8  # reads in a row that fail before it gives up


@final
class Verdict(enum.Enum):
    """What a record is. All but the first are misses for an engine."""

    GOOD = "good"
    DAMAGED = "damaged"
    """Header or payload has other bytes than were written, or is incomplete."""
    MISPLACED = "misplaced"
    """Undamaged, but of another key, model or worker than its place: files or objects that were swapped or copied."""
    OTHER_VERSION = "other version"
    OTHER_GENERATION = "other generation"
    """Of before a reset, or left by a crash: never used again."""
    UNREADABLE = "unreadable"
    """Reading it is an error."""
    GONE = "gone"
    """Deleted or evicted since it was listed."""

    @property
    def is_damage(self) -> bool:
        """Whether a person has to look at it."""
        return self in (Verdict.DAMAGED, Verdict.MISPLACED, Verdict.UNREADABLE)


def judge(record: StoredRecord, data: bytes, *, headers_only: bool) -> tuple[Verdict, str]:
    """Checks the bytes of a record.

    Args:
      record: as it was listed.
      data: all of its bytes; with `headers_only` at least the header's.
      headers_only: checks the header only.
    Returns:
      The verdict, and the reason if it is not good.
    """
    view = memoryview(data)
    try:
        header = read_header(view) if headers_only else check_record(view)
    except UnknownVersionError as e:
        return Verdict.OTHER_VERSION, str(e)
    except RecordError as e:
        return Verdict.DAMAGED, str(e)
    if header.generation != record.header_generation:
        return Verdict.OTHER_GENERATION, f"generation {header.generation:016x}"
    wrong = _misplaced(record, header)
    return (Verdict.MISPLACED, wrong) if wrong else (Verdict.GOOD, "")


def _misplaced(record: StoredRecord, header: Header) -> str:
    of = record.generation
    if header.fingerprint != bytes.fromhex(of.fingerprint)[:FINGERPRINT_NBYTES]:
        return f"of model {header.fingerprint.hex()}"
    if header.worker_id != of.worker_id:
        return f"of worker {header.worker_id}"
    if len(header.key) != record.key_nbytes or not header.key.startswith(record.key):
        return f"of key {header.key.hex()}"
    return ""


def sample(records: Iterable[StoredRecord], num: int, rng: random.Random) -> list[StoredRecord]:
    """So many records at random, each with the same probability; all if there are fewer.

    References:
      Vitter, Random sampling with a reservoir, 1985 (algorithm R).
    """
    chosen: list[StoredRecord] = []
    for i, record in enumerate(records):
        if i < num:
            chosen.append(record)
        elif (place := rng.randrange(i + 1)) < num:
            chosen[place] = record
    return chosen


@final
class Verification:
    """Reads records and counts verdicts. In memory are a few records at a time, and a bounded number of suspects.

    Args:
      inspector: of the store.
      headers_only: reads and checks only the headers.
    Attributes:
      counts: records by verdict.
      nbytes: that were read; a second look at the same record is not counted.
      suspects: damaged records with verdict and reason, at most 1,000. They are read twice: a record may have been
        written when it was read first.
    """

    def __init__(self, inspector: StoreInspector, *, headers_only: bool) -> None:
        self._inspector = inspector
        self._headers_only = headers_only
        self._num_failures = 0
        self.counts: collections.Counter[Verdict] = collections.Counter()
        self.nbytes = 0
        self.suspects: list[tuple[StoredRecord, Verdict, str]] = []

    def run(self, records: Iterable[StoredRecord], *, on_record: Callable[[], None], stops: Callable[[], bool]) -> None:
        """Verifies records.

        Args:
          records: those to read.
          on_record: called after each.
          stops: whether to end early.
        Raises:
          OSError: the store cannot be read at all.
        """
        executor = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="tpu_offload-verify")
        left = iter(records)
        waiting: collections.deque[tuple[StoredRecord, Future[tuple[Verdict, str, int]]]] = collections.deque()
        try:
            while not stops():
                for record in itertools.islice(left, 2 * NUM_THREADS - len(waiting)):
                    waiting.append((record, executor.submit(self._verify, record)))
                if not waiting:
                    break
                record, future = waiting[0]
                if not wait([future], timeout=_POLL_S).done:
                    continue
                waiting.popleft()
                self._count(record, *future.result())
                self._check_failures(record)
                on_record()
            else:
                return
            self._read_again(executor, stops)
        finally:
            executor.shutdown(wait=False, cancel_futures=True)

    def _verify(self, record: StoredRecord) -> tuple[Verdict, str, int]:
        if not record.generation.is_current:
            return Verdict.OTHER_GENERATION, "", 0
        try:
            data = self._inspector.read(record, PAGE_NBYTES if self._headers_only else record.nbytes)
        except KeyError:
            return Verdict.GONE, "", 0
        except OSError as e:
            return Verdict.UNREADABLE, str(e), 0
        return *judge(record, data, headers_only=self._headers_only), len(data)

    def _count(self, record: StoredRecord, verdict: Verdict, reason: str, nbytes: int) -> None:
        self.counts[verdict] += 1
        self.nbytes += nbytes
        self._num_failures = self._num_failures + 1 if verdict is Verdict.UNREADABLE else 0
        if verdict.is_damage and len(self.suspects) < _MAX_SUSPECTS:
            self.suspects.append((record, verdict, reason))

    def _check_failures(self, record: StoredRecord) -> None:
        if self._num_failures >= _MAX_FAILURES:
            raise OSError(
                f"{self._inspector.where}: {self._num_failures} reads in a row failed, the last of {record.place} "
                f"({self.suspects[-1][2]}); gave up after {self.counts.total()} records"
            )

    def _read_again(self, executor: ThreadPoolExecutor, stops: Callable[[], bool]) -> None:
        """Replaces the verdicts of suspects by those of a second look."""
        suspects, self.suspects = collections.deque(self.suspects), []
        future: Future[tuple[Verdict, str, int]] | None = None
        while suspects and not stops():
            future = future or executor.submit(self._verify, suspects[0][0])
            if not wait([future], timeout=_POLL_S).done:
                continue
            record, verdict, _ = suspects.popleft()
            self.counts[verdict] -= 1
            verdict, reason, _ = future.result()
            self._count(record, verdict, reason, 0)
            future = None
        self.suspects += suspects
