"""The two states of a load before it is a job: promised by a match, then waiting for the next plan."""

from typing import final

from tpu_offload.core.holdings import Holdings
from tpu_offload.types import CopyPart


@final
class Promise:
    """What a match granted.

    Attributes:
      first_block: index, in the request, of the first block to load.
      num_tokens: tokens that the engine does not have to compute.
      held: pinned chunks, a checkpoint, and for a staged load reserved staging blocks.
      lost: the host memory of some chunks is gone; the load will fail.
    """

    def __init__(self, held: Holdings, *, first_block: int, num_tokens: int) -> None:
        self.held = held
        self.first_block = first_block
        self.num_tokens = num_tokens
        self.lost = False


@final
class WaitingLoad:
    """A load that no plan contains yet, so it has no job id.

    Attributes:
      request_id: the engine's request.
      held: what was promised, as far as the load needs it.
      parts: the blocks of HBM, and their places in the host tier.
      num_valid_tokens: the request's tokens that were in HBM before it.
      num_staged_blocks: blocks that will move through the staging buffer, where the path has one: all but rows of
        states, which are never staged.
      waits_until_s: time after which it stops waiting for staging blocks.
      failed_blocks: positions of blocks that can no longer be copied.
      all_failed: none of its blocks can be used.
      error: why.
    """

    def __init__(
        self,
        request_id: str,
        held: Holdings,
        parts: tuple[CopyPart, ...],
        *,
        num_valid_tokens: int,
        num_staged_blocks: int,
        waits_until_s: float,
    ) -> None:
        self.request_id = request_id
        self.held = held
        self.parts = parts
        self.num_valid_tokens = num_valid_tokens
        self.num_staged_blocks = num_staged_blocks
        self.waits_until_s = waits_until_s
        self.failed_blocks: frozenset[int] = frozenset()
        self.all_failed = False
        self.error = ""

    @property
    def num_blocks(self) -> int:
        """Blocks that will move."""
        return sum([len(part.block_ids) for part in self.parts])
