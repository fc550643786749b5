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
      num_slots: slots of chunks; those of states come after them.
      num_host: places in the host tier: `blocks_per_chunk` in each slot of a chunk, one in that of a state.
      num_hbm: places in HBM: blocks, then rows. The first of both is never used.
      first_row: the first row.
    """

    def __init__(self, setup: Setup) -> None:
        self._size = setup.blocks_per_chunk
        self.num_slots = setup.num_slots
        self._first_state = setup.num_slots * self._size
        self.num_host = self._first_state + setup.num_host_states
        self.first_row = setup.num_blocks + 1
        self.num_hbm = self.first_row + (setup.num_rows + 1 if setup.num_rows else 0)
        self.state_group = 1 + len(setup.windows) if setup.num_rows else -1

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
