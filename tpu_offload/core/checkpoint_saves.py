"""Which checkpoints are saved: the window blocks at the boundaries where a later request may continue.

Those are the last boundary before the end of a prompt, where the same prompt can continue; what the computed tokens
reach, where the next turn of a conversation can, if generated tokens are saved; and the point up to which the host tier
had a request's prefix without a checkpoint, where the third request of a shared prefix can.

The engine frees window blocks as soon as no token to come attends to them. So a checkpoint is saved in the very step
that completes the block before its boundary, together with the chunks of full attention, or never. It is of use only
behind those chunks, so it is dropped when they find no room.
"""

import dataclasses
from typing import final

from tpu_offload.core.block_tables import read_ids
from tpu_offload.core.context import TierContext
from tpu_offload.core.engine_api import ScheduledRequest
from tpu_offload.core.index import ChunkState
from tpu_offload.core.jobs import host_blocks
from tpu_offload.core.request_state import RequestState
from tpu_offload.errors import RequestError
from tpu_offload.types import CopyPart, Direction, JobKind

_ACCOUNT = "checkpoints"  # holds the staging blocks of their saves


@dataclasses.dataclass(frozen=True, slots=True)
class WindowTail:
    """The window blocks before a boundary.

    Attributes:
      boundary: in chunks of the request.
      tables: per window group, the blocks of the chunks that cover its window.
      rolls: the boundary is where the computed tokens end, so the next one supersedes it.
    """

    boundary: int
    tables: list[list[int]]
    rolls: bool


@final
class CheckpointSaves:
    """Collects the checkpoints of the coming step, and plans their saves. Does nothing without window groups."""

    def __init__(self, context: TierContext) -> None:
        layout = context.layout
        self._index = context.index
        self._jobs = context.jobs
        self._staging = context.staging
        self._counts = context.counts
        self._breaker = context.breakers[Direction.SAVE]
        self._size = context.blocks_per_chunk
        self._chunk_tokens = context.blocks_per_chunk * context.block_size
        self._null_block = layout.null_block
        self._group_ids = context.window_group_ids
        self._num_chunks = context.window_chunks
        self._tails: dict[JobKind, list[tuple[RequestState, WindowTail]]] = {}

    def __bool__(self) -> bool:
        return bool(self._tails)

    @property
    def enabled(self) -> bool:
        """Whether the layout has window groups."""
        return bool(self._group_ids)

    def clear(self) -> None:
        """Drops what was collected."""
        self._tails.clear()

    def read(self, request: RequestState, scheduled: ScheduledRequest, num_chunks: int) -> list[WindowTail]:
        """The checkpoints of a request that the coming step makes possible, of its first `num_chunks` chunks.

        Raises:
          RequestError: a block table cannot be read, or is too short.
        """
        first = request.num_checkpoint_chunks
        if num_chunks <= first:
            return []
        prompt_end = max(0, scheduled.num_prompt_tokens - 1) // self._chunk_tokens
        boundaries = {b for b in (prompt_end, request.junction_chunk) if first < b <= num_chunks}
        if num_chunks > prompt_end:
            boundaries.add(num_chunks)
        tails = [self._read(request, scheduled, b, rolls=b > prompt_end) for b in sorted(boundaries)]
        return [tail for tail in tails if tail is not None]

    def read_end(self, request: RequestState, held: ScheduledRequest, num_chunks: int) -> list[WindowTail]:
        """The checkpoint after the first `num_chunks` chunks of a request that is preempted; as `read`."""
        tail = self._read(request, held, num_chunks, rolls=False) if num_chunks else None
        return [] if tail is None else [tail]

    def _read(
        self, request: RequestState, scheduled: ScheduledRequest, boundary: int, *, rolls: bool
    ) -> WindowTail | None:
        end, tables = boundary * self._size, []
        for group_id, num_chunks in zip(self._group_ids, self._num_chunks, strict=True):
            table = scheduled.block_tables[group_id]
            if len(table) < end:
                raise RequestError(
                    f"request {request.request_id} has {len(table)} entries in the block table of layer group "
                    f"{group_id}; expected one for each of {end} blocks, those out of the window included"
                )
            blocks = read_ids(request.request_id, table, max(0, boundary - num_chunks) * self._size, end)
            if self._null_block in blocks:
                return None
            tables.append(blocks)
        return WindowTail(boundary, tables, rolls)

    def add(self, kind: JobKind, request: RequestState, tails: list[WindowTail]) -> None:
        """The coming plan saves these checkpoints if it can, as jobs of this kind."""
        if tails:
            self._tails.setdefault(kind, []).extend([(request, tail) for tail in tails])
            request.num_checkpoint_chunks = tails[-1].boundary

    def plan(self, *, deadline_s: float) -> None:
        """Plans the saves of what was collected, after those of the chunks of full attention."""
        collected, self._tails = self._tails, {}
        for kind, tails in collected.items():
            self._plan(kind, tails, deadline_s=deadline_s)

    def _plan(self, kind: JobKind, tails: list[tuple[RequestState, WindowTail]], *, deadline_s: float) -> None:
        room = self._staging.room_for_saves() // self._size
        blocks: list[list[int]] = [[] for _ in self._group_ids]
        slots: list[list[int]] = [[] for _ in self._group_ids]
        for request, tail in tails:
            saved = self._begin(request, tail, room) if self._breaker.closed else None
            if saved is None:
                self._counts.num_dropped_checkpoints += 1
                continue
            room -= len(saved)
            for group, first, slot in saved:
                blocks[group] += tail.tables[group][first : first + self._size]
                slots[group].append(slot)
        if not any(slots):
            return
        parts = [
            CopyPart(
                group_id=group_id,
                block_ids=tuple(blocks[group]),
                host_block_ids=host_blocks(
                    slots[group], blocks_per_chunk=self._size, num_blocks=len(slots[group]) * self._size
                ),
            )
            for group, group_id in enumerate(self._group_ids)
            if slots[group]
        ]
        num_blocks = sum(map(len, blocks))
        job = self._jobs.plan(
            kind,
            tuple(parts),
            request=tails[0][0].request_id + (f" and {len(tails) - 1} more" if len(tails) > 1 else ""),
            account=_ACCOUNT,
            slots=tuple(slot for group in slots for slot in group),
            num_staging_blocks=self._staging.reserve_save(_ACCOUNT, num_blocks),
            breaker=self._breaker,
            deadline_s=deadline_s,
        )
        self._breaker.begin(job.job_id)

    def _begin(self, request: RequestState, tail: WindowTail, room: int) -> list[tuple[int, int, int]] | None:
        """Begins one checkpoint.

        Returns:
          What to save for it: window group, the chunk's first block in the tail's table, slot. None if it is dropped.
        """
        boundary, keys = tail.boundary, request.keys
        if not request.can_save or request.num_saved_chunks < boundary:
            return None
        if self._index.state(keys[boundary - 1]) not in (ChunkState.PENDING, ChunkState.READY):
            return None
        checkpoint = self._index.checkpoint(keys[boundary - 1])
        saved: list[tuple[int, int, int]] = []
        if checkpoint is not None:
            self._index.touch_checkpoint(checkpoint)
        else:
            begun = self._index.begin_checkpoint(keys, boundary, max_chunks=room)
            if begun is None:
                return None
            checkpoint, saved = begun
            if tail.rolls:
                if request.rolling is not None:
                    self._index.supersede_checkpoint(request.rolling, by=checkpoint)
                request.rolling = checkpoint
        firsts = [boundary - num_chunks for num_chunks in checkpoint.num_chunks]
        return [(group, (number - firsts[group]) * self._size, slot) for group, number, slot in saved]
