"""KV computed before a reset of the cache serves no later request, in HBM or from the host."""

import dataclasses
from typing import Any

import pytest

from tests.engine.helpers import SMALL_ENGINE, TINY, make_request, random_tokens, serve, tokens_of
from tests.engine.test_cache_loss import check_at_rest, make_engine
from tests.engine.test_scheduler import FakeOffloading, add, make_scheduler, step, step_until
from tests.engine.test_swap import FakeSwap
from tests.inside.engine import (
    active_sequences,
    block_manager,
    engine_scheduler,
    kv_blocks,
    launch_empty_batch,
    offload_scheduler,
    preempt_sequence,
    waiting_sequences,
)
from tests.inside.scheduler import tier_context
from tpu_offload import OffloadConfig
from tpu_offload.engine import Engine, Seams
from tpu_offload.engine.request import PromptTokens
from tpu_offload.engine.sequence import Phase, Sequence

ROOMY = dataclasses.replace(SMALL_ENGINE, num_blocks=64)
PROMPT = random_tokens(1, 24)  # six blocks

both_schedulings = pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])


def finish(engine, *names):
    """Runs until these requests have ended; others continue."""
    outputs: dict[Any, Any] = {}
    for _ in range(500):
        outputs |= {(o.request_id, o.index): o for o in engine.step() if o.finished}
        engine.check_invariants()
        if set(names) <= {name for name, _ in outputs}:
            return {name: output for (name, index), output in outputs.items() if index == 0}
    raise AssertionError("no progress")


def ask(engine, name, prompt, **sampling):
    """Serves a request; returns the sources of its prompt tokens."""
    engine.add_request(make_request(name, prompt, **({"max_tokens": 2} | sampling)))
    return finish(engine, name)[name].stats.prompt_tokens


def push_out(engine, num=4):
    """Evicts everything from HBM by other prompts."""
    for i in range(num):
        ask(engine, f"other {i}", random_tokens(50 + i, 60))


def computed(num_tokens):
    return PromptTokens(computed=num_tokens)


@both_schedulings
@pytest.mark.parametrize("num_steps", [1, 2, 5])
@pytest.mark.parametrize(
    "config", [ROOMY, dataclasses.replace(ROOMY, max_num_batched_tokens=16)], ids=["one", "chunks"]
)
def test_a_running_request_shares_nothing_that_it_computes(config, num_steps, asynchronous):
    engine = make_engine(config=config, asynchronous=asynchronous, decode_save=True)
    engine.add_request(make_request("old", PROMPT, max_tokens=40, seed=1))
    for _ in range(num_steps):
        engine.step()
    engine.reset_cache()
    for _ in range(14):
        engine.step()
    assert ask(engine, "new", PROMPT) == computed(24)
    old = finish(engine, "old")["old"]
    sources = ask(engine, "newer", (*PROMPT, *old.tokens))
    assert (sources.hbm, sources.host) == (24, 0), "only the prompt was computed by the second request"
    push_out(engine)
    sources = ask(engine, "newest", (*PROMPT, *old.tokens))
    assert sources.computed <= 4, "the blocks computed by the third one were saved"
    assert sources.host > 0
    check_at_rest(engine)


@both_schedulings
def test_nothing_of_a_running_request_is_saved_later(asynchronous):
    """Not even if a new request finds it in HBM and offers it for saving."""
    engine = make_engine(config=ROOMY, asynchronous=asynchronous, decode_save=True)
    engine.add_request(make_request("old", PROMPT, max_tokens=60))
    engine.step()
    engine.reset_cache()
    finish(engine, "old")
    before = engine.offload_stats().saved_blocks
    push_out(engine, num=1)
    assert engine.offload_stats().num_resident_chunks == engine.offload_stats().saved_blocks - before == 15
    check_at_rest(engine)


@both_schedulings
def test_a_request_that_waits_for_blocks_is_like_a_new_one(asynchronous):
    config = dataclasses.replace(ROOMY, max_num_seqs=1)
    engine = make_engine(config=config, asynchronous=asynchronous)
    engine.add_request(make_request("old", random_tokens(2, 24), max_tokens=8))
    engine.add_request(make_request("waits", PROMPT, max_tokens=4))
    engine.step()
    engine.reset_cache()
    assert finish(engine, "old", "waits")["waits"].stats.prompt_tokens == computed(24)
    assert ask(engine, "new", PROMPT).hbm == 20
    check_at_rest(engine)


