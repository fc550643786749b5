"""Several samples of one prompt share its blocks, and each equals a separate request."""

import dataclasses
import functools
from typing import Any

import pytest

from tests.engine.helpers import SMALL_ENGINE, TINY, WINDOWED, make_request, random_tokens, serve
from tests.engine.test_scheduler import make_scheduler, step
from tests.inside.engine import active_sequences, engine_scheduler, kv_blocks, launch_empty_batch, preempt_sequence
from tpu_offload import OffloadConfig, RequestError
from tpu_offload.engine import Engine, FinishReason, SamplingParams
from tpu_offload.engine.sequence import Phase, Sequence

pytestmark = pytest.mark.usefixtures("compiled_once")

PROMPT = random_tokens(0, 22)  # five blocks and two tokens


def serve_samples(engine, *requests):
    for request in requests:
        engine.add_request(request)
    outputs: dict[Any, Any] = {}
    for _ in range(500):
        if not engine.has_unfinished:
            return outputs
        outputs |= {(o.request_id, o.index): o for o in engine.step() if o.finished}
        engine.check_invariants()
    raise AssertionError("no progress")


@functools.cache
def alone(model, request):
    """The samples as separate requests."""
    requests = [
        dataclasses.replace(
            request,
            request_id=str(i),
            sampling=dataclasses.replace(request.sampling, n=1, seed=request.sampling.seed + i),
        )
        for i in range(request.sampling.n)
    ]
    outputs = serve(Engine(model, SMALL_ENGINE), requests)
    return [(outputs[str(i)].tokens, outputs[str(i)].logprobs) for i in range(request.sampling.n)]


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("caching", [True, False], ids=["prefix caching", "none"])
@pytest.mark.parametrize("model", [TINY, WINDOWED], ids=["full", "windows"])
@pytest.mark.parametrize("num_prompt", [1, 4, 20, 22])
def test_each_sample_equals_a_separate_request(model, caching, asynchronous, num_prompt):
    config = dataclasses.replace(SMALL_ENGINE, enable_prefix_caching=caching, async_scheduling=asynchronous)
    request = make_request("a", PROMPT[:num_prompt], max_tokens=20, temperature=1.0, seed=5, n=3)
    outputs = serve_samples(Engine(model, config), request)
    found = [(outputs["a", i].tokens, outputs["a", i].logprobs) for i in range(3)]
    assert found == alone(model, request)
    assert len({tokens for tokens, _ in found}) == 3


@pytest.mark.parametrize("model", [TINY, WINDOWED], ids=["full", "windows"])
@pytest.mark.parametrize("caching", [True, False], ids=["prefix caching", "none"])
def test_the_prompt_is_computed_and_held_once(model, caching):
    engine = Engine(model, dataclasses.replace(SMALL_ENGINE, enable_prefix_caching=caching))
    engine.add_request(make_request("a", PROMPT, max_tokens=20, n=3))
    engine.step()
    scheduler = engine_scheduler(engine)
    (leader,) = active_sequences(scheduler)
    engine.step()
    first, second, third = active_sequences(scheduler)
    assert first is leader
    for fork in (second, third):
        assert fork.block_tables[0][:5] == leader.block_tables[0][:5]
        assert (
            fork.block_tables[0][5] != leader.block_tables[0][5]
        )  # the partial block is copied, because it is written to
        assert (fork.prompt_tokens.computed, fork.prompt_tokens.hbm) == (1, 21)
        for own, others in zip(fork.block_tables[1:], leader.block_tables[1:], strict=True):
            assert own[3:5] == others[3:5]
            assert own[5] != others[5]
    # blocks 2 to 4 of each, which are shared, and the last ones
    windows = 0 if model is TINY else 2 * (3 + 3)
    assert kv_blocks(scheduler).num_free == 64 - 5 - 3 - windows


def test_forks_that_do_not_fit_wait():
    engine = Engine(TINY, dataclasses.replace(SMALL_ENGINE, max_num_seqs=2))
    request = make_request("a", PROMPT, max_tokens=12, temperature=1.0, n=4)
    outputs = serve_samples(engine, request, make_request("b", PROMPT[:9], max_tokens=5))
    assert [outputs["a", i].tokens for i in range(4)] == [tokens for tokens, _ in alone(TINY, request)]


def test_if_a_leader_is_aborted_the_next_sample_computes_the_prompt():
    """The leader is aborted before the prompt is computed; no sample waits forever."""
    scheduler = make_scheduler()
    request = make_request("a", random_tokens(1, 60), n=3)
    samples = [Sequence(request, 0.0, list(request.prompt_tokens), i) for i in range(3)]
    scheduler.add(*samples)
    step(scheduler)
    assert [sample.phase for sample in samples] == [Phase.RUNNING, Phase.FORKED, Phase.FORKED]
    scheduler.finish("a")
    scheduler.check_invariants()
    assert [sample.phase for sample in samples[1:]] == [Phase.WAITING, Phase.FORKED]
    for _ in range(4):
        step(scheduler)
    assert [sample.phase for sample in samples[1:]] == [Phase.RUNNING, Phase.RUNNING]
    assert samples[2].block_tables[0][:14] == samples[1].block_tables[0][:14]


def test_a_fork_does_not_share_what_its_leader_is_computing_again():
    """The leader was preempted after its first token and is recomputing its prompt."""
    scheduler = make_scheduler(enable_prefix_caching=False, max_num_batched_tokens=16, max_num_seqs=4)
    request = make_request("a", random_tokens(1, 40), n=2)
    leader, fork = (Sequence(request, 0.0, list(request.prompt_tokens), i) for i in range(2))
    scheduler.add(leader, fork)
    while not leader.output_tokens:
        step(scheduler)
    preempt_sequence(scheduler, leader)
    for _ in range(2):
        step(scheduler)
    assert leader.phase is Phase.RUNNING
    assert leader.num_computed_tokens < 40
    assert fork.block_tables == []
    while fork.phase is not Phase.RUNNING:
        step(scheduler)
    assert fork.prompt_tokens.hbm in (0, 39)


