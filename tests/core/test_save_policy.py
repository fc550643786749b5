"""What is worth saving: the counting sketch, and the policy on top of it."""

import hashlib
import random
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tpu_offload.config import OffloadConfig, SaveEvent
from tpu_offload.core.policies import Use
from tpu_offload.core.save_policy import SaveBySightings, make_save_policy
from tpu_offload.core.sketch import MAX_COUNT, Sketch


def keys(first: int, end: int, name: str = "") -> list[bytes]:
    return [hashlib.blake2b(f"{name}{i}".encode(), digest_size=24).digest() for i in range(first, end)]


# --- the sketch -----------------------------------------------------------------------------------


@settings(deadline=None)
@given(st.lists(st.lists(st.integers(0, 60), max_size=30), max_size=40), st.booleans())
def test_it_never_counts_too_few(rounds, uniform):
    """Also of keys that are no digests; the sketch is told of far too few to halve."""
    sketch, counts = Sketch(), {}
    name = keys(0, 61) if uniform else [bytes([i]) for i in range(61)]
    for numbers in rounds:
        told = sorted(set(numbers))
        sketch.add([name[i] for i in told])
        for i in told:
            counts[i] = counts.get(i, 0) + 1
    found = sketch.counts(name)
    assert all(found[i] >= min(count, MAX_COUNT) for i, count in counts.items())
    assert max(found) <= MAX_COUNT
    assert sum(found) == sum(min(count, MAX_COUNT) for count in counts.values()), "with so few keys it is exact"


@pytest.mark.parametrize("num_keys", [1000, 10_000])
def test_few_new_keys_look_as_if_they_had_been_seen(num_keys):
    sketch = Sketch(num_keys)
    sketch.add(keys(0, 5 * num_keys))  # half way to the halving
    wrong = sum(count > 0 for count in sketch.counts(keys(10**6, 10**6 + 20_000)))
    assert 0 < wrong < 0.02 * 20_000
    assert sketch.nbytes <= 2 * 64 * num_keys


def test_counts_are_halved_now_and_then():
    sketch = Sketch(256)
    sketch.add(keys(0, 10))
    for _ in range(3):
        sketch.add(keys(0, 1))
    sketch.add(keys(100, 100 + 2560 - 13 - 1))
    assert sketch.counts(keys(0, 2)) == [4, 1]
    sketch.add(keys(9000, 9001))
    assert sketch.counts(keys(0, 2)) == [2, 0], "what was seen once is forgotten"
    sketch.add(keys(10_000, 10_000 + 1279))
    assert sketch.counts(keys(0, 1)) == [2], "half of the additions count on"
    sketch.add(keys(20_000, 20_001))
    assert sketch.counts(keys(0, 1)) == [1]


def test_growing_keeps_the_counts():
    sketch = Sketch(300)
    rng = random.Random(0)
    for _ in range(5):
        sketch.add(rng.sample(keys(0, 400), 100))
    before = sketch.counts(keys(0, 400))
    sketch.grow(10_000)
    assert sketch.counts(keys(0, 400)) == before
    width = sketch.nbytes
    sketch.grow(100)
    assert sketch.nbytes == width


def test_another_process_counts_alike():
    """Nothing hangs on the interpreter's random hashes."""
    code = (
        "from tests.core.test_save_policy import *; s = Sketch(); s.add(keys(0, 3000)); "
        "print(sum(i * c for i, c in enumerate(s.counts(keys(0, 9000)))))"
    )
    found = {subprocess.check_output([sys.executable, "-c", code], env={"PYTHONHASHSEED": seed}) for seed in "12"}
    assert len(found) == 1


def test_nothing_is_asked_of_no_keys():
    sketch = Sketch()
    sketch.add([])
    assert sketch.counts([]) == []


# --- the policy -----------------------------------------------------------------------------------


def test_without_sightings_all_is_worth_saving_and_nothing_is_remembered():
    policy = SaveBySightings()
    policy.see(Use(0), keys(0, 5))
    policy.resize(10**9)
    assert policy._sketch is None
    assert policy.num_chunks_worth_saving(keys(0, 5), 2, 5) == 3


@pytest.mark.parametrize("num_sightings", [2, 3, 15])
def test_saves_from_the_nth_sighting_on(num_sightings):
    policy = SaveBySightings(num_sightings=num_sightings)
    for i in range(1, num_sightings + 2):
        policy.see(Use(i), keys(0, 8))
        assert policy.num_chunks_worth_saving(keys(0, 8), 0, 8) == (8 if i >= num_sightings else 0)


def test_a_prefix_that_is_worth_it_ends_where_others_part():
    policy = SaveBySightings(num_sightings=2)
    one, other = keys(0, 3) + keys(0, 4, "one"), keys(0, 3) + keys(0, 4, "other")
    policy.see(Use(0), one)
    policy.see(Use(1), other)
    assert policy.num_chunks_worth_saving(other, 0, 7) == 3
    assert policy.num_chunks_worth_saving(other, 1, 7) == 2
    assert policy.num_chunks_worth_saving(other, 3, 7) == 0
    policy.see(Use(2), other, 5)  # it had been told of the first five
    assert policy.num_chunks_worth_saving(other, 5, 7) == 2
    assert policy.num_chunks_worth_saving(other, 0, 7) == 3, "never a hole"


def test_the_settings_decide():
    policy = make_save_policy(
        OffloadConfig.create(save_on="eviction,preemption", save_after_sightings=3, decode_save=True)
    )
    assert [policy.saves_on(event) for event in SaveEvent] == [False, True, True]
    assert policy.num_tokens_to_save(num_prompt_tokens=5, num_computed_tokens=9) == 9
    policy.see(Use(0), keys(0, 2))
    assert policy.num_chunks_worth_saving(keys(0, 2), 0, 2) == 0
    policy = make_save_policy(OffloadConfig.create())
    assert [policy.saves_on(event) for event in SaveEvent] == [True, False, False]
    assert policy.num_tokens_to_save(num_prompt_tokens=5, num_computed_tokens=9) == 5
    assert policy.num_tokens_to_save(num_prompt_tokens=5, num_computed_tokens=3) == 3
