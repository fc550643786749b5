"""Classes of runs, against their definition in words."""

import math

import pytest

from tpu_offload.core.policies.run_classes import (
    CLASS_USES,
    FIRST_INTERVAL,
    MANY_USES,
    NUM_CLASSES,
    NUM_INTERVALS,
    NUM_LENGTHS,
    NUM_ORIGINS,
    PARTS,
    POOLS,
    class_of,
    is_length,
    origin_of,
    part_of_interval,
    part_of_length,
    shortest_interval,
)


def groups(values, function):
    """Consecutive values with the same class, as (first, last)."""
    found: dict[int, list[int]] = {}
    for value in values:
        found.setdefault(function(value), []).append(value)
    assert list(found) == list(range(min(found), min(found) + len(found))), "classes are in order, without a gap"
    return [(some[0], some[-1]) for some in found.values()]


def test_few_uses_two_classes_for_each_power_of_two() -> None:
    ranges = groups(range(2, MANY_USES), lambda num_uses: class_of(num_uses, 3.0, 5))
    assert ranges == [(2, 2), (3, 3), (4, 5), (6, 7), (8, 11), (12, 15)]
    assert class_of(2, 3.0, 5) == NUM_ORIGINS
    assert class_of(MANY_USES - 1, 3.0, 5) == FIRST_INTERVAL - 1
    assert [CLASS_USES[NUM_ORIGINS + i] for i, _ in enumerate(ranges)] == [first for first, _ in ranges]


@pytest.mark.parametrize("num_uses", [MANY_USES, 1000])
def test_many_uses_a_class_for_each_power_of_two_of_the_interval(num_uses) -> None:
    """Of a tier with 100 chunks the shortest are less than 32 chunks, the longest 4,096 and more."""
    shortest = shortest_interval(100)
    ranges = groups(range(1, 10_000), lambda interval: class_of(num_uses, math.log2(interval), shortest))
    assert ranges == [(1, 31), *((2**i, 2 ** (i + 1) - 1) for i in range(5, 12)), (2**12, 9999)]
    assert len(ranges) == NUM_INTERVALS
    assert class_of(num_uses, 60.0, shortest) == NUM_CLASSES - 1
    assert class_of(num_uses, 0.0, shortest) == FIRST_INTERVAL


def test_the_prior_of_intervals_falls_from_64_uses_to_16() -> None:
    uses = CLASS_USES[FIRST_INTERVAL:]
    assert (uses[0], uses[-1]) == (64, MANY_USES)
    assert uses == sorted(uses, reverse=True)


def test_only_those_used_twice_and_three_times_share_their_ages() -> None:
    assert len(POOLS) == len(CLASS_USES) == NUM_CLASSES
    shared = [c for c in range(NUM_CLASSES) if POOLS.count(POOLS[c]) > 1]
    assert shared == [class_of(2, 0.0, 0), class_of(3, 0.0, 0)]


def test_parts_of_intervals_tell_waits_of_two_to_four_tiers_from_shorter_ones() -> None:
    shortest, few_uses = shortest_interval(100), class_of(2, 3.0, 5)
    ranges = groups(range(1, 2000), lambda last: part_of_interval(few_uses, math.log2(last), shortest))
    assert ranges == [(1, 255), (256, 1999)]
    parts = [part_of_interval(c, last, shortest) for c in range(few_uses, NUM_CLASSES) for last in (0.0, 60.0)]
    assert parts == list(range(parts[0], NUM_CLASSES + len(PARTS)))
    assert [PARTS[part - NUM_CLASSES] for part in parts[::2]] == list(range(few_uses, NUM_CLASSES))
    assert [PARTS[part - NUM_CLASSES] for part in parts[1::2]] == list(range(few_uses, NUM_CLASSES))


def test_origins_are_classes_by_the_uses_of_the_run_before_and_parts_by_its_last_wait() -> None:
    assert [origin_of(1, class_id) for class_id in (0, 1, NUM_CLASSES)] == [1, 1, 1], "it was used once: no wait yet"
    parts = []
    for last in (0.0, 60.0):
        before = part_of_interval(NUM_ORIGINS, last, 5)
        assert groups(range(2, 20), lambda num_uses, part=before: PARTS[origin_of(num_uses, part) - NUM_CLASSES]) == [
            (2, 3),
            (4, 7),
            (8, 19),
        ]
        parts += [origin_of(num_uses, before) for num_uses in (2, 4, 8)]
    of_intervals = part_of_interval(NUM_ORIGINS, 0.0, 5)
    assert sorted(parts) == list(range(NUM_CLASSES + NUM_LENGTHS, of_intervals)), "each has its own number"


def test_lengths() -> None:
    lengths = groups(range(1, 1000), part_of_length)
    assert lengths[:6] == [(1, 1), (2, 2), (3, 3), (4, 5), (6, 7), (8, 11)]
    assert lengths[-1] == (128, 999)
    assert (len(lengths), part_of_length(1)) == (NUM_LENGTHS, NUM_CLASSES)
    assert [c for c in range(NUM_CLASSES + len(PARTS)) if is_length(c)] == [part_of_length(n) for n, _ in lengths]
