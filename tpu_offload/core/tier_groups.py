"""What the kinds of layer groups need of the host tier: an object for each group of the layout, made once.

Saves, loads and the names of records ask these objects, not the kind of a group. A new kind is one more class here;
docs/architecture.md lists what else tells kinds apart.
"""

import abc
from collections.abc import Iterable, Sequence
from typing import Final, final

from tpu_offload.config import OffloadConfig
from tpu_offload.core.jobs import host_blocks
from tpu_offload.layout import KVLayout, LayerGroupKind
from tpu_offload.piece_keys import PieceKey, part_keys
from tpu_offload.types import ChunkKey, Pool

CHUNK_GROUP: Final = 0
"""The layer group that chunks are of: the one with full attention, which comes first (see `KVLayout.check_tier`)."""


class TierGroup:
    """One layer group in the host tier.

    Args:
      group_id: its index in `KVLayout.groups`.
      slot_blocks: blocks of HBM that a slot holds.
      first_slot: the lowest slot of its pool; what is there has place 0 in host memory.
      is_staged: whether its copies take staging blocks, where the path has them.

    Attributes: as the arguments.
    """

    def __init__(self, group_id: int, *, slot_blocks: int, first_slot: int = 0, is_staged: bool = True) -> None:
        self.group_id = group_id
        self.slot_blocks = slot_blocks
        self.first_slot = first_slot
        self.is_staged = is_staged

    @final
    def places(self, slots: Sequence[int], *, first: int = 0, num_blocks: int) -> tuple[int, ...]:
        """Places in host memory of `num_blocks` consecutive blocks in these slots, from block `first` of these on."""
        if self.first_slot:
            slots = [slot - self.first_slot for slot in slots]
        return host_blocks(slots, blocks_per_chunk=self.slot_blocks, first=first, num_blocks=num_blocks)

    @final
    def slots_of(self, places: Iterable[int]) -> list[int]:
        """The slot of each of these places in host memory."""
        return [self.first_slot + place // self.slot_blocks for place in places]


@final
class FullAttention(TierGroup):
    """Every block before a position is needed: its chunks are what keys, lookups and eviction are about."""


class CheckpointGroup(TierGroup, abc.ABC):
    """A group of which only little is needed to continue at a boundary: checkpoints have pieces of it.

    Positions are those of blocks in the group's block table.
    """

    @abc.abstractmethod
    def first_saved(self, end: int) -> int:
        """The first block that is saved for a request to continue at the chunk boundary before block `end`."""

    @abc.abstractmethod
    def first_loaded(self, first: int, end: int) -> int:
        """The first block that is loaded for it, if HBM has the blocks before `first`."""

    @property
    @abc.abstractmethod
    def exists_where_steps_end(self) -> bool:
        """Whether its blocks exist only at boundaries where a step ended, so that the others have no checkpoint."""

    @abc.abstractmethod
    def record_names(self, piece: PieceKey) -> Sequence[ChunkKey]:
        """The records that a piece of it, what one slot holds, has in storage."""


@final
class SlidingWindow(CheckpointGroup):
    """The blocks of the last tokens before a position are needed.

    Args:
      group_id: its index in `KVLayout.groups`.
      slot_blocks: blocks of a chunk.
      window_blocks: blocks before a boundary that the tokens after it attend to.
      num_chunks: chunks that cover these.
    """

    def __init__(self, group_id: int, *, slot_blocks: int, window_blocks: int, num_chunks: int) -> None:
        super().__init__(group_id, slot_blocks=slot_blocks)
        self._window_blocks = window_blocks
        self._saved_blocks = num_chunks * slot_blocks

    def first_saved(self, end: int) -> int:
        """See `CheckpointGroup`; whole chunks."""
        return max(0, end - self._saved_blocks)

    def first_loaded(self, first: int, end: int) -> int:
        """See `CheckpointGroup`."""
        return max(first, end - self._window_blocks)

    @property
    def exists_where_steps_end(self) -> bool:
        """See `CheckpointGroup`."""
        return False

    def record_names(self, piece: PieceKey) -> Sequence[ChunkKey]:
        """See `CheckpointGroup`."""
        return (piece,)


@final
class State(CheckpointGroup):
    """The row after a position's last token is needed. Rows are megabytes, and few move: they are not staged.

    Args:
      group_id: its index in `KVLayout.groups`.
      first_slot: the lowest slot of a state.
      num_records: records of a row in storage.
    """

    def __init__(self, group_id: int, *, first_slot: int, num_records: int) -> None:
        super().__init__(group_id, slot_blocks=1, first_slot=first_slot, is_staged=False)
        self._num_records = num_records

    def first_saved(self, end: int) -> int:
        """See `CheckpointGroup`."""
        return end - 1

    def first_loaded(self, first: int, end: int) -> int:
        """See `CheckpointGroup`; whatever HBM has, the row of this boundary."""
        return end - 1

    @property
    def exists_where_steps_end(self) -> bool:
        """See `CheckpointGroup`."""
        return True

    def record_names(self, piece: PieceKey) -> Sequence[ChunkKey]:
        """See `CheckpointGroup`."""
        return part_keys(piece, self._num_records)


def tier_groups(config: OffloadConfig, layout: KVLayout, window_chunks: Sequence[int]) -> tuple[TierGroup, ...]:
    """One for each layer group, in their order. Without a host tier none has windows or states to save.

    Args:
      config: the settings.
      layout: what a block is made of.
      window_chunks: per window group, how many chunks cover its window.
    """
    size = config.blocks_per_chunk
    num_chunks = iter(window_chunks)
    groups: list[TierGroup] = []
    for group_id, group in enumerate(layout.groups):
        if not config.enabled or group.kind is LayerGroupKind.FULL_ATTENTION:
            groups.append(FullAttention(group_id, slot_blocks=size))
        elif group.kind is LayerGroupKind.SLIDING_WINDOW:
            window_blocks = layout.window_blocks(group)
            groups.append(
                SlidingWindow(group_id, slot_blocks=size, window_blocks=window_blocks, num_chunks=next(num_chunks))
            )
        else:
            assert group.kind is LayerGroupKind.STATE, f"a layer group of an unknown kind, {group.kind}"
            num_records = config.records_per_state(layout)
            first_slot = config.first_slots(layout)[Pool.STATES]
            groups.append(State(group_id, first_slot=first_slot, num_records=num_records))
    return tuple(groups)
