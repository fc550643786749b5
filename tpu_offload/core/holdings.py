"""What a copy holds, from the promise or plan that acquires it to the one place that gives it back.

`core.completion` releases it, whichever stage ends: a promise, a load that waits, a job, or a swapped-out request.
"""

from collections.abc import Hashable, Sequence
from typing import final

from tpu_offload.core.breaker import CircuitBreaker
from tpu_offload.core.index import Checkpoint, overlaps
from tpu_offload.core.policies import Use
from tpu_offload.core.swap.pool import HostBlocks
from tpu_offload.types import ChunkKey, Direction


@final
class Holdings:
    """What one copy holds: an object that goes from stage to stage, on which staging blocks and chunks may change.

    Attributes:
      direction: which way it goes.
      breaker: suspends copies of its kind.
      probe: by what the breaker knows the copy, which may be its probe. From its plan on, the job's id.
      account: the holder of its staging blocks.
      num_staging_blocks: staging blocks; 0 if it needs none, or waits for some.
      keys: chunks of the host tier that it reads, or that it writes and has made PENDING.
      slots: their slots, or those of the pieces that it writes.
      are_pinned: whether `keys` are pinned.
      uses: for each of `keys` that it saves, that of the request that saves it; empty for pieces and other copies.
      checkpoint: the checkpoint that it reads; held. None without windows and states.
      pool_blocks: places in the swap pool that it reads or writes, per layer group; held.
    """

    def __init__(
        self,
        direction: Direction,
        breaker: CircuitBreaker,
        *,
        probe: Hashable = None,
        account: str = "",
        num_staging_blocks: int = 0,
        keys: Sequence[ChunkKey] = (),
        slots: tuple[int, ...] = (),
        are_pinned: bool = False,
        uses: Sequence[Use] = (),
        checkpoint: Checkpoint | None = None,
        pool_blocks: HostBlocks = (),
    ) -> None:
        self.direction = direction
        self.breaker = breaker
        self.probe: Hashable = probe
        self.account = account
        self.num_staging_blocks = num_staging_blocks
        self.keys = keys
        self.slots = slots
        self.are_pinned = are_pinned
        self.uses = uses
        self.checkpoint = checkpoint
        self.pool_blocks = pool_blocks

    def touches(self, first: int, end: int) -> bool:
        """Whether it needs a slot of this range."""
        read = self.checkpoint
        return overlaps(self.slots, first, end) or (read is not None and overlaps(read.slots, first, end))
