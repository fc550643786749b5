"""Counts of uses: right nearly always, never too low, and old ones fade."""

import random

import pytest

from tpu_offload.core.policies.sketch import CountSketch


def sketch_of(num_chunks: int) -> CountSketch:
    sketch = CountSketch()
    sketch.resize(num_chunks)
    return sketch


@pytest.mark.parametrize("num_chunks", [1, 10, 1000])
def test_counts_are_never_too_low_and_seldom_too_high(num_chunks) -> None:
    rng, sketch = random.Random(num_chunks), sketch_of(num_chunks)
    counts: dict[bytes, int] = {}
    uses = [rng.randbytes(24) for _ in range(6 * num_chunks)]
    uses += [key for key in uses[: num_chunks // 3] for _ in range(9)]
    for key in uses:
        counts[key] = counts.get(key, 0) + 1
    for i in range(0, len(uses), 7):
        sketch.add(uses[i : i + 7])
    assert all(sketch.estimate(key) >= num for key, num in counts.items())
    assert sum(sketch.estimate(key) > num for key, num in counts.items()) <= 0.02 * len(counts)
    assert sum(sketch.estimate(rng.randbytes(24)) > 0 for _ in range(1000)) <= 20 + 1000 / num_chunks


def test_uses_fade_by_half() -> None:
    sketch = sketch_of(10)
    sketch.add([b"old"] * 20)
    assert sketch.estimate(b"old") == 15  # as far as it counts
    sketch.add([b"%d" % i for i in range(79)])
    assert sketch.estimate(b"old") == 15
    sketch.add([b"last of a hundred"])
    assert sketch.estimate(b"old") == 7
    sketch.add([b"%d" % i for i in range(50)])
    assert sketch.estimate(b"old") == 3


def test_a_tier_that_grows_a_little_keeps_the_counts() -> None:
    sketch = sketch_of(100)
    sketch.add([b"key"])
    sketch.resize(110)
    sketch.resize(50)
    assert sketch.estimate(b"key") == 1
    sketch.resize(1000)
    assert sketch.estimate(b"key") == 0
    sketch.add([b"key"])
    assert sketch.estimate(b"key") == 1
