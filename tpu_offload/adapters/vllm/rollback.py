"""Rolls requests back to before their first invalid block.

vLLM does a part of this itself: it learns the invalid block ids from the worker and, with the policy `recompute`, rolls
requests back, or with `fail` ends them. The rest is done here, after vLLM and with its own fields:

    shared blocks       vLLM has one request recompute each shared block, and the others find it in the prefix cache
                        before that has happened. Here invalid blocks are evicted from the prefix cache, and each
                        request recomputes them for itself.
    current step        vLLM looks only at tokens computed before the step. When all caches are lost, so is what the
                        step computed.
    next step           With async scheduling it is in flight, and vLLM would accept its tokens. It is handled as vLLM
                        handles a preemption: the tokens are dropped when they arrive. Until then the request is not
                        scheduled, because tpu-inference writes the last token of a step into the state of each request
                        that is in the next one. (vLLM itself preempts no request that is in a step in flight, except
                        in a reset of running requests, which drops their tokens.)
    waiting requests    that hold blocks free them, and are matched again.
    ended requests      A request that ended, or was preempted by a reset, while the step was in flight has left blocks
                        in the prefix cache that were computed on invalid ones; so has any request that found those.
                        Their block tables are gone. So when a synchronous load fails, the whole prefix cache is
                        evicted.
    streaming requests  that wait for more input cannot be rolled back, because vLLM keeps only their computed tokens.
                        Their next step is wasted: a worker reports the invalid blocks with it.
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
    """Rolls requests back. All calls come from the thread of vLLM's scheduler.

    Args:
      manager: vLLM's KV cache manager.
      block_size: tokens in a block.
      sync_loads: steps may compute on blocks before it is known whether their load has failed.
    """

    def __init__(self, manager: "KVCacheManager", *, block_size: int, sync_loads: bool) -> None:
        self._manager = manager
        self._block_size = block_size
        self._sync_loads = sync_loads
        self._awaiting_stale_output: list[Request] = []
        self._session_block_ids: dict[str, set[int]] = {}  # invalid blocks of sessions that wait for input
        self._invalid_block_ids: set[int] = set()  # those that the next step computes on

    def admit(self, request_id: str) -> None:
        """A request is scheduled with the blocks that it holds."""
        self._invalid_block_ids |= self._session_block_ids.pop(request_id, set())

    def finish(self, request_id: str) -> None:
        """A request ended."""
        self._session_block_ids.pop(request_id, None)

    def begin_step(self) -> frozenset[int]:
        """A step was scheduled; returns the invalid blocks that it computes on."""
        invalid, self._invalid_block_ids = frozenset(self._invalid_block_ids), set()
        return invalid

    def end_step(self) -> None:
        """A step has ended, and vLLM has accepted or dropped its tokens."""
        if self._awaiting_stale_output:
            waiting, self._awaiting_stale_output = self._awaiting_stale_output, []
            for request in waiting:
                if request.is_finished():
                    continue
                if request.num_stale_output_tokens:
                    self._awaiting_stale_output.append(request)
                else:
                    request.next_decode_eligible_step = 0

    def invalidate(
        self, block_ids: Collection[int], requests: Mapping[str, "Request"], *, computed_on: bool
    ) -> list[str]:
        """Rolls back every request that holds one of these blocks.

        Args:
          block_ids: the invalid blocks.
          requests: those that hold blocks, by id.
          computed_on: whether a step may have computed on the blocks already.
        Returns:
          The ids of the requests that were rolled back.
        """
        invalid = {block_id for block_id in block_ids if block_id < self._manager.block_pool.num_gpu_blocks}
        tables = {request_id: self._manager.get_block_ids(request_id)[0] for request_id in requests}
        firsts: dict[str, int] = {}
        num_before = -1
        while num_before < len(invalid):  # blocks computed on invalid ones are invalid, and may be shared in turn
            num_before = len(invalid)
            for request_id, table in tables.items():
                first = next((i for i, block_id in enumerate(table) if block_id in invalid), None)
                if first is not None:
                    firsts[request_id] = first
                    invalid.update(table[first:])
        evict_all = self._sync_loads and computed_on
        self._manager.evict_blocks(set(range(self._manager.block_pool.num_gpu_blocks)) if evict_all else invalid)
        for request_id, first in firsts.items():
            self._roll_back(requests[request_id], tables[request_id], first)
        return list(firsts)

    def check_empty(self) -> None:
        """Raises AssertionError if something is left, for tests after the last request."""
        assert not self._awaiting_stale_output, "requests that skip steps"
        assert not self._session_block_ids, "sessions that have ended"

    def _roll_back(self, request: "Request", table: Sequence[int], first: int) -> None:
        """Has a request recomputed from block `first` of its table on."""
        num_tokens = first * self._block_size
        if request.status is RequestStatus.WAITING_FOR_STREAMING_REQ:
            if request.num_computed_tokens > num_tokens:
                self._session_block_ids.setdefault(request.request_id, set()).update(table[first:])
            return
        request.num_computed_tokens = min(request.num_computed_tokens, num_tokens)
        if request.status is RequestStatus.RUNNING:
            self._drop_step_in_flight(request)
        elif request.status is not RequestStatus.WAITING_FOR_REMOTE_KVS and not request.num_computed_tokens:
            self._manager.free(request)  # if it waits for a load, vLLM frees them when the load has ended

    def _drop_step_in_flight(self, request: "Request") -> None:
        """Drops the output of the step in flight as vLLM does in a preemption, but the request keeps its blocks."""
        request.num_output_placeholders = 0
        request.spec_token_ids = []
        request.is_prefill_chunk = True  # drafts that arrive now follow a dropped token
        if request.num_in_flight_tokens:
            request.num_stale_output_tokens = request.num_in_flight_tokens
            request.drop_stale_output = True
            request.next_decode_eligible_step = sys.maxsize
            self._awaiting_stale_output.append(request)
