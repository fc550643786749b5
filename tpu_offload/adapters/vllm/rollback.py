"""Takes requests back to before blocks that do not hold what they should.

vLLM does a part of it: it is told which blocks are invalid, and with the policy `recompute` sets requests back, with
`fail` ends them. This does the rest, in vLLM's own terms, after vLLM:

    shared blocks       vLLM has one request compute each again, and the others find them in its prefix cache before
                        that has happened. Here they are taken out of it, and each request computes them for itself.
    the step at hand    vLLM looks at tokens computed before it. When all caches are lost, so are those of the step.
    the step after it   is on its way with async scheduling, and vLLM would take its tokens. What it does with a request
                        that it preempts is done to these: the tokens are dropped when they come. Until then they
                        run in no further step, because tpu-inference writes the last token of a step over those
                        of whoever is in the next one. (vLLM preempts no request of a step on its way, but for a
                        reset of running requests, which drops their tokens by itself.)
    waiting requests    that hold blocks give them back, to be matched again.
    who is gone         Requests that ended, or were preempted by a reset, while it was on its way, have left blocks
                        in the prefix cache that it computed on what is not there; so has who found theirs. Nobody
                        has their tables any more. So when a synchronous load fails the prefix cache forgets everything.
    sessions            that wait for more input cannot be set back, for their computed tokens are those that vLLM keeps
                        of them. A step is wasted on them when they go on: a worker reports the blocks with it.
"""

import sys
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, final

from vllm.v1.request import RequestStatus

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.request import Request


@final
class Rollback:
    """All calls come from the thread of vLLM's scheduler.

    Args:
      manager: vLLM's cache manager.
      block_size: tokens in a block.
      sync_loads: steps compute on blocks before it is known whether their load has failed.
    """

    def __init__(self, manager: "KVCacheManager", *, block_size: int, sync_loads: bool) -> None:
        self._manager = manager
        self._block_size = block_size
        self._sync_loads = sync_loads
        self._held_back: list[Request] = []
        self._sessions: dict[str, set[int]] = {}
        self._spoilt_block_ids: set[int] = set()  # that the coming step computes on

    def admit(self, request_id: str) -> None:
        """A request goes on with the blocks that it holds."""
        self._spoilt_block_ids |= self._sessions.pop(request_id, set())

    def finish(self, request_id: str) -> None:
        """A request ended."""
        self._sessions.pop(request_id, None)

    def begin_step(self) -> frozenset[int]:
        """A step was scheduled; the spoilt blocks that it computes on."""
        spoilt, self._spoilt_block_ids = frozenset(self._spoilt_block_ids), set()
        return spoilt

    def end_step(self) -> None:
        """A step has ended, and vLLM has taken its tokens or dropped them."""
        if self._held_back:
            held, self._held_back = self._held_back, []
            for request in held:
                if request.is_finished():
                    continue
                if request.num_stale_output_tokens:
                    self._held_back.append(request)
                else:
                    request.next_decode_eligible_step = 0

    def spoil(self, block_ids: Collection[int], requests: Mapping[str, "Request"], *, computed_on: bool) -> list[str]:
        """Sets back all of these requests that hold any of these blocks; returns which.

        `computed_on` says whether a step may have computed on them by now.
        """
        spoilt = {block_id for block_id in block_ids if block_id < self._manager.block_pool.num_gpu_blocks}
        tables = {request_id: self._manager.get_block_ids(request_id)[0] for request_id in requests}
        firsts: dict[str, int] = {}
        num_before = -1
        while num_before < len(spoilt):  # what rests on these blocks has gone bad, too, and may be shared in turn
            num_before = len(spoilt)
            for request_id, table in tables.items():
                first = next((i for i, block_id in enumerate(table) if block_id in spoilt), None)
                if first is not None:
                    firsts[request_id] = first
                    spoilt.update(table[first:])
        forget_all = self._sync_loads and computed_on
        self._manager.evict_blocks(set(range(self._manager.block_pool.num_gpu_blocks)) if forget_all else spoilt)
        for request_id, first in firsts.items():
            self._set_back(requests[request_id], tables[request_id], first)
        return list(firsts)

    def _set_back(self, request: "Request", table: Sequence[int], first: int) -> None:
        """A request computes again from block `first` of its table on."""
        num_tokens = first * self._block_size
        if request.status is RequestStatus.WAITING_FOR_STREAMING_REQ:
            if request.num_computed_tokens > num_tokens:
                self._sessions.setdefault(request.request_id, set()).update(table[first:])
            return
        request.num_computed_tokens = min(request.num_computed_tokens, num_tokens)
        if request.status is RequestStatus.RUNNING:
            self._drop_step_on_its_way(request)
        elif request.status is not RequestStatus.WAITING_FOR_REMOTE_KVS and not request.num_computed_tokens:
            self._manager.free(request)  # else vLLM does when the load has ended

    def _drop_step_on_its_way(self, request: "Request") -> None:
        """What vLLM's scheduler does when it preempts; but the request keeps its blocks."""
        request.num_output_placeholders = 0
        request.spec_token_ids = []
        request.is_prefill_chunk = True  # drafts that come now follow a token that is dropped
        if request.num_in_flight_tokens:
            request.num_stale_output_tokens = request.num_in_flight_tokens
            request.drop_stale_output = True
            request.next_decode_eligible_step = sys.maxsize
            self._held_back.append(request)
