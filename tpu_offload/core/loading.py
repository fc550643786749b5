"""From a request's hashes to its load: find the prefix, promise it, turn the promise into a load."""

import dataclasses
from collections.abc import Sequence

from tpu_offload.core.context import TierContext
from tpu_offload.core.engine_api import MISS, FailedLoad, Match, MatchState, RequestLimits
from tpu_offload.core.index import ChunkState
from tpu_offload.core.jobs import WaitingLoad, host_blocks
from tpu_offload.core.request_state import Promise, RequestState
from tpu_offload.core.tables import read_ids
from tpu_offload.core.tiering import StoragePlanner
from tpu_offload.errors import RequestError
from tpu_offload.types import BlockHash, CopyPart, Direction


class LoadPlanner:
    """The load half of the scheduler; `OffloadScheduler` documents the calls.

    A chunk is loaded whole or in part: the request may have the first blocks of a chunk in HBM already, or none of its
    last tokens.
    """

    def __init__(self, context: TierContext) -> None:
        self._index = context.index
        self._staging = context.staging
        self._breaker = context.breakers[Direction.LOAD]
        self._backoff = context.backoff
        self._block_size = context.block_size
        self._blocks_per_chunk = context.blocks_per_chunk
        self._num_groups = context.num_groups
        self._config = context.config
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
        """See `OffloadScheduler.match`.

        With `had_failed_load` no chunk is promised that failed and has not succeeded since.
        """
        if request.load is not None:
            raise RequestError(
                f"request {request.request_id} is matched while its load is in flight; wait for its update"
            )
        request.check_same(block_hashes, blocks_per_chunk=self._blocks_per_chunk)
        if num_computed_tokens % self._block_size == 0:
            request.extend_keys(block_hashes, blocks_per_chunk=self._blocks_per_chunk)
        if limits is not None:
            request.limit(limits)
        self._start_over(request, num_computed_tokens)
        if num_computed_tokens % self._block_size:
            return 0
        if not request.limits.cache:
            request.num_found_chunks = 0
            return 0
        first_block = num_computed_tokens // self._block_size
        first_chunk = self._chunk(first_block)
        if request.use.num_in_hbm != first_chunk:
            request.use = dataclasses.replace(request.use, num_in_hbm=first_chunk)
        slots = self._index.find(request.keys, first_chunk)
        if had_failed_load:
            del slots[self._backoff.num_trusted(request.keys, first_chunk, first_chunk + len(slots)) - first_chunk :]
        request.num_found_chunks = min(first_chunk + len(slots), len(request.keys))
        request.num_looked_up_tokens = num_tokens - num_computed_tokens
        # One token is left to compute; the block that holds it is loaded if tokens before it come with it.
        chunk_size = self._blocks_per_chunk * self._block_size
        end_tokens = min((first_chunk + len(slots)) * chunk_size, num_tokens - 1)
        wanted = -(-(end_tokens - num_computed_tokens) // self._block_size)
        if request.limits.max_load_tokens is not None:
            allowed = request.limits.max_load_tokens // self._block_size
            request.at_load_limit = max(0, wanted) >= allowed
            wanted = min(wanted, allowed)
            request.num_looked_up_tokens = min(request.num_looked_up_tokens, allowed * self._block_size)
        if not slots or wanted < 1:
            return 0
        request.num_found_tokens = min(end_tokens - num_computed_tokens, wanted * self._block_size)
        num_blocks = num_staging_blocks = 0
        if self._breaker.admits(request.account):
            num_blocks = wanted if self._breaker.closed else min(wanted, self._blocks_per_chunk)
            if self._staging.stages(Direction.LOAD):
                num_staging_blocks = self._staging.reserve_load(request.account, num_blocks * self._num_groups)
                request.awaits_staging = not num_staging_blocks
                if not (num_staging_blocks or can_wait):
                    num_blocks = 0
        request.num_cut_load_blocks = wanted - num_blocks
        if num_blocks == 0:
            return 0
        end_tokens = min((first_block + num_blocks) * self._block_size, num_tokens - 1)
        keys = request.keys[first_chunk : self._chunk(first_block + num_blocks - 1) + 1]
        self._index.pin(keys)
        self._breaker.begin(request.account)
        request.promise = Promise(
            first_block=first_block,
            num_blocks=num_blocks,
            num_tokens=end_tokens - num_computed_tokens,
            keys=keys,
            slots=tuple(slots[: len(keys)]),
            num_staging_blocks=num_staging_blocks,
        )
        return request.promise.num_tokens

    def _start_over(self, request: RequestState, num_computed_tokens: int) -> None:
        """Nothing of what an earlier match has found holds any more."""
        self.release(request)
        request.has_kv = True  # the engine has just said what of it is in HBM
        if num_computed_tokens == 0:
            # A reset, or a loss of the caches, has found it waiting, with nothing in HBM that it could have spoilt.
            request.saving = True
        request.num_cut_load_blocks = request.num_looked_up_tokens = request.num_found_tokens = 0
        request.awaits_staging = False
        request.at_load_limit = not request.limits.cache

    def answer(self, request: RequestState, num_tokens: int, *, storage: StoragePlanner) -> Match:
        """What the last match of a request has found, and whether it is worth while to ask again."""
        limit_s = 0.0
        if request.awaits_staging and not num_tokens:
            limit_s = self._config.load_wait_s
        elif self._ends_at_a_save(request):
            limit_s = storage.wait_s(request.keys[request.num_found_chunks], self._config.save_wait_s)
        if limit_s:
            now_s = self._clock()
            if request.arriving_since_s is None:
                request.arriving_since_s = now_s
            until_s = request.arriving_since_s + limit_s
            if now_s < until_s:
                return Match(num_tokens=num_tokens, state=MatchState.ARRIVING, until_s=until_s)
        return Match(num_tokens=num_tokens, state=MatchState.HIT) if num_tokens else MISS

    def _ends_at_a_save(self, request: RequestState) -> bool:
        """Whether what the last match of a request would find next is on its way into the host tier at this moment."""
        end = request.num_found_chunks
        return (
            not request.at_load_limit
            and end < len(request.keys)
            and self._index.state(request.keys[end]) is ChunkState.PENDING
        )

    def release(self, request: RequestState) -> None:
        """Gives a promise back, if there is one."""
        promise, request.promise, request.revoked = request.promise, None, None
        if promise is not None:
            self._index.unpin(promise.keys)
            self._staging.release(request.account, promise.num_staging_blocks, Direction.LOAD)
            self._breaker.withdraw(request.account)

    def revoke(self, request: RequestState) -> None:
        """Takes a promise back of which the engine may not have heard when it admits the request."""
        promise = request.promise or request.revoked
        self.release(request)
        request.revoked = promise

    def admit_revoked(self, request: RequestState, *, num_loaded_tokens: int) -> FailedLoad | None:
        """What becomes of a load whose promise is void: a reset took it back, or what it goes on from in HBM was lost.

        None if it stands.
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
        """Turns the promise into a load of the first `num_loaded_tokens` of it and gives the rest back."""
        promise = request.promise
        promised = promise.num_tokens if promise else 0
        if promise is None or not 0 < num_loaded_tokens <= promised:
            raise RequestError(
                f"request {request.request_id} admits {num_loaded_tokens} loaded tokens; "
                f"expected 0 to the {promised} promised"
            )
        num_blocks = -(-num_loaded_tokens // self._block_size)
        end_block = promise.first_block + num_blocks
        for table in tables:
            if len(table) < end_block:
                raise RequestError(f"request {request.request_id} has {len(table)} blocks; its load needs {end_block}")
        block_ids = [read_ids(request.request_id, table, promise.first_block, end_block) for table in tables]
        num_staging_blocks = min(num_blocks * self._num_groups, promise.num_staging_blocks)
        self._staging.release(request.account, promise.num_staging_blocks - num_staging_blocks, Direction.LOAD)
        first_chunk, end_chunk = self._chunk(promise.first_block), self._chunk(end_block - 1) + 1
        keys = promise.keys
        if end_chunk - first_chunk < len(keys):
            keys = keys[: end_chunk - first_chunk]
            self._index.pin(keys)
            self._index.unpin(promise.keys)
        self._index.touch(request.use, request.keys, end_chunk)
        request.promise = None
        host_ids = host_blocks(
            promise.slots,
            blocks_per_chunk=self._blocks_per_chunk,
            first=promise.first_block % self._blocks_per_chunk,
            num_blocks=num_blocks,
        )
        request.load = load = WaitingLoad(
            parts=tuple(
                [
                    CopyPart(group_id=group_id, block_ids=tuple(ids), host_block_ids=host_ids)
                    for group_id, ids in enumerate(block_ids)
                ]
            ),
            request_id=request.request_id,
            account=request.account,
            keys=keys,
            slots=promise.slots[: len(keys)],
            num_valid_tokens=promise.first_block * self._block_size,
            num_staging_blocks=num_staging_blocks,
            waits_until_s=waits_until_s,
        )
        if promise.lost:
            load.doomed, load.error = True, "the host memory of its chunks was lost"
        return load

    def _chunk(self, block: int) -> int:
        return block // self._blocks_per_chunk
