"""What lookups began and ceased to find, kept until the scheduler turns it into events."""

from collections import deque
from collections.abc import Sequence
from typing import final

from tpu_offload.core.chunk_table import Entries
from tpu_offload.types import ChunkKey

type Changes = tuple[Sequence[ChunkKey] | None, bool]
"""Chunks, None for all of them, and whether lookups began (True) or ceased to find them."""


@final
class ChangeLog:
    """Changes in the order in which they happened."""

    def __init__(self) -> None:
        self._changes: deque[Changes] = deque()

    def add(self, keys: Sequence[ChunkKey], *, found: bool) -> None:
        """Lookups begin or cease to find these chunks."""
        if keys:
            self._changes.append((tuple(keys), found))

    def clear(self) -> Entries:
        """Lookups find nothing any more, which supersedes all earlier changes; returns what held those."""
        superseded, self._changes = self._changes, deque([(None, False)])
        return superseded

    def take(self, max_chunks: int | None = None) -> list[Changes]:
        """Removes and returns the oldest changes, of `max_chunks` chunks at most."""
        taken: list[Changes] = []
        num_left = max_chunks
        while self._changes and num_left != 0:
            keys, found = self._changes.popleft()
            if keys is not None and num_left is not None:
                if len(keys) > num_left:
                    self._changes.appendleft((keys[num_left:], found))
                    keys = keys[:num_left]
                num_left -= len(keys)
            taken.append((keys, found))
        return taken
