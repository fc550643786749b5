"""Writes of an `object` tier that have failed, and whose objects may be stored all the same, later.

A PUT that has timed out may arrive after the scheduler has had its object deleted. Nobody knows of that object then,
and it takes room. So it is deleted once more, with the first deletion of others that comes a minute later.
"""

import itertools
import threading
from time import monotonic
from typing import final

_LATE_S = 60.0  # after which a write has arrived, if it ever does
_MAX_LATE = 4096  # what is more stays until the next start


@final
class LateWrites:
    """Keys whose writes have failed. Calls come from any thread."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._due_s: dict[bytes, float] = {}  # by key, the earliest first
        self._deleting: set[bytes] = set()

    def begin(self, key: bytes) -> None:
        """A key is written again: what is stored for it is wanted. Waits while it is being deleted."""
        with self._changed:
            self._changed.wait_for(lambda: key not in self._deleting)
            self._due_s.pop(key, None)

    def failed(self, key: bytes) -> None:
        """A write of this key has failed."""
        with self._changed:
            self._add(key)

    def _add(self, key: bytes) -> None:
        self._due_s.pop(key, None)
        if len(self._due_s) < _MAX_LATE:
            self._due_s[key] = monotonic() + _LATE_S

    def take_due(self, most: int) -> list[bytes]:
        """At most so many keys whose objects are to be deleted now; none while others are. `ended` follows."""
        now_s = monotonic()
        with self._changed:
            if self._deleting:
                return []
            first = itertools.islice(self._due_s.items(), most)
            due = [key for key, _ in itertools.takewhile(lambda entry: entry[1] <= now_s, first)]
            for key in due:
                del self._due_s[key]
            self._deleting.update(due)
        return due

    def ended(self, taken: list[bytes], left: list[bytes]) -> None:
        """The deletion of what was taken has ended; some may be stored still."""
        with self._changed:
            self._deleting.difference_update(taken)
            for key in left:
                self._add(key)
            self._changed.notify_all()

    def clear(self) -> None:
        """All objects are of an earlier generation, which is deleted as a whole."""
        with self._changed:
            self._due_s.clear()
