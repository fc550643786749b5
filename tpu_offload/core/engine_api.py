"""The types of the engine's calls and of their answers."""

import dataclasses
import enum
from collections.abc import Callable, Sequence
from typing import final

from tpu_offload.errors import RequestError
from tpu_offload.frozen import record
from tpu_offload.types import BlockHash, Direction
from tpu_offload.values import as_integer, one_line


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RequestLimits:
    """What the host tier may do for one request.

    Attributes:
      max_save_tokens: at most this many of its leading tokens are saved; None sets no limit.
      max_load_tokens: at most this many of its tokens are loaded each time it is matched; None sets no limit.
      priority: its chunks are kept longer than those that only requests of lower priority use, and its saves come first
        when there is too little room for all.
      cache: False bypasses the host tier: no lookup, no save, and its chunks do not count as seen.

    Raises:
      RequestError: an invalid value.
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
        """These limits, with the token limits no higher than those of `others`."""
        return dataclasses.replace(
            self,
            max_save_tokens=_least(self.max_save_tokens, others.max_save_tokens),
            max_load_tokens=_least(self.max_load_tokens, others.max_load_tokens),
        )

    def num_savable_tokens(self, num_tokens: int) -> int:
        """How many of the first `num_tokens` tokens may be saved."""
        if not self.cache:
            return 0
        return num_tokens if self.max_save_tokens is None else min(num_tokens, self.max_save_tokens)


def _least(one: int | None, other: int | None) -> int | None:
    if one is None or other is None:
        return other if one is None else one
    return min(one, other)


NO_LIMITS = RequestLimits()


class MatchState(enum.Enum):
    """The result of a lookup past the blocks that are in HBM."""

    MISS = "miss"  # nothing
    HIT = "hit"  # tokens that can be loaded
    ARRIVING = "arriving"  # more can be loaded soon: match again in a later step, or take what is promised now


@record(frozen=True, slots=True, kw_only=True)
class Match:
    """The answer to a lookup. The chunks it promises are pinned until `OffloadScheduler.admit` or `release`.

    ARRIVING means that the staging buffer has no room for the load, that the next chunk is being saved or read from
    storage, that the checkpoint which the request needs is being saved or read, or that shared storage is being asked.
    An engine that waits releases the request, runs others, and matches it again; the answer is ARRIVING until
    `until_s` at most, unless by then the request waits for something else. An engine that does not wait takes what is
    promised now, which may be nothing.

    Attributes:
      num_tokens: tokens past `num_computed_tokens` that can be loaded now.
      state: whether there are any, and whether there will be more.
      until_s: for ARRIVING, the time until which it may last, on the scheduler's clock.
      junction_tokens: leading tokens of the request whose chunks of full attention are in the host tier, if they go on
        past those that can be loaded for want of windows or states; else 0. An engine that ends a step there makes a
        checkpoint there possible.
    """

    num_tokens: int
    state: MatchState
    until_s: float | None = None
    junction_tokens: int = 0


MISS = Match(num_tokens=0, state=MatchState.MISS)


@record(frozen=True, slots=True, kw_only=True)
class ScheduledRequest:
    """A request that holds blocks of the HBM cache in the coming step, and its computed tokens after that step.

    It is valid for all later steps until the engine names the request again or takes its blocks. The call copies what
    it needs, so the engine may reuse its lists and arrays at once. An engine that moves KV to other blocks names the
    request again in the very next step: blocks that were named before are compared with the earlier ones, which takes
    4 ns a block.

    Attributes:
      request_id: the engine's name for it.
      block_tables: per layer group, its blocks in token order: a list, tuple, row of an array, deque, memory view or
        any other sequence of integers. Entries past the computed tokens are ignored. In a group of states, entry `p` is
        the row that has the state after exactly `(p + 1) * block_size` tokens once the step has run, and the null block
        where there is none.
      block_hashes: hashes of its full blocks whose tokens are known, in order: any sequence of bytes. It must not cover
        a token that is only assumed (a placeholder, an unverified draft).
      num_prompt_tokens: length of the prompt.
      num_computed_tokens: leading tokens whose KV the device holds *after* the coming step. Neither the token that the
        step samples nor rejected draft tokens are among them.
      retained_tokens: for a model with windows or states, block boundaries, in tokens, at which the engine expects
        later requests to continue, such as the end of a shared prefix: a checkpoint is saved there, beside those that
        the library finds worth saving by itself.
    """

    request_id: str
    block_tables: Sequence[Sequence[int]]
    block_hashes: Sequence[BlockHash]
    num_prompt_tokens: int
    num_computed_tokens: int
    retained_tokens: Sequence[int] = ()


@record(frozen=True, slots=True, kw_only=True)
class CachedPrefix:
    """A prefix in the engine's HBM cache whose last block is about to be evicted.

    Attributes:
      block_hashes: hashes of its blocks, from the first of the prompt on; may run past its end.
      num_blocks: its length: the evicted block is number `num_blocks - 1`.
      block_of: looks up, for a layer group and a block hash, the block in HBM that holds that KV; None if there is
        none. It is called during `OffloadScheduler.evict` only, and mostly not at all.
      num_prompt_tokens: how many of its leading tokens were a request's prompt. The others were generated.
      limits: those of the request that computed it.
    """

    block_hashes: Sequence[BlockHash]
    num_blocks: int
    block_of: Callable[[int, BlockHash], int | None]
    num_prompt_tokens: int
    limits: RequestLimits = NO_LIMITS


@record(frozen=True, slots=True, kw_only=True)
class FailedLoad:
    """A load that failed, as a whole or in part.

    Attributes:
      request_id: its request.
      num_valid_tokens: leading tokens whose KV is valid; the engine recomputes the rest.
    """

    request_id: str
    num_valid_tokens: int


@record(frozen=True, slots=True, kw_only=True)
class FinishedTransfer:
    """A job that every worker has finished.

    Attributes:
      direction: save or load.
      num_blocks: blocks that it moved.
      duration_s: seconds from dispatch until a poll saw the end, on the slowest worker.
    """

    direction: Direction
    num_blocks: int
    duration_s: float


@record(frozen=True, slots=True, kw_only=True)
class Update:
    """What the engine has to know after a report.

    Attributes:
      loaded: requests whose load is complete on every worker; they can be scheduled.
      failed_loads: requests whose load failed; they must be recomputed from there on.
      transfers: the jobs that this report finished.
      swapped_in: swapped-out requests whose KV is back in HBM on every worker; they can be scheduled.
      lost_swaps: swapped-out requests whose KV is lost; they must be recomputed, and the blocks of those being swapped
        in can be freed.
      lost_caches: ids of workers that have lost their KV caches, by a restart for instance. Before its next call the
        engine clears its prefix cache in HBM and calls `preempt` for every request that holds blocks, those of the
        other fields included (`swap.discard` for those being swapped in): the blocks do not hold their KV. Until then
        none of these blocks is saved or swapped out.
    """

    loaded: tuple[str, ...] = ()
    failed_loads: tuple[FailedLoad, ...] = ()
    transfers: tuple[FinishedTransfer, ...] = ()
    swapped_in: tuple[str, ...] = ()
    lost_swaps: tuple[str, ...] = ()
    lost_caches: tuple[int, ...] = ()

    def __add__(self, later: "Update") -> "Update":
        """This update and a later one, merged."""
        return Update(
            loaded=self.loaded + later.loaded,
            failed_loads=self.failed_loads + later.failed_loads,
            transfers=self.transfers + later.transfers,
            swapped_in=self.swapped_in + later.swapped_in,
            lost_swaps=self.lost_swaps + later.lost_swaps,
            lost_caches=self.lost_caches + later.lost_caches,
        )


class TierEventKind(enum.Enum):
    """How the contents of the host tier changed."""

    STORED = "stored"  # lookups find these from now on
    REMOVED = "removed"  # lookups do not find them any more
    CLEARED = "cleared"  # lookups find nothing of before any more, in no layer group


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TierEvent:
    """A change of the host tier, for routers that send a request to where its prefix is cached.

    Each layer group has events of its own. With windows or states, a request can load its prefix up to the last chunk
    boundary before its last token for which the host tier has, of each group with

    - full attention, all chunks before it,
    - a sliding window of w tokens, the last ceil((w - 1) / tokens of a chunk) of these, or all if these are fewer,
    - states, the one after it.

    Attributes:
      kind: the change.
      block_hashes: with full attention or a window, the hash of the last block of each chunk, which names the chunk and
        all before it. Of states, the hash of the last block before it. Empty for CLEARED.
      group_id: the layer group, as in `KVLayout.groups`; None for CLEARED.
    """

    kind: TierEventKind
    block_hashes: tuple[BlockHash, ...]
    group_id: int | None = 0
