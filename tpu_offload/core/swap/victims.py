"""Chooses the requests to preempt when there are too few free blocks for all to continue."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from tpu_offload.core.block_tables import read_ids, read_tables
from tpu_offload.core.validate import check_count, check_iterable, check_request
from tpu_offload.errors import RequestError
from tpu_offload.frozen import record
from tpu_offload.native import Given
from tpu_offload.values import one_line


@record(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A request that holds blocks of the HBM cache.

    Attributes:
      request_id: the engine's name for it.
      block_tables: per layer group, its blocks; requests may share blocks.
      num_new_blocks: per layer group, the number of blocks that it needs to continue.
    """

    request_id: str
    block_tables: Sequence[Sequence[int]]
    num_new_blocks: Sequence[int]


def choose_victims(candidates: Given[Sequence[Candidate]], *, num_free: Given[Sequence[int]]) -> tuple[str, ...]:
    """Finds, by simulation, the fewest requests, newest first, whose preemption lets the others continue.

    Preempting a request frees the blocks that no other request holds, and it needs no new ones. The oldest request is
    never a victim, so it always makes progress, and in turn every other.

    Args:
      candidates: the requests that hold blocks, oldest first.
      num_free: per layer group, blocks that no request holds, cached ones included.
    Returns:
      The victims' ids, newest first; empty if all can continue; all but the oldest if even that is not enough.
    Raises:
      RequestError: a candidate is none, a count is not a number, a table is not a block table, or a layer group has
        none.

    References:
      transformers, continuous batching with `cpu_offload_space` (newest first, the fewest by simulation).
    """
    check_iterable(candidates, "the candidates are", "Candidates")
    free = _counts("free blocks", num_free)
    num_groups = len(free)
    candidates = [_read(candidate, num_groups) for candidate in candidates]
    missing = [sum(c.num_new_blocks[g] for c in candidates) - free[g] for g in range(num_groups)]
    if max(missing, default=0) <= 0:
        return ()
    holders = [Counter(block_id for c in candidates for block_id in c.block_tables[g]) for g in range(num_groups)]
    victims = []
    for victim in reversed(candidates[1:]):
        victims.append(victim.request_id)
        for g in range(num_groups):
            missing[g] -= victim.num_new_blocks[g]
            for block_id in victim.block_tables[g]:
                holders[g][block_id] -= 1
                missing[g] -= not holders[g][block_id]
        if max(missing) <= 0:
            break
    return tuple(victims)


def _read(candidate: Given[Candidate], num_groups: int) -> Candidate:
    """The candidate with Python integers, validated."""
    if not isinstance(candidate, Candidate):
        raise RequestError(f"a candidate is {one_line(candidate)}; expected a Candidate")
    request_id = candidate.request_id
    check_request(request_id)
    tables = [read_ids(request_id, table) for table in read_tables(request_id, candidate.block_tables)]
    num_new_blocks = _counts(f"new blocks of request {request_id}", candidate.num_new_blocks)
    if len(tables) < num_groups or len(num_new_blocks) < num_groups:
        raise RequestError(
            f"request {request_id} has {len(tables)} block tables and {len(num_new_blocks)} numbers of new blocks; "
            f"expected {num_groups} of each"
        )
    return Candidate(request_id=request_id, block_tables=tables, num_new_blocks=num_new_blocks)


def _counts(what: str, given: Any) -> list[int]:
    check_iterable(given, f"the {what} are", "numbers, one a layer group")
    return [check_count(what, number) for number in given]
