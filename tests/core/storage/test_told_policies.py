"""What eviction policies are told of storage, in simulated time: which chunks it has, and what a hit there is worth."""

import functools

import pytest

from tests.core.policies.told import ToldPolicy
from tests.core.storage.test_load_or_recompute import (
    BREAK_EVEN,
    CHUNK_NBYTES,
    CHUNK_TOKENS,
    LATENCY_S,
    World,
    prefill_s,
)
from tests.core.storage.test_lookups import turn
from tests.inside.scheduler import request_table, storage_planners
from tests.storage.fakes import SharedEngine, prompt
from tpu_offload.config import LoadMode
from tpu_offload.core.policies import Use
from tpu_offload.core.policies.base import STORAGE_WORTH


def make(mode=LoadMode.AUTO, *, share=2.0, **settings):
    """A world whose tier reads at a share of the break-even, and the uses that its policy is told of, in order."""
    uses: dict[int, Use] = {}
    return World(mode, rate=share * BREAK_EVEN, policy=functools.partial(ToldPolicy, uses), **settings), uses


def use_of(scheduler, name):
    """What a request in the queue would tell a policy."""
    return request_table(scheduler)[name].use


def last(uses):
    return list(uses.values())[-1]


@pytest.mark.parametrize("mode", LoadMode)
@pytest.mark.parametrize("share", [0.3, 2.0, 30.0])
def test_an_eviction_policy_is_told_what_a_read_saves(share, mode):
    """By the times that were measured. Where storage is not read, or slower, a hit there is worth nothing."""
    world, uses = make(mode, share=share)
    world.warm_up()
    num_tokens = 100 * CHUNK_TOKENS
    for _ in range(2):
        world.serve(1, num_tokens)
    told = last(uses)
    assert told.num_in_storage == 100
    took_s = 4 * LATENCY_S + 100 * CHUNK_NBYTES / world.rate
    expected = 0 if mode is LoadMode.RECOMPUTE else max(0, 1 - took_s / prefill_s(0, num_tokens))
    assert told.storage_worth == pytest.approx(expected, abs=0.02)


def test_before_times_are_measured_a_read_is_taken_to_save_three_quarters():
    world, uses = make()
    for _ in range(2):
        world.serve(1, 4096)
    first, second = uses.values()
    assert (first.num_in_storage, second.num_in_storage) == (0, 4096 // CHUNK_TOKENS)
    assert first.storage_worth == second.storage_worth == STORAGE_WORTH


def test_what_another_request_is_having_read_is_read_once():
    """Two requests with one prompt, the second while the first is read: both wait for the same bytes."""
    world, _ = make(num_cpu_chunks=80)
    world.warm_up()
    num_tokens = 32 * CHUNK_TOKENS
    world.serve(1, num_tokens)
    world.push_out()
    hashes, worths = world.hashes(1, num_tokens), []
    for name in ("first", "second"):
        world.scheduler.match(name, hashes, num_tokens=num_tokens, num_computed_tokens=0)
        use = use_of(world.scheduler, name)
        assert use.num_in_storage == 32
        worths.append(use.storage_worth)
        world.step()
    assert worths[1] == pytest.approx(worths[0], abs=0.02)


def test_a_request_that_returns_after_a_preemption_is_told_again():
    world, _ = make()
    num_tokens = 16 * CHUNK_TOKENS
    world.serve(1, num_tokens)
    hashes = world.hashes(1, num_tokens)
    for _ in range(2):
        world.scheduler.match("r", hashes, num_tokens=num_tokens, num_computed_tokens=0)
        assert use_of(world.scheduler, "r").num_in_storage == 16
        world.scheduler.release("r")
        world.scheduler.admit("r", [range(len(hashes))], num_loaded_tokens=0)
        world.scheduler.preempt("r")


def test_after_a_reset_storage_has_nothing():
    world, _ = make()
    num_tokens = 16 * CHUNK_TOKENS
    world.serve(1, num_tokens)
    hashes = world.hashes(1, num_tokens)
    world.scheduler.match("r", hashes, num_tokens=num_tokens, num_computed_tokens=0)
    assert use_of(world.scheduler, "r").num_in_storage == 16
    world.scheduler.release("r")
    world.scheduler.reset()
    world.scheduler.match("r", hashes, num_tokens=num_tokens, num_computed_tokens=0)
    assert use_of(world.scheduler, "r").num_in_storage == 0


def test_storage_that_is_suspended_counts_as_empty():
    world, uses = make(breaker_failures=5, breaker_retry_s=1e6)
    num_tokens = 16 * CHUNK_TOKENS
    world.serve(1, num_tokens)
    (planner,) = storage_planners(world.scheduler)
    for job_id in range(5):
        planner.reads.breaker.failed(job_id, "the disk is gone")
    assert not planner.reads.are_admitted
    world.serve(1, num_tokens)
    assert last(uses).num_in_storage == 0


def test_requests_that_never_wait_are_not_told():
    world, uses = make(storage_wait_s=0.0)
    for _ in range(2):
        world.serve(1, 4096)
    assert last(uses).num_in_storage == 0


def test_what_shared_storage_answers_is_told():
    """A lookup has it known; the request is matched again then."""
    engine, of_others = SharedEngine(), prompt(1)
    engine.others_store(of_others)
    engine.match("r", of_others)
    assert use_of(engine.scheduler, "r").num_in_storage == 0
    turn(engine)
    engine.match("r", of_others)
    assert use_of(engine.scheduler, "r").num_in_storage == 4
