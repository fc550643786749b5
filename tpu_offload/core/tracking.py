"""What the scheduler remembers of a request, from its first match until it gives its blocks back."""

import dataclasses
from collections.abc import Sequence

from tpu_offload import hashing
from tpu_offload.core.boundary import check_keys
from tpu_offload.core.jobs import Job
from tpu_offload.core.policies import Use
from tpu_offload.core.requests import NO_LIMITS, RequestLimits
from tpu_offload.errors import RequestError
from tpu_offload.types import BlockHash, ChunkKey


@dataclasses.dataclass(slots=True)
class Promise:
    """What a match granted. The chunks are pinned and `num_blocks` staging blocks are reserved.

    Attributes:
      first_block: index, in the request, of the first block to load.
      num_blocks: blocks to load from there.
      num_tokens: tokens that the engine need not compute.
      keys: the chunks that hold those blocks; pinned.
      slots: where they are.
      lost: the host memory of some of them is gone since; the load will fail.
    """

    first_block: int
    num_blocks: int
    num_tokens: int
    keys: tuple[ChunkKey, ...]
    slots: tuple[int, ...]
    lost: bool = False


@dataclasses.dataclass(slots=True)
class TrackedRequest:
    """A request between its first match and its end or preemption.

    Attributes:
      request_id: the engine's name for it.
      account: holder of its staging blocks; unlike the request id it is never used twice, so a request
        that comes back after a preemption does not meet its own old load.
      use: what policies are told of it.
      namespace: ends its keys (see `hashing.key_namespace`).
      limits: what may be done for it.
      keys: keys of its chunks, as far as they were needed.
      promise: what it was promised and has not taken.
      load: its load, planned or in flight.
      block_ids: its blocks, as the engine last offered them: the engine's own list, which may grow.
      num_offered_chunks: leading chunks of those that should be in the host tier by now; their keys are known.
      num_gone_chunks: leading chunks that have no blocks in HBM any more (of a prefix that HBM evicts).
      num_looked_at_chunks: how many were offered when it was last tried to save them.
      num_found_chunks: leading chunks that its last match found in the host tier, or that it had in HBM then.
      num_saved_chunks: leading chunks that are in the host tier or on the way, as last seen.
      num_refused_chunks: chunks after those that found no room when it was last tried; drops if the request
        ends now.
      rests_until_s: before this time a chunk that it offers may not be copied, and nothing of it is to be looked at.
      at_load_limit: whether its last match promised all that its limits allow.
      num_cut_load_blocks: blocks that its last match found but had no staging blocks for; they become
        drops when the request ends, because until then it may be matched again.
      revoked: what it was promised and had not taken when a reset took it back.
      saving: False once a reset has made the KV in its blocks worthless to others.
    """

    request_id: str
    account: str
    use: Use
    namespace: bytes
    limits: RequestLimits = NO_LIMITS
    keys: list[ChunkKey] = dataclasses.field(default_factory=list)
    promise: Promise | None = None
    load: Job | None = None
    block_ids: Sequence[int] = ()
    num_offered_chunks: int = 0
    num_gone_chunks: int = 0
    num_looked_at_chunks: int = 0
    num_found_chunks: int = 0
    num_saved_chunks: int = 0
    num_refused_chunks: int = 0
    rests_until_s: float = 0.0
    at_load_limit: bool = False
    num_cut_load_blocks: int = 0
    revoked: Promise | None = None
    saving: bool = True

    def limit(self, limits: RequestLimits) -> None:
        """These limits hold from now on."""
        self.limits = limits
        if self.use.priority != limits.priority:
            self.use = dataclasses.replace(self.use, priority=limits.priority)

    def extend_keys(self, block_hashes: Sequence[BlockHash], *, blocks_per_chunk: int) -> None:
        """Adds the keys of the full chunks of `block_hashes` that are not there yet.

        Raises:
          RequestError: one is no bytes; nothing was added.
        """
        new = hashing.chunk_keys(
            block_hashes, blocks_per_chunk=blocks_per_chunk, namespace=self.namespace, first_chunk=len(self.keys)
        )
        try:
            keys = list(new)
        except TypeError as e:
            raise RequestError(f"request {self.request_id} has a block hash that is no bytes: {e}") from e
        check_keys(self.request_id, keys)
        self.keys.extend(keys)

    def check_same(self, block_hashes: Sequence[BlockHash], *, blocks_per_chunk: int) -> None:
        """Raises RequestError unless these hashes go on from those that earlier calls were given. O(1)."""
        last = len(self.keys) * blocks_per_chunk - 1
        if not self.keys or last >= len(block_hashes):
            return
        check_keys(self.request_id, block_hashes[last : last + 1])
        if self.keys[-1] != block_hashes[last] + self.namespace:
            raise RequestError(
                f"request {self.request_id}: the hash of block {last} is not the one it had before; end a request "
                "with finish() before another uses its request_id"
            )

    def start_over(self, *, namespace: bytes) -> None:
        """After a reset: its keys change, and the KV that it holds by now is saved no more."""
        self.namespace = namespace
        self.keys.clear()
        self.num_found_chunks = self.num_saved_chunks = self.num_refused_chunks = 0
        self.saving = False
