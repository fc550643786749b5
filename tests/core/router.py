"""A router that knows the host tier by its events only, and what a request could load of it."""

from collections.abc import Sequence

from tests.inside.scheduler import chunk_index, load_planner, request_table, slot_of_chunk, tier_context
from tpu_offload import LayerGroupKind, OffloadScheduler, TierEventKind
from tpu_offload.core.index import ChunkState
from tpu_offload.hashing import last_block_hash
from tpu_offload.types import BlockHash


def num_in_host_tier(scheduler: OffloadScheduler, hashes: Sequence[BlockHash], num_tokens: int) -> int:
    """How many tokens of a prompt a lookup finds in the host tier; unlike `num_cached_tokens`, not in storage."""
    request = request_table(scheduler).new("of a test")
    return load_planner(scheduler).num_cached_tokens(request, hashes, num_tokens=num_tokens)


class Router:
    """Follows the events of one scheduler, and applies the rule that `TierEvent` gives.

    Attributes:
      hashes: per layer group, what the host tier has of it.
    """

    def __init__(self, scheduler: OffloadScheduler) -> None:
        context = tier_context(scheduler)
        self._scheduler = scheduler
        self._groups = context.layout.groups
        self._block_size = context.block_size
        self._blocks_per_chunk = context.blocks_per_chunk
        self.hashes: list[set[BlockHash]] = [set() for _ in self._groups]

    def take(self) -> None:
        """Follows the events since the last call."""
        while events := self._scheduler.take_events():
            for event in events:
                if event.kind is TierEventKind.CLEARED:
                    assert not event.block_hashes
                    assert event.group_id is None
                    for known in self.hashes:
                        known.clear()
                    continue
                assert event.group_id is not None
                known, hashes = self.hashes[event.group_id], set(event.block_hashes)
                assert len(hashes) == len(event.block_hashes) > 0
                if event.kind is TierEventKind.STORED:
                    assert known.isdisjoint(hashes), f"layer group {event.group_id}: stored twice"
                    known |= hashes
                else:
                    assert known >= hashes, f"layer group {event.group_id}: removed without having been stored"
                    known -= hashes

    def check_chunks(self) -> None:
        """Raises AssertionError unless the events name exactly the chunks of full attention that are READY."""
        self.take()
        index = chunk_index(self._scheduler)
        ready = {last_block_hash(key) for key in slot_of_chunk(self._scheduler) if index.state(key) is ChunkState.READY}
        assert self.hashes[0] == ready

    def num_cached_tokens(self, hashes: Sequence[BlockHash], num_tokens: int) -> int:
        """How many tokens of a prompt with these block hashes could be loaded."""
        size = self._block_size * self._blocks_per_chunk
        chunks = hashes[self._blocks_per_chunk - 1 :: self._blocks_per_chunk]
        if len(self._groups) == 1:
            end = max(n for n in range(len(chunks) + 1) if self.hashes[0].issuperset(chunks[:n]))
            return max(0, min(end * size, num_tokens - 1))
        boundaries = range(min(len(chunks), (num_tokens - 1) // size), 0, -1)
        return next((n * size for n in boundaries if self._has_all(chunks[:n], size)), 0)

    def _has_all(self, chunks: Sequence[BlockHash], size: int) -> bool:
        """Whether every layer group has what it needs after these chunks, of `size` tokens each."""
        for group, known in zip(self._groups, self.hashes, strict=True):
            if group.kind is LayerGroupKind.FULL_ATTENTION:
                needed = chunks
            elif group.kind is LayerGroupKind.STATE:
                needed = chunks[-1:]
            else:
                needed = chunks[max(0, len(chunks) - -(-(group.window - 1) // size)) :]
            if not known.issuperset(needed):
                return False
        return True
