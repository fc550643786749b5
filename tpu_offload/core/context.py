"""What the parts of one scheduler share: the books, and the settings that all of them read."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Self, final

from tpu_offload import hashing
from tpu_offload.config import OffloadConfig
from tpu_offload.core.breaker import CircuitBreaker
from tpu_offload.core.chunk_backoff import ChunkBackoff
from tpu_offload.core.completion import Completion
from tpu_offload.core.index import ChunkIndex
from tpu_offload.core.jobs import JobTable
from tpu_offload.core.policies import EvictionPolicy
from tpu_offload.core.request_state import RequestState
from tpu_offload.core.staging import Staging
from tpu_offload.core.swap_pool import SwapPool
from tpu_offload.layout import KVLayout
from tpu_offload.metrics import OffloadStats
from tpu_offload.types import Direction


@final
class KeySpace:
    """What ends the keys of chunks: others after each reset, so that nothing of before is found.

    Args:
      layout: what a block is made of.
      blocks_per_chunk: blocks in a chunk.
    """

    def __init__(self, layout: KVLayout, *, blocks_per_chunk: int) -> None:
        self._fingerprint = layout.fingerprint()
        self._blocks_per_chunk = blocks_per_chunk
        self._num_resets = 0
        self.namespace = self._make()

    def reset(self) -> None:
        """From now on there are other keys."""
        self._num_resets += 1
        self.namespace = self._make()

    def _make(self) -> bytes:
        return hashing.key_namespace(self._fingerprint, blocks_per_chunk=self._blocks_per_chunk, epoch=self._num_resets)


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TierContext:
    """The books of one scheduler. Each of its parts is given all of them, and takes what it needs.

    Attributes:
      config: the settings.
      layout: what a block is made of.
      clock: monotonic seconds.
      index: the chunks of the host tier.
      staging: the staging buffer.
      swap_pool: places for requests that are swapped out.
      jobs: those in flight.
      requests: by id, those that the scheduler knows.
      keys: the key space of today.
      breakers: of saves and of loads.
      swap_breakers: of swaps out and of swaps in.
      backoff: chunks whose copies failed.
      counts: where to count.
    """

    config: OffloadConfig
    layout: KVLayout
    clock: Callable[[], float]
    index: ChunkIndex
    staging: Staging
    swap_pool: SwapPool
    jobs: JobTable
    requests: dict[str, RequestState]
    keys: KeySpace
    breakers: Mapping[Direction, CircuitBreaker]
    swap_breakers: Mapping[Direction, CircuitBreaker]
    backoff: ChunkBackoff
    counts: OffloadStats

    @classmethod
    def make(
        cls,
        config: OffloadConfig,
        layout: KVLayout,
        *,
        num_workers: int,
        staging: Staging,
        policy: EvictionPolicy,
        clock: Callable[[], float],
        record_events: bool,
    ) -> Self:
        """Empty books; the arguments are those of `OffloadScheduler`."""

        def breaker(what: str) -> CircuitBreaker:
            return CircuitBreaker(
                what, num_failures=config.breaker_failures, retry_s=config.breaker_retry_s, clock=clock
            )

        index = ChunkIndex(policy, record=record_events)
        swap_pool = SwapPool(num_groups=len(layout.groups))
        counts = OffloadStats()
        completion = Completion(
            staging=staging, index=index, pool=swap_pool, counts=counts, timeout_s=config.job_timeout_s
        )
        return cls(
            config=config,
            layout=layout,
            clock=clock,
            index=index,
            staging=staging,
            swap_pool=swap_pool,
            jobs=JobTable(layout, num_workers=num_workers, complete=completion.complete, settle=completion.settle),
            requests={},
            keys=KeySpace(layout, blocks_per_chunk=config.blocks_per_chunk),
            breakers={Direction.SAVE: breaker("saves"), Direction.LOAD: breaker("loads")},
            swap_breakers={Direction.SAVE: breaker("swaps out"), Direction.LOAD: breaker("swaps in")},
            backoff=ChunkBackoff(retry_s=config.breaker_retry_s, clock=clock),
            counts=counts,
        )

    @property
    def block_size(self) -> int:
        """Tokens in a block."""
        return self.layout.block_size

    @property
    def num_groups(self) -> int:
        """Layer groups; each has its own block table, and its own part of a chunk's slot."""
        return len(self.layout.groups)

    @property
    def blocks_per_chunk(self) -> int:
        """Blocks in a chunk."""
        return self.config.blocks_per_chunk
