"""What the scheduler takes as stored when workers start, and how a reset clears storage."""

import pytest

from tests.inside.scheduler import storage_planner
from tests.storage.fakes import StorageEngine, prompt
from tpu_offload.core.policies import POLICIES
from tpu_offload.types import STORAGE_WRITES, ChunkKey, JobKind

A, B, C = (prompt(i) for i in range(1, 4))
OTHER = ChunkKey(b"of another namespace, or of another model")


def planner(engine):
    return storage_planner(engine.scheduler)


def store(engine, *prompts):
    """Storage has these, as an earlier run left them; returns their keys."""
    keys = [key for tokens in prompts for key in engine.keys(tokens)]
    names = [name for tokens in prompts for name in engine.hashes(tokens)]
    for worker in engine.workers:
        worker.storage.update(zip(keys, names, strict=True))
    return keys


def adopt(engine, *listings):
    for worker_id, listed in enumerate(listings):
        planner(engine).adopt(worker_id, listed)
        engine.scheduler.check_invariants()


def clears(plans):
    return [job for plan in plans for job in plan.jobs if job.kind is JobKind.CLEAR]


def test_what_was_stored_is_promoted():
    engine = StorageEngine()
    keys = store(engine, A)
    adopt(engine, keys)
    assert engine.scheduler.stats().restored_chunks == len(keys)
    engine.check_storage([A])
    engine.turn()  # the workers report their memory
    engine.match("a", A)
    assert engine.turn().of(JobKind.PROMOTE)
    assert engine.scheduler.stats().promoted_chunks == len(keys) // 2, "at most half of the host tier at a time"


@pytest.mark.parametrize("policy", POLICIES)
def test_chunks_keep_their_order_of_eviction(policy):
    engine = StorageEngine(num_storage_chunks=8, storage_eviction_policy=policy)
    adopt(engine, store(engine, A, B))
    assert planner(engine).stored_keys() == engine.keys(A) + engine.keys(B)
    engine.fill(C)
    assert set(planner(engine).stored_keys()) == {*engine.keys(B), *engine.keys(C)}


def test_a_worker_that_stores_no_part_changes_nothing():
    """As a host without devices of this data-parallel rank, at first and when it is started anew."""
    engine = StorageEngine(num_workers=3)
    keys = store(engine, A)
    adopt(engine, None, keys, keys[1:])
    assert planner(engine).stored_keys() == keys[1:]
    adopt(engine, None)
    assert planner(engine).stored_keys() == keys[1:]


def test_only_what_all_workers_have_is_stored():
    engine = StorageEngine(num_workers=2)
    keys = store(engine, A)
    lost = engine.workers[1].storage.pop(keys[2]) and keys[2]
    adopt(engine, keys, [key for key in keys if key != lost])
    assert planner(engine).stored_keys() == [key for key in keys if key != lost]
    engine.turn()
    engine.rest()
    engine.turn()
    assert lost not in engine.workers[0].storage, "the rest is deleted"


def test_nothing_is_stored_before_all_workers_have_started():
    engine = StorageEngine(num_workers=2)
    keys = store(engine, A)
    adopt(engine, keys)
    assert not planner(engine).stored_keys()
    adopt(engine, keys)  # the first one once more: it has restarted
    assert not planner(engine).stored_keys()
    planner(engine).adopt(1, keys)
    assert planner(engine).stored_keys() == keys


def test_keys_of_other_namespaces_are_deleted():
    engine = StorageEngine()
    keys = store(engine, A)
    engine.workers[0].storage[OTHER] = b"x"
    adopt(engine, [OTHER, *keys])
    assert planner(engine).stored_keys() == keys
    engine.turn()
    assert OTHER not in engine.workers[0].storage


def test_workers_with_nothing_in_common_begin_anew():
    """What both have together is more than storage has room for: nothing is written until it is gone."""
    engine = StorageEngine(num_workers=2, num_storage_chunks=8)
    listings = engine.keys(A) + engine.keys(B), [*engine.keys(C), *engine.keys(prompt(9))]
    for worker, listed in zip(engine.workers, listings, strict=True):
        worker.storage.update(dict.fromkeys(listed, b"x"))
    adopt(engine, *listings)
    assert not planner(engine).stored_keys()
    assert planner(engine).records.room == -8
    plan = engine.turn()
    assert not clears([plan])
    assert len(plan.of(JobKind.DELETE)[0].deleted_keys) == 16
    assert not any(worker.storage for worker in engine.workers)
    engine.fill(A)
    engine.check_storage([A])


