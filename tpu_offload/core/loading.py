"""From a request's block hashes to its load: looks up the prefix, promises it, turns the promise into a load."""

from collections.abc import Sequence

from tpu_offload.core.block_tables import read_ids
from tpu_offload.core.context import TierContext
from tpu_offload.core.engine_api import MISS, FailedLoad, Match, MatchState, RequestLimits
from tpu_offload.core.holdings import Holdings
from tpu_offload.core.index import Checkpoint, ChunkState
from tpu_offload.core.jobs import host_blocks
from tpu_offload.core.promises import Promise, WaitingLoad
from tpu_offload.core.request_state import LastMatch, RequestState
from tpu_offload.core.storage.stack import StorageStackPlanner
from tpu_offload.core.tier_groups import CHUNK_GROUP
from tpu_offload.errors import RequestError
from tpu_offload.types import BlockHash, ChunkKey, CopyPart, Direction


class LoadPlanner:
    """The load half of the scheduler; `OffloadScheduler` documents the calls.

    A load may begin and end inside a chunk: HBM may have the chunk's first blocks already, or the request may not need
    its last ones.
    """

    def __init__(self, context: TierContext) -> None:
        self._index = context.index
        self._staging = context.staging
        self._breaker = context.breakers[Direction.LOAD]
        self._completion = context.completion
        self._backoff = context.backoff
        self._costs = context.costs
        self._block_nbytes = context.layout.block_nbytes
        self._block_size = context.block_size
        self._blocks_per_chunk = context.blocks_per_chunk
        self._checkpoint_groups = context.checkpoint_groups
        self._null_block = context.layout.null_block
        self._config = context.config
        self._counts = context.counts
        self._clock = context.clock

    def match(
        self,
        request: RequestState,
        block_hashes: Sequence[BlockHash],
        *,
        num_tokens: int,
        num_computed_tokens: int,
        can_wait: bool,
        limits: RequestLimits | None = None,
        had_failed_load: bool = False,
    ) -> int:
        """See `OffloadScheduler.match`; returns how many tokens are promised.

        With `had_failed_load`, chunks that failed and have not succeeded since are not promised.
        """
        if request.load is not None:
            raise RequestError(
                f"request {request.request_id} is matched while its load is in flight; wait for its update"
            )
        request.check_matched(
            block_hashes, num_tokens=num_tokens, block_size=self._block_size, size=self._blocks_per_chunk
        )
        is_at_block = num_computed_tokens % self._block_size == 0
        if is_at_block:
            request.extend_keys(block_hashes, blocks_per_chunk=self._blocks_per_chunk)
        if limits is not None:
            request.limit(limits)
        self._start_over(request, num_computed_tokens)
        found = request.last_match
        if not is_at_block:
            found.at_load_limit = True  # nothing is read from storage for it, and it waits for nothing
            return 0
        slots, num_wanted, checkpoint = self._look_up(
            request, num_tokens=num_tokens, num_computed_tokens=num_computed_tokens, had_failed_load=had_failed_load
        )
        if not num_wanted:
            return 0
        if not self._costs.prefers_load(
            num_wanted * self._block_nbytes,
            first=num_computed_tokens,
            end=num_computed_tokens + found.num_found_tokens,
        ):
            found.num_skipped_tokens = found.num_found_tokens
            return 0
        first_block = num_computed_tokens // self._block_size
        num_blocks, num_staging_blocks = self._reserve(request, num_wanted, checkpoint, can_wait=can_wait)
        found.num_cut_load_blocks = num_wanted - num_blocks
        if not num_blocks:
            return 0
        end_block = first_block + num_blocks
        num_promised = self._num_loadable(end_block, num_tokens) - num_computed_tokens
        keys = request.keys[first_block // self._blocks_per_chunk : -(-end_block // self._blocks_per_chunk)]
        held = self._hold(request, keys, slots, checkpoint, num_staging_blocks)
        request.promise = Promise(held, first_block=first_block, num_tokens=num_promised)
        return num_promised

    def _hold(
        self,
        request: RequestState,
        keys: Sequence[ChunkKey],
        slots: list[int],
        checkpoint: Checkpoint | None,
        num_staging_blocks: int,
    ) -> Holdings:
        """Pins what a load reads; its staging blocks are reserved already."""
        self._index.pin(keys)
        if checkpoint is not None:
            self._index.checkpoints.hold(checkpoint)
        self._breaker.begin(request.account)
        return Holdings(
            Direction.LOAD,
            self._breaker,
            probe=request.account,
            account=request.account,
            num_staging_blocks=num_staging_blocks,
            keys=keys,
            slots=tuple(slots[: len(keys)]),
            are_pinned=True,
            checkpoint=checkpoint,
        )

    def num_cached_tokens(self, request: RequestState, block_hashes: Sequence[BlockHash], *, num_tokens: int) -> int:
        """See `OffloadScheduler.num_cached_tokens`; for a request that is in no table."""
        request.extend_keys(block_hashes, blocks_per_chunk=self._blocks_per_chunk)
        _, num_blocks, _ = self._look_up(request, num_tokens=num_tokens, num_computed_tokens=0, had_failed_load=False)
        return request.last_match.num_found_tokens if num_blocks else 0

    def _look_up(
        self, request: RequestState, *, num_tokens: int, num_computed_tokens: int, had_failed_load: bool
    ) -> tuple[list[int], int, Checkpoint | None]:
        """Finds the prefix behind the computed tokens, and notes in the request what was looked up and found.

        Returns:
          The slots of the chunks found, how many of their blocks the request can use, and with windows or states the
          checkpoint at the end of these.
        """
        if not request.limits.cache:
            return [], 0, None
        found = request.last_match
        first_chunk = num_computed_tokens // (self._block_size * self._blocks_per_chunk)
        if request.use.num_in_hbm != first_chunk:
            request.use = request.use.replace(num_in_hbm=first_chunk)
        slots = self._index.find(request.keys, first_chunk)
        if had_failed_load:
            del slots[self._backoff.trusted_end(request.keys, first_chunk, first_chunk + len(slots)) - first_chunk :]
        end_chunk = first_chunk + len(slots)
        found.num_found_chunks = min(end_chunk, len(request.keys))
        found.num_looked_up_tokens = num_tokens - num_computed_tokens
        checkpoint = None
        if self._checkpoint_groups:
            checkpoint, end_chunk = self._last_checkpoint(
                request, first_chunk, end_chunk, num_tokens=num_tokens, num_computed_tokens=num_computed_tokens
            )
            del slots[end_chunk - first_chunk :]
        num_found = self._num_loadable(end_chunk * self._blocks_per_chunk, num_tokens) - num_computed_tokens
        num_blocks = max(0, -(-num_found // self._block_size))
        if request.limits.max_load_tokens is not None:
            allowed = request.limits.max_load_tokens // self._block_size
            found.at_load_limit = num_blocks >= allowed
            num_blocks = min(num_blocks, allowed)
            found.num_looked_up_tokens = min(found.num_looked_up_tokens, allowed * self._block_size)
        if not slots or not num_blocks:
            return [], 0, None
        found.num_found_tokens = min(num_found, num_blocks * self._block_size)
        return slots, num_blocks, checkpoint

    def _last_checkpoint(
        self, request: RequestState, first: int, end: int, *, num_tokens: int, num_computed_tokens: int
    ) -> tuple[Checkpoint | None, int]:
        """The last checkpoint after the computed tokens at which a request can continue, and its boundary in chunks.

        Args:
          request: the request.
          first: the chunk in which its computed tokens end.
          end: the end of its chunks in the host tier.
          num_tokens, num_computed_tokens: as in `match`.
        """
        size = self._blocks_per_chunk * self._block_size
        most = (num_tokens - 1) // size
        if request.limits.max_load_tokens is not None:
            most = min(most, (num_computed_tokens + request.limits.max_load_tokens) // size)
        found = request.last_match
        found.last_boundary = min(most, len(request.keys))
        most = min(most, end)
        checkpoint, boundary, found.awaits_checkpoint = self._index.checkpoints.find(request.keys, first, most)
        found.checkpoint_chunk = boundary
        found.junction_chunk = most if most > boundary else 0
        return checkpoint, boundary

    def _num_loadable(self, end_block: int, num_tokens: int) -> int:
        """Tokens in HBM once the blocks before `end_block` are loaded.

        One token is left to compute; the block that holds it is loaded if tokens before it come with it.
        """
        return min(end_block * self._block_size, num_tokens - 1)

    def _reserve(
        self, request: RequestState, num_wanted: int, checkpoint: Checkpoint | None, *, can_wait: bool
    ) -> tuple[int, int]:
        """How many blocks a load may have, and the staging blocks reserved for it; 0 blocks if it may not be planned.

        With `can_wait`, a load without free staging blocks is granted all the same, and waits for them. A load that
        ends at a checkpoint is granted whole.
        """
        if not self._breaker.admits(request.account):
            return 0, 0
        is_whole = self._breaker.closed or self._checkpoint_groups
        num_blocks = num_wanted if is_whole else min(num_wanted, self._blocks_per_chunk)
        if not self._staging.stages(Direction.LOAD):
            return num_blocks, 0
        num_staged = num_blocks
        if checkpoint is not None:
            staged = [group for group in self._checkpoint_groups if group.is_staged]
            num_staged += sum([num_wanted - group.first_loaded(0, num_wanted) for group in staged])
        num_staging_blocks = self._staging.reserve_load(request.account, num_staged)
        request.last_match.awaits_staging = not num_staging_blocks
        return (num_blocks if num_staging_blocks or can_wait else 0), num_staging_blocks

    def _start_over(self, request: RequestState, num_computed_tokens: int) -> None:
        """Discards the results of an earlier match."""
        self.release(request)
        request.has_kv = True  # the engine has just named the blocks that HBM has
        if num_computed_tokens == 0:
            # It holds no KV that a reset or a loss of the caches could have invalidated while it was waiting.
            request.can_save = True
        request.num_checkpoint_chunks = 0
        request.last_match = LastMatch(at_load_limit=not request.limits.cache)

    def answer(self, request: RequestState, num_tokens: int, *, storage: StorageStackPlanner) -> Match:
        """The answer to the last match of a request, and whether matching again soon may find more."""
        limit_s = 0.0
        if request.last_match.awaits_staging and not num_tokens:
            limit_s = self._config.load_wait_s
        elif self._ends_at_a_pending_chunk(request):
            limit_s = storage.wait_s(request, self._config.save_wait_s)
        elif storage.promotes_target(request):
            limit_s = storage.read_wait_s(request)
        elif request.last_match.awaits_checkpoint:
            limit_s = self._config.save_wait_s
        else:
            limit_s = request.arrival.lookup_wait_s
        if limit_s:
            now_s = self._clock()
            if request.arrival.since_s is None:
                request.arrival.since_s = now_s
            until_s = request.arrival.since_s + limit_s
            if now_s < until_s:
                return Match(num_tokens=num_tokens, state=MatchState.ARRIVING, until_s=until_s)
        if not request.last_match.junction_chunk:  # nearly always
            return Match(num_tokens=num_tokens, state=MatchState.HIT) if num_tokens else MISS
        return Match(
            num_tokens=num_tokens,
            state=MatchState.HIT if num_tokens else MatchState.MISS,
            junction_tokens=request.last_match.junction_chunk * self._blocks_per_chunk * self._block_size,
        )

    def _ends_at_a_pending_chunk(self, request: RequestState) -> bool:
        """Whether the chunk after those that the last match found is being saved, or read from storage."""
        end = request.last_match.num_found_chunks
        return (
            not request.last_match.at_load_limit
            and end < len(request.keys)
            and self._index.state(request.keys[end]) is ChunkState.PENDING
        )

    def count_lookup(self, request: RequestState) -> None:
        """Counts the last match as a lookup, once."""
        found = request.last_match
        self._counts.looked_up_tokens += found.num_looked_up_tokens
        self._counts.found_tokens += found.num_found_tokens
        self._counts.skipped_load_tokens += found.num_skipped_tokens
        found.num_looked_up_tokens = found.num_found_tokens = found.num_skipped_tokens = 0

    def release(self, request: RequestState) -> None:
        """Releases the promise, if there is one."""
        promise, request.promise, request.revoked = request.promise, None, None
        if promise is not None:
            self._completion.release(promise.held)

    def revoke(self, request: RequestState) -> None:
        """Revokes the promise; the engine may admit the request before it learns of that."""
        promise = request.promise or request.revoked
        self.release(request)
        request.revoked = promise

    def admit_revoked(self, request: RequestState, *, num_loaded_tokens: int) -> FailedLoad | None:
        """The failed load of a request whose promise is void: revoked by a reset, or its KV in HBM was lost.

        None if the promise stands.
        """
        promise = request.revoked if request.has_kv else request.promise or request.revoked
        if promise is None or not 0 < num_loaded_tokens <= promise.num_tokens:
            return None
        self.release(request)
        num_valid_tokens = promise.first_block * self._block_size if request.has_kv else 0
        return FailedLoad(request_id=request.request_id, num_valid_tokens=num_valid_tokens)

    def admit(
        self, request: RequestState, tables: Sequence[Sequence[int]], *, num_loaded_tokens: int, waits_until_s: float
    ) -> WaitingLoad:
        """Turns the promise into a load of its first `num_loaded_tokens` tokens and releases the rest."""
        promise = request.promise
        promised = promise.num_tokens if promise else 0
        least = promised if promise is not None and promise.held.checkpoint is not None else 1
        if promise is None or not least <= num_loaded_tokens <= promised:
            raise RequestError(
                f"request {request.request_id} admits {num_loaded_tokens} loaded tokens; "
                f"expected {'0 or' if least > 1 else '0 to'} the {promised} promised"
            )
        num_blocks = -(-num_loaded_tokens // self._block_size)
        end_block = promise.first_block + num_blocks
        for table in tables:
            if len(table) < end_block:
                raise RequestError(f"request {request.request_id} has {len(table)} blocks; its load needs {end_block}")
        parts, num_staged = self._parts(request, promise, tables, end_block)
        held = promise.held
        end_chunk = -(-end_block // self._blocks_per_chunk)
        self._index.touch(request.use, request.keys, end_chunk)  # a policy may raise: then the promise stands
        promise.num_tokens = num_loaded_tokens  # if this raises, a retry gets no more: the rest is released
        self._completion.release_rest(
            held,
            num_chunks=end_chunk - promise.first_block // self._blocks_per_chunk,
            num_staging_blocks=min(num_staged, held.num_staging_blocks),
        )
        request.promise = None
        request.load = load = WaitingLoad(
            request.request_id,
            held,
            tuple(parts),
            num_valid_tokens=promise.first_block * self._block_size,
            num_staged_blocks=num_staged,
            waits_until_s=waits_until_s,
        )
        if held.checkpoint is not None:
            self._index.use_checkpoint(held.checkpoint, len(held.keys))
        if promise.lost:
            load.all_failed, load.error = True, "the host memory of its chunks was lost"
        return load

    def _parts(
        self, request: RequestState, promise: Promise, tables: Sequence[Sequence[int]], end_block: int
    ) -> tuple[list[CopyPart], int]:
        """What a load copies, per group, and how many of these blocks are staged.

        Raises:
          RequestError: a block table has no block there.
        """
        first_block = promise.first_block
        host_ids = host_blocks(
            promise.held.slots,
            blocks_per_chunk=self._blocks_per_chunk,
            first=first_block % self._blocks_per_chunk,
            num_blocks=end_block - first_block,
        )
        block_ids = read_ids(request.request_id, tables[CHUNK_GROUP], first_block, end_block)
        parts = [CopyPart(group_id=CHUNK_GROUP, block_ids=tuple(block_ids), host_block_ids=host_ids)]
        num_staged = len(host_ids)
        if promise.held.checkpoint is not None:
            pieces, num_more = self._checkpoint_parts(request, promise.held.checkpoint, tables, first_block, end_block)
            return parts + pieces, num_staged + num_more
        return parts, num_staged

    def _checkpoint_parts(
        self,
        request: RequestState,
        checkpoint: Checkpoint,
        tables: Sequence[Sequence[int]],
        load_start: int,
        end_block: int,
    ) -> tuple[list[CopyPart], int]:
        """As `_parts`, of its checkpoint and without what is in HBM."""
        parts, num_staged, first_slot = [], 0, 0
        for group, num_pieces in zip(self._checkpoint_groups, checkpoint.num_pieces, strict=True):
            first = group.first_loaded(load_start, end_block)
            block_ids = self._read_held(request, tables[group.group_id], group.group_id, first, end_block)
            end_slot = first_slot + num_pieces
            places = group.places(
                checkpoint.slots[first_slot:end_slot],
                first=num_pieces * group.slot_blocks - len(block_ids),
                num_blocks=len(block_ids),
            )
            first_slot = end_slot
            if block_ids:
                parts.append(CopyPart(group_id=group.group_id, block_ids=tuple(block_ids), host_block_ids=places))
                num_staged += len(block_ids) if group.is_staged else 0
        return parts, num_staged

    def _read_held(self, request: RequestState, table: Sequence[int], group_id: int, first: int, end: int) -> list[int]:
        """The blocks of a table from position `first` to `end - 1`.

        Raises:
          RequestError: the request does not hold one of them.
        """
        block_ids = read_ids(request.request_id, table, first, end)
        if self._null_block in block_ids:
            raise RequestError(
                f"request {request.request_id} has no block in layer group {group_id} at "
                f"{first + block_ids.index(self._null_block)}; its load needs {first} to {end - 1}"
            )
        return block_ids
