"""Queues under the rule that only tails may be evicted."""

import pytest

from tests.core.policies.residents import FakeResidents, chunk_keys
from tpu_offload.core.policies.queues import ChunkQueue
from tpu_offload.types import ChunkKey


@pytest.fixture
def residents() -> FakeResidents:
    residents = FakeResidents()
    residents.add(chunk_keys("a0 a1 a2 a3"))
    residents.add(chunk_keys("b0 b1"))
    return residents


def queue_of(*keys: bytes) -> ChunkQueue:
    queue = ChunkQueue()
    queue.order.update((ChunkKey(key), i) for i, key in enumerate(keys))
    return queue


def test_consecutive_chunks_of_a_prefix_are_evicted_at_once(residents) -> None:
    queue = queue_of(b"a3", b"a2", b"b1", b"a1", b"a0")
    assert queue.evict_run(9, residents) == ([b"a3", b"a2"], b"a1")
    assert residents.evicted == [b"a3", b"a2"]
    assert list(queue.order) == [b"b1", b"a1", b"a0"]


def test_a_run_is_no_longer_than_requested_and_ends_at_a_kept_chunk(residents) -> None:
    queue = queue_of(b"a3", b"a2", b"a1", b"a0")
    assert queue.evict_run(2, residents) == ([b"a3", b"a2"], b"a1")
    assert queue.evict_run(2, residents, keep=lambda key, number: key == b"a0" and number == 3) == ([b"a1"], b"a0")
    assert list(queue.order) == [b"a0"]


def test_a_chunk_that_others_follow_is_set_aside_until_they_are_evicted(residents) -> None:
    queue = queue_of(b"a2", b"b1", b"a3", b"b0")
    assert queue.evict_run(9, residents) == ([], None)
    assert (queue.aside, len(queue)) == ({b"a2": 0}, 4)
    queue.end_eviction()
    assert list(queue.order) == [b"b1", b"a3", b"b0"]
    assert queue.evict_run(1, residents) == ([b"b1"], b"b0")
    assert queue.evict_run(9, residents) == ([b"a3"], b"a2")
    queue.recall(ChunkKey(b"a2"))
    assert list(queue.order.items()) == [(b"a2", 0), (b"b0", 3)]
    assert not queue.aside


def test_a_blocked_chunk_keeps_its_place(residents) -> None:
    residents.blocked = {b"a2", b"b1"}
    queue = queue_of(b"b1", b"a3", b"a2", b"b0")
    assert queue.evict_run(9, residents) == ([], None)
    assert queue.evict_run(9, residents) == ([b"a3"], None)
    assert len(queue) == 3
    assert not queue.aside
    queue.end_eviction()
    assert list(queue.order.items()) == [(b"b1", 0), (b"a2", 2), (b"b0", 3)]
