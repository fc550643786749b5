"""Requests whose load has ended and that vLLM has not scheduled since: they give their blocks back for a reset.

vLLM resets its cache only while no request holds blocks. It preempts running requests for that, but not those that have
waited for a load: it schedules these in the next step. A pause that keeps requests (`mode=keep`) ends when all copies
have, without such a step. So with `clear_cache` it would fail, however often it was repeated.
"""

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, final

from vllm.v1.request import RequestStatus

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.request import Request


@final
class ReceivedLoads:
    """Those requests. All calls come from the thread of vLLM's scheduler.

    Args:
      manager: vLLM's KV cache manager, whose `reset_prefix_cache` is replaced.
      holding: all requests that hold blocks, and perhaps some that do not.
    """

    def __init__(self, manager: "KVCacheManager", *, holding: Callable[[], Iterable["Request"]]) -> None:
        self._manager = manager
        self._holding = holding
        self._request_ids: set[str] = set()
        self._original: Callable[[], bool] = manager.reset_prefix_cache
        manager.reset_prefix_cache = self._reset_prefix_cache

    def add(self, request_ids: Iterable[str]) -> None:
        """The loads of these requests have ended; all that they copy is dispatched."""
        self._request_ids.update(request_ids)

    def discard(self, request_id: str) -> None:
        """It is scheduled, has lost its blocks, or has ended."""
        self._request_ids.discard(request_id)

    def check_empty(self) -> None:
        """Raises AssertionError if something is left, for tests after the last request."""
        assert not self._request_ids, "requests that have ended"

    def _reset_prefix_cache(self) -> bool:
        waiting = [request for request in self._holding() if any(self._manager.get_block_ids(request.request_id))]
        # All or none: one without blocks is queued before those that hold some, and might never get theirs.
        if all(map(self._may_free, waiting)):
            for request in waiting:  # vLLM looks each of them up again
                self._manager.free(request)
                request.num_computed_tokens = 0
        return self._original()

    def _may_free(self, request: "Request") -> bool:
        if request.status is RequestStatus.WAITING_FOR_REMOTE_KVS:
            return request.request_id in self._request_ids
        return request.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED)
