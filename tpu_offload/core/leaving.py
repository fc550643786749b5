"""Blocks that are about to be granted to somebody else: they are saved in the coming plan, or never.

There are two kinds. A preempted request gives its blocks back and will return: all that it has computed is saved,
generated tokens too, and seen or not, for it is certain to come back for them. And the engine's own prefix cache gives
blocks up. Nothing can be saved but behind what the host tier has, so with a block goes all of its prefix that is not
there. Most of that is the next to go anyway: HBM too evicts the tail of a prefix before its head.
"""

import copy
from typing import final

from tpu_offload.core.block_tables import Ids, read_hashes, read_ids
from tpu_offload.core.engine_api import CachedPrefix, ScheduledRequest
from tpu_offload.core.index import ChunkIndex
from tpu_offload.core.request_state import RequestState
from tpu_offload.core.save_policy import SaveEvent, SavePolicy
from tpu_offload.errors import RequestError
from tpu_offload.types import BlockHash, ChunkKey


@final
class LeavingBlocks:
    """What was told of since the last plan. Each is a request of its own, which nobody else knows."""

    def __init__(
        self, index: ChunkIndex, policy: SavePolicy, *, block_size: int, blocks_per_chunk: int, num_groups: int
    ) -> None:
        self._index = index
        self._policy = policy
        self._block_size = block_size
        self._blocks_per_chunk = blocks_per_chunk
        self._num_groups = num_groups
        self._leaving: list[RequestState] = []

    def __len__(self) -> int:
        return len(self._leaving)

    def clear(self) -> None:
        """Nothing of it is to be saved."""
        self._leaving.clear()

    def take(self) -> list[RequestState]:
        """All of it, for the plan at hand."""
        leaving, self._leaving = self._leaving, []
        return leaving

    def preempt(self, request: RequestState, held: ScheduledRequest) -> bool:
        """A request gives its blocks back, and is tracked no more; returns whether it is saved.

        Raises:
          RequestError: what is said of it makes no sense; nothing was changed.
        """
        if not self._policy.saves_on(SaveEvent.PREEMPTION):
            return False
        num_tokens = held.num_computed_tokens
        if request.load is not None:  # what that was to bring may be half written
            num_tokens = min(num_tokens, request.load.num_valid_tokens)
        num_blocks = min(len(held.block_hashes), *map(len, held.block_tables))
        num_chunks = self._num_chunks(request.limits.num_savable_tokens(num_tokens), num_blocks)
        request.check_same(held.block_hashes, blocks_per_chunk=self._blocks_per_chunk)
        end = num_chunks * self._blocks_per_chunk
        tables: list[Ids] = [read_ids(request.request_id, table, end=end) for table in held.block_tables]
        if num_chunks > len(request.keys):
            request.extend_keys(held.block_hashes, blocks_per_chunk=self._blocks_per_chunk)
        leaving = copy.copy(request)
        leaving.promise = leaving.load = leaving.revoked = None
        leaving.block_tables = tables
        leaving.num_offered_chunks = num_chunks
        leaving.num_saved_chunks = leaving.num_looked_at_chunks = leaving.num_refused_chunks = 0
        self._leaving.append(leaving)
        return True

    def evict(self, prefix: CachedPrefix, request: RequestState) -> None:
        """The prefix cache gives up the last block of a prefix.

        Args:
          prefix: it.
          request: stands for it: a new one, with its limits.
        Raises:
          RequestError: what is said of it makes no sense; nothing was changed.
        """
        size, num_blocks = self._blocks_per_chunk, prefix.num_blocks
        num_tokens = self._policy.num_tokens_to_save(
            num_prompt_tokens=prefix.num_prompt_tokens, num_computed_tokens=num_blocks * self._block_size
        )
        num_chunks = self._num_chunks(prefix.limits.num_savable_tokens(num_tokens), num_blocks)
        if not num_chunks or self._is_resident(prefix, num_chunks, request):
            return
        hashes = read_hashes(request.request_id, prefix.block_hashes, end=num_chunks * size)
        if len(hashes) < num_chunks * size:
            raise RequestError(f"a cached prefix has {len(hashes)} block hashes; expected {num_chunks * size}")
        request.extend_keys(hashes, blocks_per_chunk=size)
        tails = [self._tail(prefix, group_id, hashes, request) for group_id in range(self._num_groups)]
        num_left = min(map(len, tails))
        num_gone_blocks = len(hashes) - num_left
        request.block_tables = [[-1] * num_gone_blocks + tail[:num_left][::-1] for tail in tails]
        request.num_saved_chunks = request.num_gone_chunks = -(-num_gone_blocks // size)
        request.num_offered_chunks = num_worth_saving(self._policy, request, num_chunks)
        self._leaving.append(request)

    @staticmethod
    def _tail(prefix: CachedPrefix, group_id: int, hashes: list[BlockHash], request: RequestState) -> list[int]:
        """The last blocks of a prefix that a layer group has in HBM, from the last one back."""
        block_ids: list[int] = []
        for block_hash in reversed(hashes):
            block_id = prefix.block_of(group_id, block_hash)
            if block_id is None:
                break
            block_ids.append(block_id)
        return read_ids(request.request_id, block_ids)

    def _num_chunks(self, num_tokens: int, num_blocks: int) -> int:
        """The chunks that so many tokens in so many blocks fill."""
        return min(num_tokens // self._block_size, num_blocks) // self._blocks_per_chunk

    def _is_resident(self, prefix: CachedPrefix, num_chunks: int, request: RequestState) -> bool:
        """Whether the host tier has the last of so many chunks. O(1), and mostly true: tails go block by block."""
        end = num_chunks * self._blocks_per_chunk
        (block_hash,) = read_hashes(request.request_id, prefix.block_hashes, end - 1, end)
        return ChunkKey(block_hash + request.namespace) in self._index


def num_worth_saving(policy: SavePolicy, request: RequestState, num_chunks: int) -> int:
    """How many leading chunks of a request to save, of so many that may be. Those that are saved stay."""
    first = request.num_saved_chunks
    if num_chunks <= first:
        return num_chunks
    return first + policy.num_chunks_worth_saving(request.keys, first, num_chunks)
