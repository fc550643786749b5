"""ChunkIndex, case by case; `test_index_machine` tries them in any order."""

from typing import Any

import pytest

from tests.compiled import interpreted_only
from tests.core.policies.told import DepthsPolicy
from tests.inside.scheduler import slots_in
from tpu_offload.core.index import ChunkIndex, ChunkState
from tpu_offload.core.index.vacating import Vacating
from tpu_offload.core.policies import EvictionPolicy, LRUPolicy, PriorityPolicy, Use
from tpu_offload.types import ChunkKey, Pool


def chain(prefix: str, num: int) -> list[ChunkKey]:
    return [ChunkKey(f"{prefix}{i}".encode()) for i in range(num)]


def allocate(index: ChunkIndex, keys: list[ChunkKey], first: int = 0, *, protected=()) -> list[int]:
    return index.allocate(Use(0), keys, range(first, len(keys)), protected={*protected, *keys[:first]})


def complete(index: ChunkIndex, keys: list[ChunkKey], *, success: bool) -> None:
    index.complete(keys, [slots_in(index)[key] for key in keys], success=success)


def make(num_slots: int, policy: EvictionPolicy | None = None) -> ChunkIndex:
    index = ChunkIndex(policy or LRUPolicy())
    index.grow(Pool.CHUNKS, num_slots)
    return index


def fill(index: ChunkIndex, keys: list[ChunkKey]) -> None:
    assert len(allocate(index, keys)) == len(keys)
    complete(index, keys, success=True)


def test_a_chunk_is_found_only_once_its_save_is_complete() -> None:
    index = make(4)
    keys = chain("a", 3)
    allocate(index, keys)
    assert len(index.find(keys)) == 0
    complete(index, keys[:1], success=True)
    assert len(index.find(keys)) == 1
    complete(index, keys[2:], success=True)
    assert len(index.find(keys)) == 1, "the prefix ends at the first hole"
    complete(index, keys[1:2], success=True)
    assert len(index.find(keys)) == 3


def test_a_failed_save_leaves_its_slot() -> None:
    index = make(2)
    keys = chain("a", 2)
    allocate(index, keys)
    complete(index, keys, success=False)
    assert len(index) == 0
    assert len(allocate(index, chain("b", 2))) == 2
    index.check_invariants()


def test_evicts_the_tail_of_the_oldest_prefix_and_only_as_much_as_needed() -> None:
    index = make(5)
    a, b = chain("a", 3), chain("b", 4)
    fill(index, a)
    assert len(allocate(index, b)) == 4
    assert index.num_evicted == 2
    assert index.state(a[0]) is ChunkState.READY
    assert index.state(a[1]) is None
    assert index.state(a[2]) is None
    index.check_invariants()


def test_pinned_chunks_and_those_before_them_stay() -> None:
    index = make(3)
    a = chain("a", 3)
    fill(index, a)
    index.pin(a[2:])
    assert allocate(index, chain("b", 2)) == []
    assert (len(index), index.num_evicted) == (3, 0)
    index.unpin(a[2:])
    assert len(allocate(index, chain("b", 2))) == 2


def test_an_allocation_that_gets_no_slots_evicts_nothing() -> None:
    index = make(3)
    a = chain("a", 3)
    fill(index, a)
    assert allocate(index, chain("b", 2), protected=a) == []
    assert len(index.find(a)) == 3
    assert index.num_evicted == 0


def test_an_allocation_never_evicts_the_parent_of_its_chunks() -> None:
    index = make(1)
    a = chain("a", 2)
    fill(index, a[:1])
    assert allocate(index, a, first=1) == []
    assert index.state(a[0]) is ChunkState.READY


def test_an_unfinished_save_is_no_victim() -> None:
    index = make(2)
    allocate(index, chain("a", 2))
    assert allocate(index, chain("b", 1)) == []


def test_a_partial_allocation_takes_the_head() -> None:
    index = make(3)
    keys = chain("a", 5)
    assert len(allocate(index, keys)) == 3
    assert index.state(keys[2]) is ChunkState.PENDING
    assert index.state(keys[3]) is None


