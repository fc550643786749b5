"""The KV of swapped-out requests, from swap-out to swap-in, loss or discard."""

from collections.abc import Callable

import pytest

from tests.core.fakes import BLOCK_SIZE, tokens
from tests.core.swap.fakes import FAILED, FINISHED, HYBRID, WINDOWS_ONLY, SwapEngine
from tests.inside.scheduler import request_table
from tpu_offload import HostStore, JobResult, LayoutError, OffloadConfig, OffloadScheduler, RequestError, StepReport
from tpu_offload.core.swap.pool import SwapPool
from tpu_offload.types import Direction, JobKind

PROMPT = tokens(18)  # 5 blocks, the last one with one computed token


def swap_stats(engine, *names):
    stats = engine.scheduler.stats()
    return tuple(getattr(stats, name) for name in names)


def blocks_out(plan):
    return [len(part.block_ids) for job in plan.of(JobKind.SWAP_OUT) for part in job.parts]


@pytest.mark.parametrize("num_workers", [1, 3])
@pytest.mark.parametrize("layout", [SwapEngine().layout, HYBRID], ids=["full", "hybrid"])
def test_out_and_back(layout, num_workers):
    engine = SwapEngine(layout=layout, num_workers=num_workers)
    engine.start("a", PROMPT)
    assert not engine.swap.can_swap_in("a")
    assert engine.swap_out("a")
    plan = engine.step()
    assert blocks_out(plan) == ([5, 3] if engine.ring_blocks else [5])
    assert not plan.empty
    has_jobs = engine.scheduler.has_jobs
    assert has_jobs
    for worker in engine.workers:
        engine.report(worker)
    assert not engine.scheduler.has_jobs
    assert engine.swap.can_swap_in("a")
    assert engine.swap.num_blocks("a") == ((5, 3) if engine.ring_blocks else (5,))
    assert engine.swap_in("a")
    updates = engine.settle()
    assert [update.swapped_in for update in updates][-1] == ("a",)
    assert swap_stats(engine, "num_swapped_out", "num_swapped_in", "num_recomputed", "num_lost_swaps") == (1, 1, 0, 0)
    moved = 8 if engine.ring_blocks else 5
    assert swap_stats(engine, "swapped_out_blocks", "swapped_in_blocks") == (moved, moved)
    engine.check_empty()


def test_blocks_without_computed_tokens_stay():
    engine = SwapEngine()
    engine.start("a", PROMPT, num_computed=BLOCK_SIZE + 1)
    engine.swap_out("a")
    assert blocks_out(engine.step()) == [2]


@pytest.mark.parametrize(
    ("settings", "num_computed", "counted"),
    [
        ({"swap_gb": 0.0}, 17, {}),
        ({"swap_mode": "recompute"}, 17, {}),
        ({"pool": (4,)}, 17, {"num_recomputed_no_room": 1}),
        ({}, 0, {}),
    ],
)
def test_what_is_not_swapped_is_recomputed_and_counted(settings, num_computed, counted):
    engine = SwapEngine(**settings)
    engine.start("a", PROMPT, num_computed=num_computed)
    assert not engine.swap_out("a")
    assert engine.step().empty
    assert swap_stats(engine, "num_recomputed", "num_swapped_out") == (1, 0)
    for name in ("num_recomputed_no_room", "num_recomputed_faster"):
        assert swap_stats(engine, name) == (counted.get(name, 0),)
    engine.check_empty()


def test_an_exact_fit_fits():
    engine = SwapEngine(pool=(5,))
    engine.start("a", PROMPT)
    engine.start("b", tokens(5, start=100))
    assert engine.swap_out("a")
    assert not engine.swap_out("b")  # all or nothing, and there is nothing left


def test_one_round_can_mix_both():
    engine = SwapEngine(pool=(6,))
    for i, name in enumerate("abc"):
        engine.start(name, tokens(18 if name == "b" else 9, start=100 * i))
    assert [engine.swap_out(name) for name in "cba"] == [True, False, True]
    engine.settle()
    assert set(engine.out) == {"a", "c"}


def test_a_group_without_room_takes_nothing_of_the_others():
    engine = SwapEngine(layout=HYBRID, pool=(16, 2))
    engine.start("a", PROMPT)
    assert not engine.swap_out("a")
    engine.check_empty()


