"""The scheduler's state of one request, from its first match, admission or offer until it gives its blocks back."""

from collections.abc import Sequence
from typing import cast, final

from tpu_offload.core.block_tables import Ids, read_hashes
from tpu_offload.core.engine_api import NO_LIMITS, RequestLimits
from tpu_offload.core.index import Checkpoint
from tpu_offload.core.jobs import Job
from tpu_offload.core.policies import Use
from tpu_offload.core.promises import Promise, WaitingLoad
from tpu_offload.errors import RequestError
from tpu_offload.hashing import PrefixKeys, last_block_hash
from tpu_offload.types import BlockHash, ChunkKey

_MAX_LISTED = 128


@final
class LastMatch:
    """What the last match of a request looked up and found; made anew by each.

    Attributes:
      num_found_chunks: leading chunks that it found in the host tier, or that were in HBM then.
      num_looked_up_tokens: tokens that it looked up, until that is counted (see `OffloadStats`).
      num_found_tokens: how many of these it found.
      num_skipped_tokens: how many of these it did not promise, because computing them is faster.
      num_cut_load_blocks: blocks that it found and did not promise, for want of staging blocks or because loads are
        suspended; they count as drops when the request ends, because until then it may be matched again.
      awaits_staging: whether that was for want of staging blocks alone.
      at_load_limit: whether it promised all that the request's limits allow.
      last_boundary: the last boundary at which the request could continue, were everything in the host tier.
      checkpoint_chunk: the boundary at which it can continue, or where its computed tokens end.
      junction_chunk: where it would have found a longer prefix, had there been a checkpoint; else 0.
      awaits_checkpoint: whether one is being saved that it could have used.
      target_chunk: the boundary for which storage is being read; 0 if it is not.
    """

    def __init__(self, *, at_load_limit: bool = False) -> None:
        self.num_found_chunks = 0
        self.num_looked_up_tokens = 0
        self.num_found_tokens = 0
        self.num_skipped_tokens = 0
        self.num_cut_load_blocks = 0
        self.awaits_staging = False
        self.at_load_limit = at_load_limit
        self.last_boundary = 0
        self.checkpoint_chunk = 0
        self.junction_chunk = 0
        self.awaits_checkpoint = False
        self.target_chunk = 0


