"""The chunk index: which chunks the host tier holds, in which slots, and which of them may be evicted.

One `ChunkIndex` is made of parts that know nothing of it, each with data of its own:

  slots.py        which slots are free, and which must not be handed out
  prefix_tree.py  resident chunks by key and by slot, and which chunk follows which
  lookup.py       where a prefix ends in the tree, without a look at each chunk
  chunk_states.py which chunks are not READY yet or no longer, and which are pinned
  eviction.py     what a policy sees of the tree, and evicts from it
  checkpoints.py  the boundaries where a request can go on
  pieces.py       window chunks and states that these are made of, and the slots that they share
  vacating.py     evicts what is in the last slots of a pool, whose memory is to be moved
  ages.py         how long ago evicted chunks were last used
  pool_balance.py which pool gets memory from the other
  changes.py      what lookups began and ceased to find, for the tier's events
"""

from tpu_offload.core.index.changes import Changes
from tpu_offload.core.index.checkpoints import Checkpoint, NewPiece, NewPieceKey
from tpu_offload.core.index.chunk_index import ChunkIndex
from tpu_offload.core.index.chunk_states import ChunkState
from tpu_offload.core.index.pool_balance import PoolBalance, PoolMove
from tpu_offload.core.index.prefix_tree import NO_PARENT
from tpu_offload.core.index.slots import overlaps

__all__ = [
    "NO_PARENT",
    "Changes",
    "Checkpoint",
    "ChunkIndex",
    "ChunkState",
    "NewPiece",
    "NewPieceKey",
    "PoolBalance",
    "PoolMove",
    "overlaps",
]
