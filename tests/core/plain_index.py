"""What ChunkIndex and its policy should do, with plain dicts and lists and a full search for each question."""

import dataclasses

from tpu_offload.core.index import ChunkState
from tpu_offload.core.policies import Use
from tpu_offload.types import ChunkKey

PENDING, READY, INVALID = ChunkState.PENDING, ChunkState.READY, ChunkState.INVALID


@dataclasses.dataclass
class Resident:
    slot: int
    state: ChunkState = PENDING


class PlainIndex:
    """Chunks of prefixes that are known in advance.

    Args:
      prefixes: all there will ever be, head first.
    """

    def __init__(self, prefixes: list[list[ChunkKey]]) -> None:
        self.before = {key: prefix[:i] for prefix in prefixes for i, key in enumerate(prefix)}
        self.chunks: dict[ChunkKey, Resident] = {}
        self.pins: list[list[ChunkKey]] = []
        self.free: list[int] = []  # in the order in which they are handed out
        self.quarantined: list[int] = []
        self.unusable: list[int] = []
        self.num_slots = self.most_slots = 0
        self.num_evicted = 0
        self.recency = Recency(self)
        self.priorities: dict[ChunkKey, int] = {}  # the highest of a chunk's uses

    # Questions.

    def state(self, key: ChunkKey) -> ChunkState | None:
        return self.chunks[key].state if key in self.chunks else None

    def keys(self, state: ChunkState) -> list[ChunkKey]:
        return [key for key, chunk in self.chunks.items() if chunk.state is state]

    def chain(self, key: ChunkKey) -> list[ChunkKey]:
        """The resident chunk and those before it, tail first, up to the first that is not here."""
        chain = []
        for k in [key, *reversed(self.before[key])]:
            if k not in self.chunks:
                break
            chain.append(k)
        return chain

    def is_leaf(self, key: ChunkKey, chunks) -> bool:
        return not any(self.before[k][-1:] == [key] for k in chunks)

    def covered(self) -> set[ChunkKey]:
        return {key for keys in self.pins for key in self.chain(keys[-1])}

    def candidates(self, protected, chunks) -> list[ChunkKey]:
        """The chunks of `chunks` that can be evicted next."""
        covered = self.covered()
        return [
            key
            for key in chunks
            if self.state(key) is READY and key not in covered and key not in protected and self.is_leaf(key, chunks)
        ]

    def num_evictable(self, protected) -> int:
        left = list(self.chunks)
        while gone := self.candidates(protected, left):
            left = [key for key in left if key not in gone]
        return len(self.chunks) - len(left)

    def check_priority(self, victim: ChunkKey, candidates: list[ChunkKey]) -> None:
        """Raises AssertionError if a chunk of lower priority could have been evicted."""
        priority = min(self.priorities[key] for key in candidates)
        assert self.priorities[victim] == priority, f"{victim!r} was evicted although others have priority {priority}"

    # Events.

    def use(self, use: Use, keys: list[ChunkKey]) -> None:
        priority = max(-8, min(use.priority, 8))
        for key in keys:
            if key in self.chunks:
                self.priorities[key] = max(self.priorities.get(key, priority), priority)

    def grow(self, num_slots: int) -> None:
        if num_slots > self.num_slots:
            back = sorted(slot for slot in self.unusable if slot < num_slots)
            self.unusable = [slot for slot in self.unusable if slot not in back]
            self.free += [*back, *range(self.most_slots, num_slots)]
            self.num_slots, self.most_slots = num_slots, max(num_slots, self.most_slots)

    def shrink(self, num_slots: int) -> None:
        self.num_slots = min(self.num_slots, num_slots)
        self.unusable += [slot for slot in self.free if slot >= num_slots]
        self.free = [slot for slot in self.free if slot < num_slots]

    def evict(self, key: ChunkKey) -> None:
        slot = self.chunks.pop(key).slot
        if slot < self.num_slots:
            self.free.insert(0, slot)
        else:
            self.unusable.append(slot)
        del self.priorities[key]
        self.num_evicted += 1

    def lose(self, key: ChunkKey, *, quarantine: bool = False) -> None:
        """Removes a chunk whose bytes are lost or never arrived; its slot is handed out last."""
        slot = self.chunks.pop(key).slot
        del self.priorities[key]
        if quarantine:
            self.quarantined.append(slot)
        else:
            self.give_back(slot)
        self.recency.doubt(self.before[key])

    def give_back(self, slot: int) -> None:
        (self.free if slot < self.num_slots else self.unusable).append(slot)

    def invalidate(self, keys) -> None:
        covered = self.covered()
        for key in keys:
            if key in covered:
                self.chunks[key].state = INVALID
            else:
                self.lose(key)

    def clear(self) -> None:
        """Pinned and unfinished chunks stay, as if used before all others; free slots are ordered from low to high."""
        covered = self.covered()
        for key in self.keys(READY):
            if key in covered:
                self.chunks[key].state = INVALID
            else:
                del self.chunks[key]
        self.priorities = dict.fromkeys(self.chunks, 0)
        self.recency.doubt(self.chunks)
        held = {*self.quarantined, *(chunk.slot for chunk in self.chunks.values())}
        left = [slot for slot in range(self.most_slots) if slot not in held]
        self.free = [slot for slot in left if slot < self.num_slots]
        self.unusable = [slot for slot in left if slot >= self.num_slots]

    def sweep(self) -> None:
        gone = set(self.keys(INVALID)) - self.covered()
        for key in sorted(gone, key=lambda key: self.chunks[key].slot, reverse=True):
            self.lose(key)


class Recency:
    """Least recently used by its definition: a use gives its time to every chunk that it used.

    After a chunk was lost, the order of those before it is undefined: `doubtful` ones may be evicted at any time until
    they are used again. So may those that a use reached across a chunk that is not resident.
    """

    def __init__(self, plain: PlainIndex) -> None:
        self.plain = plain
        self.now = 0
        self.times: dict[ChunkKey, int] = {}
        self.doubtful: set[ChunkKey] = set()

    def use(self, keys: list[ChunkKey]) -> None:
        here = [key for key in keys if key in self.plain.chunks]
        if here:
            self.now += 1
            self.doubt(here)
            chain = self.plain.chain(here[-1])
            self.doubtful.difference_update(chain)
            self.times.update(dict.fromkeys(chain, self.now))

    def doubt(self, keys) -> None:
        self.doubtful.update(key for key in keys if key in self.plain.chunks)

    def check(self, victim: ChunkKey, candidates: list[ChunkKey]) -> None:
        """Raises AssertionError if another one had to be evicted first."""
        if victim not in self.doubtful:
            older = [k for k in candidates if k not in self.doubtful and self.times[k] < self.times[victim]]
            assert not older, f"{victim!r} was evicted although {older} were used longer ago"
