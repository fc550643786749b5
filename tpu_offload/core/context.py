"""The state and the settings that the components of one scheduler share."""

import dataclasses
import logging
from collections.abc import Callable, Mapping
from typing import Self, final

from tpu_offload.config import CopyPath, OffloadConfig
from tpu_offload.config.environment import env_name
from tpu_offload.core.breaker import CircuitBreaker
from tpu_offload.core.chunk_backoff import ChunkBackoff
from tpu_offload.core.completion import Completion
from tpu_offload.core.engine_api import RequestLimits
from tpu_offload.core.index import ChunkIndex, PoolBalance
from tpu_offload.core.jobs import JobTable
from tpu_offload.core.load_costs import LoadCosts
from tpu_offload.core.policies import EvictionPolicy, PriorityPolicy, check_maker, find_policy
from tpu_offload.core.request_table import KeySpace, RequestTable
from tpu_offload.core.staging import Staging, StagingBufferManager
from tpu_offload.core.swap.pool import SwapPool
from tpu_offload.core.tier_groups import CheckpointGroup, TierGroup, tier_groups
from tpu_offload.layout import KVLayout
from tpu_offload.metrics import OffloadStats
from tpu_offload.types import Direction

_logger = logging.getLogger(__name__)


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TierContext:
    """The shared state of one scheduler.

    Attributes:
      config: the settings.
      layout: what a block is made of.
      clock: monotonic seconds.
      index: the chunks of the host tier.
      balance: with states, decides how the host tier is divided.
      staging: the staging buffer.
      swap_pool: host memory of swapped-out requests.
      completion: gives back what they hold, and ends jobs.
      jobs: those in flight.
      requests: the tracked ones.
      keys: the namespace of chunk keys.
      breakers: of saves and of loads.
      swap_breakers: of swaps out and of swaps in.
      backoff: chunks whose copies failed.
      costs: measured times of loads and of prefill.
      counts: the counters that components increment; those of storage tiers are in `TierStats`.
      groups: the layer groups, those of full attention first.
      window_chunks: per window group, how many chunks cover its window.
      has_states: whether the host tier has states.
    """

    config: OffloadConfig
    layout: KVLayout
    clock: Callable[[], float]
    index: ChunkIndex
    balance: PoolBalance | None
    staging: Staging
    swap_pool: SwapPool
    completion: Completion
    jobs: JobTable
    requests: RequestTable
    keys: KeySpace
    breakers: Mapping[Direction, CircuitBreaker]
    swap_breakers: Mapping[Direction, CircuitBreaker]
    backoff: ChunkBackoff
    costs: LoadCosts
    counts: OffloadStats
    groups: tuple[TierGroup, ...]
    window_chunks: tuple[int, ...]
    has_states: bool

    @classmethod
    def make(
        cls,
        config: OffloadConfig,
        layout: KVLayout,
        *,
        num_workers: int,
        policy: Callable[[], EvictionPolicy] | None,
        clock: Callable[[], float],
        record_events: bool,
    ) -> Self:
        """The state of a new scheduler; the arguments are those of `OffloadScheduler`.

        Raises:
          ConfigError: the staging buffer is smaller than one chunk, or no eviction policy can be made.
        """
        buffer = StagingBufferManager(config.staging_blocks(layout) if config.enabled else 0)
        staging = Staging(buffer, {direction: config.path_for(direction) for direction in Direction})
        if policy is None:
            policy = find_policy(config.eviction_policy)
        else:
            check_maker(policy, what="policy")
        window_chunks = _window_chunks(config, layout) if config.enabled else ()
        segments = config.host_segments(layout) if config.enabled else None
        balance = None
        if segments is not None:
            balance = PoolBalance(segments.segment_slots, unit=segments.move_unit, chunks_by_age=policy().evicts_by_age)
        index = ChunkIndex(
            PriorityPolicy(policy),
            record=record_events,
            window_chunks=window_chunks,
            first_slots=config.first_slots(layout) if segments is not None else (0,),
            balance=balance,
        )
        swap_pool = SwapPool(num_groups=len(layout.groups))
        counts = OffloadStats()
        completion = Completion(staging=staging, index=index, pool=swap_pool, counts=counts)
        keys = KeySpace(layout, blocks_per_chunk=config.blocks_per_chunk)
        return cls(
            config=config,
            layout=layout,
            clock=clock,
            index=index,
            balance=balance,
            staging=staging,
            swap_pool=swap_pool,
            completion=completion,
            jobs=JobTable(
                layout, num_workers=num_workers, complete=completion.complete, release_late=completion.release_late
            ),
            requests=RequestTable(keys, _default_limits(config, layout)),
            keys=keys,
            breakers=_breakers(config, clock, saves="saves", loads="loads"),
            swap_breakers=_breakers(config, clock, saves="swaps out", loads="swaps in"),
            backoff=ChunkBackoff(retry_s=config.breaker_retry_s, clock=clock),
            costs=LoadCosts(config.effective_load_mode, clock=clock),
            counts=counts,
            groups=tier_groups(config, layout, window_chunks),
            window_chunks=window_chunks,
            has_states=config.enabled and layout.state_group is not None,
        )

    @property
    def block_size(self) -> int:
        """Tokens in a block."""
        return self.layout.block_size

    @property
    def num_groups(self) -> int:
        """Layer groups; each has its own block table."""
        return len(self.layout.groups)

    @property
    def checkpoint_groups(self) -> tuple[CheckpointGroup, ...]:
        """Those that checkpoints have pieces of: windows, then states."""
        return tuple([group for group in self.groups if isinstance(group, CheckpointGroup)])

    @property
    def num_pools(self) -> int:
        """Pools of the host tier."""
        return self.config.num_pools(self.layout)

    @property
    def blocks_per_chunk(self) -> int:
        """Blocks in a chunk."""
        return self.config.blocks_per_chunk


