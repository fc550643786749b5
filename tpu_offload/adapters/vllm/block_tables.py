"""What vLLM's block tables contain: one table a KV cache group, by position.

In tpu-inference, the rows of states have a pool and ids of their own. `with_distinct_ids` has them negative, so that an
id names one block.
"""

from collections.abc import Collection, Sequence

NULL_BLOCK = 0
"""vLLM's block of no request: it stands where a window has left a block behind, and where there is no state."""


def with_distinct_ids(tables: Sequence[Sequence[int]], state_groups: Collection[int]) -> Sequence[Sequence[int]]:
    """The block tables of a request, with the rows of states as negative ids."""
    if not state_groups:
        return tables
    return [[-row for row in table] if i in state_groups else table for i, table in enumerate(tables)]


def blocks_from(tables: Sequence[Sequence[int]], first: int) -> set[int]:
    """The blocks of a request from position `first` on, of all KV cache groups."""
    return {block_id for table in tables for block_id in table[first:]} - {NULL_BLOCK}
