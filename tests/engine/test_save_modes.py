"""Save modes and limits of the engine: the same tokens in every mode, and saved KV is loaded."""

import dataclasses
import itertools
from typing import Any

import jax.numpy as jnp
import pytest

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
from tests.grids import few, few_setups
from tests.inside.engine import one_worker
from tpu_offload import JobKind, OffloadConfig, RequestLimits
from tpu_offload.engine import Engine

pytestmark = pytest.mark.usefixtures("compiled_once")

TIGHT = dataclasses.replace(SMALL_ENGINE, num_blocks=28)
# No spare blocks: some running requests are soon preempted.
CROWDED = dataclasses.replace(TIGHT, num_spare_blocks=0)
EVENTS = ("compute", "eviction", "preemption")
MODES = [",".join(events) for n in (1, 2, 3) for events in itertools.combinations(EVENTS, n)]


def make_offload(save_on="compute", **changes):
    settings = {"num_cpu_chunks": 256, "staging_buffer_tokens": 256, "host_segment_gb": 0.001, "save_on": save_on}
    return OffloadConfig.create(**(settings | changes))


def results(outputs):
    return {name: (output.tokens, output.logprobs) for name, output in outputs.items()}


@pytest.fixture(scope="module")
def plain():
    return {
        config: results(serve_rounds(Engine(TINY, config), rounds(max_tokens=max_tokens)))
        for config, max_tokens in ((TIGHT, 6), (CROWDED, 30))
    }


FUSED = {"save_path": "fused", "load_path": "fused", "block_size_buckets": (1, 2, 4)}
IN_A_TIGHT_HBM: list[tuple[str, dict[str, Any]]] = [
    *((mode, {}) for mode in MODES[1:]),
    ("eviction", {"save_after_sightings": 2}),
    ("compute,eviction", {"save_after_sightings": 2, "decode_save": True}),
    ("eviction,preemption", FUSED),
    ("eviction", {"blocks_per_chunk": 3}),
    ("eviction,preemption", {"num_cpu_chunks": 20}),
    ("compute,eviction", {"num_cpu_chunks": 20, "blocks_per_chunk": 2}),
]
IN_A_CROWD: list[tuple[str, dict[str, Any]]] = [
    ("preemption", {}),
    ("compute,eviction,preemption", {}),
    ("compute,eviction", {"save_after_sightings": 2, "decode_save": True}),
    ("eviction,preemption", {"save_path": "staged", "load_path": "staged"}),
    ("eviction,preemption", FUSED),
    ("compute,eviction,preemption", {"save_path": "fused", "load_path": "staged"}),
    ("eviction,preemption", {"staging_buffer_tokens": 16}),
    ("compute,eviction", {"num_cpu_chunks": 20, "blocks_per_chunk": 2}),
]


@pytest.mark.parametrize(
    ("config", "max_tokens", "save_on", "changes"),
    [
        *few_setups({f"tight-{case}": (TIGHT, 6, *case) for case in IN_A_TIGHT_HBM}, f"tight-{IN_A_TIGHT_HBM[-1]}"),
        *few_setups(
            {f"crowded and async-{case}": (CROWDED, 30, *case) for case in IN_A_CROWD},
            *(f"crowded and async-{case}" for case in IN_A_CROWD[1:3]),
        ),
    ],
)
def test_tokens_are_the_same(plain, config, max_tokens, save_on, changes):
    engine_config = dataclasses.replace(config, async_scheduling=config is CROWDED)
    engine = Engine(TINY, engine_config, offload=make_offload(save_on, **changes))
    engine.wait_for_host_memory()
    outputs = serve_rounds(engine, rounds(max_tokens=max_tokens))
    assert results(outputs) == plain[config]
    if config is CROWDED:
        assert engine.stats().num_preemptions > 0
    stats = engine.offload_stats()
    if save_on != "preemption":
        assert stats.saved_blocks > 0
        assert num_loaded(outputs) > 0 or "num_cpu_chunks" in changes
    assert stats.staging_peak_blocks <= stats.staging_budget_blocks
    assert stats.num_failed_jobs == 0
    engine.close()


def damage(engine, direction):
    """Corrupts blocks from now on: those of early saves before they are read, or those of loads after."""
    begin_step = one_worker(engine).begin_step

    def damaging(plan, kv_caches, **kwargs):
        jobs = plan.of(JobKind.EARLY_SAVE) if direction == "early" else plan.of(JobKind.LOAD)
        block_ids = jnp.asarray([b for job in jobs for b in job.block_ids], int)
        if direction == "early":
            kv_caches = [cache.at[block_ids].set(1.0) for cache in kv_caches]
            return begin_step(plan, kv_caches, **kwargs)
        return [cache.at[block_ids].set(1.0) for cache in begin_step(plan, kv_caches, **kwargs)]

    one_worker(engine).begin_step = damaging


@pytest.mark.parametrize("direction", ["early", "load"])
def test_wrong_bytes_would_be_noticed(plain, direction):
    engine = Engine(TINY, TIGHT, offload=make_offload("eviction"))
    damage(engine, direction)
    assert results(serve_rounds(engine, rounds())) != plain[TIGHT]
    engine.close()


def test_without_need_nothing_is_saved():
    """If everything fits in HBM, nothing is copied and prefixes hit there."""
    engine = Engine(TINY, dataclasses.replace(TIGHT, num_blocks=300), offload=make_offload("eviction,preemption"))
    serve_rounds(engine, rounds())
    assert engine.offload_stats().saved_blocks == 0
    engine.close()


