"""Validates what engines pass to `RequestSwap`, before anything is changed."""

from collections.abc import Collection, Sequence
from typing import Any, Final

from tpu_offload.core.block_tables import read_ids, read_tables
from tpu_offload.core.validate import read_numbers
from tpu_offload.errors import RequestError
from tpu_offload.layout import KVLayout, LayerGroupKind
from tpu_offload.values import as_integer, one_line

_MAX_TOKENS: Final = 2**63 - 1


def read_prefill(num_tokens: Any, seconds: Any, num_attended: Any) -> tuple[int, float, float]:
    """All three as Python numbers.

    Raises:
      RequestError: one of them is not a number.
    """
    count = as_integer(num_tokens)
    try:
        took_s, attended = float(seconds), float(num_attended)
    except Exception:  # the object is not ours
        count = None
    if count is None:
        raise RequestError(
            f"a step computed {one_line(num_tokens)} tokens, which attend to {one_line(num_attended)}, in "
            f"{one_line(seconds)} seconds; expected numbers"
        )
    return min(count, _MAX_TOKENS), took_s, attended


def read_computed_blocks(
    layout: KVLayout, request_id: str, block_tables: Any, num_computed_tokens: int
) -> list[list[int]]:
    """Per layer group, the blocks that hold computed tokens.

    Raises:
      RequestError: these are not block tables, or too few, or one is too short.
    """
    groups = layout.groups
    tables = read_tables(request_id, block_tables)
    if len(tables) != len(groups):
        raise RequestError(f"request {request_id} has {len(tables)} block tables; expected {len(groups)}")
    needed = -(-num_computed_tokens // layout.block_size)
    blocks = []
    for group, table in zip(groups, tables, strict=True):
        full = group.kind is LayerGroupKind.FULL_ATTENTION
        if full and len(table) < needed:
            raise RequestError(
                f"request {request_id} has {len(table)} blocks for {num_computed_tokens} computed tokens; expected "
                f"{needed}"
            )
        blocks.append(read_ids(request_id, table, end=needed if full else None))
    return blocks


def read_granted_blocks(request_id: str, block_tables: Any, needed: Sequence[int]) -> list[list[int]]:
    """Per layer group, the first `needed` blocks of its block table.

    Raises:
      RequestError: these are not block tables, or one is too short.
    """
    tables = read_tables(request_id, block_tables)
    if len(tables) != len(needed) or any(len(table) < n for table, n in zip(tables, needed, strict=True)):
        raise RequestError(
            f"request {request_id} is swapped in into {[len(table) for table in tables]} blocks; expected at "
            f"least {list(needed)}, one number per layer group"
        )
    return [read_ids(request_id, table, end=n) for table, n in zip(tables, needed, strict=True)]


def read_present(request_id: str, present: Collection[int], *, end: int) -> frozenset[int]:
    """Positions in the first group's block table, each below `end`.

    Raises:
      RequestError: one is not.
    """
    positions = read_numbers(request_id, "present", present)
    if positions and max(positions) >= end:
        raise RequestError(
            f"request {request_id} is swapped in with the blocks {sorted(positions)} present; expected numbers under "
            f"{end}"
        )
    return positions
