"""What the engine says about its requests, and what it is told back."""

import dataclasses
import enum
from collections.abc import Callable, Sequence
from typing import final

from tpu_offload.errors import RequestError
from tpu_offload.types import BlockHash, Direction
from tpu_offload.values import as_integer, one_line


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RequestLimits:
    """What the host tier may do for one request.

    Attributes:
      max_save_tokens: of its leading tokens at most so many are saved; None sets no limit.
      max_load_tokens: at most so many of its tokens are loaded, each time that it is matched; None sets no limit.
      priority: what it uses is kept longer than what only requests of lower priority use, and its saves come first when
        there is too little room for all.
      cache: False for a request that the host tier takes no notice of: nothing of it is saved, nothing is loaded for
        it, and it is not counted as having come by.

    Raises:
      RequestError: a value that cannot be.
    """

    max_save_tokens: int | None = None
    max_load_tokens: int | None = None
    priority: int = 0
    cache: bool = True

    def __post_init__(self) -> None:
        for name in ("max_save_tokens", "max_load_tokens", "priority"):
            value = as_integer(getattr(self, name))
            if value is not None:
                object.__setattr__(self, name, value)
        for name in ("max_save_tokens", "max_load_tokens"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 0):
                raise RequestError(f"{name}={one_line(value)}; expected an integer from 0 on, or None for no limit")
        if type(self.priority) is not int or abs(self.priority) >= 2**31:
            raise RequestError(f"priority={one_line(self.priority)}; expected an integer of at most 31 bits")
        if type(self.cache) is not bool:
            raise RequestError(f"cache={one_line(self.cache)}; expected True or False")

    def within(self, others: "RequestLimits") -> "RequestLimits":
        """These, with the token limits no higher than those of `others`."""
        return dataclasses.replace(
            self,
            max_save_tokens=_least(self.max_save_tokens, others.max_save_tokens),
            max_load_tokens=_least(self.max_load_tokens, others.max_load_tokens),
        )

    def num_savable_tokens(self, num_tokens: int) -> int:
        """How many of so many leading tokens may be saved."""
        if not self.cache:
            return 0
        return num_tokens if self.max_save_tokens is None else min(num_tokens, self.max_save_tokens)


def _least(one: int | None, other: int | None) -> int | None:
    if one is None or other is None:
        return other if one is None else one
    return min(one, other)


NO_LIMITS = RequestLimits()


class MatchState(enum.Enum):
    """What a lookup found past the blocks that are in HBM."""

    MISS = "miss"  # nothing
    HIT = "hit"  # tokens that can be loaded
    ARRIVING = "arriving"  # more will be there soon: ask again in a later step, or go on with what is there now


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """The answer to a lookup. What it promises is pinned until `OffloadScheduler.admit` or `release`.

    ARRIVING means that the next chunk is being saved or read from storage, or that the staging buffer has no room for
    the load. An engine that waits releases the request, runs others, and matches it again; the answer is ARRIVING until
    `until_s` at most, unless it has something else to wait for by then. An engine that does not wait takes what is
    promised now, which may be nothing.

    Attributes:
      num_tokens: tokens past `num_computed_tokens` that can be loaded now.
      state: whether there are any, and whether there will be more.
      until_s: for ARRIVING, the end of waiting for this, on the scheduler's clock.
    """

    num_tokens: int
    state: MatchState
    until_s: float | None = None


