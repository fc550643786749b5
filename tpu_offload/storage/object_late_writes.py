"""Writes of an `object` tier that have failed, and whose objects may be stored all the same, later.

A PUT that has timed out may arrive after the scheduler has had its object deleted. Nobody knows of that object then,
and it takes room. So it is deleted once more a minute later.
"""

import itertools
import threading
from time import monotonic
from typing import final

_LATE_S = 60.0  # after which a write has arrived, if it ever does
_MAX_LATE = 4096


@final
class LateWrites:
    """Keys whose writes have failed. Calls come from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._due_s: dict[bytes, float] = {}  # by key, the earliest first

    def begin(self, key: bytes) -> None:
        """A key is written again: what is stored for it is wanted."""
        with self._lock:
            self._due_s.pop(key, None)

    def failed(self, *keys: bytes) -> None:
        """Writes of these keys have failed, or their second deletion."""
        with self._lock:
            for key in keys[: max(0, _MAX_LATE - len(self._due_s))]:
                self._due_s[key] = monotonic() + _LATE_S

    def take_due(self, most: int) -> list[bytes]:
        """At most so many keys whose objects are to be deleted now."""
        now_s = monotonic()
        with self._lock:
            first = itertools.islice(self._due_s.items(), most)
            due = [key for key, _ in itertools.takewhile(lambda entry: entry[1] <= now_s, first)]
            for key in due:
                del self._due_s[key]
        return due

    def clear(self) -> None:
        """All objects are of an earlier generation, which is deleted as a whole."""
        with self._lock:
            self._due_s.clear()
