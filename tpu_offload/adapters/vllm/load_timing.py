"""When a load runs: before the step that computes the request's first tokens, or in the background.

The whole batch waits for loads of the first kind, so those of one step are limited together. A request beyond the limit
waits for its load in vLLM's queue while others run.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, final

from vllm.v1.request import RequestStatus

from tpu_offload import BlockHash

if TYPE_CHECKING:
    from vllm.v1.request import Request


@final
class LoadTiming:
    """Chooses for the requests of a pass, and knows which loads run in the background.

    Args:
      sync_load: whether loads run before a step at all.
      block_size: tokens in a block.

    Attributes:
      max_blocks: blocks that are loaded before one step; 0: no limit.
    """

    def __init__(self, *, sync_load: bool, block_size: int) -> None:
        self.max_blocks = 0
        self._sync_load = sync_load
        self._block_size = block_size
        self._sync_blocks: dict[str, int] = {}  # per request, blocks that are loaded before the next step
        # Requests that are loaded in the background, by the hash of the first block loaded, and the inverse.
        self._background_loads: dict[BlockHash, str] = {}
        self._first_hashes: dict[str, BlockHash] = {}

    def runs_before_step(self, request_id: str, num_tokens: int) -> bool:
        """Whether the load of a request that was just matched runs before the step."""
        if not self._sync_load:
            return False
        self._sync_blocks.pop(request_id, None)
        num_blocks = -(-num_tokens // self._block_size)
        if self.max_blocks and sum(self._sync_blocks.values()) + num_blocks > self.max_blocks:
            return False
        self._sync_blocks[request_id] = num_blocks
        return True

    def take_sync(self) -> set[str]:
        """The requests that are loaded before this step. The next pass begins with none."""
        chosen = set(self._sync_blocks)
        self._sync_blocks.clear()
        return chosen

    def begin_background(
        self, request_id: str, first: BlockHash, request_of: Callable[[str], "Request | None"]
    ) -> bool:
        """Begins a load in the background, unless another request waits for one that begins with the same block.

        vLLM finds loaded blocks in its prefix cache once the load has ended. Until then each request for one document
        would load all of it into blocks of its own. A load ends after `job_timeout_s` at the latest.

        Args:
          request_id: the request.
          first: the hash of the first block that it loads.
          request_of: a request that holds blocks, by its id.
        Returns:
          Whether it began; else the request has to ask again.
        """
        if not self._sync_load:
            return True
        other = request_of(self._background_loads.get(first, ""))
        waits = other is not None and other.status is RequestStatus.WAITING_FOR_REMOTE_KVS
        if other is not None and other.request_id != request_id and waits:
            return False
        self.end_background(request_id)
        self._background_loads[first] = request_id
        self._first_hashes[request_id] = first
        return True

    def end_background(self, request_id: str) -> None:
        """The request is no longer loaded in the background, or from another block on."""
        first = self._first_hashes.pop(request_id, None)
        if first is not None and self._background_loads.get(first) == request_id:
            del self._background_loads[first]

    def check_empty(self) -> None:
        """Raises AssertionError if something is left, for tests after the last request."""
        assert not self._background_loads, "loads of requests that have ended"
        assert not self._first_hashes, "requests that have ended"
