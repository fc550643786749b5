"""Priorities on top of any eviction policy: chunks of lower priority are evicted first, whatever the policy.

There is one policy for each priority in use, a level, and it orders the chunks of that level only. A use of higher
priority raises the chunks it uses; none is lowered again. So a chunk can follow one of another level: each level sees
only its own chunks, and is notified when the last chunk of another level that followed one of them is removed.
"""

from collections import deque
from collections.abc import Callable, Collection, Container, Sequence
from typing import Any, final

from tpu_offload.core.chunk_table import Entries
from tpu_offload.core.policies.base import EvictionPolicy, Residents, Use
from tpu_offload.native import Given
from tpu_offload.types import ChunkKey
from tpu_offload.values import one_line

_MAX_PRIORITY = 8  # each level has its own ghosts and counts, so users must not be able to create any number of them


@final
class PriorityPolicy(EvictionPolicy):
    """One policy for each priority; lower ones are evicted first.

    While all uses have priority 0 it only forwards calls. Priorities below -8 count as -8, above 8 as 8.

    Args:
      make: a new policy, for one level.
    """

    def __init__(self, make: Callable[[], EvictionPolicy]) -> None:
        self._make = make
        self._base = make()
        self._num_chunks = 0
        # The policies of the other priorities, while they have chunks.
        self._others: dict[int, EvictionPolicy] = {}
        self._sizes: dict[int, int] = {}  # their chunks
        self._level_of: dict[ChunkKey, int] = {}  # without those of level 0

    def resize(self, num_chunks: int) -> None:
        """See the base class; each level may have the whole tier."""
        self._num_chunks = num_chunks
        for policy in (self._base, *self._others.values()):
            policy.resize(num_chunks)

    def insert(self, use: Use, keys: Sequence[ChunkKey], parent: ChunkKey | None, depth: int) -> None:
        """See the base class."""
        if not self._others and not use.priority:
            self._base.insert(use, keys, parent, depth)
            return
        level = _clamped(use.priority)
        if level:
            self._join(level, keys)
        self._insert(level, use, keys, parent, depth)

    def _insert(self, level: int, use: Use, keys: Sequence[ChunkKey], parent: ChunkKey | None, depth: int) -> None:
        if parent is not None and self._level_of.get(parent, 0) != level:
            parent = None
        self._policy(level).insert(use, keys, parent, depth)

    def touch(self, use: Use, keys: Sequence[ChunkKey], num_chunks: int, residents: Residents) -> None:
        """See the base class. O(num_chunks) in Python where there is more than one level."""
        if not self._others and not use.priority:
            self._base.touch(use, keys, num_chunks, residents)
            return
        to = _clamped(use.priority)
        # Consecutive chunks of one level, with that level, the chunk before them and how many come before them.
        parts: list[tuple[int, ChunkKey | None, int, list[ChunkKey]]] = []
        before: ChunkKey | None = None
        evicted: list[ChunkKey] = []
        for depth, key in enumerate(keys[:num_chunks]):
            if key not in residents:
                before = None
                evicted.append(key)
                continue
            level = self._level_of.get(key, 0)
            if before is not None and parts[-1][0] == level:
                parts[-1][3].append(key)
            else:
                parts.append((level, before, depth, [key]))
            before = key
        for level, _, _, part in reversed(parts):  # the tail before the head
            if level >= to:
                self._policy(level).touch(use, part, len(part), residents)
        for level, parent, depth, part in parts:
            if level < to:
                self._raise(use, part, parent, depth, to)
        if evicted and (not to or to in self._others):  # this level will have them if they are saved again
            self._policy(to).touch(use, evicted, len(evicted), residents)

    def _raise(self, use: Use, keys: list[ChunkKey], parent: ChunkKey | None, depth: int, to: int) -> None:
        """Moves consecutive resident chunks to a higher level."""
        for key in reversed(keys):
            self._policy(self._leave(key)).remove(key, None)
        self._drop_empty()
        if to:
            self._join(to, keys)
        self._insert(to, use, keys, parent, depth)

    def remove(self, key: ChunkKey, parent: ChunkKey | None) -> None:
        """See the base class."""
        if not self._others:
            self._base.remove(key, parent)
            return
        level = self._leave(key)
        if parent is None or self._level_of.get(parent, 0) == level:
            self._policy(level).remove(key, parent)
        else:
            self._policy(level).remove(key, None)
            self.became_leaf(parent)
        self._drop_empty()

    def became_leaf(self, key: ChunkKey) -> None:
        """See the base class."""
        self._policy(self._level_of.get(key, 0)).became_leaf(key)

    def clear(self) -> list[Entries]:
        """See the base class."""
        policies = (self._base, *self._others.values())
        held: list[Entries] = [self._level_of]
        self._others, self._sizes, self._level_of = {}, {}, {}
        try:
            for policy in policies:
                held += _cleared(policy)
        except BaseException:  # it may be a user's own, and still have chunks that are gone
            self._base = self._make()
            self._base.resize(self._num_chunks)
            raise
        return held

    def evict(self, num_chunks: int, residents: Residents) -> None:
        """See the base class. One by one from a level while lower ones have chunks, which may become leaves."""
        if not self._others:
            self._base.evict(num_chunks, residents)
            return
        while num_chunks:
            num_lower = 0
            for level in sorted([*self._others, 0]):
                view = _Level(self, level, residents)
                if num_here := len(view):
                    self._policy(level).evict(1 if num_lower else num_chunks, view)
                if view.num_evicted:
                    num_chunks -= view.num_evicted
                    break
                num_lower += num_here
            else:
                break
        self._drop_empty()

    @property
    def num_above_and_below(self) -> int:
        """Resident chunks of all levels but 0."""
        return len(self._level_of)

    def num_at(self, level: int) -> int:
        """Resident chunks of a level, not 0."""
        return self._sizes[level]

    def note_evicted(self, key: ChunkKey) -> None:
        """The policy of its level has evicted this chunk."""
        self._leave(key)

    def _policy(self, level: int) -> EvictionPolicy:
        return self._others[level] if level else self._base

    def _join(self, level: int, keys: Sequence[ChunkKey]) -> None:
        if level not in self._others:
            policy = self._others[level] = self._make()
            policy.resize(self._num_chunks)
            self._sizes[level] = 0
        self._sizes[level] += len(keys)
        self._level_of.update(dict.fromkeys(keys, level))

    def _leave(self, key: ChunkKey) -> int:
        level = self._level_of.pop(key, 0)
        if level:
            self._sizes[level] -= 1
        return level

    def _drop_empty(self) -> None:
        for level in [level for level, size in self._sizes.items() if not size]:
            del self._others[level], self._sizes[level]

    def check_invariants(self, leaves: Collection[ChunkKey], residents: Residents) -> None:
        """See the base class."""
        assert all(key in residents for key in self._level_of), "a chunk that is not resident has a priority"
        levels = list(self._level_of.values())
        assert self._sizes == {level: levels.count(level) for level in self._others}
        assert all(self._sizes.values()), "a level without chunks"
        for level in [*self._others, 0]:
            own = [key for key in leaves if self._level_of.get(key, 0) == level]
            self._policy(level).check_invariants(own, _Level(self, level, residents))


