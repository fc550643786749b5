"""How large every table is that an object keeps, found without knowing them: so that one that grows is noticed."""

import collections
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

_TABLES = (dict, list, set, frozenset, tuple, collections.deque)
_PACKAGE = "tpu_offload"
_AT_LEAST = 16


def table_sizes(root: Any, name: str) -> dict[str, int]:
    """Entries of every container that is reached from an object, by the attributes that lead to it.

    Containers at the same place of several objects, as of all that are in one list, count together. Objects of other
    libraries, and what only a closure knows, are not looked into.

    Args:
      root: where to start.
      name: what to call it.
    """
    sizes: collections.Counter[str] = collections.Counter()
    seen: set[int] = set()
    waiting: collections.deque[tuple[str, Any]] = collections.deque([(name, root)])
    while waiting:
        path, value = waiting.popleft()
        if id(value) in seen:
            continue
        if isinstance(value, _TABLES):
            seen.add(id(value))
            sizes[path] += len(value)
            waiting += ((f"{path}[]", entry) for entry in _entries(value))
        elif type(value).__module__.split(".")[0] == _PACKAGE:
            seen.add(id(value))
            waiting += ((f"{path}.{attribute}", entry) for attribute, entry in _attributes(value))
    return dict(sizes)


def grown_tables(samples: Sequence[Mapping[str, int]]) -> dict[str, str]:
    """The tables that grew over the second half of samples taken one after another.

    One that is full, or as full as chance has it, goes up and down. One that leaks has more entries in all of the last
    third of that half than in any of its first third, and not by a little: chance can do that too, the more so the
    fewer samples there are. Of many samples, 17 entries and 5 % of them are not a little.

    Args:
      samples: what `table_sizes` returned.
    Returns:
      From what to what they grew; nothing from fewer than six samples in that half.
    """
    half = samples[len(samples) // 2 :]
    third = len(half) // 3
    if third < 2:
        return {}
    by_share = max(0.05, 1 / third)
    grown = {}
    for path in sorted({path for sample in half for path in sample}):
        sizes = [sample.get(path, 0) for sample in half]
        before, after = max(sizes[:third]), min(sizes[-third:])
        if after - before > max(_AT_LEAST, by_share * before):
            grown[path] = f"{before:,} to {after:,}"
    return grown


def _entries(table: Any) -> Iterator[Any]:
    """What may hold further tables; of equal kinds of plain values, by far the most, nothing."""
    values = (*table.keys(), *table.values()) if isinstance(table, dict) else table
    return (value for value in values if not isinstance(value, (int, float, str, bytes, type(None))))


def _attributes(value: Any) -> Iterator[tuple[str, Any]]:
    slots = (name for cls in type(value).__mro__ for name in _slots(cls))
    names = dict.fromkeys((*getattr(value, "__dict__", ()), *slots))
    return ((name, getattr(value, name)) for name in names if hasattr(value, name))


def _slots(cls: type) -> Sequence[str]:
    slots = cls.__dict__.get("__slots__", ())
    names = (slots,) if isinstance(slots, str) else tuple(slots)
    return [name for name in names if name not in ("__weakref__", "__dict__")]
