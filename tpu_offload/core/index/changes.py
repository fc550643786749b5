"""What lookups began and ceased to find, kept until the scheduler turns it into events."""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple, final

from tpu_offload.core.chunk_table import Entries
from tpu_offload.types import ChunkKey


class Changes(NamedTuple):
    """What lookups began or ceased to find at one time.

    Attributes:
      keys: chunks, or the names of pieces (`PieceKey`); None for all that there was.
      found: whether lookups began (True) or ceased to find them.
      of_pieces: whether they are pieces of checkpoints, not chunks of full attention.
    """

    keys: Sequence[ChunkKey] | None
    found: bool
    of_pieces: bool = False


@final
class ChangeLog:
    """Changes in the order in which they happened."""

    def __init__(self) -> None:
        self._changes: deque[Changes] = deque()

    def __bool__(self) -> bool:
        return bool(self._changes)

    def add(self, keys: Sequence[ChunkKey], *, found: bool, of_pieces: bool = False) -> None:
        """Lookups begin or cease to find these chunks, or pieces."""
        if keys:
            self._changes.append(Changes(tuple(keys), found, of_pieces))

    def clear(self) -> Entries:
        """Lookups find nothing any more, which supersedes all earlier changes; returns what held those."""
        superseded, self._changes = self._changes, deque([Changes(None, False)])
        return superseded

    def take(self, max_keys: int | None = None) -> list[Changes]:
        """Removes and returns the oldest changes, of `max_keys` chunks and pieces at most."""
        taken: list[Changes] = []
        num_left = max_keys
        while self._changes and num_left != 0:
            changes = self._changes.popleft()
            keys = changes.keys
            if keys is not None and num_left is not None:
                if len(keys) > num_left:
                    self._changes.appendleft(changes._replace(keys=keys[num_left:]))
                    changes = changes._replace(keys=keys[:num_left])
                    num_left = 0
                else:
                    num_left -= len(keys)
            taken.append(changes)
        return taken
