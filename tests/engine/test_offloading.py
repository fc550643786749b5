"""The engine with the library: the same tokens, and KV is really loaded from the host."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from tests.compiled import interpreted_only
from tests.engine.helpers import (
    SMALL_ENGINE,
    TINY,
    make_request,
    num_loaded,
    random_tokens,
    rounds,
    serve,
    serve_rounds,
    tokens_of,
)
from tests.grids import few
from tests.inside.engine import offload_scheduler, one_worker
from tests.inside.worker import tier_group
from tpu_offload import OffloadConfig, RequestError, Update
from tpu_offload.engine import Engine, FinishReason
from tpu_offload.types import Direction, JobKind

pytestmark = pytest.mark.usefixtures("compiled_once")

# One conversation fills most of it, so that each turn evicts the others.
TIGHT = dataclasses.replace(SMALL_ENGINE, num_blocks=28, max_num_seqs=3)


def make_offload(**changes) -> OffloadConfig:
    settings = {"num_cpu_chunks": 256, "staging_buffer_tokens": 256, "host_segment_gb": 0.001}
    return OffloadConfig.create(**(settings | changes))


@pytest.fixture(scope="module")
def plain_outputs():
    return serve_rounds(Engine(TINY, TIGHT), rounds())


@pytest.mark.parametrize(
    "changes",
    few(
        [
            {},
            {"save_path": "staged", "load_path": "staged"},
            {"save_path": "staged"},
            {"load_path": "staged"},
            {"save_path": "fused", "load_path": "fused", "block_size_buckets": (1, 2, 4)},
            {"save_path": "fused", "load_path": "staged"},
            {"load_path": "fused", "blocks_per_chunk": 2, "block_size_buckets": (1, 2, 4)},
            {"blocks_per_chunk": 3},
            {"staging_buffer_tokens": 16},  # four blocks: every load is truncated, saves are deferred
            {"decode_save": True},
        ],
        {},
        {"save_path": "staged", "load_path": "staged"},
        {"staging_buffer_tokens": 16},
        {"decode_save": True},
    ),
    ids=str,
)
def test_outputs_are_the_same_and_kv_is_loaded(plain_outputs, changes):
    engine = Engine(TINY, TIGHT, offload=make_offload(**changes))
    outputs = serve_rounds(engine, rounds())
    assert tokens_of(outputs) == tokens_of(plain_outputs)
    assert num_loaded(outputs) > 0
    stats = engine.offload_stats()
    assert stats.staging_peak_blocks <= stats.staging_budget_blocks
    assert stats.num_failed_jobs == 0
    engine.close()


@pytest.mark.parametrize("changes", [{"num_staging_blocks": 1}, {"staging_buffer_tokens": 7}], ids=str)
def test_direct_copies_of_chunks_larger_than_the_staging_buffer(plain_outputs, changes):
    offload = make_offload(**({"staging_buffer_tokens": None} | changes), blocks_per_chunk=3)
    engine = Engine(TINY, TIGHT, offload=offload)
    outputs = serve_rounds(engine, rounds())
    assert tokens_of(outputs) == tokens_of(plain_outputs)
    assert num_loaded(outputs) > 0
    stats = engine.offload_stats()
    assert (stats.num_failed_jobs, stats.staging_peak_blocks) == (0, 0)
    engine.close()


def test_outputs_are_the_same_under_eviction(plain_outputs):
    engine = Engine(TINY, TIGHT, offload=make_offload(num_cpu_chunks=30))
    outputs = serve_rounds(engine, rounds())
    assert tokens_of(outputs) == tokens_of(plain_outputs)
    assert engine.offload_stats().num_evicted_chunks > 0
    engine.close()


@pytest.mark.parametrize("kv_dtype", few(["float32", "float8_e5m2"], "float8_e5m2"))
def test_every_kv_dtype(kv_dtype):
    model = dataclasses.replace(TINY, num_layers=1, kv_dtype=kv_dtype)
    engine = Engine(model, TIGHT, offload=make_offload())
    outputs = serve_rounds(engine, rounds(2))
    assert tokens_of(outputs) == tokens_of(serve_rounds(Engine(model, TIGHT), rounds(2)))
    assert num_loaded(outputs) > 0
    engine.close()


def test_most_of_a_repeated_prompt_is_loaded():
    engine = Engine(TINY, TIGHT, offload=make_offload())
    outputs = serve_rounds(engine, rounds(2))
    for request in rounds(2)[1]:
        sources = outputs[request.request_id].stats.prompt_tokens
        assert sources.computed <= TIGHT.block_size, request.request_id
    engine.close()


def test_wrong_bytes_would_be_noticed(plain_outputs):
    """The comparisons above can fail: overwriting loaded blocks changes the tokens."""
    engine = Engine(TINY, TIGHT, offload=make_offload())
    first, second, _ = rounds()
    serve(engine, first)
    begin_step = one_worker(engine).begin_step

    def damaging(plan, kv_caches, **kwargs):
        kv_caches = begin_step(plan, kv_caches, **kwargs)
        block_ids = jnp.asarray([b for job in plan.of(JobKind.LOAD) for b in job.block_ids], int)
        return [cache.at[block_ids].set(1.0) for cache in kv_caches]

    one_worker(engine).begin_step = damaging
    outputs = serve(engine, second)
    changed = [name for name, output in outputs.items() if output.tokens != plain_outputs[name].tokens]
    assert len(changed) >= len(outputs) // 2
    engine.close()


def test_preempted_requests_reload_and_agree():
    config = dataclasses.replace(SMALL_ENGINE, num_blocks=20, max_num_seqs=4)
    requests = [make_request(f"r{i}", random_tokens(i, 20), max_tokens=40, temperature=1.0, seed=i) for i in range(4)]
    plain = Engine(TINY, config)
    expected = serve(plain, requests)
    engine = Engine(TINY, config, offload=make_offload(decode_save=True))
    outputs = serve(engine, requests)
    assert plain.stats().num_preemptions > 0
    assert engine.stats().num_preemptions > 0
    assert tokens_of(outputs) == tokens_of(expected)
    assert num_loaded(outputs) > 0
    engine.close()


@pytest.mark.parametrize("num_steps", few([0, 1, 2, 3, 5, 9], 1, 5))
def test_abort_at_any_moment_leaves_nothing_behind(plain_outputs, num_steps):
    engine = Engine(TINY, TIGHT, offload=make_offload())
    first, second, third = rounds()
    serve(engine, first)
    for request in second:
        engine.add_request(request)
    for _ in range(num_steps):
        engine.step()
    for request in second:
        aborted = engine.abort(request.request_id)
        assert all(output.finish_reason is FinishReason.ABORTED for output in aborted)
        engine.check_invariants()
    outputs = serve(engine, third)
    assert tokens_of(outputs) == {r.request_id: plain_outputs[r.request_id].tokens for r in third}
    for _ in range(20):  # until copies in flight are reported
        engine.step()
        engine.check_invariants()
        if engine.offload_stats().num_jobs_in_flight == 0:
            break
    stats = engine.offload_stats()
    assert (stats.num_jobs_in_flight, stats.staging_reserved_blocks) == (0, 0)
    engine.close()


def test_copies_do_not_make_the_step_compile_again(caplog):
    config = dataclasses.replace(TIGHT, max_model_len=300)  # a shape that no other test has compiled
    with jax.log_compiles():
        engine = Engine(TINY, config, offload=make_offload())
        engine.warm_up()
        assert "Compiling jit(_step)" in caplog.text
        caplog.clear()
        assert num_loaded(serve_rounds(engine, rounds(2))) > 0
        assert "Compiling jit(_step)" not in caplog.text
    engine.close()


@pytest.mark.parametrize("changes", [{"num_cpu_chunks": 0}, {"staging_buffer_tokens": 0}], ids=str)
def test_zero_turns_offloading_off(changes):
    engine = Engine(TINY, TIGHT, offload=make_offload(**changes))
    assert engine.offload_stats() is None
    engine.close()


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_decode_save_saves_every_block_that_was_computed(prefix_caching):
    config = dataclasses.replace(SMALL_ENGINE, num_blocks=40, enable_prefix_caching=prefix_caching)
    engine = Engine(TINY, config, offload=make_offload(decode_save=True))
    serve(engine, [make_request("a", random_tokens(1, 9), max_tokens=24)])
    # The KV of the last token is never computed: 9 + 24 - 1 tokens.
    assert engine.offload_stats().num_resident_chunks == 32 // config.block_size
    engine.close()


@interpreted_only
@pytest.mark.parametrize("decode_save", [False, True])
def test_a_step_offers_only_sequences_that_complete_a_block(decode_save):
    config = dataclasses.replace(SMALL_ENGINE, num_blocks=40, max_num_batched_tokens=6)
    engine = Engine(TINY, config, offload=make_offload(decode_save=decode_save))
    offered = []
    scheduler: Any = offload_scheduler(engine)
    plan_step = scheduler.plan_step

    def spy(changed):
        offered.append([request.num_computed_tokens for request in changed])
        return plan_step(changed)

    scheduler.plan_step = spy
    serve(engine, [make_request("a", random_tokens(1, 15), max_tokens=12)])
    # The prompt in steps of 6 tokens, then one by one: 6, 12, 15, 16, 17, ... with blocks of 4.
    prompt, generated = [[6], [12], []], [[16], [], [], [], [20], [], [], [], [24], [], []]
    assert config.block_size == 4
    assert offered == prompt + (generated if decode_save else [[]] * len(generated))


def test_a_cache_salt_that_is_not_text_is_rejected():
    engine = Engine(TINY, SMALL_ENGINE)
    request = dataclasses.replace(make_request("a", (1, 2, 3)), cache_salt="\udc00")
    with pytest.raises(RequestError, match="cache_salt that is not valid text"):
        engine.add_request(request)
    assert not engine.has_unfinished


def test_outputs_are_the_same_when_host_memory_is_lost(plain_outputs, caplog):
    """A save fails and destroys its segment: only its chunks are lost."""
    engine = Engine(TINY, TIGHT, offload=make_offload())
    first, second, third = rounds()
    outputs = serve(engine, first)
    group = tier_group(one_worker(engine))
    copier: Any = group.copiers[Direction.SAVE]

    def fails_once(segment_id, *args):
        del copier.save
        for stripe in group.memory.arena.segment(segment_id):
            stripe.delete()
        raise RuntimeError("halted")

    copier.save = fails_once
    serve(engine, [make_request("new", random_tokens(99, 20))])
    assert engine.offload_stats().num_failed_jobs >= 1
    assert "is lost" in caplog.text
    outputs |= serve(engine, second)
    last = serve(engine, third)
    assert tokens_of(outputs | last) == tokens_of(plain_outputs)
    assert num_loaded(last) > 0, "recomputed blocks were saved again"
    engine.close()


def test_a_partly_failed_load_recomputes_only_the_rest():
    config = dataclasses.replace(SMALL_ENGINE, num_blocks=28, max_num_seqs=1)
    # A few blocks a segment, so that the prompt is in several.
    offload = make_offload(host_segment_gb=4.5 * 2048 / 2**30, save_path="direct", load_path="direct")
    prompt, others = random_tokens(1, 80), random_tokens(2, 80)
    plain = Engine(TINY, config)
    expected = [tokens_of(serve(plain, [make_request(f"p{i}", p)])) for i, p in enumerate((prompt, others, prompt))]
    engine = Engine(TINY, config, offload=offload)
    engine.wait_for_host_memory()
    outputs = [serve(engine, [make_request("p0", prompt)]), serve(engine, [make_request("p1", others)])]
    copier: Any = tier_group(one_worker(engine)).copiers[Direction.LOAD]
    real, segments = copier.load, []

    def maybe(segment_id, rows, kv_caches):
        segments.append(segment_id)
        if len(segments) == 2:
            raise RuntimeError("injected")
        return real(segment_id, rows, kv_caches)

    copier.load = maybe
    outputs.append(serve(engine, [make_request("p2", prompt)]))
    assert len(set(segments)) > 1, "the blocks are in several segments"
    assert [tokens_of(output) for output in outputs] == expected
    loaded = outputs[2]["p2"].stats.prompt_tokens.host
    assert 0 < loaded < 76
    assert engine.offload_stats().num_failed_jobs == 1
    engine.check_invariants()
    engine.close()


@interpreted_only
def test_closing_an_engine_with_copies_in_flight_does_not_affect_the_next_one():
    expected = tokens_of(serve(Engine(TINY, SMALL_ENGINE), [make_request("a", random_tokens(1, 60))]))
    for num_steps in range(2):
        engine = Engine(TINY, SMALL_ENGINE, offload=make_offload())
        engine.wait_for_host_memory()
        engine.add_request(make_request("a", random_tokens(1, 60)))
        for _ in range(num_steps):
            engine.step()
        offload_scheduler(engine).apply = lambda report: Update()
        engine.step()
        assert engine.offload_stats().num_jobs_in_flight > 0
        engine.close()  # with copies in flight
        beside = Engine(TINY, SMALL_ENGINE, offload=make_offload())
        assert tokens_of(serve(beside, [make_request("a", random_tokens(1, 60))])) == expected
        beside.close()