@both_schedulings
@pytest.mark.parametrize("num_steps", [1, 4], ids=["forked after", "forked before"])
def test_samples_share_the_prompt_among_themselves_only(num_steps, asynchronous):
    """Samples forked after the reset are new to the library, which would save the shared blocks."""
    request = make_request("old", PROMPT, max_tokens=24, temperature=1.0, seed=3, n=3)
    alone = [dataclasses.replace(request, request_id=f"{i}") for i in range(3)]
    alone = [
        dataclasses.replace(one, sampling=dataclasses.replace(one.sampling, n=1, seed=3 + i))
        for i, one in enumerate(alone)
    ]
    expected = tokens_of(serve(Engine(TINY, ROOMY), alone))
    engine = make_engine(config=ROOMY, asynchronous=asynchronous, decode_save=True)
    engine.add_request(request)
    for _ in range(num_steps):
        engine.step()
    assert engine.stats().num_active == (1 if num_steps == 1 else 3)
    engine.reset_cache()
    for _ in range(3):
        engine.step()
    before = engine.offload_stats().saved_blocks  # includes blocks in flight, which are not published
    outputs: dict[Any, Any] = {}
    while len(outputs) < 3:
        outputs |= {o.index: o for o in engine.step() if o.finished}
        engine.check_invariants()
    assert [outputs[i].tokens for i in range(3)] == [expected[f"{i}"] for i in range(3)]
    assert [outputs[i].stats.prompt_tokens.hbm for i in range(3)] == [0, 23, 23], "they continue unchanged"
    for _ in range(10):
        engine.step()
    stats = engine.offload_stats()
    assert (stats.saved_blocks - before, stats.num_resident_chunks) == (0, 0)
    assert ask(engine, "new", PROMPT) == computed(24)
    check_at_rest(engine)


@both_schedulings
def test_a_load_in_flight(asynchronous):
    """Part of the prompt is in HBM, also from before the reset."""
    silent = False
    offload = OffloadConfig.create(num_cpu_chunks=256, staging_buffer_tokens=256)
    config = dataclasses.replace(ROOMY, num_blocks=40, async_scheduling=asynchronous)
    engine = Engine(TINY, config, offload=offload, seams=Seams(relay=lambda report: [] if silent else [report]))
    engine.wait_for_host_memory()
    long = random_tokens(7, 80)
    answer = serve(engine, [make_request("first", long, max_tokens=4)])["first"].tokens
    push_out(engine)
    for num_hbm in (0, 40):
        if num_hbm:
            ask(engine, "first again", long)
            push_out(engine)
            ask(engine, "part", long[:num_hbm])
        engine.add_request(make_request("loads", long, max_tokens=4))
        silent = True
        engine.step()
        silent = False
        (loading,) = active_sequences(engine_scheduler(engine))
        assert (loading.phase, loading.num_computed_tokens) == (Phase.LOADING, num_hbm)
        engine.reset_cache()
        output = finish(engine, "loads")["loads"]
        assert output.tokens == answer
        assert output.stats.prompt_tokens.host == 0
        # Without a part in HBM nothing from before the reset is left, and the recomputed blocks can be shared.
        assert ask(engine, "new", long).hbm == (0 if num_hbm else 76)
    engine.close()


SWAPS = {"swap_gb": 0.01, "swap_mode": "swap", "num_cpu_chunks": 64, "decode_save": True}


@both_schedulings
@pytest.mark.parametrize("when", ["out before", "being swapped in", "out after"])
def test_a_swapped_request(when, asynchronous):
    engine = make_engine(config=ROOMY, asynchronous=asynchronous, **SWAPS)
    request = make_request("old", PROMPT, max_tokens=30, temperature=1.0, seed=1)
    expected = tokens_of(serve(Engine(TINY, ROOMY), [request]))
    engine.add_request(request)
    for _ in range(6):
        engine.step()
    scheduler = engine_scheduler(engine)
    (old,) = active_sequences(scheduler)
    if when == "out after":
        engine.reset_cache()
        engine.step()
    preempt_sequence(scheduler, old)
    assert old.phase is Phase.SWAPPED
    launch_empty_batch(engine)
    if when == "being swapped in":
        waiting_sequences(scheduler).remove(old)
        assert scheduler._swap_in(old)
        active_sequences(scheduler).append(old)
    if when != "out after":
        engine.reset_cache()
    # Before any of it is recomputed.
    engine.step()
    goes_on = old.num_computed_tokens > 0 and old.is_stale
    assert goes_on == (when == "out after")
    sources = ask(engine, "new", PROMPT)
    assert sources.host == 0
    outputs = finish(engine, "old")
    assert tokens_of(outputs)["old"] == expected["old"]
    assert outputs["old"].stats.prompt_tokens.host == 0
    if when == "out after":
        assert sources == computed(24)
        assert outputs["old"].stats.prompt_tokens == computed(24), "it was computed once and swapped in"
        assert ask(engine, "newer", (*PROMPT, *expected["old"])).hbm == 24
    else:
        assert ask(engine, "newer", (*PROMPT, *expected["old"])).hbm > 40, "all of it was recomputed"
    check_at_rest(engine)


