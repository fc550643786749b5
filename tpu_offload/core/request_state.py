"""What the scheduler remembers of a request, from its first match until it gives its blocks back."""

import dataclasses
from collections.abc import Sequence

from tpu_offload.core.engine_api import NO_LIMITS, RequestLimits
from tpu_offload.core.jobs import Job, WaitingLoad
from tpu_offload.core.policies import Use
from tpu_offload.core.tables import Ids, read_hashes
from tpu_offload.errors import RequestError
from tpu_offload.hashing import PrefixKeys, last_block_hash
from tpu_offload.types import BlockHash, ChunkKey

_MAX_LISTED = 64


@dataclasses.dataclass(slots=True)
class Promise:
    """What a match granted. The chunks are pinned and `num_staging_blocks` staging blocks are reserved.

    Attributes:
      first_block: index, in the request, of the first block to load.
      num_blocks: blocks to load from there.
      num_tokens: tokens that the engine need not compute.
      keys: the chunks that hold those blocks; pinned.
      slots: where they are.
      num_staging_blocks: what the load can go through; 0 if it needs none, or will wait for some.
      lost: the host memory of some of them is gone since; the load will fail.
    """

    first_block: int
    num_blocks: int
    num_tokens: int
    keys: Sequence[ChunkKey]
    slots: tuple[int, ...]
    num_staging_blocks: int
    lost: bool = False


@dataclasses.dataclass(slots=True)
class RequestState:
    """A request between its first match and its end or preemption.

    Attributes:
      request_id: the engine's name for it.
      account: holder of its staging blocks; unlike the request id it is never used twice, so a request
        that comes back after a preemption does not meet its own old load.
      use: what policies are told of it.
      namespace: ends its keys (see `hashing.key_namespace`).
      limits: what may be done for it.
      keys: keys of its chunks, as far as they were needed. A list while they are few, which is three times as fast as
        making each when it is asked for.
      promise: what it was promised and has not taken.
      load: its load, waiting or in flight.
      block_tables: per layer group, its first blocks, those of the chunks on offer at least, as the engine last said
        them; nobody else's. Empty while nothing is on offer.
      num_offered_chunks: leading chunks of those that should be in the host tier by now; their keys are known.
      num_gone_chunks: leading chunks that have no blocks in HBM any more (of a prefix that HBM evicts).
      num_tried_chunks: how many were offered when it was last tried to save them.
      num_found_chunks: leading chunks that its last match found in the host tier, or that it had in HBM then.
      num_looked_up_tokens: what its last match asked the host tier for, until that is counted (see `OffloadStats`).
      num_found_tokens: how many of these it found.
      num_saved_chunks: leading chunks that are in the host tier or on the way, as last seen.
      num_refused_chunks: chunks after those that found no room when it was last tried; drops if the request
        ends now.
      backoff_until_s: before this time a chunk that it offers may not be copied, and nothing of it is to be looked at.
      at_load_limit: whether its last match promised all that its limits allow.
      num_cut_load_blocks: blocks that its last match found and did not promise, for want of staging blocks or because
        loads are suspended; they become drops when the request ends, because until then it may be matched again.
      awaits_staging: whether that was for want of staging blocks alone.
      arriving_since_s: when its matches began to be answered with ARRIVING; None if they were not since it held blocks.
      revoked: what it was promised and had not taken when a reset took it back.
      can_save: False once a reset has made the KV in its blocks worthless to others, or a loss of the caches to all.
      has_kv: False once the caches were lost, until it is matched again: what it has in HBM, by its own blocks or by
        those that its last match found there, is not its KV.
    """

    request_id: str
    account: str
    use: Use
    namespace: bytes
    limits: RequestLimits = NO_LIMITS
    keys: list[ChunkKey] | PrefixKeys = dataclasses.field(default_factory=list)
    promise: Promise | None = None
    load: Job | WaitingLoad | None = None
    block_tables: list[Ids] = dataclasses.field(default_factory=list)
    num_offered_chunks: int = 0
    num_gone_chunks: int = 0
    num_tried_chunks: int = 0
    num_found_chunks: int = 0
    num_looked_up_tokens: int = 0
    num_found_tokens: int = 0
    num_saved_chunks: int = 0
    num_refused_chunks: int = 0
    backoff_until_s: float = 0.0
    at_load_limit: bool = False
    num_cut_load_blocks: int = 0
    awaits_staging: bool = False
    arriving_since_s: float | None = None
    revoked: Promise | None = None
    can_save: bool = True
    has_kv: bool = True

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
        self.add_keys(self.new_hashes(block_hashes, blocks_per_chunk=blocks_per_chunk))

    def add_keys(self, hashes: list[BlockHash]) -> None:
        """Adds the keys of chunks, named by what `new_hashes` returned."""
        keys, namespace = self.keys, self.namespace
        if isinstance(keys, list):
            if len(keys) + len(hashes) <= _MAX_LISTED:
                keys += [ChunkKey(block_hash + namespace) for block_hash in hashes]
                return
            hashes = [*map(last_block_hash, keys), *hashes]
            self.keys = keys = PrefixKeys(namespace)
        keys.extend(hashes)

    def new_hashes(self, block_hashes: Sequence[BlockHash], *, blocks_per_chunk: int) -> list[BlockHash]:
        """The hashes that name the full chunks of `block_hashes` whose keys are not there yet.

        Raises:
          RequestError: one is no bytes.
        """
        first = (len(self.keys) + 1) * blocks_per_chunk - 1
        return read_hashes(self.request_id, block_hashes, first, step=blocks_per_chunk)

    def check_same(self, block_hashes: Sequence[BlockHash], *, blocks_per_chunk: int) -> None:
        """Raises RequestError unless these hashes go on from those that earlier calls were given. O(1)."""
        last = len(self.keys) * blocks_per_chunk - 1
        if not 0 <= last < len(block_hashes):
            return
        block_hash = block_hashes[last] if type(block_hashes) is list else b""
        if type(block_hash) is not bytes or not block_hash:
            (block_hash,) = read_hashes(self.request_id, block_hashes, last, last + 1)
        if self.keys[-1] != block_hash + self.namespace:
            raise RequestError(
                f"request {self.request_id}: the hash of block {last} is not the one it had before; end a request "
                "with finish() before another uses its request_id"
            )

    def start_over(self, *, namespace: bytes) -> None:
        """After a reset: its keys change, and the KV that it holds by now is saved no more."""
        self.namespace = namespace
        self.keys = []
        self.num_found_chunks = self.num_saved_chunks = self.num_refused_chunks = 0
        self.can_save = False

    def lose_caches(self) -> None:
        """The KV that it holds is gone. A promise that rests on nothing in HBM stays what it was."""
        if self.promise is None or self.promise.first_block:
            self.can_save = self.has_kv = False