def test_a_shared_prompt_is_swapped_out_once():
    tight = dataclasses.replace(SMALL_ENGINE, num_blocks=24)
    config = OffloadConfig.create(swap_gb=0.01, swap_mode="swap", num_cpu_chunks=0, skip_jax_precompile=True)
    engine = Engine(TINY, tight, offload=config)
    engine.wait_for_host_memory()
    request = make_request("a", random_tokens(3, 32), max_tokens=40, temperature=1.0, n=3)
    other = make_request("b", random_tokens(4, 8), max_tokens=60)
    outputs = serve_samples(engine, other, request)
    assert [outputs["a", i].tokens for i in range(3)] == [tokens for tokens, _ in alone(TINY, request)]
    stats = engine.offload_stats()
    assert stats.num_swapped_out >= 2
    assert stats.swap_skipped_blocks >= 8  # the prompt's blocks, for the second sample swapped out or in


@pytest.mark.parametrize("model", [TINY, WINDOWED], ids=["full", "windows"])
@pytest.mark.parametrize("caching", [True, False], ids=["prefix caching", "none"])
def test_samples_that_were_away_share_their_prompt_again(model, caching):
    config = dataclasses.replace(SMALL_ENGINE, enable_prefix_caching=caching, num_blocks=48 if model is TINY else 72)
    offload = OffloadConfig.create(swap_gb=0.01, swap_mode="swap", num_cpu_chunks=0, skip_jax_precompile=True)
    engine = Engine(model, config, offload=offload)
    engine.wait_for_host_memory()
    request = make_request("a", random_tokens(3, 41), max_tokens=24, temperature=1.0, n=3)
    engine.add_request(request)
    for _ in range(6):
        engine.step()
    scheduler = engine_scheduler(engine)
    assert len(active_sequences(scheduler)) == 3
    for sequence in list(active_sequences(scheduler)):
        preempt_sequence(scheduler, sequence)
    launch_empty_batch(engine)
    kv_blocks(scheduler).invalidate()  # as if others had overwritten everything
    outputs: dict[Any, Any] = {}
    shared = 0
    while engine.has_unfinished:
        outputs |= {o.index: o for o in engine.step() if o.finished}
        engine.check_invariants()
        tables = [s.block_tables[0][:10] for s in active_sequences(scheduler) if s.phase is Phase.RUNNING]
        shared = max(shared, len(tables) if len(tables) > 1 and all(table == tables[0] for table in tables) else 0)
    assert shared == 3
    assert [outputs[i].tokens for i in range(3)] == [tokens for tokens, _ in alone(model, request)]
    assert engine.offload_stats().num_swapped_in == 3


@pytest.mark.parametrize(("caching", "num_computed"), [(True, 2), (False, 22)])
def test_a_fork_too_late_for_its_leaders_windows(caching, num_computed):
    """They have left behind what the prompt's last token attends to; the prefix cache has kept its full blocks."""
    config = dataclasses.replace(SMALL_ENGINE, max_num_seqs=2, max_num_batched_tokens=4, enable_prefix_caching=caching)
    engine = Engine(WINDOWED, config)
    late = make_request("late", PROMPT, max_tokens=60, temperature=1.0, seed=3, n=2)
    outputs = serve_samples(engine, make_request("first", PROMPT[:5], max_tokens=30), late)
    assert [outputs["late", i].tokens for i in range(2)] == [tokens for tokens, _ in alone(WINDOWED, late)]
    assert outputs["late", 1].stats.prompt_tokens.computed == num_computed


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("num_prompt", range(17, 25))
def test_forks_find_what_the_leader_has_just_freed(asynchronous, num_prompt):
    """Its first token may have moved its windows past a block that the prompt's last token attends to."""
    engine = Engine(WINDOWED, dataclasses.replace(SMALL_ENGINE, async_scheduling=asynchronous))
    request = make_request("a", PROMPT[:num_prompt] + PROMPT[: num_prompt - 22], max_tokens=20, temperature=1.0, n=3)
    outputs = serve_samples(engine, request)
    assert [outputs["a", i].tokens for i in range(3)] == [tokens for tokens, _ in alone(WINDOWED, request)]
    assert [outputs["a", i].stats.prompt_tokens.computed for i in (1, 2)] == [1, 1]


def test_aborting_a_request_ends_all_its_samples():
    engine = Engine(TINY, SMALL_ENGINE)
    engine.add_request(make_request("a", PROMPT, n=3))
    engine.step()
    outputs = engine.abort("a")
    assert [(output.request_id, output.index) for output in outputs] == [("a", 0), ("a", 1), ("a", 2)]
    assert all(output.finish_reason is FinishReason.ABORTED for output in outputs)
    assert not engine.has_unfinished
    engine.check_invariants()


def test_names_of_samples_are_taken():
    engine = Engine(TINY, SMALL_ENGINE)
    engine.add_request(make_request("a", PROMPT, n=2))
    for request in (make_request("a", PROMPT), make_request("a#1", PROMPT)):
        with pytest.raises(RequestError, match="is still unfinished; choose another request_id"):
            engine.add_request(request)


def test_n_is_checked():
    wrong: dict[Any, str] = {0: "at least 1", 1.5: "an integer"}
    for n, expected in wrong.items():
        with pytest.raises(ValueError, match=f"n={n}; expected {expected}"):
            SamplingParams(max_tokens=1, n=n)