def test_the_pool_is_the_smallest_of_the_workers_and_grows():
    engine = SwapEngine(num_workers=2, pool=(0,))
    engine.workers[0].num_blocks = (9,)
    engine.report(engine.workers[0])
    assert swap_stats(engine, "swap_pool_blocks") == (0,)
    engine.workers[1].num_blocks = (5,)
    engine.report(engine.workers[1])
    assert swap_stats(engine, "swap_pool_blocks") == (5,)


def test_a_shared_block_is_copied_once():
    """Samples of one prompt: the first copies the prompt, the others only their own blocks."""
    engine = SwapEngine(pool=(16,))
    for i, name in enumerate("abc"):
        engine.start(name, [*tokens(12), 50 + i, 51 + i, 52 + i, 53 + i, 54 + i])
    assert all(engine.swap_out(name) for name in "abc")
    assert blocks_out(engine.step()) == [4, 1, 1]
    assert swap_stats(engine, "swap_held_blocks", "swap_skipped_blocks") == (6, 6)
    engine.settle()
    engine.swap_in("b")
    engine.discard("a")
    engine.settle()
    assert swap_stats(engine, "swap_held_blocks") == (4,)  # c's own one and the prompt
    engine.swap_in("c")
    engine.settle()
    engine.check_empty()


def test_who_shares_a_block_waits_for_its_copy_and_falls_with_it():
    engine = SwapEngine()
    for name in "ab":
        engine.start(name, [*tokens(12), *[60 + ord(name)] * 5])
    engine.swap_out("a")
    engine.failing = lambda job: job.request_id == "a"
    engine.step()
    engine.swap_out("b")  # shares blocks whose copy is not reported yet, and has failed
    engine.step()
    assert engine.swap_in("b")
    engine.step()
    (worker,) = engine.workers
    first, second, back = worker.unreported
    assert engine.report(worker, [second, back]).swapped_in == ()
    update = engine.report(worker, [first])
    assert set(update.lost_swaps) == {"a", "b"}
    assert update.swapped_in == ()
    engine.check_empty()


@pytest.mark.parametrize("first", ["out", "back"])
def test_it_may_return_before_its_copies_out_are_reported(first):
    """The copy back is dispatched after them; the request is back when both are reported, on every worker."""
    engine = SwapEngine(num_workers=2)
    engine.start("a", PROMPT)
    engine.swap_out("a")
    engine.step()
    assert engine.swap_in("a")
    engine.step()
    for i, worker in enumerate(engine.workers):
        out, back = worker.unreported
        assert engine.report(worker, [out if first == "out" else back]).swapped_in == ()
        assert engine.report(worker).swapped_in == (("a",) if i else ())
    engine.check_empty()


def test_with_nothing_to_copy_back_it_still_waits_for_its_copies_out():
    engine = SwapEngine()
    engine.start("a", tokens(9))
    engine.swap_out("a")
    engine.step()
    assert engine.swap_in("a", present={0, 1})
    engine.abort_swap_in("a")
    assert engine.swap_in("a", present={0, 1})
    assert engine.report(engine.workers[0]).swapped_in == ("a",)
    engine.check_empty()


def test_a_failed_copy_is_not_shared_afterwards():
    engine = SwapEngine()
    engine.failing = lambda job: True
    engine.start("a", PROMPT)
    engine.swap_out("a")
    engine.settle()
    engine.failing = lambda job: False
    engine.start("b", PROMPT)
    engine.swap_out("b")
    assert blocks_out(engine.step()) == [5]
    engine.settle()
    engine.swap_in("b")
    engine.settle()


def test_blocks_that_are_in_hbm_again_are_not_copied_back():
    engine = SwapEngine()
    engine.start("a", PROMPT)
    engine.swap_out("a")
    engine.settle()
    assert engine.swap_in("a", present={0, 1, 3})
    (job,) = engine.step().of(JobKind.SWAP_IN)
    assert job.num_blocks == 2
    engine.settle()
    engine.check_empty()


def test_nothing_to_copy_back_is_back_at_once():
    engine = SwapEngine()
    engine.start("a", tokens(9))  # 2 blocks, full
    engine.swap_out("a")
    engine.settle()
    assert not engine.swap_in("a", present={0, 1})
    assert "a" in engine.running
    engine.check_empty()


