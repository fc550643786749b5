"""Random runs of an engine that swaps: all tokens and log-probabilities equal those with unlimited HBM."""

import dataclasses
import random
from collections import Counter
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.engine.helpers import SMALL_ENGINE, STATEFUL, TINY, WINDOWED, make_request, random_tokens
from tests.grids import few
from tests.inside.engine import engine_scheduler, kv_blocks, one_worker
from tests.inside.worker import swap_groups
from tpu_offload import OffloadConfig, OffloadStats, RequestLimits
from tpu_offload.engine import Engine, FinishReason
from tpu_offload.memory import host_arena
from tpu_offload.types import Direction

pytestmark = pytest.mark.usefixtures("compiled_once")

MODELS = {"full": TINY, "windows": WINDOWED, "states": STATEFUL}
NAMES = {model: name for name, model in MODELS.items()}
TIGHT = dataclasses.replace(SMALL_ENGINE, num_blocks=34, max_num_seqs=6)
UNLIMITED = dataclasses.replace(TIGHT, num_blocks=400, enable_prefix_caching=False)
COUNTS: Counter[Any] = Counter()


def make_requests():
    """Prompts with shared prefixes, greedy and sampled, some with several samples or stop tokens."""
    rng = random.Random(0)
    requests = []
    for i in range(18):
        prompt = random_tokens(i % 3, 12)[: rng.choice([0, 5, 12])] + random_tokens(100 + i, rng.randint(3, 40))
        sampled = i % 2 == 1
        requests.append(
            make_request(
                f"r{i}", prompt, max_tokens=rng.randint(5, 60), temperature=0.9 * sampled, top_k=20 * (i % 4 == 1),
                seed=1000 * i, n=rng.choice([1, 1, 1, 2, 3]), stop_token_ids=(7,) if i % 5 == 0 else (),
            )
        )  # fmt: skip
    return requests


REQUESTS = make_requests()


def result(output):
    return output.tokens, output.logprobs, output.finish_reason


@pytest.fixture(scope="module", params=MODELS)
def reference(request):
    """A model, and its results with unlimited HBM by request id and sample."""
    model = MODELS[request.param]
    engine = Engine(model, UNLIMITED)
    expected: dict[Any, Any] = {}
    for wanted in REQUESTS:
        engine.add_request(wanted)
        while engine.has_unfinished:
            expected |= {(o.request_id, o.index): result(o) for o in engine.step() if o.finished}
    assert engine.stats().num_preemptions == 0
    return model, expected


class Faults:
    """Makes swaps out fail at random, before their dispatch or destroying their memory."""

    def __init__(self, engine, rng, rate):
        self.groups = swap_groups(one_worker(engine))
        for group in self.groups:
            copier: Any = group.copiers[Direction.SAVE]
            copier.save = self.failing(copier.save, group.memory.arena, rng, rate)

    def failing(self, save, arena, rng, rate):
        def copy(segment_id, *args):
            segment = arena.segment(segment_id)
            if rng.random() < rate:
                if rng.random() < 0.5:
                    for part in segment:
                        part.delete()
                raise RuntimeError("injected")
            return save(segment_id, *args)

        return copy


