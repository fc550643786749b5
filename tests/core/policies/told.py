"""LRU that notes what it is told."""

from tpu_offload.core.policies import EvictionPolicy, LRUPolicy, Use
from tpu_offload.types import ChunkKey


class ToldPolicy(EvictionPolicy):
    """Notes the uses that it is told of in `told`, by their id."""

    def __init__(self, told: dict[int, Use]) -> None:
        self.lru, self.told = LRUPolicy(), told

    def insert(self, use, keys, parent, depth):
        self.told[use.use_id] = use
        self.lru.insert(use, keys, parent, depth)

    def touch(self, use, keys, num_chunks, residents):
        self.told[use.use_id] = use
        self.lru.touch(use, keys, num_chunks, residents)

    def remove(self, key, parent):
        self.lru.remove(key, parent)

    def became_leaf(self, key):
        self.lru.became_leaf(key)

    def clear(self):
        return self.lru.clear()

    def evict(self, num_chunks, residents):
        self.lru.evict(num_chunks, residents)

    def check_invariants(self, leaves, residents):
        self.lru.check_invariants(leaves, residents)


class DepthsPolicy(ToldPolicy):
    """Notes in `depths` how deep each chunk was when it was inserted."""

    def __init__(self, depths: dict[ChunkKey, int]) -> None:
        super().__init__({})
        self.depths = depths

    def insert(self, use, keys, parent, depth):
        self.depths.update(zip(keys, range(depth, depth + len(keys)), strict=True))
        super().insert(use, keys, parent, depth)
