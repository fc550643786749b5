"""What vLLM's block tables contain: one table a KV cache group, by position."""

from collections.abc import Sequence

NULL_BLOCK = 0
"""vLLM's block of no request: it stands where a sliding window has left a block behind."""


def blocks_from(tables: Sequence[Sequence[int]], first: int) -> set[int]:
    """The blocks of a request from position `first` on, of all KV cache groups."""
    return {block_id for table in tables for block_id in table[first:]} - {NULL_BLOCK}