def test_slots_are_handed_out_from_low_to_high_and_grow() -> None:
    index = make(2)
    keys = chain("a", 6)
    assert allocate(index, keys) == [0, 1]
    index.grow(Pool.CHUNKS, 4)
    index.grow(Pool.CHUNKS, 3)
    assert index.num_slots(Pool.CHUNKS) == 4
    assert allocate(index, keys, first=2) == [2, 3]
    index.check_invariants()


def test_invalidating_a_head_leaves_a_tail_that_lookups_find_again_after_it() -> None:
    index = make(3)
    a = chain("a", 2)
    fill(index, a)
    index.invalidate(a[:1])
    assert len(index.find(a)) == 0
    allocate(index, a[:1])
    complete(index, a[:1], success=True)
    assert len(index.find(a)) == 2
    index.check_invariants()


def test_an_invalidated_chunk_is_found_no_more_and_removed_with_its_last_pin() -> None:
    index = make(2)
    a = chain("a", 2)
    fill(index, a)
    index.pin(a[1:])
    index.pin(a[1:])
    assert index.invalidate([*a, ChunkKey(b"unknown")]) == a
    assert index.invalidate(a) == []
    assert len(index.find(a)) == 0
    assert index.state(a[1]) is ChunkState.INVALID
    index.unpin(a[1:])
    assert allocate(index, chain("b", 2)) == [], "their slots may still be read"
    index.unpin(a[1:])
    assert [index.state(key) for key in a] == [None, None]
    index.check_invariants()


def test_losing_slots_invalidates_their_chunks() -> None:
    index = make(4)
    a = chain("a", 4)
    fill(index, a)
    assert sorted(index.invalidate_slots(1, 3)) == a[1:3]
    assert [index.state(key) is ChunkState.READY for key in a] == [True, False, False, True]
    index.check_invariants()


def test_clear_invalidates_pinned_chunks_and_keeps_pending_ones() -> None:
    index = make(4)
    a, b = chain("a", 2), chain("b", 1)
    fill(index, a)
    allocate(index, b)
    index.pin(a[:1])
    index.clear()
    assert [index.state(key) for key in (*a, *b)] == [ChunkState.INVALID, None, ChunkState.PENDING]
    index.check_invariants()


def test_a_policy_is_told_how_deep_chunks_are_also_with_holes_and_after_a_clear() -> None:
    depths: dict[ChunkKey, int] = {}
    index = make(9, DepthsPolicy(depths))
    a = chain("a", 6)
    b = [*a[:3], *chain("b", 3)]
    fill(index, a)
    allocate(index, b, 3)
    expected = {key: keys.index(key) for keys in (a, b) for key in keys}
    assert depths == expected
    index.invalidate([a[3], a[5]])
    depths.clear()
    index.allocate(Use(1), a, [3, 5])
    assert depths == {a[3]: 3, a[5]: 5}
    index.pin(a[:3])
    depths.clear()
    index.clear()
    assert depths == {key: expected[key] for key in (*a[:4], a[5], *b[3:])} | {a[5]: 0}, "what it follows is gone"
    index.check_invariants()


def test_a_pin_keeps_all_chunks_before_it_also_invalidated_ones() -> None:
    index = make(5)
    a = chain("a", 4)
    fill(index, a)
    index.pin(a[:2])
    index.pin(a[1:3])
    assert index.invalidate([a[0], a[3]]) == [a[0], a[3]]
    assert [index.state(key) for key in (a[0], a[3])] == [ChunkState.INVALID, None]
    assert len(allocate(index, chain("b", 5))) == 2
    index.unpin(a[1:3])
    assert index.state(a[0]) is ChunkState.INVALID, "the other pin covers it"
    index.unpin(a[:2])
    assert index.state(a[0]) is None
    index.check_invariants()


def test_only_ready_chunks_can_be_pinned() -> None:
    index = make(1)
    allocate(index, chain("a", 1))
    with pytest.raises(AssertionError, match="only a READY chunk"):
        index.pin(chain("a", 1))


def test_pins_are_counted() -> None:
    index = make(1)
    a = chain("a", 1)
    fill(index, a)
    index.pin(a)
    index.pin(a)
    index.unpin(a)
    assert allocate(index, chain("b", 1)) == []
    index.unpin(a)
    with pytest.raises(AssertionError, match="more often"):
        index.unpin(a)