@final
class Arrival:
    """How long the matches of a request may be ARRIVING, and what it has asked shared storage for.

    Attributes:
      since_s: when a match was first answered with ARRIVING since it last held blocks; None if none was.
      storage_wait_s: how long they may be for chunks of storage; None until that was estimated.
      first_asked_chunk, num_asked_chunks: from where and up to where shared storage was asked for its chunks; it does
        not ask for them again.
      settled_at: the length of its prompt, in chunks, and how many reads had failed, when nothing was left to ask.
      num_asked_boundaries: leading chunks, up to which shared storage was asked for checkpoints for it.
      awaited_lookup: the first record of the lookup that its last match waits for; None if it waits for none.
      lookup_wait_s: how long they may be ARRIVING for that lookup; 0 if it waits for none.
    """

    def __init__(self) -> None:
        self.since_s: float | None = None
        self.storage_wait_s: float | None = None
        self.first_asked_chunk = self.num_asked_chunks = 0
        self.num_asked_boundaries = 0
        self.settled_at = 0, 0
        self.awaited_lookup: ChunkKey | None = None
        self.lookup_wait_s = 0.0

    def note_asked(self, first: int, end: int) -> None:
        """Shared storage is asked for these chunks."""
        if self.num_asked_chunks:
            first = min(first, self.first_asked_chunk)
            if end >= self.first_asked_chunk:  # else what is between them is still to be asked for
                end = max(end, self.num_asked_chunks)
        self.first_asked_chunk, self.num_asked_chunks = first, end

    def start_over(self) -> None:
        """Its keys have changed."""
        self.first_asked_chunk = self.num_asked_chunks = self.num_asked_boundaries = 0
        self.settled_at = 0, 0
        self.awaited_lookup = None


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
      last_match: what its last match found.
      arrival: how long it may wait for what is being saved, or read from storage.
      promise: what it was promised and has not taken.
      revoked: what it was promised and had not taken when a reset revoked it.
      load: its load, waiting or in flight.
      block_table: its first blocks of full attention, at least those of the chunks on offer, as the engine last named
        them; not shared. Empty while nothing is on offer.
      num_offered_chunks: leading chunks that should be in the host tier by now; their keys are known.
      offered_in_step: id of the last step that the engine named it for.
      num_gone_chunks: leading chunks that HBM has evicted already (of a prefix that it evicts).
      num_tried_chunks: `num_offered_chunks` when a plan last tried to save them.
      num_saved_chunks: leading chunks that are in the host tier or being saved, as last seen.
      num_deferred_chunks: chunks after those for which the last plan had no room; drops if the request ends now.
      backoff_until_s: before this time a chunk on offer backs off, and no plan tries to save the request.
      num_checkpoint_chunks: the last boundary whose checkpoint was to be saved.
      rolling: the checkpoint at the end of its tokens, which its next one supersedes.
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
        self.last_match = LastMatch()
        self.arrival = Arrival()
        self.promise: Promise | None = None
        self.revoked: Promise | None = None
        self.load: Job | WaitingLoad | None = None
        self.block_table: Ids = []
        self.num_offered_chunks = 0
        self.offered_in_step = -1
        self.num_gone_chunks = 0
        self.num_tried_chunks = 0
        self.num_saved_chunks = 0
        self.num_deferred_chunks = 0
        self.backoff_until_s = 0.0
        self.num_checkpoint_chunks = 0
        self.rolling: Checkpoint | None = None
        self.can_save = True
        self.has_kv = True

    def copy_for_early_save(self, block_table: Ids, num_chunks: int) -> "RequestState":
        """What stands for the request after its preemption, while the chunks in these blocks are saved."""
        saved = RequestState(self.request_id, account=self.account, use=self.use, namespace=self.namespace)
        saved.limits = self.limits
        saved.keys = self.keys
        saved.block_table = block_table
        saved.num_offered_chunks = num_chunks
        saved.can_save = self.can_save
        return saved

    def limit(self, limits: RequestLimits) -> None:
        """Sets the limits, and the priority that policies see."""
        self.limits = limits
        if self.use.priority != limits.priority:
            self.use = self.use.replace(priority=limits.priority)

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
                keys += [cast(ChunkKey, block_hash + namespace) for block_hash in hashes]
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
        """Raises RequestError unless these hashes agree with those of earlier calls, as far as both go. O(1)."""
        num_common = min(len(self.keys), len(block_hashes) // blocks_per_chunk)
        if not num_common:
            return
        last = num_common * blocks_per_chunk - 1
        block_hash = block_hashes[last] if type(block_hashes) is list else b""
        if type(block_hash) is not bytes or not block_hash:
            read = read_hashes(self.request_id, block_hashes, last, last + 1)
            if not read:
                raise RequestError(
                    f"request {self.request_id} has fewer block hashes than the {last + 1} that it counts"
                )
            block_hash = read[0]
        if self.keys[num_common - 1] != block_hash + self.namespace:  # chained: it stands for all before it
            raise RequestError(
                f"request {self.request_id}: the hash of block {last} differs from that of an earlier call; call "
                "finish() before another request uses the same request_id"
            )

    def check_matched(self, block_hashes: Sequence[BlockHash], *, num_tokens: int, block_size: int, size: int) -> None:
        """Validates the hashes of a match. O(1).

        What is found for them goes into the request's blocks: a hash that stands for other tokens would be wrong KV.

        Args:
          block_hashes: hashes of its full blocks.
          num_tokens: its tokens.
          block_size: tokens of a block.
          size: blocks of a chunk.
        Raises:
          RequestError: there are more hashes than full blocks, fewer than in an earlier call, or others.
        """
        num_hashes = len(block_hashes)
        if num_hashes * block_size > num_tokens:
            raise RequestError(
                f"request {self.request_id} has {num_hashes} block hashes for {num_tokens} tokens; expected at most "
                f"{num_tokens // block_size}, one a full block of {block_size} tokens: make the hasher with "
                f"block_size={block_size}"
            )
        self.check_same(block_hashes, blocks_per_chunk=size)
        if num_hashes // size < len(self.keys):
            raise RequestError(
                f"request {self.request_id} has {num_hashes} block hashes, and had at least {len(self.keys) * size} in "
                "an earlier call; call finish() before another request uses the same request_id"
            )

    def start_over(self, *, namespace: bytes) -> None:
        """After a reset: its keys change, and the KV that it holds is no longer saved."""
        self.namespace = namespace
        self.keys = []
        self.last_match.num_found_chunks = self.num_saved_chunks = self.num_deferred_chunks = 0
        self.rolling = None
        self.arrival.start_over()
        self.use = self.use.replace(num_in_storage=0)
        self.can_save = False

    def mark_caches_lost(self) -> None:
        """The KV that it holds is gone. A promise that begins at its first block needs none, and stays."""
        if self.promise is None or self.promise.first_block:
            self.can_save = self.has_kv = False
