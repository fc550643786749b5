"""Swapping preempted requests: order, fairness, sharing, ends. test_swap_random compares tokens."""

import dataclasses

import pytest

from tests.compiled import interpreted_only
from tests.engine.helpers import SMALL_ENGINE, TINY, make_request, random_tokens, serve, tokens_of
from tests.engine.test_scheduler import FakeOffloading, add, make_scheduler, step, step_until
from tests.inside.engine import (
    engine_scheduler,
    kv_blocks,
    offload_scheduler,
    offloading,
    one_worker,
    preempt_sequence,
    waiting_sequences,
)
from tests.inside.worker import arena_segments, swap_groups
from tpu_offload import OffloadConfig, StepReport
from tpu_offload.engine import Engine, FinishReason
from tpu_offload.engine.sequence import Phase, Sequence

pytestmark = pytest.mark.usefixtures("compiled_once")

TIGHT = dataclasses.replace(SMALL_ENGINE, num_blocks=20)  # of four tokens


class FakeSwap(FakeOffloading):
    """A fake that accepts every swap; the test ends the copies."""

    def __init__(self, *, swaps=True):
        super().__init__()
        self.swaps = swaps
        self.can = set()
        self.waits = True

    def preempt(self, sequence):
        self.events.append(("preempt", sequence.sequence_id))
        return self.swaps and sequence.phase is not Phase.LOADING

    def can_swap_in(self, sequence):
        return sequence.sequence_id in self.can

    def swap_in(self, sequence, *, present):
        self.events.append(("swap_in", sequence.sequence_id, dict(present)))
        return self.waits


def pressed(*, num_blocks=9, num_old=16):
    """Two requests in few blocks, of which the newer one has just been swapped out."""
    offload = FakeSwap()
    scheduler = make_scheduler(num_blocks=num_blocks, offload=offload)
    old, new = add(scheduler, "old", num_old), add(scheduler, "new", 12)
    step_until(scheduler, lambda: new.phase is Phase.SWAPPED)
    return scheduler, offload, old, new


def test_a_swapped_request_keeps_its_computed_tokens():
    scheduler, offload, old, new = pressed()
    assert new.num_computed_tokens == len(new.tokens) - 1
    assert new.block_tables == []
    assert (new.num_preemptions, new.num_swaps, scheduler.num_swapped) == (1, 1, 1)
    scheduler.finish("old")
    assert step(scheduler) == {}  # it cannot return: its KV is lost, and the next update reports that
    assert not scheduler.awaits_copies
    offload.can.add("new")
    assert step(scheduler) == {}
    assert new.phase is Phase.RETURNING
    assert scheduler.awaits_copies
    scheduler.end_swap_in("new")
    assert step(scheduler) == {"new": 1}  # no token is computed twice
    assert old.phase is Phase.FINISHED


def test_with_nothing_to_copy_it_runs_at_once():
    scheduler, offload, _, _ = pressed()
    scheduler.finish("old")
    offload.can.add("new")
    offload.waits = False
    assert step(scheduler) == {"new": 1}


def test_swapped_requests_return_before_new_ones_and_several_at_once():
    offload = FakeSwap()
    scheduler = make_scheduler(num_blocks=30, max_num_seqs=8, offload=offload)
    first = add(scheduler, "a", 40, max_tokens=60)
    others = [add(scheduler, name, 12, max_tokens=60) for name in "bcd"]
    step_until(scheduler, lambda: all(sequence.phase is Phase.RUNNING for sequence in others))
    for _ in range(60):
        if sum(sequence.phase is Phase.SWAPPED for sequence in others) == 2:
            break
        step(scheduler)
    swapped = [sequence for sequence in others if sequence.phase is Phase.SWAPPED]
    assert [sequence.sequence_id for sequence in swapped] == ["c", "d"]  # the newest ones
    late = add(scheduler, "late", 4)
    step(scheduler)
    assert late.phase is Phase.WAITING  # it would fit, but it arrived later
    scheduler.finish("a")
    step(scheduler)
    assert late.phase is Phase.WAITING
    offload.can |= {"c", "d"}
    assert "late" in step(scheduler)
    assert all(sequence.phase is Phase.RETURNING for sequence in swapped)
    assert first.phase is Phase.FINISHED


