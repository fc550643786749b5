"""What the scheduler remembers of a request, from its first match until it gives its blocks back."""

import dataclasses
from collections.abc import Hashable, Sequence

from tpu_offload import hashing
from tpu_offload.core.jobs import Job
from tpu_offload.types import BlockHash, ChunkKey


@dataclasses.dataclass(frozen=True, slots=True)
class Promise:
    """What a match granted. The chunks are pinned and `num_blocks` staging blocks are reserved.

    Attributes:
      first_block: index, in the request, of the first block to load.
      num_blocks: blocks to load from there.
      num_tokens: tokens that the engine need not compute.
      keys: the chunks that hold those blocks.
    """

    first_block: int
    num_blocks: int
    num_tokens: int
    keys: tuple[ChunkKey, ...]


@dataclasses.dataclass(slots=True)
class TrackedRequest:
    """A request between its first match and its end or preemption.

    Attributes:
      request_id: the engine's name for it.
      account: holder of its staging blocks; unlike the request id it is never used twice, so a request
        that comes back after a preemption does not meet its own old load.
      epoch: number of resets of the cache before its keys were made.
      keys: keys of its chunks, as far as they were needed.
      promise: what it was promised and has not taken.
      load: its load, planned or in flight.
      num_saved_chunks: leading chunks that are in the host tier or on the way, as last seen.
      num_refused_chunks: chunks after those that found no room in the last step; drops if the request
        ends now.
      num_cut_load_blocks: blocks that its last match found but had no staging blocks for; they become
        drops when the request ends, because until then it may be matched again.
      saving: False once a reset has made the KV in its blocks worthless to others.
    """

    request_id: str
    account: Hashable
    epoch: int
    keys: list[ChunkKey] = dataclasses.field(default_factory=list)
    promise: Promise | None = None
    load: Job | None = None
    num_saved_chunks: int = 0
    num_refused_chunks: int = 0
    num_cut_load_blocks: int = 0
    saving: bool = True

    def extend_keys(self, block_hashes: Sequence[BlockHash], *, blocks_per_chunk: int) -> None:
        """Adds the keys of the full chunks of `block_hashes` that are not there yet."""
        self.keys.extend(
            hashing.chunk_keys(
                block_hashes, blocks_per_chunk=blocks_per_chunk, first_chunk=len(self.keys), epoch=self.epoch
            )
        )

    def start_over(self, *, epoch: int) -> None:
        """After a reset: its keys change, and the KV that it holds by now is saved no more."""
        self.epoch = epoch
        self.keys.clear()
        self.num_saved_chunks = self.num_refused_chunks = 0
        self.saving = False
