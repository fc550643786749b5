"""Takes requests back to before blocks that do not hold what they should.

vLLM does a part of it: it is told which blocks are invalid, and with the policy `recompute` sets requests back, with
`fail` ends them. This does the rest, in vLLM's own terms, after vLLM:

    shared blocks       vLLM has one request compute each again, and the others find them in its prefix cache before
                        that has happened. Here they are taken out of it, and each request computes them for itself.
    the step at hand    vLLM looks at tokens computed before it. When all caches are lost, so are those of the step.
    the step after it   is on its way with async scheduling, and vLLM would take its tokens. What it does with a request
                        that it preempts is done to these: the tokens are dropped when they come. Until then they
                        run in no further step, because tpu-inference writes the last token of a step over those
                        of whoever is in the next one. (Requests of a step on its way are never preempted.)
    waiting requests    that hold blocks give them back, to be matched again.
    ended requests      have left blocks in the prefix cache that a step on its way when they ended computes on what is
                        not there. Those are taken out as well.
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
    """

    def __init__(self, manager: "KVCacheManager", *, block_size: int) -> None:
        self._manager = manager
        self._block_size = block_size
        self._held_back: list[Request] = []
        self._sessions: dict[str, set[int]] = {}
        self._spoilt_block_ids: set[int] = set()  # that the coming step computes on
        # Blocks of requests that ended since the last step was scheduled, and between the two before it.
        self._left: list[Sequence[int]] = []
        self._left_before: list[Sequence[int]] = []

    def admit(self, request_id: str) -> None:
        """A request goes on with the blocks that it holds."""
        self._spoilt_block_ids |= self._sessions.pop(request_id, set())

    def finish(self, request_id: str, block_ids: Sequence[int]) -> None:
        """A request ended, and gives up these blocks."""
        self._sessions.pop(request_id, None)
        self._left.append(block_ids)

    def begin_step(self) -> frozenset[int]:
        """A step was scheduled; the spoilt blocks that it computes on.

        At most one more is on its way: of those that were when a request ended, the last has ended two steps later.
        """
        self._left, self._left_before = [], self._left
        spoilt, self._spoilt_block_ids = frozenset(self._spoilt_block_ids), set()
        return spoilt

    def end_step(self) -> None:
        """A step has ended, and vLLM has taken its tokens or dropped them."""
        if self._held_back:
            held, self._held_back = self._held_back, []
            for request in held:
                if request.num_stale_output_tokens:
                    self._held_back.append(request)
                else:
                    request.next_decode_eligible_step = 0

    def forget_all(self) -> None:
        """Nothing that vLLM's prefix cache holds is found any more. Requests keep their blocks."""
        self._manager.evict_blocks(set(range(self._manager.block_pool.num_gpu_blocks)))

    def spoil(self, block_ids: Collection[int], requests: Mapping[str, "Request"]) -> list[str]:
        """Sets back all of these requests that hold any of these blocks; returns which."""
        spoilt = {block_id for block_id in block_ids if block_id < self._manager.block_pool.num_gpu_blocks}
        tables = {request_id: self._manager.get_block_ids(request_id)[0] for request_id in requests}
        firsts: dict[str, int] = {}
        num_before = -1
        while num_before < len(spoilt):  # what rests on these blocks has gone bad, too, and may be shared in turn
            num_before = len(spoilt)
            for request_id, table in tables.items():
                first = _find(spoilt, table)
                if first < len(table):
                    firsts[request_id] = first
                    spoilt.update(table[first:])
            for table in (*self._left, *self._left_before):
                spoilt.update(table[_find(spoilt, table) :])
        self._manager.evict_blocks(spoilt)
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
        if request.num_in_flight_tokens:
            request.spec_token_ids = []
            request.num_stale_output_tokens = request.num_in_flight_tokens
            request.drop_stale_output = True
            request.next_decode_eligible_step = sys.maxsize
            self._held_back.append(request)


def _find(spoilt: Collection[int], table: Sequence[int]) -> int:
    """Place of the first spoilt block in a table; its length if there is none."""
    return next((i for i, block_id in enumerate(table) if block_id in spoilt), len(table))