def _default_limits(config: OffloadConfig, layout: KVLayout) -> RequestLimits:
    """Those of each request; warns of those within which nothing is ever copied.

    A save is of whole chunks. So is a load with windows or states, which ends at a checkpoint; others are of blocks.
    """
    chunk_tokens = config.blocks_per_chunk * layout.block_size
    has_checkpoints = bool(layout.window_groups) or layout.state_group is not None
    unit, least_load = ("a chunk", chunk_tokens) if has_checkpoints else ("a block", layout.block_size)
    for name, limit, least, what in (
        ("max_save_tokens", config.max_save_tokens, chunk_tokens, "a chunk, so nothing is saved"),
        ("max_load_tokens", config.max_load_tokens, least_load, f"{unit}, so nothing is loaded"),
    ):
        if config.enabled and 0 < limit < least:
            _logger.warning(
                "%s=%d is less than the %d tokens of %s; set it to 0 (no limit), or at least %d",
                env_name(name),
                limit,
                least,
                what,
                least,
            )
    return RequestLimits(max_save_tokens=config.max_save_tokens or None, max_load_tokens=config.max_load_tokens or None)


def _window_chunks(config: OffloadConfig, layout: KVLayout) -> tuple[int, ...]:
    """Per window group, how many chunks cover its window; warns of settings with which few checkpoints are kept."""
    size = config.blocks_per_chunk
    num_chunks = tuple(-(-layout.window_blocks(group) // size) for group in layout.window_groups)
    needed, there = 2 * sum(num_chunks), config.host_chunks(layout)
    if needed > there:
        _logger.warning(
            "the host tier has %d chunks, and the windows of this model take %d at each boundary: few or no hits; make "
            "it at least %d chunks (TPU_OFFLOAD_HOST_GB)",
            there,
            needed // 2,
            needed,
        )
    staging = config.staging_blocks(layout)
    if config.save_path is not CopyPath.DIRECT and sum(num_chunks) * size > staging:
        _logger.warning(
            "the staging buffer has %d blocks, and the windows of this model take %d at each boundary, which are saved "
            "together: no hits; make it at least %d blocks (TPU_OFFLOAD_STAGING_BUFFER_TOKENS=%d)",
            staging,
            sum(num_chunks) * size,
            2 * sum(num_chunks) * size,
            2 * sum(num_chunks) * size * layout.block_size,
        )
    if any(layout.window_blocks(group) % size for group in layout.window_groups):
        _logger.warning(
            "the windows take %s blocks and a chunk %d: where a step begins within a chunk, windows are not saved; "
            "set TPU_OFFLOAD_BLOCKS_PER_CHUNK to a number that divides them",
            ", ".join(str(layout.window_blocks(group)) for group in layout.window_groups),
            size,
        )
    return num_chunks


def _breakers(
    config: OffloadConfig, clock: Callable[[], float], *, saves: str, loads: str
) -> Mapping[Direction, CircuitBreaker]:
    return {
        direction: CircuitBreaker(
            name, num_failures=config.breaker_failures, retry_s=config.breaker_retry_s, clock=clock
        )
        for direction, name in ((Direction.SAVE, saves), (Direction.LOAD, loads))
    }