MISS = Match(num_tokens=0, state=MatchState.MISS)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ScheduledRequest:
    """A request that holds blocks of the HBM cache in the coming step, and how far it is after that.

    It stands for all later steps until the engine says something else of the request or takes its blocks. What counts
    is what it says during the call that it is given to: nothing of it is kept, and the engine may use its lists and
    arrays for something else at once. An engine that moves KV to other blocks names the request again in the very next
    step: blocks that were named before are compared with what they were, 4 ns a block.

    Attributes:
      request_id: the engine's name for it.
      block_tables: per layer group, its blocks in token order: a list, tuple, row of an array, deque, memory view or
        any other sequence of integers. They may run past what is computed; what is there is not looked at.
      block_hashes: hashes of its full blocks whose tokens are known, in order: any sequence of bytes. A token
        that is only assumed (a placeholder, an unverified draft) must not be in one.
      num_prompt_tokens: length of the prompt.
      num_computed_tokens: leading tokens whose KV the device holds *after* the coming step. The token
        that the step samples is not among them, rejected draft tokens neither.
    """

    request_id: str
    block_tables: Sequence[Sequence[int]]
    block_hashes: Sequence[BlockHash]
    num_prompt_tokens: int
    num_computed_tokens: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CachedPrefix:
    """A prefix in the engine's HBM cache, the last block of which is about to be granted to somebody else.

    Attributes:
      block_hashes: hashes of its blocks, from the first of the prompt on; may run past its end.
      num_blocks: its length: the block that goes is number `num_blocks - 1`.
      block_of: for a layer group and the hash of a block, the block in HBM that holds its KV, None if there is none: a
        lookup in the prefix cache. It is called during `OffloadScheduler.evict` only, and mostly not at all.
      num_prompt_tokens: how many of its leading tokens were a request's prompt. The others were generated.
      limits: those of the request that computed it.
    """

    block_hashes: Sequence[BlockHash]
    num_blocks: int
    block_of: Callable[[int, BlockHash], int | None]
    num_prompt_tokens: int
    limits: RequestLimits = NO_LIMITS


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FailedLoad:
    """A load that did not bring all that it should have.

    Attributes:
      request_id: whose load it was.
      num_valid_tokens: leading tokens whose KV is right; the engine computes from there on.
    """

    request_id: str
    num_valid_tokens: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
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


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """What a report changed for the engine.

    Attributes:
      loaded: requests whose load is complete on every worker; they can be scheduled.
      failed_loads: requests that must be computed where they hoped to load.
      transfers: the jobs that this report finished.
      swapped_in: swapped-out requests whose KV is back in HBM on every worker; they can be scheduled.
      lost_swaps: swapped-out requests whose KV will not come back; they must be recomputed, and their blocks, if
        they were on their way back, can be freed.
      lost_caches: ids of workers that have lost their KV caches, also by a restart. Before its next call the engine
        forgets its prefix cache in HBM and calls `preempt` for every request that holds blocks, those of the other
        fields included (`swap.discard` for those on their way back): what they hold is not their KV. Until then
        nothing of them is saved or swapped out.
    """

    loaded: tuple[str, ...] = ()
    failed_loads: tuple[FailedLoad, ...] = ()
    transfers: tuple[FinishedTransfer, ...] = ()
    swapped_in: tuple[str, ...] = ()
    lost_swaps: tuple[str, ...] = ()
    lost_caches: tuple[int, ...] = ()

    def __add__(self, later: "Update") -> "Update":
        """What this and a later update say."""
        return Update(
            loaded=self.loaded + later.loaded,
            failed_loads=self.failed_loads + later.failed_loads,
            transfers=self.transfers + later.transfers,
            swapped_in=self.swapped_in + later.swapped_in,
            lost_swaps=self.lost_swaps + later.lost_swaps,
            lost_caches=self.lost_caches + later.lost_caches,
        )


class TierEventKind(enum.Enum):
    """What became of chunks in the host tier."""

    STORED = "stored"  # a lookup finds them from now on
    REMOVED = "removed"  # no lookup finds them any more
    CLEARED = "cleared"  # no lookup finds any chunk any more, whatever was told before


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TierEvent:
    """A change of the host tier, for routers that send a request where its prefix is.

    Attributes:
      kind: what happened.
      block_hashes: the hash of the last block of each chunk, which names the chunk and all before it. None are named
        where all are gone.
    """

    kind: TierEventKind
    block_hashes: tuple[BlockHash, ...]
