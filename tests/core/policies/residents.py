"""Resident chunks as plain sets, and least recently used as it is defined."""

import itertools

from tpu_offload.core.index import ChunkIndex
from tpu_offload.core.policies import EvictionPolicy, Residents, Use
from tpu_offload.types import ChunkKey

_numbers = itertools.count()


def chunk_keys(names: str) -> list[ChunkKey]:
    """A key for each word."""
    return [ChunkKey(name.encode()) for name in names.split()]


def new_use(priority: int = 0) -> Use:
    return Use(next(_numbers), priority)


class FakeResidents(Residents):
    """A tree of chunks; those in `blocked` cannot be evicted. `evicted` lists evictions in order."""

    def __init__(self) -> None:
        self.parents: dict[ChunkKey, ChunkKey | None] = {}
        self.blocked: set[ChunkKey] = set()
        self.evicted: list[ChunkKey] = []

    def add(self, keys: list[ChunkKey], parent: ChunkKey | None = None) -> None:
        for key in keys:
            self.parents[key] = parent
            parent = key

    def __contains__(self, key) -> bool:
        return key in self.parents

    def __len__(self) -> int:
        return len(self.parents)

    def is_leaf(self, key: ChunkKey) -> bool:
        return key not in self.parents.values()

    def leaves(self) -> list[ChunkKey]:
        return [key for key in self.parents if self.is_leaf(key)]

    def prefix(self, key: ChunkKey) -> list[ChunkKey]:
        """The chunk and those before it, head first, as far as they are resident."""
        chain: list[ChunkKey] = []
        step: ChunkKey | None = key
        while step in self.parents:
            chain.append(step)
            step = self.parents[step]
        return chain[::-1]

    def depth_after(self, parent: ChunkKey | None) -> int:
        """How many resident chunks come before one that follows `parent`."""
        return 0 if parent is None else len(self.prefix(parent))

    def num_evictable(self) -> int:
        left = dict(self.parents)
        while free := left.keys() - left.values() - self.blocked:
            left = {key: parent for key, parent in left.items() if key not in free}
        return len(self.parents) - len(left)

    def evict_tail(self, key, max_chunks, *, until=(), singly=False):
        assert max_chunks >= 1
        num_evicted = 0
        while num_evicted < max_chunks and self.is_leaf(key) and key not in self.blocked:
            parent = self.parents.pop(key)
            self.evicted.append(key)
            num_evicted += 1
            if parent is None or parent not in self.parents:
                return num_evicted, None
            key = parent
            if key in until:
                break
        return num_evicted, key


class CountedResidents(Residents):
    """An index whose policy's calls to its residents are counted."""

    actual: Residents

    def __init__(self, policy: EvictionPolicy) -> None:
        self.policy = policy
        self.index = ChunkIndex(_Counting(policy, self))
        self.num_asked = 0

    def __contains__(self, key) -> bool:
        self.num_asked += 1
        return key in self.actual

    def __len__(self) -> int:
        return len(self.index)

    def is_leaf(self, key) -> bool:
        self.num_asked += 1
        return self.actual.is_leaf(key)

    def evict_tail(self, key, max_chunks, *, until=(), singly=False):
        self.num_asked += 1
        return self.actual.evict_tail(key, max_chunks, until=until, singly=singly)

    def wrap(self, residents: Residents) -> "CountedResidents":
        """Counts the calls to these from now on."""
        self.actual = residents
        return self


class _Counting(EvictionPolicy):
    """Forwards all calls, with residents that count."""

    def __init__(self, policy: EvictionPolicy, residents: CountedResidents) -> None:
        self.policy, self.residents = policy, residents
        self.resize, self.insert, self.remove = policy.resize, policy.insert, policy.remove
        self.became_leaf, self.clear = policy.became_leaf, policy.clear

    def resize(self, num_chunks): ...

    def insert(self, use, keys, parent, depth): ...

    def remove(self, key, parent): ...

    def became_leaf(self, key): ...

    def clear(self): ...

    def touch(self, use, keys, num_chunks, residents):
        self.policy.touch(use, keys, num_chunks, self.residents.wrap(residents))

    def evict(self, num_chunks, residents):
        self.policy.evict(num_chunks, self.residents.wrap(residents))

    def check_invariants(self, leaves, residents):
        self.policy.check_invariants(leaves, self.residents.wrap(residents))


class LRUByDefinition:
    """Every use sets the time of each chunk of the prefix; the leaf used longest ago is evicted. O(chunks) a victim."""

    def __init__(self, residents: FakeResidents) -> None:
        self.residents = residents
        self.times: dict[ChunkKey, int] = {}
        self.now = 0

    def use(self, keys: list[ChunkKey]) -> None:
        self.now += 1
        self.times.update(dict.fromkeys(keys, self.now))

    def victims(self, num_chunks: int) -> list[ChunkKey]:
        parents = dict(self.residents.parents)
        victims: list[ChunkKey] = []
        while len(victims) < num_chunks:
            inner = set(parents.values())
            free = [key for key in parents if key not in inner and key not in self.residents.blocked]
            if not free:
                break
            victims.append(min(free, key=self.times.__getitem__))
            del parents[victims[-1]]
        return victims
