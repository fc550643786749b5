"""Loads in pieces on a real worker: bytes, what bounds a piece, and what becomes of a load that ends between two."""

from typing import Any

import jax
import numpy as np
import pytest

from tests.jobs import copy_job, host_block_ids
from tests.worker.engine import (
    CANCELLED,
    FAILED,
    FINISHED,
    NUM_HOST_BLOCKS,
    Engine,
    broken,
)
from tpu_offload.errors import CachesLostError
from tpu_offload.types import JobKind, StepPlan

NUM_BLOCKS = 10
STAGING = 6


def filled(path, *, max_load_blocks=0, **settings):
    """An engine whose host pool holds random bytes that were saved there, and an exact bound on a step's loads."""
    engine = Engine(path, **settings)
    if max_load_blocks:
        nbytes = engine.layout.block_nbytes_per_device
        engine = Engine(path, max_load_gb_per_step=(max_load_blocks + 0.5) * nbytes / 2**30, **settings)
    for first in range(0, NUM_HOST_BLOCKS - 4, 4):
        save = engine.save([0, 1, 2, 3], range(first, first + 4))
        engine.step(saves=[save])
        engine.expect_saved(save)
        engine.drain()
        engine.scribble()
    return engine


def long_load(engine, num_blocks=NUM_BLOCKS, *, num_staging_blocks=0):
    """A load of scattered places in all segments."""
    places = np.random.default_rng(3).permutation(16)[:num_blocks].tolist()
    blocks = tuple(range(num_blocks))
    return copy_job(
        engine.new_job_id(),
        JobKind.LOAD,
        blocks,
        places,
        request_id="r",
        num_staging_blocks=num_staging_blocks,
    )


def num_staged(engine):
    return sum(flight.num_staged for flight in engine.flights)


@pytest.mark.parametrize("window", [1, 2, 3, STAGING])
def test_a_staged_load_goes_through_its_staging_blocks_in_pieces(window) -> None:
    engine = filled("staged")
    load, peak = long_load(engine, num_staging_blocks=window), 0
    results: dict[int, Any] = {}
    engine.begin(load)
    for _ in range(200):
        peak = max(peak, num_staged(engine))
        report = engine.worker.poll(wait=True)
        results |= {result.job_id: result.state for result in report.results}
        if results:
            break
        engine.begin()
    assert results == {load.job_id: FINISHED}
    assert peak <= window
    engine.expect_loaded(load)
    engine.check()


@pytest.mark.parametrize("path", ["direct", "fused"])
def test_a_direct_load_moves_so_many_blocks_before_each_step(path) -> None:
    engine = filled(path, max_load_blocks=4)
    load = long_load(engine)
    engine.begin(load)
    sizes = [len(flight.moves) for flight in engine.flights]
    assert sum(sizes) == 4
    assert engine.worker.has_flights
    assert engine.states() == {load.job_id: FINISHED}
    engine.expect_loaded(load)
    engine.check()


def test_small_loads_do_not_wait_for_a_long_one() -> None:
    engine = filled("direct", max_load_blocks=4)
    long, small, other = long_load(engine, 8), engine.load([8], [3]), engine.load([9, 10], [0, 1])
    engine.begin(long, small, other)
    ended = [result.job_id for result in engine.worker.poll(wait=True).results]
    assert small.job_id in ended
    assert long.job_id not in ended
    states = dict.fromkeys(ended, FINISHED) | engine.states()
    assert states == dict.fromkeys([long.job_id, small.job_id, other.job_id], FINISHED)
    for job in (long, small, other):
        engine.expect_loaded(job)
    engine.check()


@pytest.mark.parametrize("path", ["direct", "staged"])
def test_a_load_that_is_cancelled_between_pieces_writes_nothing_more(path) -> None:
    engine = filled(path, max_load_blocks=4)
    load = long_load(engine, num_staging_blocks=2 if path == "staged" else 0)
    engine.begin(load)
    jax.block_until_ready(engine.caches)
    engine.begin(cancel=[load.job_id])
    engine.expect_what_is_there()
    results = engine.drain()
    assert [result.state for result in results.values()] == [CANCELLED]
    engine.scribble()
    engine.step()
    engine.check()


@pytest.mark.parametrize("path", ["direct", "staged"])
def test_a_piece_that_fails_ends_the_load_with_the_blocks_before_it(path) -> None:
    engine = filled(path, max_load_blocks=4)
    load = long_load(engine, num_staging_blocks=4 if path == "staged" else 0)
    engine.begin(load)
    real = engine.loader.load
    engine.loader.load = broken(RuntimeError("injected"))
    results: dict[int, Any] = {}
    while not results:
        results = {result.job_id: result for result in engine.worker.poll(wait=True).results}
        engine.begin()
    engine.loader.load = real
    result = results[load.job_id]
    assert result.state is FAILED
    assert result.failed_blocks == tuple(range(4, NUM_BLOCKS))
    first = copy_job(99, JobKind.LOAD, load.block_ids[:4], host_block_ids(load)[:4])
    engine.expect_loaded(first)
    engine.check()
    again = long_load(engine)
    engine.begin(again)
    engine.drain()
    engine.expect_loaded(again)
    engine.check()