def test_workers_that_have_not_quite_the_same_keep_what_they_share():
    """As after a power failure, or when a tier is made smaller: each has other ones of the newest records."""
    engine = StorageEngine(num_workers=2, num_storage_chunks=8)
    keys = store(engine, A, B)
    others = engine.keys(C)
    for worker, lost, other in zip(engine.workers, (keys[7], keys[6]), others[:2], strict=True):
        del worker.storage[lost]
        worker.storage[other] = b"x"
    adopt(engine, *([*worker.storage] for worker in engine.workers))
    assert planner(engine).stored_keys() == keys[:6]
    engine.turn()
    engine.rest()
    assert [set(worker.storage) for worker in engine.workers] == [set(keys[:6])] * 2


@pytest.mark.parametrize("num_workers", [1, 2])
def test_a_worker_that_restarts_during_a_deletion_keeps_the_rest(num_workers):
    """What it was to delete is listed again: it must not count twice, or the full tier would seem to hold too much."""
    engine = StorageEngine(num_workers=num_workers, num_storage_chunks=8)
    keys = store(engine, A, B)
    adopt(engine, *([keys] * num_workers))
    records = planner(engine).records
    records.evict(2)
    (deletion,) = engine.turn(num_jobs=0).of(JobKind.DELETE)
    assert len(deletion.deleted_keys) == 2
    planner(engine).adopt(num_workers - 1, keys)
    engine.scheduler.check_invariants()
    assert len(planner(engine).stored_keys()) == 6
    assert records.room == 0


def test_a_worker_that_restarts_keeps_what_it_has():
    engine = StorageEngine(num_workers=2)
    keys = store(engine, A, B)
    adopt(engine, keys, keys)
    planner(engine).adopt(1, [*keys[1:], OTHER])
    engine.scheduler.check_invariants()
    assert planner(engine).stored_keys() == keys[1:]
    assert list(planner(engine).records.to_delete) == [keys[0], OTHER]


# --- reset ----------------------------------------------------------------------------------------


@pytest.fixture
def engine():
    engine = StorageEngine()
    engine.fill(A)
    assert planner(engine).stored_keys()
    return engine


def test_a_reset_clears_before_anything_is_written(engine):
    engine.scheduler.reset()
    assert engine.scheduler.has_jobs, "an idle engine plans it"
    engine.serve("b", B)
    plans = engine.rest()
    assert not engine.workers[0].storage.keys() & set(engine.keys(A))
    written = [bool(job.chunks) for plan in plans for job in plan.of(*STORAGE_WRITES)]
    assert sorted(written) == written, "never before the clear"
    engine.fill(C)
    engine.check_storage([B, C])


def test_a_clear_that_fails_is_retried_and_nothing_is_written(engine):
    engine.scheduler.reset()
    for _ in range(3):
        plan = engine.turn(fail=True)
        assert len(clears([plan])) == 1
        assert engine.workers[0].storage, "it failed"
    plan = engine.turn()
    assert len(clears([plan])) == len(plan.of(*STORAGE_WRITES)) == 1
    assert not engine.workers[0].storage
    assert not planner(engine).writes.must_clear
    engine.fill(C)
    engine.check_storage([C])


def test_a_reset_during_a_clear_clears_again(engine):
    engine.scheduler.reset()
    engine.turn(num_jobs=0)
    engine.scheduler.reset()
    engine.turn()
    assert len(clears([engine.turn()])) == 1
    assert not planner(engine).writes.must_clear


def test_a_listing_from_before_a_reset_is_ignored():
    engine = StorageEngine()
    keys = store(engine, A)
    engine.scheduler.reset()
    adopt(engine, keys)
    assert not planner(engine).stored_keys()
    assert not planner(engine).records.to_delete, "the clear deletes it"
    engine.rest()
    assert not engine.workers[0].storage


def test_nothing_is_deleted_in_a_tier_that_another_worker_shares():
    """The workers disagree, as those of different versions of a tier of one's own may."""
    engine = StorageEngine(num_workers=2)
    keys = store(engine, A)
    records = planner(engine).records
    planner(engine).adopt(0, (), is_shared=True)
    adopt(engine, [OTHER, *keys], keys)
    assert set(planner(engine).stored_keys()) == set(keys)
    assert not records.to_delete
    planner(engine).adopt(1, keys[1:])
    assert not records.to_delete
    assert not [job for plan in engine.rest() for job in plan.of(JobKind.DELETE)]