def test_no_request_is_overtaken_or_waits_forever():
    """The first one does not fit; the ones that hold blocks are cancelled one by one, and it returns."""
    scheduler, offload, old, new = pressed()
    offload.can.add("new")
    small = add(scheduler, "small", 4)
    for _ in range(3):
        step(scheduler)
    assert (new.phase, small.phase) == (Phase.SWAPPED, Phase.WAITING)
    scheduler.finish("old")
    step(scheduler)
    assert new.phase is Phase.RETURNING
    assert old.phase is Phase.FINISHED


def test_a_victim_being_swapped_in_is_swapped_out_again():
    scheduler, offload, _, new = pressed()
    offload.can.add("new")
    scheduler.finish("old")
    step(scheduler)
    assert new.phase is Phase.RETURNING
    preempt_sequence(scheduler, new)
    assert (new.phase, new.block_tables) == (Phase.SWAPPED, [])
    assert (new.num_preemptions, new.num_swaps) == (2, 1)
    scheduler.check_invariants()


@pytest.mark.parametrize("phase", [Phase.SWAPPED, Phase.RETURNING])
def test_a_lost_swap_is_recomputed(phase):
    scheduler, offload, _, new = pressed()
    generated = new.output_tokens
    if phase is Phase.RETURNING:
        scheduler.finish("old")
        offload.can.add("new")
        step(scheduler)
    assert new.phase is phase
    scheduler.lose_swap("new")
    assert (new.phase, new.num_computed_tokens, new.num_swaps) == (Phase.WAITING, 0, 0)
    scheduler.check_invariants()
    if phase is Phase.SWAPPED:
        scheduler.finish("old")
    assert step(scheduler)["new"] > 1
    assert new.output_tokens[: len(generated)] == generated


@pytest.mark.parametrize("swaps", [True, False])
def test_a_token_in_flight_is_neither_lost_nor_duplicated(swaps):
    """The previous step is in flight when its sequence is preempted."""
    offload = FakeSwap(swaps=swaps)
    scheduler = make_scheduler(num_blocks=9, offload=offload)
    old, new = add(scheduler, "old", 16), add(scheduler, "new", 12)
    batch = scheduler.schedule()
    token = iter(range(100, 1000))
    for _ in range(40):
        following = scheduler.schedule()
        preempted = new.phase is not Phase.RUNNING
        before = list(new.tokens)
        scheduler.complete(batch, [(next(token), -1.0) for _ in batch], now_s=1.0)
        scheduler.check_invariants()
        batch = following
        if preempted:
            break
    else:
        raise AssertionError("no request was preempted")
    assert len(new.tokens) == len(before) + 1  # the token that was in flight
    assert new.num_in_flight == 0
    if swaps:
        assert new.num_computed_tokens == len(new.tokens) - 1
    assert len(new.logprobs) == len(new.output_tokens)
    assert old.phase is Phase.RUNNING


def test_blocks_recomputed_by_others_are_shared():
    """While it was swapped out another request computed the same prefix, which is shared and not copied."""
    scheduler, offload, _, new = pressed(num_blocks=16, num_old=44)
    scheduler.finish("old")
    prompt = new.request.prompt_tokens
    twin = Sequence(make_request("twin", (*prompt, 1, 2), max_tokens=5), 0.0, [*prompt, 1, 2])
    scheduler.add(twin)
    twin.arrival = 0  # moves ahead in the queue, which it normally cannot
    waiting_sequences(scheduler).reverse()
    step(scheduler)
    offload.can.add("new")
    step(scheduler)
    (event,) = [event for event in offload.events if event[0] == "swap_in"]
    assert event[2] == dict(enumerate(twin.block_tables[0][:3]))
    scheduler.end_swap_in("new")
    assert new.block_tables[0][:3] == twin.block_tables[0][:3]
    scheduler.check_invariants()


