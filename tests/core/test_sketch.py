"""Counts of keys: right nearly always, never too low, and old ones fade."""

import hashlib
import random
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tpu_offload.core.sketch import MAX_COUNT, Sketch


def keys(first: int, end: int) -> list[bytes]:
    return [hashlib.blake2b(b"%d" % i, digest_size=24).digest() for i in range(first, end)]


def counts(sketch: Sketch, asked: list[bytes]) -> list[int]:
    return [sketch.count(key) for key in asked]


@settings(deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 60), max_size=30), max_size=40),
    st.booleans(),
    st.lists(st.integers(0, 3000), max_size=3),
)
def test_it_never_counts_too_few(rounds, uniform, sizes):
    """Also of keys that are no digests, and of a sketch that grows; far too few are added to halve."""
    sketch, expected = Sketch(), [0] * 61
    name = keys(0, 61) if uniform else [bytes([i]) for i in range(61)]
    for number, numbers in enumerate(rounds):
        if number < len(sizes):
            sketch.grow(sizes[number])
        sketch.add([name[i] for i in numbers])
        for i in numbers:
            expected[i] = min(expected[i] + 1, MAX_COUNT)
    assert counts(sketch, name) == expected, "with so few keys it is exact"


@pytest.mark.parametrize("num_keys", [1000, 10_000])
def test_few_new_keys_look_as_if_they_had_been_seen(num_keys):
    sketch = Sketch(num_keys)
    sketch.add(keys(0, 10 * num_keys - 1))  # the next one halves
    wrong = sum(count > 0 for count in counts(sketch, keys(10**6, 10**6 + 20_000)))
    assert 0 < wrong < 0.03 * 20_000
    assert sketch.nbytes <= 2 * 128 * num_keys


def test_few_returning_keys_are_counted_too_high():
    sketch, rng = Sketch(1000), random.Random(0)
    expected: dict[Any, int] = {}
    uses = keys(0, 6000) + 9 * keys(0, 330)
    rng.shuffle(uses)
    for key in uses:
        expected[key] = expected.get(key, 0) + 1
    for i in range(0, len(uses), 7):
        sketch.add(uses[i : i + 7])
    assert all(sketch.count(key) >= num for key, num in expected.items())
    assert sum(sketch.count(key) > num for key, num in expected.items()) <= 0.02 * len(expected)


def test_counts_are_halved_now_and_then():
    sketch = Sketch(256)
    sketch.add(keys(0, 10))
    sketch.add(3 * keys(0, 1))
    sketch.add(keys(100, 100 + 2560 - 13 - 1))
    assert counts(sketch, keys(0, 2)) == [4, 1]
    sketch.add(keys(9000, 9001))
    assert counts(sketch, keys(0, 2)) == [2, 0], "what was seen once is forgotten"
    sketch.add(keys(10_000, 10_000 + 1279))
    assert counts(sketch, keys(0, 1)) == [2], "half of the additions count on"
    sketch.add(keys(20_000, 20_001))
    assert counts(sketch, keys(0, 1)) == [1]


def test_growing_keeps_the_counts():
    sketch = Sketch(300)
    rng = random.Random(0)
    for _ in range(5):
        sketch.add(rng.sample(keys(0, 400), 100))
    before = counts(sketch, keys(0, 400))
    assert sum(before) >= 500
    sketch.grow(10_000)
    assert counts(sketch, keys(0, 400)) == before
    nbytes = sketch.nbytes
    sketch.grow(100)
    assert sketch.nbytes == nbytes


def test_another_process_has_the_same_counts():
    """Counts do not depend on the interpreter's random hashes."""
    code = (
        "from tests.core.test_sketch import *; s = Sketch(); s.add(keys(0, 3000)); "
        "print(sum(i * c for i, c in enumerate(counts(s, keys(0, 9000)))))"
    )
    found = {subprocess.check_output([sys.executable, "-c", code], env={"PYTHONHASHSEED": seed}) for seed in "12"}
    assert len(found) == 1


def test_an_empty_list_of_keys_changes_nothing():
    sketch = Sketch()
    sketch.add([])
    assert sketch.count(b"key") == 0