def test_host_memory_that_is_lost_between_pieces_is_not_read() -> None:
    engine = filled("direct", max_load_blocks=4)
    load = long_load(engine)
    engine.begin(load)
    lost = host_block_ids(load)[9] // engine.spec.segment_blocks
    engine.memory.check_segment(lost, lost=True)
    engine.begin()
    result = engine.drain()[load.job_id]
    assert result.state is FAILED
    assert result.failed_blocks[0] >= 4, "what came before is there"
    assert not engine.worker.has_flights


def test_a_load_in_pieces_is_written_when_its_last_piece_is() -> None:
    engine = filled("direct", max_load_blocks=4)
    load = long_load(engine)
    engine.begin(load)
    written = []
    for _ in range(3):
        written.append(engine.worker.take_written_loads())
        engine.begin()
    assert written == [(), (), (load.job_id,)]
    engine.drain()


def resume_until_ended(engine):
    """What an engine does that waits for its loads before the forward pass; results by job id."""
    results: dict[int, Any] = {}
    for _ in range(200):
        results |= {result.job_id: result for result in engine.worker.poll(wait=True).results}
        if not engine.worker.has_flights:
            return results
        engine.caches = engine.worker.resume_loads(engine.caches)
    raise AssertionError("the load never ends")


@pytest.mark.parametrize("lockstep", [False, True])
def test_a_staged_load_is_resumed_within_its_step(lockstep) -> None:
    engine = filled("staged")
    if lockstep:
        engine.in_lockstep()
    load, save = long_load(engine, num_staging_blocks=2), engine.save([11], [19])
    engine.begin(load)
    results = resume_until_ended(engine)
    assert {job_id: result.state for job_id, result in results.items()} == {load.job_id: FINISHED}
    assert engine.worker.take_written_loads() == (load.job_id,)
    engine.expect_loaded(load)
    engine.end(save)  # of the same plan, which has not ended
    engine.expect_saved(save)
    assert engine.states() == {save.job_id: FINISHED}
    engine.check()
    assert engine.worker.resume_loads(engine.caches) is engine.caches, "nothing to resume"
    assert Engine("staged", num_cpu_chunks=0).worker.resume_loads(engine.caches) is engine.caches, "nor without a tier"


@pytest.mark.parametrize("half", ["load", "resume_load"])
def test_a_load_that_fails_as_it_is_resumed_ends_with_the_blocks_before_it(half) -> None:
    engine = filled("staged")
    load = long_load(engine, num_staging_blocks=2)
    engine.begin(load)
    setattr(engine.loader, half, broken(RuntimeError("injected")))
    result = resume_until_ended(engine)[load.job_id]
    assert (result.state, result.error) == (FAILED, "RuntimeError: injected")
    first = {"load": 2, "resume_load": 0}[half]
    assert result.failed_blocks == (tuple(range(first, NUM_BLOCKS)) if first else ()), "none named: all of them"
    engine.expect_loaded(copy_job(99, JobKind.LOAD, load.block_ids[:first], host_block_ids(load)[:first]))
    engine.check()


def test_caches_that_are_lost_as_a_load_is_resumed_end_the_step() -> None:
    engine = filled("staged")
    load, save = long_load(engine, num_staging_blocks=2), engine.save([11], [19])
    plan = StepPlan(step_id=engine.step_id + 1, jobs=(load, save), next_job_id=engine.sent(load, save))
    engine.caches = engine.worker.begin_step(plan, engine.caches)
    jax.block_until_ready(engine.flights[0].waiting_on)
    engine.loader.resume_load = broken(RuntimeError("injected"), takes="caches")
    with pytest.raises(CachesLostError):
        engine.worker.resume_loads(engine.caches)
    engine.worker.end_step(plan, engine.caches)
    report = engine.worker.poll(wait=True)
    ends = {result.job_id: result.state for result in report.results}
    assert ends.keys() == {load.job_id, save.job_id}
    assert ends[load.job_id] is FAILED
    assert ends[save.job_id] is CANCELLED, "the saves of the plan too: there is nothing to save"
    assert not engine.worker.has_flights
    assert num_staged(engine) == 0
    assert (report.num_cache_losses, report.oldest_job_id) == (1, plan.next_job_id)
