"""The scheduler's state of one request, from its first match until it gives its blocks back."""

import dataclasses
import itertools
import operator
from collections.abc import Iterable, Sequence
from typing import cast, final

from tpu_offload.core.block_tables import Ids, read_hashes
from tpu_offload.core.engine_api import NO_LIMITS, RequestLimits
from tpu_offload.core.index import Checkpoint
from tpu_offload.core.jobs import Job
from tpu_offload.core.load_stages import Promise, WaitingLoad
from tpu_offload.core.policies import Use
from tpu_offload.errors import RequestError
from tpu_offload.hashing import PrefixKeys, last_block_hash
from tpu_offload.types import BlockHash, ChunkKey

_MAX_LISTED = 128


@final
class RequestState:
    """A request between its first match and its end or preemption.

    Attributes:
      request_id: the engine's name for it.
      account: holder of its staging blocks; unlike the request id it is never used twice, so a request that returns
        after a preemption is not confused with its own old load.
      use: describes it to policies.
      namespace: the suffix of its keys (see `hashing.key_namespace`).
      limits: its save and load limits.
      keys: keys of its chunks, as far as they were needed. A list while they are few, which is three times as fast as
        making each when it is asked for.
      promise: what it was promised and has not taken.
      load: its load, waiting or in flight.
      block_tables: per layer group, its first blocks, at least those of the chunks on offer, as the engine last named
        them; not shared. Empty while nothing is on offer.
      num_offered_chunks: leading chunks that should be in the host tier by now; their keys are known.
      num_gone_chunks: leading chunks that have no blocks in HBM any more (of a prefix that HBM evicts).
      num_tried_chunks: `num_offered_chunks` when a plan last tried to save them.
      num_found_chunks: leading chunks that its last match found in the host tier, or that it had in HBM then.
      num_looked_up_tokens: tokens that its last match looked up, until that is counted (see `OffloadStats`).
      num_found_tokens: how many of these it found.
      num_saved_chunks: leading chunks that are in the host tier or being saved, as last seen.
      num_checkpoint_chunks: the last boundary whose checkpoint was to be saved.
      junction_chunk: where its last match would have found a longer prefix, had there been a checkpoint; else 0.
      checkpoint_chunk: the boundary at which its last match can continue, or where its computed tokens end.
      last_boundary: the last boundary at which it could continue, were everything in the host tier.
      target_chunk: the boundary for which storage is being read for it; 0 if it is not.
      awaits_checkpoint: whether one is being saved that its last match could have used.
      rolling: the checkpoint at the end of its tokens, which its next one supersedes.
      num_deferred_chunks: chunks after those for which the last plan had no room; drops if the request ends now.
      backoff_until_s: before this time a chunk on offer backs off, and no plan tries to save the request.
      at_load_limit: whether its last match promised all that its limits allow.
      num_cut_load_blocks: blocks that its last match found and did not promise, for want of staging blocks or because
        loads are suspended; they count as drops when the request ends, because until then it may be matched again.
      awaits_staging: whether that was for want of staging blocks alone.
      arriving_since_s: when its matches began to be answered with ARRIVING; None if they were not since it held blocks.
      storage_wait_s: how long its matches may be ARRIVING for chunks of storage; None until that was estimated.
      num_asked_chunks: leading chunks, up to which shared storage was asked for it; it does not ask for them again.
      num_asked_boundaries: leading chunks, up to which shared storage was asked for checkpoints for it.
      awaited_lookup: the first record of the lookup that its last match waits for; None if it waits for none.
      lookup_wait_s: how long its matches may be ARRIVING for that; else 0.
      num_skipped_tokens: tokens that its last match found and did not promise, because computing them is faster.
      revoked: what it was promised and had not taken when a reset revoked it.
      can_save: False once a reset has invalidated the KV in its blocks for other requests, or the caches were lost.
      has_kv: False once the caches were lost, until it is matched again: neither its own blocks nor those that its last
        match found in HBM hold its KV.
    """

    def __init__(self, request_id: str, *, account: str, use: Use, namespace: bytes) -> None:
        self.request_id = request_id
        self.account = account
        self.use = use
        self.namespace = namespace
        self.limits: RequestLimits = NO_LIMITS
        self.keys: list[ChunkKey] | PrefixKeys = []
        self.promise: Promise | None = None
        self.load: Job | WaitingLoad | None = None
        self.block_tables: list[Ids] = []
        self.num_offered_chunks = 0
        self.num_gone_chunks = 0
        self.num_tried_chunks = 0
        self.num_found_chunks = 0
        self.num_looked_up_tokens = 0
        self.num_found_tokens = 0
        self.num_saved_chunks = 0
        self.num_checkpoint_chunks = 0
        self.junction_chunk = 0
        self.checkpoint_chunk = 0
        self.last_boundary = 0
        self.target_chunk = 0
        self.awaits_checkpoint = False
        self.rolling: Checkpoint | None = None
        self.num_deferred_chunks = 0
        self.backoff_until_s = 0.0
        self.at_load_limit = False
        self.num_cut_load_blocks = 0
        self.awaits_staging = False
        self.arriving_since_s: float | None = None
        self.storage_wait_s: float | None = None
        self.num_asked_chunks = 0
        self.num_asked_boundaries = 0
        self.awaited_lookup: ChunkKey | None = None
        self.lookup_wait_s = 0.0
        self.num_skipped_tokens = 0
        self.revoked: Promise | None = None
        self.can_save = True
        self.has_kv = True

    def copy(self) -> "RequestState":
        """A copy that shares keys, tables and what else it holds; a compiled class has no `copy.copy`."""
        other = RequestState(self.request_id, account=self.account, use=self.use, namespace=self.namespace)
        other.limits = self.limits
        other.keys = self.keys
        other.promise = self.promise
        other.load = self.load
        other.block_tables = self.block_tables
        other.num_offered_chunks = self.num_offered_chunks
        other.num_gone_chunks = self.num_gone_chunks
        other.num_tried_chunks = self.num_tried_chunks
        other.num_found_chunks = self.num_found_chunks
        other.num_looked_up_tokens = self.num_looked_up_tokens
        other.num_found_tokens = self.num_found_tokens
        other.num_saved_chunks = self.num_saved_chunks
        other.num_checkpoint_chunks = self.num_checkpoint_chunks
        other.junction_chunk = self.junction_chunk
        other.checkpoint_chunk = self.checkpoint_chunk
        other.last_boundary = self.last_boundary
        other.target_chunk = self.target_chunk
        other.awaits_checkpoint = self.awaits_checkpoint
        other.rolling = self.rolling
        other.num_deferred_chunks = self.num_deferred_chunks
        other.backoff_until_s = self.backoff_until_s
        other.at_load_limit = self.at_load_limit
        other.num_cut_load_blocks = self.num_cut_load_blocks
        other.awaits_staging = self.awaits_staging
        other.arriving_since_s = self.arriving_since_s
        other.storage_wait_s = self.storage_wait_s
        other.num_asked_chunks = self.num_asked_chunks
        other.num_asked_boundaries = self.num_asked_boundaries
        other.awaited_lookup = self.awaited_lookup
        other.lookup_wait_s = self.lookup_wait_s
        other.num_skipped_tokens = self.num_skipped_tokens
        other.revoked = self.revoked
        other.can_save = self.can_save
        other.has_kv = self.has_kv
        return other

    def limit(self, limits: RequestLimits) -> None:
        """Sets the limits, and the priority that policies see."""
        self.limits = limits
        if self.use.priority != limits.priority:
            self.use = dataclasses.replace(self.use, priority=limits.priority)

    def extend_keys(self, block_hashes: Sequence[BlockHash], *, blocks_per_chunk: int) -> None:
        """Adds the missing keys of the full chunks of `block_hashes`.

        Raises:
          RequestError: a hash is not bytes; nothing was added.
        """
        self.add_keys(self.new_hashes(block_hashes, blocks_per_chunk=blocks_per_chunk))

    def add_keys(self, hashes: list[BlockHash]) -> None:
        """Adds the keys of chunks, from the hashes that `new_hashes` returned."""
        keys, namespace = self.keys, self.namespace
        if isinstance(keys, list):
            if len(hashes) == 1 and len(keys) < _MAX_LISTED:  # a request in decode
                keys.append(cast(ChunkKey, hashes[0] + namespace))
                return
            if len(keys) + len(hashes) <= _MAX_LISTED:
                keys += cast(Iterable[ChunkKey], map(operator.add, hashes, itertools.repeat(namespace)))
                return
            hashes = [*map(last_block_hash, keys), *hashes]
            self.keys = keys = PrefixKeys(namespace)
        keys.extend(hashes)

    def new_hashes(self, block_hashes: Sequence[BlockHash], *, blocks_per_chunk: int) -> list[BlockHash]:
        """The hashes of the full chunks of `block_hashes` whose keys are missing.

        Raises:
          RequestError: a hash is not bytes.
        """
        first = (len(self.keys) + 1) * blocks_per_chunk - 1
        return read_hashes(self.request_id, block_hashes, first, step=blocks_per_chunk)

    def check_same(self, block_hashes: Sequence[BlockHash], *, blocks_per_chunk: int) -> None:
        """Raises RequestError unless these hashes continue those of earlier calls. O(1)."""
        last = len(self.keys) * blocks_per_chunk - 1
        if not 0 <= last < len(block_hashes):
            return
        block_hash = block_hashes[last] if type(block_hashes) is list else b""
        if type(block_hash) is not bytes or not block_hash:
            (block_hash,) = read_hashes(self.request_id, block_hashes, last, last + 1)
        if self.keys[-1] != block_hash + self.namespace:
            raise RequestError(
                f"request {self.request_id}: the hash of block {last} differs from that of an earlier call; call "
                "finish() before another request uses the same request_id"
            )

    def start_over(self, *, namespace: bytes) -> None:
        """After a reset: its keys change, and the KV that it holds is no longer saved."""
        self.namespace = namespace
        self.keys = []
        self.num_found_chunks = self.num_saved_chunks = self.num_deferred_chunks = 0
        self.rolling = None
        self.num_asked_chunks = self.num_asked_boundaries = 0
        self.awaited_lookup = None
        self.can_save = False

    def mark_caches_lost(self) -> None:
        """The KV that it holds is gone. A promise that begins at its first block needs none, and stays."""
        if self.promise is None or self.promise.first_block:
            self.can_save = self.has_kv = False
