"""Per-chunk failure backoff: after one failure a chunk gets its own job; after two it backs off exponentially."""

import dataclasses
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import final

from tpu_offload.types import ChunkKey, Direction

_MAX_FAILURES = 2
_MAX_BACKOFF = 64  # times the first wait
_CAPACITY = 4096


@dataclasses.dataclass(slots=True)
class _Entry:
    """A chunk that failed.

    Attributes:
      num_failures: since it last succeeded; failures of copies that were in flight together count once.
      known_from: jobs with smaller ids were planned before its last failure was known.
      failed_load: a load was among the failures, so that only a load can clear it.
      until_s: no copy of it is planned before this time.
    """

    num_failures: int = 0
    known_from: int = 0
    failed_load: bool = False
    until_s: float = 0.0


@final
class ChunkBackoff:
    """The last chunks that failed, at most 4096; all others cost nothing.

    After its second failure a chunk backs off for `retry_s`, after each further one for twice as long. Without backoff
    every request with a bad chunk in its prefix would try it again.

    Args:
      retry_s: seconds of the first backoff.
      clock: monotonic seconds.
    """

    def __init__(self, *, retry_s: float, clock: Callable[[], float]) -> None:
        self._retry_s = retry_s
        self._clock = clock
        self._entries: OrderedDict[ChunkKey, _Entry] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[ChunkKey]:
        return iter(self._entries)

    def __contains__(self, key: object) -> bool:
        return key in self._entries

    def copyable_end(self, keys: Sequence[ChunkKey], first: int, end: int) -> int:
        """Of the chunks `first` to `end - 1` of a prefix, the first that backs off; `end` if none does."""
        if not self._entries:
            return end
        now_s = self._clock()
        for i in range(first, end):
            entry = self._entries.get(keys[i])
            if entry is not None and now_s < entry.until_s:
                return i
        return end

    def until_s(self, key: ChunkKey) -> float:
        """When a chunk that backs off may be copied again."""
        entry = self._entries.get(key)
        return entry.until_s if entry is not None else 0.0

    def now_s(self) -> float:
        """The time that `until_s` is compared with."""
        return self._clock()

    def trusted_end(self, keys: Sequence[ChunkKey], first: int, end: int) -> int:
        """Of the chunks `first` to `end - 1` of a prefix, the first that failed lately; `end` if none did."""
        if not self._entries:
            return end
        return next((i for i in range(first, end) if keys[i] in self._entries), end)

    def failed(
        self, keys: Iterable[ChunkKey], direction: Direction, *, job_id: int, next_job_id: int
    ) -> list[ChunkKey]:
        """Records that copies of these chunks failed.

        Args:
          keys: the chunks.
          direction: of the copies.
          job_id: of their job.
          next_job_id: of the next job.
        Returns:
          The chunks that have failed too often.
        """
        now_s, too_often = self._clock(), []
        for key in keys:
            entry = self._entries.setdefault(key, _Entry())
            self._entries.move_to_end(key)
            entry.failed_load |= direction is Direction.LOAD
            if job_id < entry.known_from:  # planned before the last failure was known: the same failure
                continue
            entry.known_from = next_job_id
            entry.num_failures += 1
            if entry.num_failures >= _MAX_FAILURES:
                backoff = min(2 ** (entry.num_failures - _MAX_FAILURES), _MAX_BACKOFF)
                entry.until_s = now_s + backoff * self._retry_s
                too_often.append(key)
        while len(self._entries) > _CAPACITY:
            self._entries.popitem(last=False)
        return too_often

    def succeeded(self, keys: Iterable[ChunkKey], direction: Direction) -> None:
        """Records that copies of these chunks succeeded."""
        if not self._entries:
            return
        for key in keys:
            entry = self._entries.get(key)
            if entry is not None and (direction is Direction.LOAD or not entry.failed_load):
                del self._entries[key]

    def clear(self) -> None:
        """Forgets all failures: the namespace of keys has changed."""
        self._entries.clear()
