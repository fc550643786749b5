"""Early saves: of blocks that are granted to another request in the coming step, so saved in its plan or never.

There are two kinds. A preempted request gives its blocks back and will return: all that it has computed is saved,
generated tokens included, however rarely its chunks were seen, because it is certain to reuse them. And the engine's
prefix cache evicts blocks. A chunk is of use only behind the chunks before it, so with a block goes all of its prefix
that the host tier lacks. Most of that would be evicted next: HBM too evicts the tail of a prefix before its head.
"""

from typing import Any, final

from tpu_offload.core.block_tables import read_hashes, read_ids
from tpu_offload.core.context import TierContext
from tpu_offload.core.engine_api import CachedPrefix, ScheduledRequest
from tpu_offload.core.request_state import RequestState
from tpu_offload.core.save_policy import SaveEvent, SavePolicy
from tpu_offload.core.tier_groups import CHUNK_GROUP
from tpu_offload.errors import RequestError
from tpu_offload.types import BlockHash, ChunkKey


@final
class EarlySaves:
    """The early saves for the next plan. Each is a request of its own, which is tracked nowhere else."""

    def __init__(self, context: TierContext, policy: SavePolicy) -> None:
        self._index = context.index
        self._policy = policy
        self._block_size = context.block_size
        self._blocks_per_chunk = context.blocks_per_chunk
        self._requests: list[RequestState] = []
        self._priorities: dict[ChunkKey, int] = {}  # of the chunks that these save

    def __len__(self) -> int:
        return len(self._requests)

    def clear(self) -> None:
        """Drops them all."""
        self._requests.clear()
        self._priorities.clear()

    def take(self) -> list[RequestState]:
        """Removes and returns them all, for a plan."""
        requests, self._requests, self._priorities = self._requests, [], {}
        return requests

    def preempt(self, request: RequestState, held: ScheduledRequest) -> RequestState | None:
        """A request is preempted; returns what stands for it, to be added, or None if its blocks are not saved.

        Raises:
          RequestError: `held` is invalid; nothing was changed.
        """
        if not self._policy.saves_on(SaveEvent.PREEMPTION):
            return None
        num_tokens = held.num_computed_tokens
        if request.load is not None:  # blocks of a load in flight may be half written
            num_tokens = min(num_tokens, request.load.num_valid_tokens)
        given = held.block_tables[CHUNK_GROUP]
        num_blocks = min(len(held.block_hashes), len(given))
        num_chunks = self._num_chunks(request.limits.num_savable_tokens(num_tokens), num_blocks)
        request.check_same(held.block_hashes, blocks_per_chunk=self._blocks_per_chunk)
        block_ids = read_ids(request.request_id, given, end=num_chunks * self._blocks_per_chunk)
        if num_chunks > len(request.keys):
            request.extend_keys(held.block_hashes, blocks_per_chunk=self._blocks_per_chunk)
        return request.copy_for_early_save(block_ids, num_chunks)

    def add(self, saved: RequestState) -> None:
        """The coming plan saves this. O(chunks)."""
        self._requests.append(saved)
        if saved.can_save:
            priority = saved.limits.priority
            for key in saved.keys[saved.num_gone_chunks : saved.num_offered_chunks]:
                self._priorities[key] = max(priority, self._priorities.get(key, priority))

    def evict(self, prefix: CachedPrefix, request: RequestState) -> None:
        """The prefix cache evicts the last block of a prefix.

        Args:
          prefix: the prefix.
          request: a new request that stands for it, with its limits.
        Raises:
          RequestError: the prefix is invalid; nothing was changed.
        """
        size, num_blocks = self._blocks_per_chunk, prefix.num_blocks
        num_tokens = int(
            self._policy.num_tokens_to_save(
                num_prompt_tokens=prefix.num_prompt_tokens, num_computed_tokens=num_blocks * self._block_size
            )
        )
        num_chunks = self._num_chunks(prefix.limits.num_savable_tokens(num_tokens), num_blocks)
        if not num_chunks or self._has_last(prefix, num_chunks, request):
            return
        hashes = read_hashes(request.request_id, prefix.block_hashes, end=num_chunks * size)
        if len(hashes) < num_chunks * size:
            raise RequestError(f"a cached prefix has {len(hashes)} block hashes; expected {num_chunks * size}")
        request.extend_keys(hashes, blocks_per_chunk=size)
        tail = self._tail(prefix, hashes, request)
        num_gone_blocks = len(hashes) - len(tail)
        request.block_table = [-1] * num_gone_blocks + tail[::-1]
        request.num_saved_chunks = request.num_gone_chunks = -(-num_gone_blocks // size)
        request.num_offered_chunks = num_worth_saving(self._policy, request, num_chunks)
        self.add(request)

    @staticmethod
    def _tail(prefix: CachedPrefix, hashes: list[BlockHash], request: RequestState) -> list[int]:
        """The last blocks of a prefix that are in HBM, in reverse order."""
        block_ids: list[Any] = []
        block_of: Any = prefix.block_of  # the engine's, validated below
        for block_hash in reversed(hashes):
            block_id = block_of(CHUNK_GROUP, block_hash)
            if block_id is None:
                break
            block_ids.append(block_id)
        return read_ids(request.request_id, block_ids)

    def _num_chunks(self, num_tokens: int, num_blocks: int) -> int:
        """How many chunks these tokens fill, in this many blocks."""
        return min(num_tokens // self._block_size, num_blocks) // self._blocks_per_chunk

    def _has_last(self, prefix: CachedPrefix, num_chunks: int, request: RequestState) -> bool:
        """Whether the host tier has the last chunk, or the coming plan saves it early, with no lower priority. O(1).

        Mostly true: tails are evicted block by block.
        """
        end = num_chunks * self._blocks_per_chunk
        (block_hash,) = read_hashes(request.request_id, prefix.block_hashes, end - 1, end)
        key = ChunkKey(block_hash + request.namespace)
        priority = self._priorities.get(key)
        return key in self._index or (priority is not None and priority >= prefix.limits.priority)


def num_worth_saving(policy: SavePolicy, request: RequestState, num_chunks: int) -> int:
    """How many of the first `num_chunks` chunks of a request to save; those saved already count."""
    first = request.num_saved_chunks
    if num_chunks <= first:
        return num_chunks
    return first + int(policy.num_chunks_worth_saving(request.keys, first, num_chunks))
