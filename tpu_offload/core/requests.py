"""What the engine says about its requests, and what it is told back."""

import dataclasses
import enum
from collections.abc import Sequence

from tpu_offload.types import BlockHash, Direction


@dataclasses.dataclass(frozen=True, slots=True)
class ScheduledRequest:
    """A request that holds blocks of the HBM cache in the coming step, and how far it is after that.

    It stands for all later steps until the engine says something else of the request or takes its blocks.

    Attributes:
      request_id: the engine's name for it.
      block_ids: its blocks, in token order; may run past what is computed. It is kept and read again in
        later steps: a list that the engine appends to is fine, a buffer that it fills with something else is not.
      block_hashes: hashes of its full blocks whose tokens are known, in order. A token that is only
        assumed (a placeholder, an unverified draft) must not be in one.
      num_prompt_tokens: length of the prompt.
      num_computed_tokens: leading tokens whose KV the device holds *after* the coming step. The token
        that the step samples is not among them, rejected draft tokens neither.
    """

    request_id: str
    block_ids: Sequence[int]
    block_hashes: Sequence[BlockHash]
    num_prompt_tokens: int
    num_computed_tokens: int


@dataclasses.dataclass(frozen=True, slots=True)
class FailedLoad:
    """A load that did not bring all that it should have.

    Attributes:
      request_id: whose load it was.
      num_valid_tokens: leading tokens whose KV is right; the engine computes from there on.
    """

    request_id: str
    num_valid_tokens: int


@dataclasses.dataclass(frozen=True, slots=True)
class FinishedTransfer:
    """A job that every worker has finished.

    Attributes:
      direction: save or load.
      num_blocks: blocks that it moved.
      duration_s: the slowest worker's seconds from dispatch until it was seen finished.
    """

    direction: Direction
    num_blocks: int
    duration_s: float


@dataclasses.dataclass(frozen=True, slots=True)
class Update:
    """What a report changed for the engine.

    Attributes:
      loaded: requests whose load is complete on every worker; they can be scheduled.
      failed_loads: requests that must be computed where they hoped to load.
      transfers: the jobs that this report finished.
      swapped_in: swapped-out requests whose KV is back in HBM on every worker; they can be scheduled.
      lost_swaps: swapped-out requests whose KV will not come back; they must be recomputed, and their blocks, if
        they were on their way back, can be freed.
    """

    loaded: tuple[str, ...] = ()
    failed_loads: tuple[FailedLoad, ...] = ()
    transfers: tuple[FinishedTransfer, ...] = ()
    swapped_in: tuple[str, ...] = ()
    lost_swaps: tuple[str, ...] = ()


class TierEventKind(enum.Enum):
    """What became of chunks in the host tier."""

    STORED = "stored"  # a lookup finds them from now on
    REMOVED = "removed"  # no lookup finds them any more


@dataclasses.dataclass(frozen=True, slots=True)
class TierEvent:
    """A change of the host tier, for routers that send a request where its prefix is.

    Attributes:
      kind: what happened.
      block_hashes: the hash of the last block of each chunk, which names the chunk and all before it.
    """

    kind: TierEventKind
    block_hashes: tuple[BlockHash, ...]
