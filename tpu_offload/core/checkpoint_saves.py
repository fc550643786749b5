"""Which checkpoints are saved: windows and states at the boundaries where a later request may continue.

Those are the last boundary before the end of a prompt, where the same prompt can continue; what the computed tokens
reach, where the next turn of a conversation can, if generated tokens are saved; the point up to which the host tier
had a request's prefix without a checkpoint, where the third request of a shared prefix can; and what the engine names
as such (`ScheduledRequest.retained_tokens`).

The engine frees window blocks as soon as no token to come attends to them, and a later step writes over a state. So a
checkpoint is saved in the very step that completes the block before its boundary, together with the chunks of full
attention, or never. It is of use only behind those chunks, so it is dropped when they find no room. A state exists at
boundaries where a step ends; at the others nothing is saved.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, final

from tpu_offload.core.block_tables import read_ids, read_tokens
from tpu_offload.core.context import TierContext
from tpu_offload.core.engine_api import ScheduledRequest
from tpu_offload.core.host_writes import PieceWrites
from tpu_offload.core.index import ChunkState, NewPiece
from tpu_offload.core.request_state import RequestState
from tpu_offload.core.save_jobs import SaveJobs
from tpu_offload.core.tier_groups import CheckpointGroup
from tpu_offload.errors import RequestError
from tpu_offload.types import CopyPart, Direction, JobKind

_ACCOUNT = "checkpoints"  # holds the staging blocks of their saves


@dataclasses.dataclass(frozen=True, slots=True)
class Tail:
    """The blocks in HBM that make the checkpoint at a boundary.

    Attributes:
      boundary: in chunks of the request.
      tables: per window group, the blocks of the chunks that cover its window, and then the row of the state, if there
        are states; None if the request has freed some.
      rolls: the boundary is where the computed tokens end, so the next one supersedes it.
    """

    boundary: int
    tables: list[list[int]] | None
    rolls: bool


@final
class CheckpointSaves:
    """Collects the checkpoints of the coming step, and plans their saves. Does nothing without windows or states."""

    def __init__(self, context: TierContext) -> None:
        self._index = context.index
        self._jobs = SaveJobs(context, _ACCOUNT, PieceWrites(context.index))
        self._counts = context.counts
        self._breaker = context.breakers[Direction.SAVE]
        self._size = context.blocks_per_chunk
        self._chunk_tokens = context.blocks_per_chunk * context.block_size
        self._null_block = context.layout.null_block
        self._groups = context.checkpoint_groups
        self._tails: dict[JobKind, list[tuple[RequestState, Tail]]] = {}

    def __bool__(self) -> bool:
        return bool(self._tails)

    @property
    def enabled(self) -> bool:
        """Whether the layout has windows or states."""
        return bool(self._groups)

    def clear(self) -> None:
        """Drops what was collected."""
        self._tails.clear()

    def read(self, request: RequestState, scheduled: ScheduledRequest, num_chunks: int) -> list[Tail]:
        """The checkpoints of a request that the coming step makes possible, of its first `num_chunks` chunks.

        Raises:
          RequestError: a block table cannot be read, or is too short.
        """
        first = request.num_checkpoint_chunks
        if num_chunks <= first:
            return []
        num_savable = request.limits.num_savable_tokens(scheduled.num_prompt_tokens)
        prompt_end = min(max(0, scheduled.num_prompt_tokens - 1), num_savable) // self._chunk_tokens
        retained = self._retained(request, scheduled)
        boundaries = {b for b in (prompt_end, request.last_match.junction_chunk, *retained) if first < b <= num_chunks}
        rolling = {num_chunks} - boundaries if num_chunks > prompt_end else set()
        tails = [self._read(request, scheduled, b, rolls=b in rolling) for b in sorted(boundaries | rolling)]
        return [tail for tail in tails if tail is not None]

    def read_end(self, request: RequestState, held: ScheduledRequest, num_chunks: int) -> list[Tail]:
        """The checkpoint after the first `num_chunks` chunks of a request that is preempted; as `read`."""
        tail = self._read(request, held, num_chunks, rolls=False) if num_chunks else None
        return [] if tail is None else [tail]

    def _retained(self, request: RequestState, scheduled: ScheduledRequest) -> list[int]:
        """The boundaries that the engine names, in chunks; those inside a chunk cannot be saved."""
        given: Any = scheduled.retained_tokens
        if type(given) is tuple and not given:  # nearly always
            return []
        tokens = read_tokens(request.request_id, given, "retained_tokens")
        return [num // self._chunk_tokens for num in tokens if num % self._chunk_tokens == 0]

    def _read(self, request: RequestState, scheduled: ScheduledRequest, boundary: int, *, rolls: bool) -> Tail | None:
        """The tail of one boundary; None if no step ended there, so that it has no state."""
        end = boundary * self._size
        tables: list[list[int]] | None = []
        for group in reversed(self._groups):  # states first: without one there is no checkpoint
            table = self._checked(request, scheduled, group.group_id, end)
            blocks = read_ids(request.request_id, table, group.first_saved(end), end)
            if self._null_block in blocks:
                if group.exists_where_steps_end:
                    return None
                tables = None
            elif tables is not None:
                tables.insert(0, blocks)
        return Tail(boundary, tables, rolls)

    def _checked(self, request: RequestState, scheduled: ScheduledRequest, group_id: int, end: int) -> Sequence[int]:
        """The block table of one group, which has an entry for each of `end` blocks."""
        table = scheduled.block_tables[group_id]
        if len(table) < end:
            raise RequestError(
                f"request {request.request_id} has {len(table)} entries in the block table of layer group "
                f"{group_id}; expected one for each of {end} blocks, those that it does not hold included"
            )
        return table

    def add(self, kind: JobKind, request: RequestState, tails: list[Tail]) -> None:
        """The coming plan saves these checkpoints if it can, as jobs of this kind."""
        if tails:
            self._tails.setdefault(kind, []).extend([(request, tail) for tail in tails])
            request.num_checkpoint_chunks = tails[-1].boundary

    def plan(self, room_blocks: int, *, deadline_s: float) -> None:
        """Plans the saves of what was collected, after those of the chunks of full attention.

        Args:
          room_blocks: how many blocks of attention these have left to save; states need none of that room.
          deadline_s: of the jobs.
        """
        collected, self._tails = self._tails, {}
        room = room_blocks // self._size
        for kind, tails in collected.items():
            room -= self._plan(kind, tails, room, deadline_s=deadline_s)

    def _plan(self, kind: JobKind, tails: list[tuple[RequestState, Tail]], room: int, *, deadline_s: float) -> int:
        """Plans one job for these; returns how many window chunks it saves, at most `room`."""
        batch = _Batch(self._groups)
        try:
            for request, tail in tails:
                # Unless the breaker is closed, one is the probe: else only a chunk that is not saved yet would be.
                may_save = self._breaker.closed or (not batch.request_ids and self._breaker.admits(_ACCOUNT))
                saved = self._begin(request, tail, room - batch.num_chunks) if may_save else None
                if saved is None:
                    self._counts.num_dropped_checkpoints += 1
                    continue
                if saved:
                    batch.add(request, tail, saved)
        finally:  # also if an eviction policy raises: a job ends what was begun
            if any(batch.slots):
                self._plan_job(kind, batch, deadline_s=deadline_s)
        return batch.num_chunks

    def _plan_job(self, kind: JobKind, batch: "_Batch", *, deadline_s: float) -> None:
        parts = []
        for group, blocks, slots in zip(self._groups, batch.blocks, batch.slots, strict=True):
            if slots:
                places = group.places(slots, num_blocks=len(blocks))
                parts.append(CopyPart(group_id=group.group_id, block_ids=tuple(blocks), host_block_ids=places))
        self._jobs.plan(
            kind,
            parts,
            (),
            [slot for slots in batch.slots for slot in slots],
            num_staged_blocks=batch.num_chunks * self._size,
            request_ids=batch.request_ids,
            deadline_s=deadline_s,
        )

    def _begin(self, request: RequestState, tail: Tail, room: int) -> list[NewPiece] | None:
        """Begins one checkpoint; returns the pieces to save for it, None if it is dropped."""
        boundary, keys = tail.boundary, request.keys
        if not request.can_save:
            return None
        if self._index.state(keys[boundary - 1]) not in (ChunkState.PENDING, ChunkState.READY):
            return None
        checkpoint = self._index.checkpoints.get(keys[boundary - 1])
        if checkpoint is not None:
            self._index.touch_checkpoint(checkpoint)
            return []
        if tail.tables is None:
            return None
        before = request.rolling if tail.rolls else None
        begun = self._index.begin_checkpoint(keys, boundary, max_chunks=room, before=before, rolls=tail.rolls)
        if begun is None:
            return None
        checkpoint, saved = begun
        if tail.rolls:
            if before is not None:
                self._index.checkpoints.supersede(before, by=checkpoint)
            request.rolling = checkpoint
        return saved


class _Batch:
    """The pieces of one save job, as they are collected.

    Args:
      groups: those of a checkpoint.

    Attributes:
      blocks: per group, blocks of HBM.
      slots: per group, the slots of their pieces.
      request_ids: the requests that hold the blocks.
    """

    def __init__(self, groups: Sequence[CheckpointGroup]) -> None:
        self._groups = groups
        self.blocks: list[list[int]] = [[] for _ in groups]
        self.slots: list[list[int]] = [[] for _ in groups]
        self.request_ids: list[str] = []

    @property
    def num_chunks(self) -> int:
        """Window chunks to save: what takes staging blocks."""
        return sum([len(slots) for group, slots in zip(self._groups, self.slots, strict=True) if group.is_staged])

    def add(self, request: RequestState, tail: Tail, saved: list[NewPiece]) -> None:
        """Adds the pieces of one checkpoint."""
        assert tail.tables is not None, "a window that has been passed is not saved"
        for piece in saved:
            table, size = tail.tables[piece.group], self._groups[piece.group].slot_blocks
            first = len(table) - (tail.boundary - piece.number) * size
            self.blocks[piece.group] += table[first : first + size]
            self.slots[piece.group].append(piece.slot)
        self.request_ids.append(request.request_id)