def tier_engine(**settings):
    """An engine whose tier has the first chunks of PROMPT."""
    engine = SwapEngine(num_host_chunks=8, **settings)
    request = engine.start("warm", PROMPT)
    engine.step([engine.scheduled(request)])
    engine.settle()
    engine.discard("warm")
    assert swap_stats(engine, "num_resident_chunks") == (4 // engine.config.blocks_per_chunk,)
    return engine


@pytest.mark.parametrize("blocks_per_chunk", [1, 2])
def test_what_the_host_tier_has_is_not_copied_again(blocks_per_chunk):
    engine = tier_engine(blocks_per_chunk=blocks_per_chunk)
    engine.start("a", PROMPT)
    engine.swap_out("a")
    assert blocks_out(engine.step()) == [1]  # the block that is not full
    engine.settle()
    # A flood of others cannot evict it.
    for i in range(6):
        other = engine.start(f"flood{i}", tokens(33, start=1000 * i + 100))
        engine.step([engine.scheduled(other)])
        engine.settle()
        engine.discard(other.name)
    engine.swap_in("a")
    (job,) = engine.step().of(JobKind.SWAP_IN)
    assert [(part.store, len(part.block_ids)) for part in job.parts] == [
        (HostStore.HOST_TIER, 4), (HostStore.SWAP_POOL, 1)
    ]  # fmt: skip
    engine.settle()
    engine.check_empty()


def test_all_of_it_in_the_tier_needs_no_copy_out():
    engine = tier_engine()
    engine.start("a", PROMPT, num_computed=16)
    assert engine.swap_out("a")
    assert engine.step().empty
    assert engine.swap.can_swap_in("a")
    engine.swap_in("a")
    engine.settle()
    engine.check_empty()


def test_tier_memory_that_is_lost_takes_the_request_with_it():
    engine = tier_engine()
    engine.start("a", PROMPT)
    engine.start("b", tokens(9, start=500))
    engine.swap_out("a")
    engine.swap_out("b")
    engine.settle()
    engine.workers[0].lose_slots(0, 1)
    update = engine.report(engine.workers[0])
    assert update.lost_swaps == ("a",)
    assert set(engine.out) == {"b"}


@pytest.mark.parametrize("where", ["leaving", "out", "returning"])
def test_lost_pool_memory_is_told(where):
    engine = SwapEngine()
    engine.start("a", PROMPT)
    engine.swap_out("a")
    engine.step()
    if where != "leaving":
        engine.settle()
    if where == "returning":
        engine.swap_in("a")
        engine.step()
    engine.workers[0].lose(0, 4, 5)
    update = engine.report(engine.workers[0])
    assert update.lost_swaps == ("a",)
    assert update.swapped_in == ()
    engine.settle()
    engine.check_empty()
    assert swap_stats(engine, "num_lost_swaps") == (1,)


@pytest.mark.parametrize("where", ["planned out", "leaving", "out", "planned in", "returning", "back"])
def test_an_end_at_any_moment_leaves_nothing(where):
    engine = SwapEngine()
    engine.start("a", PROMPT)
    engine.swap_out("a")
    steps: list[Callable[[], object]] = [
        engine.step,
        lambda: engine.report(engine.workers[0]),
        lambda: engine.swap_in("a"),
        engine.step,
        lambda: engine.report(engine.workers[0]),
    ]
    for act in steps[: ["planned out", "leaving", "out", "planned in", "returning", "back"].index(where)]:
        act()
    engine.discard("a", "unknown")
    engine.settle()
    engine.check_empty()
    assert swap_stats(engine, "num_lost_swaps") == (0,)


def test_blocks_under_a_copy_are_not_reused_until_it_is_reported():
    """No ABA: the request has ended, but its copy may still land."""
    engine = SwapEngine(pool=(5,))
    engine.start("a", PROMPT)
    engine.swap_out("a")
    engine.step()
    engine.discard("a")
    engine.start("b", tokens(18, start=100))
    assert not engine.swap_out("b")
    engine.report(engine.workers[0])
    engine.start("c", tokens(18, start=200))
    assert engine.swap_out("c")


def test_taken_away_again_while_it_comes_back():
    engine = SwapEngine()
    engine.start("a", PROMPT)
    engine.swap_out("a")
    engine.settle()
    engine.swap_in("a")
    engine.abort_swap_in("a")  # before it was sent
    assert engine.step().of(JobKind.SWAP_IN) == ()
    engine.swap_in("a")
    engine.step()
    engine.abort_swap_in("a")  # in flight; its HBM blocks are others' now
    assert engine.swap.can_swap_in("a")
    engine.swap_in("a")
    engine.settle()
    assert "a" in engine.running
    assert swap_stats(engine, "num_swapped_in") == (1,)
    engine.check_empty()


def check_it_goes_on(engine):
    """The request comes back, and is saved and swapped out like any other."""
    engine.swap_in("a")
    engine.settle()
    request = engine.running["a"]
    engine.step([engine.scheduled(request)])
    engine.settle()
    assert engine.scheduler.stats().saved_blocks == request.num_computed // BLOCK_SIZE
    assert engine.swap_out("a")


def test_a_loss_of_the_caches_costs_a_request_that_is_out_nothing():
    """Its KV is in the pool: once it is back, it is saved and swapped out like any other."""
    engine = SwapEngine(num_host_chunks=8)
    engine.start("a", PROMPT)
    engine.swap_out("a")
    engine.settle()
    engine.scheduler.mark_caches_lost()
    assert engine.swap.can_swap_in("a")
    check_it_goes_on(engine)
    engine.settle()
    engine.discard("a")
    engine.settle()
    engine.check_empty()


@pytest.mark.parametrize("is_sent", [False, True])
def test_a_loss_while_a_request_returns_costs_it_nothing_either(is_sent):
    engine = SwapEngine(num_host_chunks=8)
    engine.start("a", PROMPT)
    engine.swap_out("a")
    engine.settle()
    engine.swap_in("a")
    if is_sent:
        engine.step()
    engine.scheduler.mark_caches_lost()
    engine.abort_swap_in("a")
    engine.settle()
    check_it_goes_on(engine)


def test_a_loss_while_a_request_returns_counts_until_its_return_is_aborted():
    """Its blocks may hold nothing."""
    engine = SwapEngine(num_host_chunks=8)
    engine.start("a", PROMPT)
    engine.swap_out("a")
    engine.settle()
    engine.swap_in("a")
    engine.scheduler.mark_caches_lost()
    assert not request_table(engine.scheduler)["a"].can_save


def test_abort_when_the_loss_is_not_reported_yet():
    engine = SwapEngine()
    engine.start("a", PROMPT)
    engine.swap_out("a")
    engine.settle()
    engine.swap_in("a")
    engine.step()
    engine.scheduler.reset()
    engine.abort_swap_in("a")
    assert not engine.swap.can_swap_in("a")
    assert engine.report(engine.workers[0]).lost_swaps == ("a",)
    engine.check_empty()


def test_a_failed_copy_back_is_recomputed():
    engine = SwapEngine()
    engine.start("a", PROMPT)
    engine.swap_out("a")
    engine.settle()
    engine.failing = lambda job: True
    engine.swap_in("a")
    updates = engine.settle()
    assert [update.lost_swaps for update in updates if update.lost_swaps] == [("a",)]
    assert swap_stats(engine, "num_failed_jobs", "num_lost_swaps") == (1, 1)
    engine.check_empty()


@pytest.mark.parametrize("direction", ["out", "in"])
def test_what_is_never_reported_times_out_and_what_it_may_still_write_is_not_reused(direction, caplog):
    engine = SwapEngine(job_timeout_s=10.0)
    engine.start("a", PROMPT)
    engine.swap_out("a")
    if direction == "in":
        engine.settle()
        engine.swap_in("a")
    engine.step()
    engine.clock.now_s += 11
    engine.step()
    late, engine.workers[0].unreported = engine.workers[0].unreported, []
    assert engine.report(engine.workers[0]).lost_swaps == ("a",)
    assert f"swap {direction} of request a timed out; the request is recomputed" in caplog.text
    assert swap_stats(engine, "swap_held_blocks", "num_timed_out_jobs", "num_failed_jobs") == (
        5 if direction == "out" else 0, 1, 1
    )  # fmt: skip
    assert not engine.scheduler.has_jobs  # no request waits for it
    assert engine.report(engine.workers[0], late).swapped_in == ()  # late: it frees the memory, nothing else
    engine.check_empty()


def test_reset_recomputes_what_is_out():
    engine = tier_engine()
    for i, name in enumerate("abcd"):
        engine.start(name, tokens(18, start=100 * i))
    for name in "abc":
        engine.swap_out(name)
    engine.settle()
    engine.swap_in("b")
    engine.step()
    engine.swap_out("d")
    engine.step()
    engine.scheduler.reset()
    assert not engine.swap.can_swap_in("a")
    with pytest.raises(RequestError, match="request a is not swapped out, or its KV is lost; call can_swap_in first"):
        engine.swap.num_blocks("a")  # the engine has not been told yet
    update = engine.report(engine.workers[0])
    assert set(update.lost_swaps) == {"a", "b", "c", "d"}
    assert update.swapped_in == ()
    engine.settle()
    engine.check_empty()


def test_swapped_out_again_soon_after_is_thrash():
    engine = SwapEngine()
    engine.start("a", PROMPT)
    for num_steps, thrashed in ((0, 0), (5, 1), (40, 1), (1, 2)):
        for _ in range(num_steps):
            engine.step()
        engine.swap_out("a")
        assert swap_stats(engine, "num_thrashed_swaps") == (thrashed,)
        engine.settle()
        engine.swap_in("a")
        engine.settle()
    for _ in range(40):
        engine.step()
    assert not engine.swap._stats._swapped_in_at


def test_results_that_fit_nothing_change_nothing():
    engine = SwapEngine(num_workers=2)
    engine.start("a", PROMPT)
    engine.swap_out("a")
    engine.step()
    (result,) = engine.workers[0].unreported
    planned = [JobResult(job_id=result.job_id + 1, state=FINISHED), JobResult(job_id=99, state=FAILED)]
    engine.report(engine.workers[0], [result, result, *planned])
    engine.report(engine.workers[0], [result])
    engine.scheduler.apply(StepReport(worker_id=7, results=(result,), num_host_slots=(0,)))
    assert engine.scheduler.has_jobs
    assert swap_stats(engine, "num_ignored_results", "num_rejected_reports") == (4, 1)
    engine.report(engine.workers[1])
    assert not engine.scheduler.has_jobs


def test_calls_that_make_no_sense_change_nothing():
    engine = SwapEngine(layout=HYBRID)
    request = engine.start("a", PROMPT)
    tables = [request.block_ids, request.ring]
    with pytest.raises(RequestError, match="has 1 block tables; expected 2"):
        engine.swap.swap_out("a", tables[:1], num_computed_tokens=17)
    with pytest.raises(RequestError, match="has 4 blocks for 17 computed tokens; expected 5"):
        engine.swap.swap_out("a", [tables[0][:4], tables[1]], num_computed_tokens=17)
    with pytest.raises(RequestError, match="request a is not swapped out"):
        engine.swap.num_blocks("a")
    with pytest.raises(
        RequestError, match=r"computed 512 tokens, which attend to 'many', in 0\.1 seconds; expected num"
    ):
        engine.swap.observe_prefill(512, 0.1, "many")  # type: ignore[arg-type]
    engine.check_empty()
    with pytest.raises(RequestError, match="num_computed_tokens=-3; expected an integer from 0 on"):
        engine.swap.swap_out("a", tables, num_computed_tokens=-3)
    with pytest.raises(RequestError, match="cannot be swapped in now; call can_swap_in"):
        engine.swap.swap_in("a", tables)
    engine.swap_out("a")
    with pytest.raises(RequestError, match="a is swapped out already"):
        engine.swap.swap_out("a", tables, num_computed_tokens=17)
    with pytest.raises(RequestError, match="is not being swapped in"):
        engine.swap.abort_swap_in("a")
    engine.settle()
    with pytest.raises(RequestError, match=r"into \[4, 3\] blocks; expected at least \[5, 3\]"):
        engine.swap.swap_in("a", [[0, 1, 2, 3], [0, 1, 2]])
    with pytest.raises(RequestError, match="present; expected numbers under 5"):
        engine.swap.swap_in("a", tables, present={5})
    with pytest.raises(RequestError, match="in present, number=-1; expected an integer from 0 on"):
        engine.swap.swap_in("a", tables, present={-1, 2})
    assert engine.swap_in("a")
    engine.settle()
    engine.check_empty()


def test_a_measured_rate_comes_from_measured_copies():
    engine = SwapEngine()
    engine.start("a", PROMPT)
    engine.swap_out("a")
    engine.step()
    (result,) = engine.workers[0].unreported
    engine.workers[0].unreported = [JobResult(job_id=result.job_id, state=FINISHED, copy_s=0.5)]
    engine.report(engine.workers[0])
    nbytes = 5 * engine.layout.groups[0].block_nbytes
    assert swap_stats(engine, "swap_out_nbytes_per_s", "swap_in_nbytes_per_s") == (2 * nbytes, 0)
    assert swap_stats(engine, "swapped_out_nbytes") == (nbytes,)


def test_hybrid_layouts_swap_but_have_no_host_tier():
    with pytest.raises(LayoutError, match="the host tier supports one"):
        OffloadScheduler(OffloadConfig.create(swap_gb=1), HYBRID)
    OffloadScheduler(OffloadConfig.create(swap_gb=1, host_gb=0), HYBRID)


def test_hashes_do_not_name_the_blocks_of_a_ring():
    """All layers have windows: two requests with one prefix hold other tokens by now, in places of the same number."""
    engine = SwapEngine(layout=WINDOWS_ONLY)
    for name in "ab":
        engine.start(name, [*tokens(12), *[50 + ord(name)] * 12])
    for name in "ab":
        engine.swap_out(name)
    assert blocks_out(engine.step()) == [3, 3]
    with pytest.raises(RequestError, match="expected numbers under 0"):
        engine.swap.swap_in("b", [[0, 1, 2]], present={0})
    for name in "ab":
        engine.swap_in(name)
    engine.settle()
    engine.check_empty()


def test_memory_that_is_gone_for_good_is_tried_last():
    """A segment that cannot be allocated again must not swallow one request after the other."""
    engine = SwapEngine(pool=(10,))
    engine.failing = lambda job: any(place < 5 for part in job.parts for place in part.host_block_ids)
    for i in range(4):
        engine.start(f"r{i}", tokens(18, start=100 * i))
        engine.swap_out(f"r{i}")
        engine.settle()
        if i:
            engine.swap_in(f"r{i}")
            engine.settle()
    assert swap_stats(engine, "num_lost_swaps", "num_swapped_in") == (1, 3)
    engine.failing = lambda job: False
    engine.start("x", tokens(18, start=900))
    engine.start("y", tokens(18, start=1000))
    engine.swap_out("x")
    engine.swap_out("y")  # needs the places that were in doubt
    engine.settle()
    for name in "xy":
        engine.swap_in(name)
        engine.settle()
    assert swap_stats(engine, "num_lost_swaps") == (1,)
    engine.start("z", tokens(18, start=1100))
    engine.swap_out("z")
    (job,) = engine.step().of(JobKind.SWAP_OUT)
    assert set(job.parts[0].host_block_ids) == set(range(5)), (
        "not in doubt any more: the places that were freed last, as of any others"
    )


def test_memory_in_doubt_comes_after_what_is_new():
    pool = SwapPool(num_groups=1)
    pool.grow([2])
    pool.mark_suspect(0, {0, 1})
    pool.grow([4])
    taken = pool.allocate([2])
    assert taken is not None
    assert set(taken[0]) == {2, 3}
    assert pool.allocate([2]) is not None
    assert pool.allocate([1]) is None


def test_direction_of_the_parts():
    engine = SwapEngine()
    engine.start("a", PROMPT)
    engine.swap_out("a")
    (job,) = engine.step().of(JobKind.SWAP_OUT)
    assert (job.direction, job.request_id) == (Direction.SAVE, "a")


def test_a_request_that_is_swapped_out_again_before_it_is_known_as_lost() -> None:
    """Its engine has recomputed it since: the update must not have it recomputed once more."""
    engine = SwapEngine(swap_mode="swap")
    scheduler = engine.scheduler
    assert scheduler.swap.swap_out("a", [[1, 2]], num_computed_tokens=8)
    scheduler.preempt("a")
    scheduler.reset()
    assert not scheduler.swap.can_swap_in("a")
    assert scheduler.swap.swap_out("a", [[3, 4]], num_computed_tokens=8)
    scheduler.check_invariants()
    assert scheduler.take_update().lost_swaps == ()
    assert scheduler.swap.can_swap_in("a")
