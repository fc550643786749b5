import pytest
from hypothesis import given
from hypothesis import strategies as st

from tpu_offload.kernels import split_into_buckets, usable_buckets


@pytest.mark.parametrize(
    ("budget", "configured", "expected"),
    [(1, (), (1,)), (6, (), (1, 2, 4)), (8, (), (1, 2, 4, 8)), (8, (1, 3, 16), (1, 3)), (0, (), (1,))],
)
def test_usable_buckets(budget, configured, expected):
    assert usable_buckets(budget, configured) == expected


def test_split_takes_the_largest_first():
    assert split_into_buckets(13, (1, 2, 4, 8)) == [8, 4, 1]
    assert split_into_buckets(7, (1, 3)) == [3, 3, 1]
    assert split_into_buckets(0, (1, 2)) == []


@given(st.integers(0, 5000), st.sets(st.integers(2, 300), max_size=6))
def test_split_is_exact(num_blocks, sizes):
    buckets = (1, *sorted(sizes))
    parts = split_into_buckets(num_blocks, buckets)
    assert sum(parts) == num_blocks
    assert set(parts) <= set(buckets)
    assert parts == sorted(parts, reverse=True)