def _cleared(policy: EvictionPolicy) -> Sequence[Entries]:
    """What a policy, which may be a user's own, has held.

    Raises:
      TypeError: it did not return containers.
    """
    held: Any = policy.clear()
    if not isinstance(held, (list, tuple)) or not all(
        isinstance(entries, (dict, set, list, deque)) for entries in held
    ):
        raise TypeError(
            f"{type(policy).__name__}.clear() returned {one_line(held)}; expected a list of the dicts, sets, lists and "
            "deques that held its chunks"
        )
    return held


def _clamped(priority: int) -> int:
    return max(-_MAX_PRIORITY, min(priority, _MAX_PRIORITY))


@final
class _Level(Residents):
    """The chunks of one level for its policy."""

    def __init__(self, policy: PriorityPolicy, level: int, residents: Residents) -> None:
        self._priorities = policy
        self._level_of = policy._level_of
        self._level = level
        self._residents = residents
        self.is_stored = residents.is_stored
        self.num_evicted = 0

    def _is_here(self, key: ChunkKey) -> bool:
        return self._level_of.get(key, 0) == self._level

    def __contains__(self, key: ChunkKey) -> bool:
        return key in self._residents and self._is_here(key)

    def __len__(self) -> int:
        if self._level:
            return self._priorities.num_at(self._level)
        return len(self._residents) - self._priorities.num_above_and_below

    def is_leaf(self, key: ChunkKey) -> bool:
        return self._residents.is_leaf(key)

    def evict_tail(
        self, key: ChunkKey, max_chunks: Given[int], *, until: Container[ChunkKey] = (), singly: Given[bool] = False
    ) -> tuple[int, ChunkKey | None]:
        """See the base class. A prefix begins after its last chunk of another level."""
        residents, num_evicted = self._residents, 0
        while True:
            num, stopped_at = residents.evict_tail(key, 1)
            if not num:
                stopped_at = key
                break
            num_evicted += 1
            self._priorities.note_evicted(key)
            if stopped_at is not None and not self._is_here(stopped_at):
                if residents.is_leaf(stopped_at):
                    self._priorities.became_leaf(stopped_at)
                stopped_at = None
            if stopped_at is None or num_evicted == max_chunks or stopped_at in until:
                break
            key = stopped_at
        self.num_evicted += num_evicted
        return num_evicted, stopped_at
