"""What KV events say of a stored block besides its hash: its tokens, its parent, its adapter.

The library knows chunks by their hashes alone. The requests that it looks up and saves for know the rest, and a save
may end after its request has. So a request is kept until every job that was planned while it ran has ended.
"""

import dataclasses
from collections import deque
from typing import TYPE_CHECKING, Any, final

from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from tpu_offload import BlockHash


@final
@dataclasses.dataclass(slots=True)
class BlockSource:
    """Where the tokens of a block are.

    Attributes:
      request: the newest request that has it.
      position: which of the request's blocks it is.
      num_requests: tracked requests that have it, always at the same position, because a hash covers all before it.
    """

    request: "Request"
    position: int
    num_requests: int = 1

    def hash_before(self, num_blocks: int) -> "BlockHash | None":
        """The hash of the block `num_blocks` before it; None before the first one."""
        before = self.position - num_blocks
        return self.request.block_hashes[before] if before >= 0 else None

    def token_ids(self, num_blocks: int, block_size: int) -> list[int]:
        """The tokens of `num_blocks` blocks, of which it is the last."""
        first = self.position + 1 - num_blocks
        return list(self.request.all_token_ids[first * block_size : (self.position + 1) * block_size])

    def extra_keys(self, num_blocks: int, block_size: int) -> tuple[Any, ...] | None:
        """What else the hashes of these blocks cover: images, adapter, salt."""
        first = self.position + 1 - num_blocks
        end = self.position + 1
        keys: tuple[Any, ...] | None = generate_block_hash_extra_keys(
            self.request, first * block_size, end * block_size, start_mm_idx=0
        )[0]
        return keys


@final
@dataclasses.dataclass(slots=True)
class _Tracked:
    request: "Request"
    hashes: list["BlockHash"] = dataclasses.field(default_factory=list)


@final
class BlockSources:
    """The blocks of all requests whose chunks may be stored. Memory: one entry a block of these requests."""

    def __init__(self) -> None:
        self._blocks: dict[BlockHash, BlockSource] = {}
        self._running: dict[str, _Tracked] = {}
        self._ended: deque[tuple[int, _Tracked]] = deque()  # each with the id of the first job planned after it

    def __len__(self) -> int:
        """Blocks. For tests."""
        return len(self._blocks)

    def track(self, request: "Request") -> None:
        """Takes the blocks of a request, as far as they are hashed."""
        tracked = self._running.setdefault(request.request_id, _Tracked(request))
        hashes, found = tracked.hashes, request.block_hashes
        while hashes and (len(hashes) > len(found) or found[len(hashes) - 1] != hashes[-1]):
            self._release(hashes.pop())  # the request goes on with other tokens, as a session may
        for position in range(len(hashes), len(found)):
            block_hash = found[position]
            hashes.append(block_hash)
            source = self._blocks.get(block_hash)
            if source is None:
                self._blocks[block_hash] = BlockSource(request, position)
            else:
                source.request = request  # the newest, so that ended ones are not kept
                source.num_requests += 1

    def finish(self, request_id: str, *, next_job_id: int) -> None:
        """The request ended; its saves in flight have smaller ids than `next_job_id`."""
        tracked = self._running.pop(request_id, None)
        if tracked is not None:
            self._ended.append((next_job_id, tracked))

    def forget(self, *, oldest_job_id: int) -> None:
        """Forgets ended requests of which no job is in flight: those in flight have no smaller id."""
        while self._ended and self._ended[0][0] <= oldest_job_id:
            for block_hash in self._ended.popleft()[1].hashes:
                self._release(block_hash)

    def get(self, block_hash: "BlockHash") -> BlockSource | None:
        """Where the tokens of a block are; None if no tracked request has it."""
        source = self._blocks.get(block_hash)
        if source is None:
            return None
        found = source.request.block_hashes
        return source if source.position < len(found) and found[source.position] == block_hash else None

    def _release(self, block_hash: "BlockHash") -> None:
        source = self._blocks[block_hash]
        source.num_requests -= 1
        if not source.num_requests:
            del self._blocks[block_hash]
