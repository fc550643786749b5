"""Requests whose KV may be of other tokens than those that vLLM has for them: nothing of it is kept, nor found.

Workers say which (`runner_tokens`). From then to their end nothing of them is saved. vLLM keeps blocks in HBM under the
same hashes, so what they have generated is taken out of its prefix cache in every step, before the next one is
scheduled, and a request that has found some of it is distrusted as well.
"""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, final

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.request import Request


@final
class Distrust:
    """All calls come from the thread of vLLM's scheduler.

    Args:
      manager: vLLM's cache manager.
      block_size: tokens in a block.
    """

    def __init__(self, manager: "KVCacheManager", *, block_size: int) -> None:
        self._manager = manager
        self._block_size = block_size
        self._request_ids: set[str] = set()

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._request_ids

    @property
    def request_ids(self) -> frozenset[str]:
        """Those that have not ended."""
        return frozenset(self._request_ids)

    def add(self, request_id: str) -> None:
        """An unfinished request is distrusted."""
        self._request_ids.add(request_id)

    def finish(self, request_id: str) -> None:
        """A request ended; another may come under the same id."""
        self._request_ids.discard(request_id)

    def forget(self, block_ids: Iterable[int]) -> None:
        """Takes blocks out of vLLM's prefix cache."""
        num_blocks = self._manager.block_pool.num_gpu_blocks
        self._manager.evict_blocks({block_id for block_id in block_ids if 0 <= block_id < num_blocks})

    def spread(self, requests: Mapping[str, "Request"]) -> list[str]:
        """A step was scheduled: vLLM forgets what they have generated, and what is computed on it is distrusted.

        Args:
          requests: those that hold blocks.
        Returns:
          Those that were trusted before.
        """
        if self._request_ids.isdisjoint(requests):
            return []
        tables = {request_id: self._manager.get_block_ids(request_id)[0] for request_id in requests}
        bad: set[int] = set()
        todo, spread = [request_id for request_id in requests if request_id in self._request_ids], []
        while todo:
            for request_id in todo:
                bad.update(tables[request_id][requests[request_id].num_prompt_tokens // self._block_size :])
            todo = [r for r in requests if r not in self._request_ids and not bad.isdisjoint(tables[r])]
            self._request_ids.update(todo)
            spread += todo
        self.forget(bad)
        return spread