def test_a_prefix_computed_during_the_swap_in_is_deduplicated():
    """Another request computed the prefix while the swap-in was in flight."""
    scheduler, offload, _, new = pressed(num_blocks=16, num_old=44)
    scheduler.finish("old")
    offload.can.add("new")
    kv_blocks(scheduler).invalidate()  # as if all of it had been evicted from HBM
    step(scheduler)
    prompt = new.request.prompt_tokens
    twin = Sequence(make_request("twin", (*prompt, 1, 2), max_tokens=5), 0.0, [*prompt, 1, 2])
    scheduler.add(twin)
    step(scheduler)
    assert not set(new.block_tables[0]) & set(twin.block_tables[0])
    num_free = kv_blocks(scheduler).num_free
    scheduler.end_swap_in("new")
    assert new.block_tables[0][:3] == twin.block_tables[0][:3]
    assert kv_blocks(scheduler).num_free == num_free + 3
    scheduler.check_invariants()


# The whole engine.


def swap_config(**settings):
    defaults = {"swap_gb": 0.01, "swap_mode": "swap", "num_cpu_chunks": 0, "skip_jax_precompile": True}
    return OffloadConfig.create(**(defaults | settings))


def some_requests(num=4, *, max_tokens=24):
    return [make_request(f"r{i}", random_tokens(i, 14 + i), max_tokens=max_tokens) for i in range(num)]


@pytest.fixture(scope="module")
def answers():
    return serve(Engine(TINY, SMALL_ENGINE), some_requests(6))


def engine_with_one_out(**settings):
    """An engine that has just swapped out a request, and the sequence."""
    engine = Engine(TINY, TIGHT, offload=swap_config(**settings))
    engine.wait_for_host_memory()
    for request in some_requests():
        engine.add_request(request)
    for _ in range(100):
        engine.step()
        swapped = [s for s in waiting_sequences(engine_scheduler(engine)) if s.phase is Phase.SWAPPED]
        if swapped:
            return engine, swapped[0]
    raise AssertionError("no request was swapped out")


def finish(engine, outputs=()):
    outputs = {output.request_id: output for output in outputs}
    for _ in range(500):
        if not engine.has_unfinished:
            break
        outputs |= {output.request_id: output for output in engine.step() if output.finished}
        engine.check_invariants()
    for _ in range(20):
        engine.step()
    for _ in range(100):  # copies may be slow on a busy machine
        if not engine.offload_stats().num_jobs_in_flight:
            break
        offloading(engine).poll(wait=True)
    stats = engine.offload_stats()
    assert (stats.swap_held_blocks, stats.num_jobs_in_flight, stats.num_swapped_requests) == (0, 0, 0)
    assert kv_blocks(engine_scheduler(engine)).num_free == kv_blocks(engine_scheduler(engine)).total
    return outputs


@pytest.mark.parametrize("num_steps", range(8))
def test_cancelling_at_any_time_does_not_affect_other_requests(answers, num_steps):
    engine, victim = engine_with_one_out()
    for _ in range(num_steps):
        engine.step()
    aborted = engine.abort(victim.request_id)
    assert [output.finish_reason for output in aborted] in ([FinishReason.ABORTED], [])
    engine.check_invariants()
    outputs = finish(engine, aborted)
    for name, output in outputs.items():
        num_tokens = len(output.tokens)
        assert output.tokens == answers[name].tokens[:num_tokens]
    engine.close()


def test_one_call_cancels_a_list():
    engine, _ = engine_with_one_out()
    outputs = engine.abort("r0", "r1", "r2", "r3", "unknown", "r0")
    assert sorted(output.request_id for output in outputs) == ["r0", "r1", "r2", "r3"]
    assert not engine.has_unfinished
    assert finish(engine) == {}


def test_cancelling_the_others_lets_the_swapped_request_continue(answers):
    """A peer admitted nothing after a swap until a request finished, and hung if the others were cancelled."""
    engine, victim = engine_with_one_out()
    engine.abort(*({f"r{i}" for i in range(4)} - {victim.request_id}))
    outputs = finish(engine)
    assert outputs[victim.request_id].tokens == answers[victim.request_id].tokens


def test_closing_the_engine_with_copies_in_flight():
    """Closing waits for copies in flight; nothing is served or reported after it."""
    engine, _ = engine_with_one_out()
    worker = one_worker(engine)
    engine.close()
    assert not worker.has_flights
    assert not any(arena_segments(group.memory.arena) for group in swap_groups(worker))
    other, _ = engine_with_one_out()  # a second engine in this process
    finish(other)


