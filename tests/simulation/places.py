"""Where blocks are: one numbering of all memory of a worker in HBM, and one of its host tier.

Rows of states have numbers of their own in the library, in HBM and in the host tier. Here they come after the blocks,
so that everything else moves, loses and compares them as it does blocks.
"""

from typing import final

from tests.simulation.trace import Setup
from tpu_offload.types import CopyJob, CopyPart


@final
class Places:
    """The numbering of one run.

    Attributes:
      num_slots: slots of chunks; those of states come after them. A chunk has `blocks_per_chunk` places, a state one.
      first_row: the place in HBM of the first row. As the first block it is never used.
      state_group: the layer group of states; -1 without one.
    """

    def __init__(self, setup: Setup) -> None:
        self._size, self._block_size = setup.blocks_per_chunk, setup.block_size
        self.num_slots = setup.num_slots
        self._first_state = setup.num_slots * self._size
        self._num_host_states = setup.num_host_states
        self.first_row = setup.num_blocks + 1
        self._num_rows = setup.num_rows + 1 if setup.num_rows else 0
        self.state_group = 1 + len(setup.windows) if setup.num_rows else -1

    def block_length(self, group_id: int) -> int:
        """Values in a block of a layer group: one for each token, and one in a row."""
        return 1 if group_id == self.state_group else self._block_size

    def hbm_sizes(self) -> list[int]:
        """Values in each place in HBM."""
        return [self._block_size] * self.first_row + [1] * self._num_rows

    def host_sizes(self) -> list[int]:
        """Values in each place in the host tier."""
        return [self._block_size] * self._first_state + [1] * self._num_host_states

    def hbm_of(self, part: CopyPart) -> list[int]:
        """Places in HBM of a part's blocks."""
        first = self.first_row if part.group_id == self.state_group else 0
        return [first + block for block in part.block_ids]

    def hbm(self, job: CopyJob) -> list[int]:
        """Those of all parts, in the order of `CopyJob.block_ids`."""
        return [place for part in job.parts for place in self.hbm_of(part)]

    def host_of(self, part: CopyPart) -> list[int]:
        """Places in the host tier of a part's blocks."""
        first = self._first_state if part.group_id == self.state_group else 0
        return [first + block for block in part.host_block_ids]

    def host(self, job: CopyJob) -> list[int]:
        """Those of all parts, in the order of `CopyJob.block_ids`."""
        return [place for part in job.parts for place in self.host_of(part)]

    def of_slot(self, slot: int) -> range:
        """The places of a slot."""
        if slot < self.num_slots:
            return range(slot * self._size, (slot + 1) * self._size)
        return range(self._first_state + slot - self.num_slots, self._first_state + slot - self.num_slots + 1)

    def slot_of(self, place: int) -> int:
        """The slot of a place."""
        if place < self._first_state:
            return place // self._size
        return self.num_slots + place - self._first_state

    def num_staged(self, job: CopyJob) -> int:
        """Blocks of a job that need the staging buffer if its direction does: states do not."""
        return sum(len(part.block_ids) for part in job.parts if part.group_id != self.state_group)
