"""The chunks of one save job, as they are collected from requests, and the planning of save jobs."""

from collections.abc import Sequence
from typing import final

from tpu_offload.core.block_tables import plain
from tpu_offload.core.context import TierContext
from tpu_offload.core.holdings import Holdings
from tpu_offload.core.host_writes import HostWrites
from tpu_offload.core.jobs import label_of
from tpu_offload.core.policies import Use
from tpu_offload.core.request_state import RequestState
from tpu_offload.types import ChunkKey, CopyPart, Direction, JobKind


@final
class SaveJobs:
    """Plans save jobs, either of chunks or of pieces.

    Args:
      context: the scheduler's shared state.
      account: the holder of their staging blocks.
      writes: what they write.
    """

    def __init__(self, context: TierContext, account: str, writes: HostWrites) -> None:
        self._jobs = context.jobs
        self._staging = context.staging
        self._breaker = context.breakers[Direction.SAVE]
        self._account = account
        self._writes = writes

    def plan(
        self,
        kind: JobKind,
        parts: list[CopyPart],
        keys: Sequence[ChunkKey],
        slots: Sequence[int],
        *,
        num_staged_blocks: int,
        request_ids: Sequence[str],
        deadline_s: float,
        uses: Sequence[Use] = (),
    ) -> None:
        """Plans a job, and reserves its staging blocks.

        Args:
          kind: a save, or an early save.
          parts: what moves.
          keys, slots: the PENDING chunks or pieces that it writes, see `Holdings`.
          num_staged_blocks: blocks that move through the staging buffer, where the path has one.
          request_ids: the requests that hold the blocks.
          deadline_s: see `Job`.
          uses: see `Holdings`.
        """
        num_staging_blocks = self._staging.reserve_save(self._account, num_staged_blocks) if num_staged_blocks else 0
        held = Holdings(
            Direction.SAVE,
            self._breaker,
            account=self._account,
            num_staging_blocks=num_staging_blocks,
            keys=tuple(keys),
            slots=tuple(slots),
            uses=uses,
        )
        self._jobs.plan(
            kind, tuple(parts), held, request=label_of(request_ids), writes=self._writes, deadline_s=deadline_s
        )


@final
class SaveBatch:
    """The chunks of one save job, as they are collected.

    Attributes:
      block_ids: their blocks in HBM.
      keys: the chunks.
      slots: the chunks' slots in the host tier.
      request_ids: the requests that hold the blocks.
      uses: for each chunk, that of the request that saves it.
    """

    __slots__ = ("block_ids", "keys", "request_ids", "slots", "uses")

    def __init__(self) -> None:
        self.block_ids: list[int] = []
        self.keys: list[ChunkKey] = []
        self.slots: list[int] = []
        self.request_ids: list[str] = []
        self.uses: list[Use] = []

    def add(self, request: RequestState, chunks: Sequence[int], slots: list[int], blocks_per_chunk: int) -> None:
        """Adds the chunks of these numbers, ascending, of one request."""
        self.request_ids.append(request.request_id)
        if len(chunks) == blocks_per_chunk == 1:  # fast path: a request that generates
            first = chunks[0]
            self.block_ids.append(int(request.block_table[first]))
            self.keys.append(request.keys[first])
            self.slots.append(slots[0])
            self.uses.append(request.use)
        else:
            self._add_all(request, chunks, blocks_per_chunk)
            self.slots += slots
            self.uses += [request.use] * len(slots)

    def _add_all(self, request: RequestState, chunks: Sequence[int], size: int) -> None:
        first, end, keys = chunks[0], chunks[-1] + 1, request.keys
        are_consecutive = end - first == len(chunks)
        self.keys += keys[first:end] if are_consecutive else [keys[i] for i in chunks]
        if are_consecutive:
            self.block_ids += plain(request.block_table[first * size : end * size])
        else:
            block_ids = plain(request.block_table)
            self.block_ids += [block_ids[i * size + j] for i in chunks for j in range(size)]
