"""A request of the simulated engine."""

import dataclasses
import enum

from tpu_offload import BlockHash


class Phase(enum.Enum):
    WAITING = "waiting"  # has neither promise nor blocks
    PROMISED = "promised"  # has a promise, but no blocks
    LOADING = "loading"
    RUNNING = "running"
    SWAPPED = "swapped"  # swapped out
    RETURNING = "returning"

    @property
    def holds_blocks(self) -> bool:
        return self in (Phase.LOADING, Phase.RUNNING, Phase.RETURNING)


@dataclasses.dataclass(slots=True, eq=False)
class Request:
    """A request.

    Attributes:
      name: its id; ids are reused.
      arrival: position in the queue.
      salt: cache salt.
      tokens: prompt and generated tokens.
      nodes: for each token, the prefix that ends with it.
      hashes: hashes of the full blocks.
      num_prompt: length of the prompt.
      max_tokens: length at which it ends.
      phase: its phase.
      tables: per layer group, its blocks in HBM; empty if it has none.
      num_computed: leading tokens whose KV is in the blocks.
      num_loading: tokens of its load.
      num_promised: promised tokens, while PROMISED.
      kv: the KV of these in the first layer group, by position.
      num_named: full blocks when it was last in `plan_step`.
      is_stale: some of its KV is from before a reset, so that other requests must not use KV computed from it.
      swap_is_stale: it was swapped out at a reset, and must not be swapped in.
      waits_until_s: the deadline, if its last match answered ARRIVING; else 0.
      num_found: tokens that this match found.
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
    tables: list[list[int]] = dataclasses.field(default_factory=list)
    num_computed: int = 0
    num_loading: int = 0
    num_promised: int = 0
    kv: list[int] = dataclasses.field(default_factory=list)
    num_named: int = 0
    is_stale: bool = False
    swap_is_stale: bool = False
    waits_until_s: float = 0.0
    num_found: int = 0


@dataclasses.dataclass(slots=True)
class TokenSpan:
    """The tokens of a request that a step computes.

    Attributes:
      request: the request.
      start: position of the first token.
      end: position after the last known token.
      num_drafts: draft tokens after that.
      num_accepted: number of drafts that will be accepted.
    """

    request: Request
    start: int
    end: int
    num_drafts: int = 0
    num_accepted: int = 0