def test_a_preempted_request_finds_its_prompt_and_answer_when_it_returns():
    engine = Engine(TINY, CROWDED, offload=make_offload("preemption"))
    engine.wait_for_host_memory()
    (requests,) = rounds(1, max_tokens=40)
    outputs = serve(engine, requests)
    stats: list[Any] = [outputs[request.request_id].stats for request in requests]
    assert sum(s.num_preemptions for s in stats) >= 4
    for request, s in zip(requests, stats, strict=True):
        assert s.prompt_tokens.computed == len(request.prompt_tokens), "looked up once, although it was served twice"
    # Generated tokens are loaded too, although decode_save is off.
    assert engine.offload_stats().loaded_tokens > sum(s.prompt_tokens.host for s in stats)
    engine.close()


@pytest.mark.wide
def test_a_host_tier_of_hbms_size_helps_only_with_saves_on_eviction():
    """Three prompts of 13 blocks in turn, with 28 blocks in HBM and 28 in the host tier."""
    loaded, saved = {}, {}
    for save_on in ("compute", "eviction"):
        engine = Engine(
            TINY, dataclasses.replace(TIGHT, max_num_seqs=1), offload=make_offload(save_on, num_cpu_chunks=28)
        )
        engine.wait_for_host_memory()
        outputs: dict[Any, Any] = {}
        for turn, i in enumerate([0, 1, 2, 1, 0, 2, 1, 0, 2, 0, 1] * 3):
            outputs |= serve(engine, [make_request(f"{turn}", random_tokens(i, 50), max_tokens=4)])
        loaded[save_on], saved[save_on] = num_loaded(outputs), engine.offload_stats().saved_blocks
        engine.close()
    # 540 of 1650 tokens hit in HBM, and at most 960 can come from the host tier. Observed: 260 and 804.
    assert loaded["eviction"] > 2 * loaded["compute"], (loaded, saved)
    assert saved["eviction"] < saved["compute"]


# --- one request and another ----------------------------------------------------------------------


@pytest.mark.parametrize("save_on", few(MODES, first=2))
def test_tenants_share_nothing(save_on):
    """Equal prompts with two salts: each finds only its own KV in the host tier."""
    engine = Engine(TINY, TIGHT, offload=make_offload(save_on))
    engine.wait_for_host_memory()
    prompt = random_tokens(1, 50)

    def ask(name, salt):
        (output,) = serve(engine, [make_request(name, prompt, salt=salt)]).values()
        fill = [make_request(f"{name} fill {i}", random_tokens(100 + i, 60)) for i in range(4)]
        serve(engine, fill)
        return output

    ask("warm", "")
    for salt in ("red", "blue"):
        sources = ask(f"{salt} 1", salt).stats.prompt_tokens
        assert (sources.host, sources.hbm, sources.computed) == (0, 0, 50)
    for salt in ("red", "blue"):
        sources = ask(f"{salt} 2", salt).stats.prompt_tokens
        assert sources.hbm == 0
        if save_on != "preemption":
            assert sources.host == 48
    engine.close()


def flooded(engine, name, **changes):
    """Serves a prompt, then enough others to evict it from HBM."""
    request = dataclasses.replace(make_request(name, random_tokens(1, 50)), **changes)
    (output,) = serve(engine, [request]).values()
    serve(engine, [make_request(f"{name} fill {i}", random_tokens(100 + i, 60)) for i in range(4)])
    return output.stats.prompt_tokens


@pytest.mark.parametrize("save_on", ["compute", "eviction"])
def test_limits_of_a_request(save_on):
    engine = Engine(TINY, TIGHT, offload=make_offload(save_on))
    engine.wait_for_host_memory()
    assert flooded(engine, "a", limits=RequestLimits(cache=False)).computed == 50
    assert flooded(engine, "b", limits=RequestLimits(max_save_tokens=23)).host == 0, "nothing was saved of the first"
    assert flooded(engine, "c", limits=RequestLimits(cache=False)).host == 0, "it loads nothing either"
    assert flooded(engine, "d").host == 20, "the whole blocks that the second one was allowed to save"
    assert flooded(engine, "e", limits=RequestLimits(max_load_tokens=30)).host == 28
    assert flooded(engine, "f").host == 48
    engine.close()


def test_limits_of_all_requests():
    engine = Engine(TINY, TIGHT, offload=make_offload(max_save_tokens=32, max_load_tokens=16))
    engine.wait_for_host_memory()
    flooded(engine, "a")
    assert flooded(engine, "b", limits=RequestLimits(max_load_tokens=30)).host == 16
    assert engine.offload_stats().saved_blocks == 8 + 4 * 8
    engine.close()


def test_the_second_request_is_saved():
    engine = Engine(TINY, TIGHT, offload=make_offload(save_after_sightings=2))
    engine.wait_for_host_memory()
    assert flooded(engine, "a").computed == 50
    assert engine.offload_stats().saved_blocks == 0
    assert flooded(engine, "b").computed == 50
    assert flooded(engine, "c").host == 48
    engine.close()


def test_tokens_of_plain_and_limited_requests_are_the_same(plain):
    for limits in (RequestLimits(cache=False), RequestLimits(max_save_tokens=10, max_load_tokens=10, priority=3)):
        engine = Engine(TINY, TIGHT, offload=make_offload("eviction,compute"))
        assert tokens_of(serve_rounds(engine, rounds(limits=limits))) == {
            name: tokens for name, (tokens, _) in plain[TIGHT].items()
        }
        engine.close()
