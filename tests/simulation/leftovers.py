"""Finds tables of the scheduler's objects that should be empty at the end but are not."""

import dataclasses
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

from tests.compiled import state_of

# Tables that are not empty at the end: of fixed size, or bounded by the memory that they describe.
_BOUNDED = (
    "_context.index",  # slots and resident chunks; see `check_invariants`
    "_num_slots", "_known", "_capacity", "_num_swap_blocks", "_oldest", "_of_storage", "breakers",  # one entry each
    "_workers._expected", "_workers._setups", "_workers._missing",  # likewise
    "swap_pool._free", "swap_pool._suspect", "swap_pool._num_blocks",  # places of the swap pool
    "swap_pool._num_known", "swap_pool._unusable",
    "_swap._stats._swapped_in_at",  # the last 32 steps
    "backoff._entries",  # the last chunks that failed, at most 4096
    "_costs", "_context.costs",  # the last measurements
    "_stages",  # one entry for each direction
    "_checkpoints._sizes",  # one entry for each layer group
)  # fmt: skip
# What late jobs of a worker that never reports again hold.
_LATE = ("_late", "_transfers._to_cancel", "staging.buffer._accounts", "swap_pool._num_holders")
_MODULE = "tpu_offload.core"


def non_empty_tables(scheduler: Any, *, late_jobs: bool) -> dict[str, int]:
    """Sizes of the non-empty tables, by attribute path.

    Args:
      scheduler: an `OffloadScheduler` without requests or jobs.
      late_jobs: whether a worker never reported its copies.
    """
    allowed = _BOUNDED + (_LATE if late_jobs else ())
    return {
        path: size
        for path, size in _tables(scheduler, "", set())
        if size and not any(path.endswith(name) or f"{name}." in path or f"{name}[" in path for name in allowed)
    }


def _tables(owner: Any, path: str, seen: set[int]) -> Iterator[tuple[str, int]]:
    if id(owner) in seen:
        return
    seen.add(id(owner))
    for name, value in _attributes(owner):
        yield from _look(value, f"{path}.{name}", seen)


def _look(value: Any, path: str, seen: set[int]) -> Iterator[tuple[str, int]]:
    if isinstance(value, dict | set | list | deque):
        if _is_ours(value):  # it has attributes beside its entries
            yield from _tables(value, path, seen)
        inner = list(value.values()) if isinstance(value, Mapping) else list(value)
        if not any(isinstance(item, dict | set | list | deque) or _is_ours(item) for item in inner) or not inner:
            yield path, len(value)
            return
        if _is_ours(inner[0]) and not isinstance(inner[0], dict | set | list | deque):
            yield path, len(value)
        for i, item in enumerate(inner):
            yield from _look(item, f"{path}[{i}]", seen)
    elif _is_ours(value):
        yield from _tables(value, path, seen)


def _is_ours(value: Any) -> bool:
    return type(value).__module__.startswith(_MODULE) and not isinstance(value, type)


def _attributes(owner: Any) -> list[tuple[str, Any]]:
    if isinstance(getattr(type(owner), "__slots__", None), tuple) and not dataclasses.is_dataclass(owner):
        return []  # a part of a table
    attributes = state_of(owner).items()
    return [
        (name, value) for name, value in attributes if name != "_on_end"
    ]  # methods of objects that are visited elsewhere
