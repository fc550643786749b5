"""Requests whose KV may be of other tokens than those that vLLM has for them: nothing of it is kept, nor found.

Workers say which (`runner_tokens`), and from which block on. From then to their end nothing of them is saved. vLLM
keeps blocks in HBM under the same hashes, so theirs are taken out of its prefix cache in every step, before the next
one is scheduled, and a request that has found some of them is distrusted from there on as well.
"""

from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING, final

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.request import Request

_MARGIN = 2  # blocks; vLLM hashes a block when all its tokens are known, a step or two after it is computed


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
        self._firsts: dict[str, int] = {}  # the first block of each that may be wrong
        self._num_forgotten: dict[str, int] = {}  # blocks of each that were full when vLLM forgot them
        self._bad: set[int] = set()  # blocks of those that have joined since the last step

    def __bool__(self) -> bool:
        return bool(self._firsts or self._bad)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._firsts

    @property
    def request_ids(self) -> frozenset[str]:
        """Those that have not ended."""
        return frozenset(self._firsts)

    def hear(self, request_id: str, block_ids: Collection[int], request: "Request | None") -> None:
        """A worker distrusts a request.

        Args:
          request_id: the request.
          block_ids: its blocks, from the first that may be wrong on.
          request: None if it has ended; then others may have found its blocks.
        """
        self._bad.update(block_ids)
        self._forget(block_ids)
        if request is not None:
            self._firsts.setdefault(request_id, request.num_prompt_tokens // self._block_size)

    def finish(self, request_id: str) -> None:
        """A request ended; another may come under the same id."""
        self._firsts.pop(request_id, None)
        self._num_forgotten.pop(request_id, None)

    def spread(self, requests: Mapping[str, "Request"], admitted: Collection[str]) -> list[str]:
        """A step was scheduled: vLLM forgets blocks of theirs, and who has found any is distrusted.

        Args:
          requests: those that hold blocks.
          admitted: those that were given their first blocks in this step.
        Returns:
          Those that were trusted before.
        """
        spread: list[str] = []
        bad, self._bad = self._bad, set()
        # Blocks are shared when a request is admitted, or have been with one that is distrusted only now.
        looked_at = requests if bad or not self._firsts.keys().isdisjoint(admitted) else admitted
        tables = {r: self._manager.get_block_ids(r)[0] for r in {*looked_at, *self._firsts} if r in requests}
        for request_id in admitted:
            self._num_forgotten.pop(request_id, None)
        for request_id, first in self._firsts.items():
            bad.update(tables.get(request_id, ())[first:])
        num_before = -1
        while num_before < len(bad):
            num_before = len(bad)
            for request_id in looked_at:
                if request_id in self._firsts:
                    continue
                table = tables[request_id]
                num_good = next((i for i, block_id in enumerate(table) if block_id in bad), len(table))
                if num_good < len(table):
                    self._firsts[request_id] = num_good
                    bad.update(table[num_good:])
                    spread.append(request_id)
        for request_id, first in self._firsts.items():
            if request_id in tables:
                done = self._num_forgotten.get(request_id, 0) - _MARGIN
                self._forget(tables[request_id][max(first, done) :])
                self._num_forgotten[request_id] = requests[request_id].num_computed_tokens // self._block_size
        return spread

    def _forget(self, block_ids: Iterable[int]) -> None:
        """Takes blocks out of vLLM's prefix cache."""
        num_blocks = self._manager.block_pool.num_gpu_blocks
        self._manager.evict_blocks({block_id for block_id in block_ids if 0 <= block_id < num_blocks})
