"""Which chunks storage takes: all, those seen twice, or those that were loaded; written on save or on eviction."""

import pytest

from tests.core.fakes import BLOCK_SIZE
from tests.inside.scheduler import storage_planner, write_candidates
from tests.storage.fakes import StorageEngine, prompt
from tpu_offload.config import StorageAdmission
from tpu_offload.core.policies import Use
from tpu_offload.core.storage.admission import AdmissionFilter
from tpu_offload.types import ChunkKey

A, B = prompt(1), prompt(2)


def stored(engine):
    return set(storage_planner(engine.scheduler).records.stored)


def keys(*names):
    return [ChunkKey(b"key %d of a chunk" % name) for name in names]


def test_all_are_admitted_by_default():
    admission = AdmissionFilter(StorageAdmission.ALL, 8)
    assert not admission.depends_on_uses
    assert admission.admits(*keys(1))


@pytest.mark.parametrize("admission", [StorageAdmission.SECOND_SIGHTING, StorageAdmission.AFTER_HIT])
def test_uses_of_the_other_kind_do_not_count(admission):
    tested = AdmissionFilter(admission, 8)
    by_sight = admission is StorageAdmission.SECOND_SIGHTING
    count, other = (tested.observe, tested.hit) if by_sight else (tested.hit, tested.observe)
    for _ in range(3):
        other(keys(1, 2))
    assert not any(map(tested.admits, keys(1, 2)))
    count(keys(1))
    assert tested.admits(*keys(1)) != by_sight, "a second sighting, or the first hit"
    count(keys(1))
    assert tested.admits(*keys(1))
    assert not tested.admits(*keys(2))


def test_uses_are_forgotten_after_ten_times_as_many_as_storage_has_chunks():
    admission = AdmissionFilter(StorageAdmission.SECOND_SIGHTING, 300)
    admission.observe(keys(1))
    admission.observe(keys(*range(2, 3001)))  # the additions that halve all counts
    admission.observe(keys(1))
    assert not admission.admits(*keys(1))


@pytest.mark.parametrize("admission", ["second_sighting", "after_hit"])
def test_a_generated_chunk_offers_none_of_the_prompt_again(admission):
    engine = StorageEngine(storage_admission=admission)
    engine.fill(A)
    planner, chunks = storage_planner(engine.scheduler), engine.keys(A)
    planner.writes.observe(Use(100), chunks, 0)
    planner.writes.hit(Use(100), chunks)
    assert list(write_candidates(planner)) == chunks
    planner.writes.forget_candidates()
    planner.writes.observe(Use(100), chunks, len(chunks) - 1)
    assert list(write_candidates(planner)) == chunks[-1:]


@pytest.mark.parametrize("write_on", ["save", "eviction"])
def test_what_is_seen_once_is_never_written(write_on):
    engine = StorageEngine(storage_admission="second_sighting", storage_write_on=write_on)
    for number in range(1, 6):
        engine.fill(prompt(number))
    stats = engine.scheduler.stats()
    assert (stored(engine), stats.cascaded_chunks) == (set(), 0)
    assert stats.rejected_storage_chunks == (20 if write_on == "save" else 16)
    assert stats.dropped_cascade_chunks == stats.dropped_demotion_chunks == 0


def test_a_chunk_in_the_host_tier_is_written_when_it_is_seen_again():
    engine = StorageEngine(storage_admission="second_sighting", num_host_chunks=16)
    engine.fill(A)
    assert engine.serve("b", A[: 2 * BLOCK_SIZE]) > 0
    engine.rest()
    assert stored(engine) == set(engine.keys(A)[:2]), "those that both requests contained"
    engine.check_storage([A])


def test_a_chunk_that_was_evicted_meanwhile_is_written_when_it_is_saved_again():
    engine = StorageEngine(storage_admission="second_sighting")
    engine.fill(A)
    engine.fill(B)
    assert stored(engine) == set()
    engine.fill(A)
    assert stored(engine) == set(engine.keys(A))
    engine.check_storage([A])


def test_a_request_that_is_matched_often_is_one_sighting():
    engine = StorageEngine(storage_admission="second_sighting", num_host_chunks=16)
    engine.fill(A)
    for _ in range(3):
        engine.match("b", prompt(7))
    engine.serve("b", prompt(7))
    engine.rest()
    assert stored(engine) == set()


def test_chunks_are_written_when_a_request_loads_them():
    engine = StorageEngine(storage_admission="after_hit", num_host_chunks=16)
    engine.fill(A)
    engine.match("b", A)
    engine.rest()
    assert stored(engine) == set(), "a promise is no load"
    engine.scheduler.finish("b")
    assert engine.serve("c", A) > 0
    engine.rest()
    assert stored(engine) == set(engine.keys(A))
    engine.check_storage([A])


def test_a_load_counts_for_the_chunks_that_hbm_had_before_it():
    """Without the head in storage, the tail would be of no use there."""
    engine = StorageEngine(storage_admission="after_hit", num_host_chunks=16)
    engine.fill(A)
    engine.scheduler.match("b", engine.hashes(A), num_tokens=16, num_computed_tokens=2 * BLOCK_SIZE)
    engine.scheduler.admit("b", [[1, 2, 3, 4]], num_loaded_tokens=7)
    assert list(write_candidates(storage_planner(engine.scheduler))) == engine.keys(A)


def test_what_has_had_a_hit_is_demoted():
    engine = StorageEngine(storage_admission="after_hit", storage_write_on="eviction", num_host_chunks=8)
    engine.fill(A)
    engine.fill(B)
    assert engine.serve("again", A) > 0
    engine.rest()
    assert stored(engine) == set(), "it is in the host tier"
    engine.fill(prompt(3, num_blocks=8))
    assert stored(engine) == set(engine.keys(A))
    engine.check_storage([A])


def test_a_reset_forgets_no_rule():
    engine = StorageEngine(storage_admission="second_sighting", num_host_chunks=16)
    engine.fill(A)
    engine.scheduler.reset()
    engine.fill(A)
    assert stored(engine) == set(), "under its new keys it was seen once"
    engine.fill(A)
    assert stored(engine) == set(engine.keys(A))
