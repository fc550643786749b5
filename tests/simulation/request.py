"""A request of the simulated engine."""

import dataclasses
import enum

from tpu_offload import BlockHash, Match


class Phase(enum.Enum):
    WAITING = "waiting"  # has nothing
    PARKED = "parked"  # has a promise, and no blocks
    LOADING = "loading"
    RUNNING = "running"
    OUT = "out"  # swapped out
    RETURNING = "returning"

    @property
    def holds_blocks(self) -> bool:
        return self in (Phase.LOADING, Phase.RUNNING, Phase.RETURNING)


@dataclasses.dataclass(slots=True, eq=False)
class Request:
    """A request.

    Attributes:
      name: its id; names are used again.
      arrival: place in the queue.
      salt: cache salt.
      tokens: all that are known.
      nodes: the prefix that ends with each token.
      hashes: of the full blocks.
      num_prompt: length of the prompt.
      max_tokens: length at which it ends.
      phase: where it is.
      blocks: its blocks of HBM.
      num_computed: leading tokens whose KV is in them.
      num_loading: tokens that its load brings.
      num_promised: tokens that it was promised while PARKED.
      kv: the KV that those blocks must hold, by position.
      num_named: full blocks when the scheduler last heard of it.
      tainted: some of its KV is of weights that are no longer in use, and what hangs on it is nobody else's.
      is_void: it was swapped out when the weights changed, and must not come back.
      arriving: the answer of its last match, if that was ARRIVING.
    """

    name: str
    arrival: int
    salt: int
    tokens: list[int]
    nodes: list[int]
    num_prompt: int
    max_tokens: int
    hashes: list[BlockHash] = dataclasses.field(default_factory=list)
    phase: Phase = Phase.WAITING
    blocks: list[int] = dataclasses.field(default_factory=list)
    num_computed: int = 0
    num_loading: int = 0
    num_promised: int = 0
    kv: list[int] = dataclasses.field(default_factory=list)
    num_named: int = 0
    tainted: bool = False
    is_void: bool = False
    arriving: Match | None = None


@dataclasses.dataclass(slots=True)
class Run:
    """What a step computes of a request.

    Attributes:
      request: whose.
      start: position of the first token.
      end: position after the last known one.
      num_drafts: guessed tokens after that.
      num_accepted: how many of those will turn out right.
    """

    request: Request
    start: int
    end: int
    num_drafts: int = 0
    num_accepted: int = 0
