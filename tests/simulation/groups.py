"""The layer groups of the simulated model: which blocks of a request each one needs, and what these hold.

Each group has its own block table, by position: tokens `p * block_size` and following are in the block at position `p`,
and where the request holds no block the table has NULL. A rule about windows is here and nowhere else in the
simulation, so that another kind of group is another class.
"""

import abc
from collections.abc import Iterator, Sequence
from typing import final

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

    def loaded(self, first: int, end: int) -> range:
        """Positions of the blocks that a load of the blocks `first` to `end - 1` of a prefix copies."""
        needed = self.needed(end * self.block_size)
        return range(max(first, needed.start), needed.stop)

    @abc.abstractmethod
    def content(self, values: Sequence[int]) -> tuple[int, ...]:
        """What a block holds once the tokens in it are computed; `values` is their KV in the first group."""

    @abc.abstractmethod
    def reads(self, table: Sequence[int], values: Sequence[int], start: int) -> "Reads":
        """What a step reads whose first token is `start`.

        Args:
          table: the block table.
          values: the KV of the request in the first group.
          start: the first token.
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

    def reads(self, table: Sequence[int], values: Sequence[int], start: int) -> Reads:
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
        return LayerGroup(LayerGroupKind.FULL_ATTENTION, (pages,))

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
        return LayerGroup(LayerGroupKind.SLIDING_WINDOW, (pages,), self._window)

    def first_token(self, num_computed: int) -> int:
        return max(0, num_computed - self._window + 1)


def chunks_of(positions: range, size: int) -> range:
    """The chunks of `size` blocks that cover these positions."""
    return range(positions.start // size, -(-positions.stop // size)) if positions else range(0)


def make_groups(setup: Setup) -> tuple[Group, ...]:
    """The layer groups of a run."""
    size = setup.block_size
    windows = [WindowGroup(i, block_size=size, window=window) for i, window in enumerate(setup.windows, 1)]
    return FullGroup(0, block_size=size), *windows