def run_random(model, expected, seed, *, pool_blocks, asynchronous, tier, fault_rate=0.0, num_rounds=1, **settings):
    """Serves random requests; returns the library's counts at the end.

    With several rounds they are repeated, some with limits, and the cache is sometimes reset.
    """
    rng = random.Random(seed)
    num_blocks = TIGHT.num_blocks if model is TINY else 60
    config = dataclasses.replace(TIGHT, async_scheduling=asynchronous, num_blocks=num_blocks)
    nbytes = pool_blocks * 1.01 * 4 * TIGHT.block_size * 2 * TINY.num_kv_heads * TINY.head_dim  # 2 layers of 2 bytes
    engine = Engine(
        model,
        config,
        offload=OffloadConfig.create(
            swap_gb=nbytes / 2**30,
            swap_mode="swap",
            num_cpu_chunks=tier,
            decode_save=bool(tier) and seed % 2 == 0,
            num_staging_blocks=16,
            skip_jax_precompile=True,
            **settings,
        ),
    )
    engine.wait_for_host_memory()
    if fault_rate and pool_blocks:
        Faults(engine, rng, fault_rate)
    if num_rounds > 1:
        for _ in range(num_rounds - 1):
            serve_round(model, expected, engine, rng, limits=True)
    aborted = serve_round(model, expected, engine, rng, limits=num_rounds > 1)
    check_rest(engine)
    stats = engine.offload_stats() or OffloadStats()  # without pool and tier the engine has no library
    engine.close()
    COUNTS.update(stats.as_dict())
    COUNTS["runs"] += 1
    COUNTS["preemptions"] += engine.stats().num_preemptions
    COUNTS["aborted"] += len(aborted)
    COUNTS[f"swaps of {NAMES[model]}"] += stats.num_swapped_in
    return stats


def serve_round(model, expected, engine, rng, *, limits):
    """Serves some of the requests; returns the aborted ones."""
    waiting = rng.sample(REQUESTS, 12)
    asked = {request.request_id: request for request in waiting}
    unfinished, finished, aborted = set(), {}, set()

    def take(output):
        key = output.request_id, output.index
        assert key not in finished
        finished[key] = output
        if all((output.request_id, i) in finished for i in range(asked[output.request_id].sampling.n)):
            unfinished.discard(output.request_id)

    for _ in range(3000):
        if waiting and rng.random() < 0.25:
            request = waiting.pop(0)
            unfinished.add(request.request_id)
            if limits and rng.random() < 0.3:
                request = dataclasses.replace(request, limits=random_limits(rng))
            engine.add_request(request)
        if limits and rng.random() < 0.01:
            engine.reset_cache()
        if unfinished and rng.random() < 0.02:
            names = rng.sample(sorted(unfinished), min(len(unfinished), rng.randint(1, 2)))
            for output in engine.abort(*names):
                assert output.finish_reason is FinishReason.ABORTED
                aborted.add((output.request_id, output.index))
                take(output)
        for output in engine.step():
            if output.finished:
                take(output)
        engine.check_invariants()
        if not (waiting or unfinished):
            break
    else:
        raise AssertionError(f"{engine.stats()}: no progress")
    for key, output in finished.items():
        if key in aborted:  # compare the generated part
            num_tokens = len(output.tokens)
            assert output.tokens == expected[key][0][:num_tokens], key
            assert output.logprobs == expected[key][1][:num_tokens], key
        else:
            assert result(output) == expected[key], key
    assert not engine.has_unfinished
    return aborted


def random_limits(rng):
    return RequestLimits(
        max_save_tokens=rng.choice([None, 0, 9, 20]),
        max_load_tokens=rng.choice([None, 0, 9, 20]),
        priority=rng.randint(-1, 1),
        cache=rng.random() < 0.8,
    )


def check_rest(engine):
    """Checks that nothing is held when all requests have ended."""
    for _ in range(50):  # until copies in flight are reported
        if (engine.offload_stats() or OffloadStats()).num_jobs_in_flight == 0:
            break
        engine.step()
    stats = engine.offload_stats() or OffloadStats()  # without pool and tier the engine has no library
    assert (stats.num_jobs_in_flight, stats.swap_held_blocks, stats.num_swapped_requests) == (0, 0, 0)
    assert stats.staging_reserved_blocks == 0
    assert kv_blocks(engine_scheduler(engine)).num_free == kv_blocks(engine_scheduler(engine)).total
    engine.check_invariants()


def seeds(max_examples):
    """Deterministic seeds from hypothesis."""
    checks = [HealthCheck.too_slow, HealthCheck.data_too_large]
    chosen = settings(max_examples=max_examples, derandomize=True, deadline=None, suppress_health_check=checks)
    return lambda test: chosen(given(seed=st.integers(0, 2**32 - 1))(test))


