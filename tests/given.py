"""What engines have in place of lists: sequences of all libraries, and objects that are none."""

import array
import random
from collections import UserList, deque
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from tpu_offload.types import BlockHash


class EngineError(Exception):
    """Raised by an object of the engine's while the library reads it."""


class Breaks(list[Any]):
    """A list that raises when it is read past its middle."""

    def __iter__(self) -> Any:
        for i, item in enumerate(list.__iter__(self)):
            if i >= len(self) // 2:
                raise EngineError("two\nlines")
            yield item

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice) or index >= len(self) // 2:
            raise EngineError("two\nlines")
        return list.__getitem__(self, index)


class Lies:
    """Says that it is longer than it is."""

    def __init__(self, items: list[Any]) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items) + 5

    def __getitem__(self, index: Any) -> Any:
        return self.items[index]


class Unprintable:
    """Not even a message can say what it is."""

    def __repr__(self) -> str:
        raise EngineError("no repr")

    def __len__(self) -> int:
        raise EngineError("no len")

    def __index__(self) -> int:
        raise EngineError("no index")

    def __eq__(self, other: object) -> bool:
        raise EngineError("no comparison")

    __hash__ = None  # type: ignore[assignment]


def broken_iterator(items: list[Any]) -> Any:
    """A generator that raises midway."""
    yield from items[: len(items) // 2]
    raise EngineError("midway")


TABLE_FORMS: dict[str, Callable[[Any], Any]] = {
    "list": list,
    "tuple": tuple,
    "deque": deque,
    "UserList": UserList,
    "list of numpy ints": lambda ids: [np.int32(i) for i in ids],
    "int64 row": lambda ids: np.array([ids, ids], np.int64)[1],
    "int32 row": lambda ids: np.array(ids, np.int32),
    "uint16 column": lambda ids: np.array([ids, ids], np.uint16).T[:, 0],
    "row of objects": lambda ids: np.array(ids, object),
    "jax array": lambda ids: jnp.array(ids, jnp.int32),
    "array": lambda ids: array.array("q", ids),
    "memory view": lambda ids: memoryview(np.array(ids, np.int64)),
    "memory view with a stride": lambda ids: memoryview(np.array(ids, np.int32).repeat(2))[::2],
}
"""Forms of a block table that the library reads."""

HASH_FORMS: dict[str, Callable[[Any], Any]] = {
    "list": list,
    "tuple": tuple,
    "deque": deque,
    "UserList": UserList,
    "row of objects": lambda hashes: np.array(hashes, object),
}
"""Forms of block hashes that it reads."""

NUMBER_FORMS: dict[str, Callable[[Any], Any]] = {
    "int": int,
    "int64": np.int64,
    "uint8": np.uint8,
    "0-d array": np.array,
    "jax": jnp.int32,
}
"""Forms of small numbers that it reads."""


def bad_table(rng: random.Random, ids: list[int]) -> Any:
    """No block table, though it looks like one."""
    wrong = rng.choice([True, False, -1, -(10**30), 10**30, 1.0, None, "1", b"1", np.True_, np.float32(2), [3],
                        np.array([1, 2]), Unprintable(), 2**63])  # fmt: skip
    mixed: list[Any] = list(ids)
    if mixed:
        mixed[rng.randrange(len(mixed))] = wrong
    return rng.choice([
        lambda: mixed, lambda: tuple(mixed), lambda: deque(mixed), lambda: iter(ids), lambda: broken_iterator(ids),
        lambda: (i for i in ids), lambda: set(ids), lambda: dict.fromkeys(ids), lambda: np.array(ids, float),
        lambda: np.array(ids, bool), lambda: np.array([ids, ids]), lambda: np.array(3), lambda: -np.array(ids) - 1,
        lambda: jnp.array(ids, float), lambda: jnp.array(3), lambda: bytes(ids), lambda: bytearray(ids),
        lambda: memoryview(bytes(ids)), lambda: str(ids), lambda: Breaks(ids), lambda: Unprintable(), lambda: None,
        lambda: 5, lambda: array.array("d", ids), lambda: map(int, ids), lambda: Lies(ids), lambda: np.array(["1"] * 4),
    ])()  # fmt: skip


def bad_hashes(rng: random.Random, hashes: list[BlockHash]) -> Any:
    """No block hashes, though it looks like some."""
    wrong = rng.choice([bytearray(b"1" * 16), np.bytes_(b"1" * 16), "1" * 16, 7, None, memoryview(b"1" * 16), True,
                        Unprintable()])  # fmt: skip
    mixed: list[Any] = list(hashes)
    if mixed:
        mixed[rng.randrange(len(mixed))] = wrong
    return rng.choice([
        lambda: mixed, lambda: tuple(mixed), lambda: deque(mixed), lambda: iter(hashes), lambda: set(hashes),
        lambda: broken_iterator(hashes), lambda: np.array(hashes), lambda: np.array(hashes, "V16"),
        lambda: np.zeros((4, 16)),
        lambda: b"".join(hashes), lambda: "text", lambda: Breaks(hashes), lambda: Unprintable(), lambda: None,
        lambda: 5, lambda: dict.fromkeys(hashes), lambda: np.array([hashes, hashes], object), lambda: range(4),
        lambda: Lies(hashes),
    ])()  # fmt: skip


def bad_number(rng: random.Random) -> Any:
    """No count."""
    return rng.choice([-1, True, False, np.True_, 1.0, np.float64(2), "3", b"3", None, [1], np.array([1]), np.int64(-3),
                       jnp.float32(1), Unprintable(), float("nan"), 10**30])  # fmt: skip
