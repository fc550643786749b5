"""Everything that an object consists of, as values that can be compared: a call that raises has changed none of it."""

import enum
from collections import OrderedDict, deque
from typing import Any

import numpy as np

from tests.compiled import state_of

NOT_STATE = {"_num_created"}  # numbers that are never used twice, and may be skipped
_PLAIN = (type(None), bool, int, float, str, bytes, enum.Enum, type)


def snapshot(root: Any) -> dict[str, Any]:
    """Paths and plain values of all that can be reached through fields and containers; objects that are met twice once.

    Functions, locks and classes count as themselves.
    """
    values: dict[str, Any] = {}
    seen: dict[int, str] = {}
    kept: list[Any] = []  # a compiled object makes a tuple anew at each read: another one could get its id

    def walk(path: str, value: Any) -> None:
        if isinstance(value, _PLAIN):
            values[path] = value
            return
        if id(value) in seen:
            values[path] = f"see {seen[id(value)]}"
            return
        if isinstance(value, (bytearray, np.ndarray)):
            values[path] = bytes(value)
            return
        if isinstance(value, (set, frozenset)):
            values[path] = sorted(map(repr, value))
            return
        if isinstance(value, (dict, OrderedDict)):
            seen[id(value)] = path
            kept.append(value)
            values[path] = list(map(repr, value))
            for key, item in value.items():
                walk(f"{path}[{key!r}]", item)
            return
        if isinstance(value, (list, tuple, deque)):
            seen[id(value)] = path
            kept.append(value)
            if all(isinstance(item, _PLAIN) for item in value):
                values[path] = (type(value).__name__, *value)
                return
            values[path] = (type(value).__name__, len(value))
            for i, item in enumerate(value):
                if type(item) is dict and not item:
                    continue  # most parts of a `ChunkTable`; the length of the list tells that they are there
                walk(f"{path}[{i}]", item)
            return
        if type(value).__module__.startswith("tpu_offload"):
            seen[id(value)] = path
            kept.append(value)
            values[path] = type(value).__name__
            for name, item in sorted(state_of(value).items()):
                if name not in NOT_STATE:
                    walk(f"{path}.{name}", item)
            return
        values[path] = f"{type(value).__name__} {id(value)}"

    walk("", root)
    return values


def differences(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Where two snapshots differ."""
    paths = [path for path in {**before, **after} if before.get(path, "-") != after.get(path, "-")]
    return [f"{path}: {before.get(path, '-')} is now {after.get(path, '-')}" for path in paths]
