"""A load before it is a job: promised by a match, then waiting for the next plan."""

from collections.abc import Sequence
from typing import final

from tpu_offload.core.index import Checkpoint
from tpu_offload.types import ChunkKey, CopyPart


@final
class Promise:
    """What a match granted: pinned chunks and, for a staged load, reserved staging blocks.

    Attributes:
      first_block: index, in the request, of the first block to load.
      num_blocks: blocks to load from there.
      num_tokens: tokens that the engine does not have to compute.
      keys: the chunks that hold those blocks; pinned.
      slots: their slots.
      num_staging_blocks: staging blocks that the load holds; 0 if it needs none, or will wait for some.
      checkpoint: the pieces at its end; held. None without windows and states.
      lost: the host memory of some chunks is gone; the load will fail.
    """

    def __init__(
        self,
        *,
        first_block: int,
        num_blocks: int,
        num_tokens: int,
        keys: Sequence[ChunkKey],
        slots: tuple[int, ...],
        num_staging_blocks: int,
        checkpoint: Checkpoint | None = None,
    ) -> None:
        self.first_block = first_block
        self.num_blocks = num_blocks
        self.num_tokens = num_tokens
        self.keys = keys
        self.slots = slots
        self.num_staging_blocks = num_staging_blocks
        self.checkpoint = checkpoint
        self.lost = False


@final
class WaitingLoad:
    """A load that no plan contains yet, so it has no job id.

    Attributes:
      request_id: the engine's request.
      account: the holder of the staging blocks.
      parts: the blocks of HBM, and their places in the host tier.
      keys: the chunks that hold them; pinned.
      slots: the chunks' slots in the host tier.
      num_valid_tokens: the request's tokens that were in HBM before it.
      num_staged_blocks: blocks that will move through the staging buffer, where the path has one: all but states.
      num_staging_blocks: staging blocks that it holds; 0 if it needs none, or waits for some.
      checkpoint: the checkpoint that it reads; held. None without windows and states.
      waits_until_s: time after which it stops waiting for staging blocks.
      failed_blocks: positions of blocks that can no longer be copied.
      all_failed: none of its blocks can be used.
      error: why.
    """

    def __init__(
        self,
        *,
        request_id: str,
        account: str,
        parts: tuple[CopyPart, ...],
        keys: Sequence[ChunkKey],
        slots: tuple[int, ...],
        num_valid_tokens: int,
        num_staged_blocks: int,
        num_staging_blocks: int,
        waits_until_s: float,
        checkpoint: Checkpoint | None = None,
    ) -> None:
        self.request_id = request_id
        self.account = account
        self.parts = parts
        self.keys = keys
        self.slots = slots
        self.num_valid_tokens = num_valid_tokens
        self.num_staged_blocks = num_staged_blocks
        self.num_staging_blocks = num_staging_blocks
        self.waits_until_s = waits_until_s
        self.checkpoint = checkpoint
        self.failed_blocks: frozenset[int] = frozenset()
        self.all_failed = False
        self.error = ""

    @property
    def num_blocks(self) -> int:
        """Blocks that will move."""
        return sum([len(part.block_ids) for part in self.parts])