@interpreted_only
def test_slots_are_free_after_a_clear_whose_policy_raises() -> None:
    class Faulty(LRUPolicy):  # type: ignore[misc]
        def clear(self) -> list[Any]:
            raise RuntimeError("of an eviction policy")

    index = ChunkIndex(PriorityPolicy(Faulty))
    index.grow(Pool.CHUNKS, 4)
    fill(index, chain("a", 4))
    with pytest.raises(RuntimeError, match="of an eviction policy"):
        index.clear()
    fill(index, chain("b", 4))
    assert len(allocate(index, chain("c", 4))) == 4, "the old policy would evict what is gone"
    index.check_invariants()


@interpreted_only
def test_slots_are_vacated_from_the_last_one_on() -> None:
    index = make(5)
    for name in "abcde":
        fill(index, chain(name, 1))
    evicted: list[ChunkKey] = []
    vacating = Vacating(index._tree, index._states, index.checkpoints, evict=evicted.append)
    vacating.evict_chunks(range(1, 5))
    by_slot = {slot: key for key, slot in slots_in(index).items()}
    assert evicted == [by_slot[slot] for slot in (4, 3, 2, 1)]
    vacating.evict_chunks(range(1, 5))
    assert evicted[4:] == evicted[:4], "and around again"


@pytest.fixture
def faulty_index() -> ChunkIndex:
    """Of 4 slots, with a policy that raises at the first `remove`."""

    class Faulty(LRUPolicy):  # type: ignore[misc]
        is_faulty = True

        def remove(self, key: ChunkKey, parent: ChunkKey | None) -> None:
            super().remove(key, parent)
            was_faulty, self.is_faulty = self.is_faulty, False
            if was_faulty:
                raise RuntimeError("of an eviction policy")

    return make(4, Faulty())


@interpreted_only
def test_all_of_a_failed_save_is_removed_although_the_policy_raises(faulty_index) -> None:
    keys = chain("a", 3)
    allocate(faulty_index, keys)
    with pytest.raises(RuntimeError, match="of an eviction policy"):
        complete(faulty_index, keys, success=False)
    assert len(faulty_index) == 0
    assert faulty_index.num_free_slots == 4
    faulty_index.check_invariants()


@interpreted_only
def test_no_lost_chunk_is_found_although_the_policy_raises(faulty_index) -> None:
    keys = chain("a", 3)
    fill(faulty_index, keys)
    with pytest.raises(RuntimeError, match="of an eviction policy"):
        faulty_index.invalidate_slots(0, 4)
    assert not faulty_index.find(keys)
    assert len(faulty_index) == 0
    faulty_index.check_invariants()


@interpreted_only
def test_all_that_a_pin_kept_is_removed_although_the_policy_raises(faulty_index) -> None:
    keys = chain("a", 3)
    fill(faulty_index, keys)
    faulty_index.pin(keys)
    faulty_index.invalidate_slots(0, 4)
    assert len(faulty_index) == 3
    with pytest.raises(RuntimeError, match="of an eviction policy"):
        faulty_index.unpin(keys)
    assert len(faulty_index) == 0
    faulty_index.check_invariants()


def test_a_checkpoint_whose_eviction_raises_keeps_none_of_the_pieces_that_it_shares() -> None:
    index = ChunkIndex(LRUPolicy(), window_chunks=(3,))
    index.grow(Pool.CHUNKS, 10)
    keys = chain("a", 4)
    fill(index, keys)
    begun = index.begin_checkpoint(keys, 3, max_chunks=3)
    assert begun is not None
    index.checkpoints.complete([piece.slot for piece in begun[1]], success=True)

    def take(_: object) -> list[int]:
        raise RuntimeError("of an eviction policy")

    with pytest.raises(RuntimeError, match="of an eviction policy"):
        index.checkpoints.begin(keys, 4, max_chunks=3, take=take)
    index.check_invariants()
    index.checkpoints.drop(begun[0])
    assert index.checkpoints.occupied() == set()
