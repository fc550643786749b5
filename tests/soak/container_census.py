"""Counts the entries of all containers reachable from an object, to detect leaks.

The report of a soak calls them tables.
"""

import array
import collections
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, final

_CONTAINERS = (dict, list, set, frozenset, tuple, collections.deque)
_PACKAGES = ("tpu_offload", "tests")  # `tests`, because the soak wraps copiers
_AT_LEAST, _OF_FEW = 16, 240
_MOST_SAMPLES = 1024


def container_sizes(root: Any, name: str) -> dict[str, int]:
    """Number of entries of every container reachable from an object, by attribute path.

    Containers at the same path, as in all elements of a list, count together. Objects of other libraries and variables
    of closures are not visited.

    Args:
      root: the object to start from.
      name: its name in the paths.
    """
    sizes: collections.Counter[str] = collections.Counter()
    seen: set[int] = set()
    waiting: collections.deque[tuple[str, Any]] = collections.deque([(name, root)])
    while waiting:
        path, value = waiting.popleft()
        if id(value) in seen:
            continue
        if isinstance(value, _CONTAINERS):
            seen.add(id(value))
            sizes[path] += len(value)
            waiting += ((f"{path}[]", entry) for entry in _entries(value))
        elif type(value).__module__.split(".")[0] in _PACKAGES:
            seen.add(id(value))
            waiting += ((f"{path}.{attribute}", entry) for attribute, entry in _attributes(value))
    return dict(sizes)


@final
class SizeHistory:
    """Sizes of containers over time, in bounded memory: with many samples every other one is dropped.

    Attributes:
      sizes: of each container, oldest first.
      num_samples: that are kept, of every container.
    """

    def __init__(self) -> None:
        self.sizes: dict[str, array.array[int]] = {}
        self.num_samples = 0
        self._num_seen = 0
        self._every = 1

    def add(self, sizes: Mapping[str, int]) -> None:
        """Adds a result of `container_sizes`. A container that is missing has no entries."""
        self._num_seen += 1
        if (self._num_seen - 1) % self._every:
            return
        for path in sizes.keys() - self.sizes.keys():
            self.sizes[path] = array.array("q", bytes(8 * self.num_samples))
        for path, history in self.sizes.items():
            history.append(sizes.get(path, 0))
        self.num_samples += 1
        if self.num_samples == _MOST_SAMPLES:
            self.sizes = {path: history[::2] for path, history in self.sizes.items()}
            self.num_samples = -(-self.num_samples // 2)
            self._every *= 2

    @property
    def num_containers(self) -> int:
        """Number of containers seen so far."""
        return len(self.sizes)

    def largest(self, num: int) -> dict[str, int]:
        """The largest containers of the second half, and their maximum sizes."""
        half = {path: max(history[len(history) // 2 :], default=0) for path, history in self.sizes.items()}
        return dict(collections.Counter(half).most_common(num))

    def grown(self) -> dict[str, str]:
        """The containers that grew over the second half.

        A bounded container fluctuates. A leaking one has more entries in the whole last third of that half than
        anywhere in its first third, by a margin above random variation, which is larger with fewer samples. With many
        samples the margin is 17 entries plus 5 %.

        Returns:
          By path, the sizes before and after; empty with fewer than six samples in that half.
        """
        third = (self.num_samples - self.num_samples // 2) // 3
        if third < 2:
            return {}
        by_share, at_least = max(0.05, 1 / third), max(_AT_LEAST, _OF_FEW / third)
        grown = {}
        for path, history in sorted(self.sizes.items()):
            half = history[len(history) // 2 :]
            before, after = max(half[:third]), min(half[-third:])
            if after - before > max(at_least, by_share * before):
                grown[path] = f"{before:,} to {after:,}"
        return grown


def _entries(container: Any) -> Iterator[Any]:
    """The elements that may hold further containers; most containers hold only plain values."""
    values = (*container.keys(), *container.values()) if isinstance(container, dict) else container
    return (value for value in values if not isinstance(value, (int, float, str, bytes, type(None))))


def _attributes(value: Any) -> Iterator[tuple[str, Any]]:
    slots = (name for cls in type(value).__mro__ for name in _slots(cls))
    names = dict.fromkeys((*getattr(value, "__dict__", ()), *slots))
    return ((name, getattr(value, name)) for name in names if hasattr(value, name))


def _slots(cls: type) -> Sequence[str]:
    slots = cls.__dict__.get("__slots__", ())
    names = (slots,) if isinstance(slots, str) else tuple(slots)
    return [name for name in names if name not in ("__weakref__", "__dict__")]