def test_lost_reports_delay_no_other_request():
    """All but the swapped-out request are cancelled; a new one is served before the copy times out."""
    engine, victim = engine_with_one_out()
    one_worker(engine).poll = lambda *, wait=False, wait_s=1.0: StepReport(worker_id=0, results=(), num_host_slots=(0,))
    engine.abort(*({f"r{i}" for i in range(4)} - {victim.request_id}))
    engine.add_request(make_request("new", random_tokens(77, 5), max_tokens=3))
    outputs = [output for _ in range(8) for output in engine.step()]
    assert [output.request_id for output in outputs if output.finished] == ["new"]
    engine.close()


def test_a_request_that_can_never_fit_fails_alone(answers):
    engine, _ = engine_with_one_out()
    engine.add_request(make_request("huge", random_tokens(9, 70), max_tokens=40))
    outputs = finish(engine, [o for o in engine.step() if o.finished])
    assert outputs["huge"].finish_reason is FinishReason.ERROR
    assert "need 28 blocks of 4 tokens, HBM has 20" in outputs["huge"].error
    for name, expected in answers.items():
        if name in outputs:
            assert outputs[name].tokens == expected.tokens


def test_the_state_that_a_swapped_request_keeps(answers):
    """Token budget, stop tokens, times and log-probabilities continue."""
    engine, victim = engine_with_one_out()
    first_token_s, arrival_s = victim.first_token_s, victim.arrival_s
    output = finish(engine)[victim.request_id]
    assert output.finish_reason is FinishReason.LENGTH
    assert len(output.tokens) == 24
    assert output.logprobs == answers[victim.request_id].logprobs
    assert (output.stats.first_token_s, output.stats.arrival_s) == (first_token_s, arrival_s)
    assert output.stats.num_swaps == output.stats.num_preemptions >= 1
    assert output.stats.prompt_tokens.computed <= victim.num_prompt_tokens  # nothing was recomputed


def test_blocks_in_the_host_tier_are_not_swapped_out(answers):
    engine, victim = engine_with_one_out(num_cpu_chunks=64, decode_save=True)
    stats = engine.offload_stats()
    assert stats.swap_skipped_blocks > 0
    engine.step()
    assert engine.offload_stats().swapped_out_blocks < -(-victim.num_computed_tokens // 4)
    assert finish(engine)[victim.request_id].tokens == answers[victim.request_id].tokens


def test_forced_recompute_swaps_nothing(answers):
    engine = Engine(TINY, TIGHT, offload=swap_config(swap_mode="recompute"))
    engine.wait_for_host_memory()
    assert tokens_of(serve(engine, some_requests())) == {f"r{i}": answers[f"r{i}"].tokens for i in range(4)}
    stats = engine.offload_stats()
    assert stats.num_swapped_out == stats.num_recomputed_faster == 0
    assert stats.num_recomputed == engine.stats().num_preemptions > 0
    assert stats.swap_pool_blocks == 0  # no memory is allocated


@interpreted_only
def test_the_choice_is_made_from_measured_rates():
    """A fast measured prefill turns swapping off, a slow one turns it on."""
    for seconds, swaps in ((1e-9, False), (1e3, True)):
        engine = Engine(TINY, TIGHT, offload=swap_config(swap_mode="auto"))
        engine.wait_for_host_memory()
        swap = offload_scheduler(engine).swap
        for copies in swap._costs._copies.values():
            copies.add(1e6, 1.0)
        swap.observe_prefill(1000, 1000 * seconds)
        swap.observe_prefill = lambda *args: None
        serve(engine, some_requests(3))
        stats = engine.offload_stats()
        assert (stats.num_swapped_out > 0, stats.num_recomputed_faster > 0) == (swaps, not swaps)
        assert stats.prefill_tokens_per_s == pytest.approx(1 / seconds)
        engine.close()


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_rates_are_measured_while_serving(asynchronous):
    engine = Engine(TINY, dataclasses.replace(TIGHT, async_scheduling=asynchronous), offload=swap_config())
    engine.wait_for_host_memory()
    serve(engine, some_requests(6, max_tokens=40))
    stats = engine.offload_stats()
    assert min(stats.swap_out_nbytes_per_s, stats.swap_in_nbytes_per_s, stats.prefill_tokens_per_s) > 0
    assert (
        stats.swapped_out_nbytes
        == stats.swapped_out_blocks * swap_groups(one_worker(engine))[0].memory.spec.block_nbytes_per_device
    )
