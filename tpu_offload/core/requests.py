"""What the engine says about its requests, and what it is told back."""

import dataclasses
from collections.abc import Sequence

from tpu_offload.types import BlockHash


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
    """A load that brought nothing.

    Attributes:
      request_id: whose load it was.
      num_valid_tokens: leading tokens whose KV is right; the engine computes from there on.
    """

    request_id: str
    num_valid_tokens: int


@dataclasses.dataclass(frozen=True, slots=True)
class Update:
    """What a report changed for the engine.

    Attributes:
      loaded: requests whose load is complete on every worker; they can be scheduled.
      failed_loads: requests that must be computed where they hoped to load.
    """

    loaded: tuple[str, ...] = ()
    failed_loads: tuple[FailedLoad, ...] = ()
