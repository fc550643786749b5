"""The layer groups of the simulated model: which blocks of a request each one needs, and what these hold.

Each group has its own block table, by position: tokens `p * block_size` and following are in the block at position `p`,
and where the request holds no block the table has NULL. A rule about windows is here and nowhere else in the
simulation, so that another kind of group is another class.
"""

import abc
from collections.abc import Iterator, Sequence
from typing import final

from tests.simulation.places import Places
from tests.simulation.trace import Setup
from tpu_offload import LayerGroup, LayerGroupKind
from tpu_offload.layout import PageGroup

NULL = 0  # granted to nobody if there are several groups
_TAG_BITS = 60  # KV and junk have fewer


class Group(abc.ABC):
    """A layer group.

    Args:
      group_id: its index in the layout.
      block_size: tokens in a block.
    """

    kind: str
    """For counts."""
    pool = 0
    """The pool of blocks that it shares."""

    def __init__(self, group_id: int, *, block_size: int) -> None:
        self.group_id = group_id
        self.block_size = block_size
        self._tag = group_id << _TAG_BITS

    @abc.abstractmethod
    def layer_group(self, pages: PageGroup) -> LayerGroup:
        """The description for the library."""

    @abc.abstractmethod
    def needed(self, num_computed: int) -> range:
        """Positions of the blocks that tokens after `num_computed` depend on."""

    @abc.abstractmethod
    def filled(self, start: int, end: int) -> range:
        """Positions of the blocks that a step which computes these tokens writes."""

    def granted(self, start: int, end: int) -> range:
        """Positions of the blocks that such a step needs for what it writes."""
        return self.filled(start, end)

    def loaded(self, first: int, end: int) -> range:
        """Positions of the blocks that a load of the blocks `first` to `end - 1` of a prefix copies."""
        needed = self.needed(end * self.block_size)
        return range(max(first, needed.start), needed.stop)

    def pieces(self, end: int, size: int) -> list[range]:
        """Per slot of a checkpoint after `end` tokens, the positions of its blocks; a chunk has `size` blocks."""
        needed = self.needed(end)
        if not needed:
            return []
        chunks = range(needed.start // size, -(-needed.stop // size))
        return [range(chunk * size, (chunk + 1) * size) for chunk in chunks]

    def left_over(self, num_computed: int, num_blocks: int) -> range:
        """Positions below `num_blocks` whose blocks must be given back if only these tokens are computed after all."""
        return range(0)

    def end_of_step(self, start: int, end: int, *, dice: int, chunk_tokens: int) -> int:
        """Where a step from `start` ends that could compute tokens up to `end`."""
        return end

    def moved(self, start: int, end: int) -> tuple[int, int] | None:
        """From which position to which one a block moves in the step that computes these tokens."""
        return None

    @abc.abstractmethod
    def content(self, values: Sequence[int]) -> tuple[int, ...]:
        """What a block holds once the tokens in it are computed; `values` is their KV in the first group."""

    @abc.abstractmethod
    def reads(self, table: Sequence[int], values: Sequence[int], start: int, end: int) -> "Reads":
        """What a step reads that computes the tokens `start` to `end - 1`.

        Args:
          table: the block table.
          values: the KV of the request in the first group.
          start, end: the tokens.
        """

    @abc.abstractmethod
    def writes(self, table: Sequence[int], values: Sequence[int], start: int) -> Iterator[tuple[int, int, int]]:
        """(Block, offset, value) of what a step writes; `values` begin with its first token, `start`."""


type Reads = tuple[tuple[int, ...], int, tuple[int, ...]]
"""Blocks, how much of the first to skip, and what must follow."""


class KVGroup(Group):
    """A group with a part of the KV of each token."""

    @abc.abstractmethod
    def first_token(self, num_computed: int) -> int:
        """The first token that the token after `num_computed` others attends to."""

    def needed(self, num_computed: int) -> range:
        return range(self.first_token(num_computed) // self.block_size, -(-num_computed // self.block_size))

    def filled(self, start: int, end: int) -> range:
        return range(start // self.block_size, -(-end // self.block_size))

    def content(self, values: Sequence[int]) -> tuple[int, ...]:
        return tuple([value + self._tag for value in values])

    def reads(self, table: Sequence[int], values: Sequence[int], start: int, end: int) -> Reads:
        first, blocks = self.first_token(start), self.needed(start)
        skipped = first - blocks.start * self.block_size
        return tuple(table[blocks.start : blocks.stop]), skipped, self.content(values[first:start])

    def writes(self, table: Sequence[int], values: Sequence[int], start: int) -> Iterator[tuple[int, int, int]]:
        for i, value in enumerate(values, start):
            yield table[i // self.block_size], i % self.block_size, value + self._tag


@final
class FullGroup(KVGroup):
    """Full attention: all blocks are needed."""

    kind = "full attention"

    def layer_group(self, pages: PageGroup) -> LayerGroup:
        return LayerGroup(kind=LayerGroupKind.FULL_ATTENTION, page_groups=(pages,))

    def first_token(self, num_computed: int) -> int:
        return 0


@final
class WindowGroup(KVGroup):
    """A sliding window.

    Args:
      window: tokens that a token attends to, itself included.
    """

    kind = "windows"

    def __init__(self, group_id: int, *, block_size: int, window: int) -> None:
        super().__init__(group_id, block_size=block_size)
        self._window = window

    def layer_group(self, pages: PageGroup) -> LayerGroup:
        return LayerGroup(kind=LayerGroupKind.SLIDING_WINDOW, page_groups=(pages,), window=self._window)

    def first_token(self, num_computed: int) -> int:
        return max(0, num_computed - self._window + 1)


@final
class StateGroup(Group):
    """A state, as of linear attention: one row, which a step reads and writes as a whole.

    At the boundary of a block the row stays as it is, and the next step writes into another one. Inside a block the
    next step writes into the same row, and takes it along to the block in which it ends.

    Args:
      first_row: the place in HBM of row 0.
      row_elements: size of a row.
    """

    kind = "states"
    pool = 1

    def __init__(self, group_id: int, *, block_size: int, first_row: int, row_elements: int) -> None:
        super().__init__(group_id, block_size=block_size)
        self._first_row = first_row
        self._row_elements = row_elements

    def layer_group(self, pages: PageGroup) -> LayerGroup:
        row = PageGroup(layer_ids=(max(pages.layer_ids) + 1,), page_shape=(self._row_elements,), dtype="bfloat16")
        return LayerGroup(kind=LayerGroupKind.STATE, page_groups=(row,))

    def needed(self, num_computed: int) -> range:
        return self.filled(0, num_computed) if num_computed else range(0)

    def filled(self, start: int, end: int) -> range:
        return range((end - 1) // self.block_size, (end - 1) // self.block_size + 1)

    def granted(self, start: int, end: int) -> range:
        return range(0) if self.moved(start, end) else self.filled(start, end)

    def pieces(self, end: int, size: int) -> list[range]:
        return [self.needed(end)]

    def left_over(self, num_computed: int, num_blocks: int) -> range:
        return range(self.needed(num_computed).stop, num_blocks)

    def end_of_step(self, start: int, end: int, *, dice: int, chunk_tokens: int) -> int:
        """Mostly the first boundary of a chunk, where the library can save the state."""
        size = self.block_size if dice >> 22 & 3 == 3 else chunk_tokens
        next_boundary = (start // size + 1) * size
        return end if dice >> 24 & 7 == 7 else min(end, next_boundary)

    def moved(self, start: int, end: int) -> tuple[int, int] | None:
        if start % self.block_size == 0 or self.needed(start) == self.filled(start, end):
            return None
        return self.needed(start).start, self.filled(start, end).start

    def content(self, values: Sequence[int]) -> tuple[int, ...]:
        return (values[-1] + self._tag,)

    def reads(self, table: Sequence[int], values: Sequence[int], start: int, end: int) -> Reads:
        if not start:
            return (), 0, ()
        row = table[self.needed(start).start] or table[self.filled(start, end).start]
        return (self._first_row + row,), 0, self.content(values[:start])

    def writes(self, table: Sequence[int], values: Sequence[int], start: int) -> Iterator[tuple[int, int, int]]:
        yield self._first_row + table[self.filled(start, start + len(values)).start], 0, values[-1] + self._tag


def make_groups(setup: Setup) -> tuple[Group, ...]:
    """The layer groups of a run."""
    size = setup.block_size
    groups: list[Group] = [FullGroup(0, block_size=size)]
    groups += [WindowGroup(i, block_size=size, window=window) for i, window in enumerate(setup.windows, 1)]
    if setup.num_rows:
        first_row, row_elements = Places(setup).first_row, size * setup.blocks_per_chunk * 64
        groups.append(StateGroup(len(groups), block_size=size, first_row=first_row, row_elements=row_elements))
    return tuple(groups)