@pytest.mark.parametrize("asynchronous", few([False, True], True), ids=["sync", "async"])
@seeds(3)
def test_pools_of_all_and_part_and_nothing_of_what_is_needed(reference, asynchronous, seed):
    model, expected = reference
    tier = 0 if model is not TINY or seed % 3 else 12
    needed = run_random(model, expected, seed, pool_blocks=400, asynchronous=asynchronous, tier=tier).swap_peak_blocks
    for share in (0.3, 0.0):
        stats = run_random(model, expected, seed, pool_blocks=int(needed * share), asynchronous=asynchronous, tier=tier)
        assert share or stats.num_swapped_out == 0


@pytest.mark.parametrize("rebuilds", [True, False])
@seeds(3)
def test_failing_copies_cost_a_recompute_and_no_token(reference, rebuilds, seed):
    model, expected = reference
    with pytest.MonkeyPatch.context() as monkeypatch:
        if not rebuilds:
            monkeypatch.setattr(host_arena, "_rebuild", lambda *args: None)  # lost segments are not reallocated
        run_random(model, expected, seed, pool_blocks=30, asynchronous=seed % 2 == 0, tier=0, fault_rate=0.4)


SAVING: Counter[Any] = Counter()


@pytest.mark.wide
@pytest.mark.parametrize("save_on", ["eviction", "preemption", "compute,eviction,preemption"])
@pytest.mark.parametrize("reference", ["full"], indirect=True)
@seeds(5)
def test_saving_at_other_times_costs_no_token(reference, save_on, seed):
    stats = save_at(reference, save_on, seed, tier=(12, 40, 200)[seed % 3])
    SAVING[f"saved on {save_on}"] += stats.saved_blocks
    SAVING["loaded"] += stats.loaded_blocks
    SAVING["runs"] += 1


STATES: Counter[Any] = Counter()


@pytest.mark.wide
@pytest.mark.parametrize("reference", ["states"], indirect=True)
@seeds(4)
def test_states_in_the_tier_and_swapped(reference, seed):
    stats = save_at(reference, "compute,preemption", seed, tier=(100, 500)[seed % 2])
    STATES.update(loaded=stats.loaded_blocks, checkpoints=stats.num_checkpoints, runs=1)
    STATES["evicted"] += stats.num_evicted_checkpoints


@pytest.mark.wide
def test_those_runs_saved_and_loaded_states():
    if STATES["runs"] < 4:
        pytest.skip("not all of the random runs were executed")
    assert min(STATES.values()) > 3, STATES
    assert len(STATES) == 4


def save_at(reference, save_on, seed, *, tier):
    model, expected = reference
    return run_random(
        model,
        expected,
        seed,
        pool_blocks=20 * (seed % 4 == 0),
        asynchronous=seed % 2 == 0,
        tier=tier,
        num_rounds=3,
        save_on=save_on,
        save_after_sightings=1 + (seed % 5 == 0),
        blocks_per_chunk=1 + seed % 2,
    )


@pytest.mark.wide
def test_those_runs_saved_and_loaded():
    if SAVING["runs"] < 15:
        pytest.skip("not all of the random runs were executed")
    assert all(count > 30 for name, count in SAVING.items() if name != "runs"), SAVING
    assert len(SAVING) == 5


@pytest.mark.wide
def test_those_runs_swapped_enough():
    if COUNTS["runs"] < 3 * (3 * 2 * 3 + 3 * 2) + 15 + 4:
        pytest.skip("not all of the random runs were executed")
    assert COUNTS["preemptions"] > 300, COUNTS
    for name in ("num_swapped_in", "num_recomputed_no_room", "num_lost_swaps", "swap_skipped_blocks", "aborted",
                 "num_thrashed_swaps", "swaps of full", "swaps of windows", "swaps of states"):  # fmt: skip
        assert COUNTS[name] > 10, (name, COUNTS)
