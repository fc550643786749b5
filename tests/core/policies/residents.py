"""Resident chunks as plain sets, and least recently used as it is defined."""

import itertools

from tpu_offload.core.policies import Residents, Use

_numbers = itertools.count()


def new_use() -> Use:
    return Use(next(_numbers))


class FakeResidents(Residents):
    """A tree of chunks; those in `blocked` may not go. `evicted` says what went, in order."""

    def __init__(self) -> None:
        self.parents: dict[bytes, bytes | None] = {}
        self.blocked: set[bytes] = set()
        self.evicted: list[bytes] = []

    def add(self, keys: list[bytes], parent: bytes | None = None) -> None:
        for key in keys:
            self.parents[key] = parent
            parent = key

    def __contains__(self, key) -> bool:
        return key in self.parents

    def is_leaf(self, key: bytes) -> bool:
        return key not in self.parents.values()

    def leaves(self) -> list[bytes]:
        return [key for key in self.parents if self.is_leaf(key)]

    def evict(self, key, num_chunks, *, stop=()):
        assert num_chunks >= 1
        num_evicted = 0
        while num_evicted < num_chunks and self.is_leaf(key) and key not in self.blocked:
            parent = self.parents.pop(key)
            self.evicted.append(key)
            num_evicted += 1
            if parent is None or parent not in self.parents:
                return num_evicted, None
            key = parent
            if key in stop:
                break
        return num_evicted, key


class LRUByDefinition:
    """Every use sets the time of each chunk of the prefix; the leaf used longest ago goes. O(chunks) a victim."""

    def __init__(self, residents: FakeResidents) -> None:
        self.residents = residents
        self.times: dict[bytes, int] = {}
        self.now = 0

    def use(self, keys: list[bytes]) -> None:
        self.now += 1
        self.times.update(dict.fromkeys(keys, self.now))

    def victims(self, num_chunks: int) -> list[bytes]:
        parents, victims = dict(self.residents.parents), []
        while len(victims) < num_chunks:
            inner = set(parents.values())
            free = [key for key in parents if key not in inner and key not in self.residents.blocked]
            if not free:
                break
            victims.append(min(free, key=self.times.__getitem__))
            del parents[victims[-1]]
        return victims