def test_requests_swapped_out_after_a_reset_are_not_found_by_hash():
    """Otherwise a request that is swapped out later would get these blocks instead of its own."""
    engine = make_engine(config=ROOMY, **SWAPS)
    for name in ("old", "new"):
        engine.add_request(make_request(name, PROMPT, max_tokens=30))
        for _ in range(3):
            engine.step()
        if name == "old":
            engine.reset_cache()
    before = engine.offload_stats().swap_skipped_blocks
    old, new = active_sequences(engine_scheduler(engine))
    assert (old.is_stale, new.is_stale) == (True, False)
    preempt_sequence(engine_scheduler(engine), old)
    preempt_sequence(engine_scheduler(engine), new)
    stats = engine.offload_stats()
    assert stats.num_swapped_out == 2
    assert stats.swap_skipped_blocks - before <= 6, "only what the host tier has of the second one"
    pool = tier_context(offload_scheduler(engine)).swap_pool
    assert pool.find(old.block_hashes[:6]) == [None] * 6
    outputs = finish(engine, "old", "new")
    assert outputs["old"].tokens == outputs["new"].tokens
    check_at_rest(engine)


def test_one_that_is_swapped_in_does_not_share_blocks_computed_since():
    offload = FakeSwap()
    scheduler = make_scheduler(offload=offload)
    old = add(scheduler, "old", 24, seed=1)
    step(scheduler)
    scheduler.invalidate_prefixes()
    new = add(scheduler, "new", 24, seed=1)
    step_until(scheduler, lambda: new.output_tokens)
    preempt_sequence(scheduler, old)
    offload.can.add("old")
    step_until(scheduler, lambda: old.phase is Phase.RETURNING)
    assert offload.events[-1] == ("swap_in", "old", {})
    scheduler.end_swap_in("old")
    step(scheduler)
    assert not set(old.block_tables[0]) & set(new.block_tables[0])


def test_a_sample_that_was_computed_again_shares_with_none_that_was_not():
    offload = FakeSwap(swaps=False)
    scheduler = make_scheduler(enable_prefix_caching=False, offload=offload)
    request = make_request("a", PROMPT, max_tokens=30, n=2)
    leader, fork = (Sequence(request, 0.0, list(PROMPT), i) for i in range(2))
    scheduler.add(leader, fork)
    step_until(scheduler, lambda: fork.phase is Phase.RUNNING)
    assert fork.block_tables[0][:5] == leader.block_tables[0][:5]
    scheduler.invalidate_prefixes()
    preempt_sequence(scheduler, fork)
    step_until(scheduler, lambda: fork.phase is Phase.RUNNING)
    assert (leader.is_stale, fork.is_stale) == (True, False)
    offload.swaps = True
    preempt_sequence(scheduler, fork)
    offload.can.add("a#1")
    step_until(scheduler, lambda: fork.phase is Phase.RETURNING)
    assert offload.events[-1] == ("swap_in", "a#1", {})


def test_one_swapped_out_before_and_swapped_in_after_is_not_shared():
    """The library drops it and reports that; the scheduler does not rely on it."""
    offload = FakeSwap()
    scheduler = make_scheduler(offload=offload)
    old = add(scheduler, "old", 24)
    step(scheduler)
    preempt_sequence(scheduler, old)
    scheduler.invalidate_prefixes()
    offload.can.add("old")
    step_until(scheduler, lambda: old.phase is Phase.RETURNING)
    scheduler.end_swap_in("old")
    step(scheduler)
    assert kv_blocks(scheduler).find_prefix(old.block_hashes) == [{}]


def test_one_that_is_computed_again_shares_again():
    scheduler = make_scheduler()
    old = add(scheduler, "old", 24)
    step(scheduler)
    scheduler.invalidate_prefixes()
    was_stale = old.is_stale
    preempt_sequence(scheduler, old)
    assert was_stale
    assert not old.is_stale
    for _ in range(2):
        step(scheduler)
    new = Sequence(old.request, 0.0, list(old.request.prompt_tokens))
    new.request = dataclasses.replace(old.request, request_id="new")
    scheduler.add(new)
    step(scheduler)
    assert new.prompt_tokens.hbm == 20


def test_a_load_that_succeeds_despite_the_reset_is_not_shared():
    scheduler = make_scheduler(offload=FakeOffloading(8))
    old = add(scheduler, "old", 24)
    step_until(scheduler, lambda: old.phase is Phase.LOADING)
    scheduler.invalidate_prefixes()
    scheduler.end_load("old")
    step(scheduler)
    assert old.is_stale
    assert kv_blocks(scheduler).find_prefix(old.block_hashes) == [{}]


def test_the_invariant_can_fail():
    scheduler = make_scheduler()
    old = add(scheduler, "old", 24)
    step(scheduler)
    scheduler.invalidate_prefixes()
    block_manager(kv_blocks(scheduler)).register(old.block_tables[0][0], old.block_hashes[0])
    with pytest.raises(AssertionError, match="KV from before a reset is in the prefix cache"):
        scheduler.check_invariants()
