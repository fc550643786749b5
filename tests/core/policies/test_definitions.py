"""Policies of the literature, chunk by chunk, against plain versions of the published algorithms.

Prompts of one chunk have no prefixes that could be shared, so nothing but the textbook decides.
"""

import random
from collections.abc import Callable
from typing import Any

import pytest

from tests.compiled import interpreted_only
from tests.core.policies import textbook
from tests.core.policies.residents import chunk_keys
from tpu_offload.core.index import ChunkIndex
from tpu_offload.core.policies import ARCPolicy, EvictionPolicy, LRUPolicy, S3FIFOPolicy, Use, WTinyLFUPolicy
from tpu_offload.types import ChunkKey, Pool


class LateARC(textbook.ARC):
    """Evicts before it looks for a ghost, so the target moves after the eviction."""

    def use(self, key) -> None:
        if key in self:
            super().use(key)
            return
        t1, t2, b1, b2, c = self.t1, self.t2, self.b1, self.b2, self.c
        if len(t1) + len(t2) == c:
            self.replace(None)
        if key in b1:
            self.p = min(c, self.p + max(1, len(b2) / len(b1)))
            del b1[key]
            t2[key] = None
        elif key in b2:
            self.p = max(0, self.p - max(1, len(b1) / len(b2)))
            del b2[key]
            t2[key] = None
        else:
            t1[key] = None
        while len(t1) + len(b1) > c:
            b1.popitem(last=False)
        while len(t1) + len(t2) + len(b1) + len(b2) > 2 * c:
            b2.popitem(last=False)


class FillingWTinyLFU(textbook.WTinyLFU):
    """Four fifths of what the main part holds are protected, also while it fills up."""

    def use(self, key) -> None:
        super().use(key)
        while len(self.protected) > max(0, int(0.8 * (len(self.protected) + len(self.probation)))):
            self.probation[self.protected.popitem(last=False)[0]] = None


class ExactCounts:
    """In place of the sketch."""

    def __init__(self, reference) -> None:
        self.reference = reference

    def grow(self, num_keys) -> None: ...

    def add(self, keys) -> None: ...

    def count(self, key) -> int:
        return self.reference.counts.get(key, 0)


def wtinylfu(reference) -> WTinyLFUPolicy:
    policy = WTinyLFUPolicy()
    policy._sketch = ExactCounts(reference)  # type: ignore[assignment]
    return policy


PAIRS: dict[str, tuple[Callable[[int], Any], Callable[[Any], EvictionPolicy]]] = {
    "lru": (textbook.LRU, lambda _: LRUPolicy()),
    "arc": (LateARC, lambda _: ARCPolicy()),
    "s3fifo": (textbook.S3FIFO, lambda _: S3FIFOPolicy()),
    "wtinylfu": (FillingWTinyLFU, wtinylfu),
}


def prompts(kind: str, rng: random.Random, size: int) -> list[ChunkKey]:
    """Reused chunks: by popularity, in loops slightly too long for the tier, or alternating."""
    popular = [int(rng.paretovariate(0.4)) % (10 * size) for _ in range(20 * size)]
    loops = [i % (size + 1 + size // 4) for i in range(20 * size)]
    if kind == "turns":
        parts = [popular[i : i + size] if (i // size) % 2 else loops[i : i + size] for i in range(0, 20 * size, size)]
        return [ChunkKey(b"%d" % key) for part in parts for key in part]
    return [ChunkKey(b"%d" % key) for key in {"popular": popular, "loops": loops}[kind]]


@pytest.mark.parametrize("kind", ["popular", "loops", "turns"])
@pytest.mark.parametrize("size", [2, 7, 30, 200])
@pytest.mark.parametrize(
    "name", [name if name != "wtinylfu" else pytest.param(name, marks=interpreted_only) for name in PAIRS]
)
def test_agrees_with_the_published_algorithm(name, size, kind) -> None:
    make_reference, make_policy = PAIRS[name]
    reference = make_reference(size)
    index = ChunkIndex(make_policy(reference))
    index.grow(Pool.CHUNKS, size)
    num_hits = 0
    chunks = prompts(kind, random.Random(size), size)
    for i, key in enumerate(chunks):
        use, hit = Use(i), key in index
        num_hits += hit
        assert hit == (key in reference), f"use {i}"
        if name == "wtinylfu":
            reference.use(key)  # counts first, as both do
        if hit:
            index.touch(use, [key], 1)
        else:
            index.complete([key], index.allocate(use, [key], [0]), success=True)
        index.touch(use, [key], 1)
        if name != "wtinylfu":
            reference.use(key)
    assert {key for key in chunks if key in index} == {key for key in chunks if key in reference}
    assert index.num_evicted > 10
    assert num_hits or kind == "loops"


@pytest.mark.parametrize("policy", [LRUPolicy(), ARCPolicy(), WTinyLFUPolicy()], ids=lambda p: type(p).__name__)
def test_a_request_that_ends_late_was_used_late(policy) -> None:
    """It is one use, but not over before it ends."""
    index = ChunkIndex(policy)
    index.grow(Pool.CHUNKS, 2)
    for use, key in enumerate(chunk_keys("a b")):
        index.complete([key], index.allocate(Use(use), [key], [0]), success=True)
    index.touch(Use(0), chunk_keys("a"), 1)
    index.allocate(Use(2), chunk_keys("c"), [0])
    assert [key for key in chunk_keys("a b") if key in index] == chunk_keys("a")
