"""A failed load that destroys the KV caches costs time, but changes no token."""

import dataclasses
import time
from typing import Any

import pytest

from tests.engine.helpers import SMALL_ENGINE, TINY, make_request, random_tokens, serve, tokens_of
from tests.grids import few
from tests.inside.engine import engine_scheduler, one_worker
from tpu_offload import JobKind, OffloadConfig
from tpu_offload.engine import Engine, Seams

pytestmark = pytest.mark.usefixtures("compiled_once")

TIGHT = dataclasses.replace(SMALL_ENGINE, num_blocks=28, max_num_seqs=3)
SWAPS = {"swap_gb": 0.01, "swap_mode": "swap", "num_cpu_chunks": 0}


class Taker:
    """A copier of which some loads, by number, fail and destroy the caches."""

    def __init__(self, copier, fatal):
        self._copier = copier
        self._fatal = fatal

    def __getattr__(self, name):
        return getattr(self._copier, name)

    def load(self, segment_id, rows, kv_caches):
        # The second half of a staged load donates the caches.
        self._maybe_fail(kv_caches, second_half=False)
        return self._copier.load(segment_id, rows, kv_caches)

    def resume_load(self, flight, live, kv_caches):
        self._maybe_fail(kv_caches, second_half=True)
        return self._copier.resume_load(flight, live, kv_caches)

    def _maybe_fail(self, kv_caches, *, second_half):
        if second_half != (type(self._copier).__name__ == "StagedCopier"):
            return
        self._fatal.num_loads += 1
        if self._fatal.num_loads in self._fatal.numbers:
            kv_caches[-1].delete()
            raise RuntimeError("the device halted")


class Fatal:
    """Decides which loads fail, counted over all copiers of an engine."""

    def __init__(self, *numbers):
        self.num_loads, self.numbers = 0, set(numbers)

    def seams(self):
        return Seams(wrap_copier=lambda copier, store: Taker(copier, self))


def make_engine(*numbers, config=TIGHT, asynchronous=False, **settings):
    given = {"num_cpu_chunks": 256, "staging_buffer_tokens": 256, "host_segment_gb": 0.001}
    given |= {"breaker_failures": 0}  # otherwise loads are soon suspended
    given |= {"job_timeout_s": 3600} | settings  # on a busy machine compilation may exceed the default
    config = dataclasses.replace(config, async_scheduling=asynchronous)
    engine = Engine(TINY, config, offload=OffloadConfig.create(**given), seams=Fatal(*numbers).seams())
    engine.wait_for_host_memory()
    return engine


def some_requests(num=6, *, name="", **sampling):
    return [
        make_request(f"{name}r{i}", random_tokens(i, 20 + 7 * i), max_tokens=9 + 3 * i, seed=i, **sampling)
        for i in range(num)
    ]


@pytest.fixture(scope="module")
def answers():
    return tokens_of(serve(Engine(TINY, TIGHT), some_requests()))


def check_at_rest(engine):
    for _ in range(20):
        engine.step()
        if engine.offload_stats().num_jobs_in_flight == 0:
            break
    engine.check_invariants()
    stats = engine.offload_stats()
    assert (stats.num_jobs_in_flight, stats.staging_reserved_blocks, stats.num_ignored_results) == (0, 0, 0)
    engine.close()


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize(
    "settings",
    few(
        [
            {},
            {"save_path": "staged", "load_path": "staged"},
            {"save_path": "fused", "block_size_buckets": (1, 2, 4)},
            {"decode_save": True, "staging_buffer_tokens": 32},
            {"blocks_per_chunk": 3},
        ],
        first=2,
    ),
    ids=str,
)
def test_tokens_are_those_of_an_undisturbed_run(answers, settings, asynchronous, caplog):
    engine = make_engine(1, 2, 5, asynchronous=asynchronous, **settings)
    for turn in range(4):
        caplog.clear()
        before = engine.stats().num_cache_losses
        assert tokens_of(serve(engine, some_requests())) == answers, turn
        lines = [r for r in caplog.records if r.name == "tpu_offload.engine.engine"]
        assert len(lines) == engine.stats().num_cache_losses - before, "one log line per loss"
    assert engine.stats().num_cache_losses == 3
    assert engine.offload_stats().loaded_blocks > 0, "chunks saved before the loss hit after it"
    check_at_rest(engine)


@pytest.mark.parametrize("asynchronous", few([False, True], True), ids=["sync", "async"])
@pytest.mark.parametrize(
    "settings", few([SWAPS, {**SWAPS, "num_cpu_chunks": 60, "decode_save": True}], first=1), ids=str
)
def test_swapped_requests_come_back(settings, asynchronous):
    config = dataclasses.replace(SMALL_ENGINE, num_blocks=20, max_num_seqs=4, num_spare_blocks=0)
    requests = [make_request(f"r{i}", random_tokens(i, 9), max_tokens=50, temperature=1.0, seed=i) for i in range(6)]
    expected = tokens_of(serve(Engine(TINY, config), requests))
    engine = make_engine(1, 3, config=config, asynchronous=asynchronous, **settings)
    for _ in range(2):
        assert tokens_of(serve(engine, requests)) == expected
    assert engine.stats().num_cache_losses == 2
    stats = engine.offload_stats()
    assert stats.num_swapped_in > 0
    assert stats.num_swapped_requests == stats.swap_held_blocks == 0
    check_at_rest(engine)


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_several_samples_of_a_prompt(asynchronous):
    requests = some_requests(3, name="many ", temperature=1.0, n=3)

    def answers_of(engine):
        found: dict[Any, Any] = {}
        for request in requests:
            engine.add_request(request)
        while engine.has_unfinished:
            found |= {(o.request_id, o.index): o.tokens for o in engine.step() if o.finished}
            engine.check_invariants()
        return found

    config = dataclasses.replace(TIGHT, max_num_seqs=4)
    expected = answers_of(Engine(TINY, config))
    engine = make_engine(2, 3, config=config, asynchronous=asynchronous)
    for _ in range(3):
        serve(engine, some_requests(name="other "))  # evicts them from HBM
        assert answers_of(engine) == expected
    assert engine.stats().num_cache_losses == 2
    check_at_rest(engine)


def test_nothing_in_hbm_is_reused_after_a_loss():
    engine = make_engine(2, config=dataclasses.replace(TIGHT, num_blocks=60))
    prompt = random_tokens(1, 24)
    serve(engine, [make_request("a", prompt, max_tokens=4)])
    for i in range(5):  # evicts the first one, and stays resident
        serve(engine, [make_request(f"other {i}", random_tokens(50 + i, 40), max_tokens=4)])
    last = random_tokens(54, 40)
    assert serve(engine, [make_request("x", last, max_tokens=2)])["x"].stats.prompt_tokens.hbm > 0
    serve(engine, [make_request("again", prompt, max_tokens=4)])
    assert engine.stats().num_cache_losses == 1
    sources = serve(engine, [make_request("y", last, max_tokens=2)])["y"].stats.prompt_tokens
    assert sources.hbm == 0
    assert sources.host > 0, "the host tier stays"
    check_at_rest(engine)


def test_no_plan_is_carried_out_twice(answers):
    engine = make_engine(1, 2)
    worker = one_worker(engine)
    job_ids: list[int] = []
    begin_step = worker.begin_step

    def spy(plan, kv_caches, **kwargs):
        job_ids.extend(job.job_id for job in (*plan.of(JobKind.LOAD), *plan.of(JobKind.SAVE)))
        return begin_step(plan, kv_caches, **kwargs)

    worker.begin_step = spy
    for _ in range(3):
        assert tokens_of(serve(engine, some_requests())) == answers
    assert engine.stats().num_cache_losses == 2
    assert len(job_ids) == len(set(job_ids))
    check_at_rest(engine)


def test_an_engine_makes_progress_if_all_loads_fail(answers):
    engine = make_engine(*range(1000))
    for _ in range(3):
        assert tokens_of(serve(engine, some_requests())) == answers
    assert engine.stats().num_cache_losses > 3
    check_at_rest(engine)


def test_reports_may_come_in_any_number(answers):
    """None or several per step."""
    held = []

    def relay(report):
        held.append(report)
        if len(held) < 3:
            return []
        arrived = held[:]
        held.clear()
        return arrived

    config = OffloadConfig.create(num_cpu_chunks=256, staging_buffer_tokens=256)
    engine = Engine(TINY, TIGHT, offload=config, seams=Seams(relay=relay))
    engine.wait_for_host_memory()
    for _ in range(3):
        assert tokens_of(serve(engine, some_requests())) == answers
    assert engine.offload_stats().loaded_blocks > 0
    engine.close()


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("num_steps", [0, 1, 3, 8])
def test_a_reset_invalidates_the_cache_and_changes_no_token(answers, asynchronous, num_steps):
    engine = make_engine(asynchronous=asynchronous)
    serve(engine, some_requests())
    found: dict[Any, Any] = {}
    for request in some_requests():
        engine.add_request(request)
    for _ in range(num_steps):
        found |= tokens_of({o.request_id: o for o in engine.step() if o.finished})
    engine.reset_cache()
    engine.check_invariants()
    found |= tokens_of(serve(engine, []))
    assert found == answers
    engine.reset_cache()
    (output,) = serve(engine, some_requests(1)).values()
    assert output.stats.prompt_tokens.hbm == output.stats.prompt_tokens.host == 0
    check_at_rest(engine)


@pytest.mark.parametrize("asynchronous", few([False, True], True), ids=["sync", "async"])
@pytest.mark.parametrize(
    "settings",
    few(
        [{}, {**SWAPS, "num_cpu_chunks": 60, "decode_save": True}], {**SWAPS, "num_cpu_chunks": 60, "decode_save": True}
    ),
    ids=str,
)
def test_reports_may_stop_coming(settings, asynchronous):
    """Then loads and swaps time out, and the requests that wait for them are recomputed."""
    num_silent, silent = 0, False

    def relay(report):
        nonlocal num_silent
        num_silent += silent
        return [] if silent else [report]

    config = dataclasses.replace(SMALL_ENGINE, num_blocks=20, num_spare_blocks=0, async_scheduling=asynchronous)
    requests = [make_request(f"r{i}", random_tokens(i, 9), max_tokens=50, temperature=1.0, seed=i) for i in range(6)]
    expected = tokens_of(serve(Engine(TINY, config), requests))
    settings = {"num_cpu_chunks": 256, "staging_buffer_tokens": 256, "job_timeout_s": 1} | settings
    engine = Engine(TINY, config, offload=OffloadConfig.create(**settings), seams=Seams(relay=relay))
    engine.wait_for_host_memory()
    assert tokens_of(serve(engine, requests)) == expected
    for request in requests:
        engine.add_request(request)
    waits = False
    outputs: dict[Any, Any] = {}
    until_s = time.monotonic() + 60
    while engine.has_unfinished and time.monotonic() < until_s:
        silent = silent or engine.stats().num_swapped > 0 or not settings.get("swap_gb")
        outputs |= {o.request_id: o for o in engine.step() if o.finished}
        time.sleep(0.005 * silent)  # until the jobs time out
        engine.check_invariants()
        waits = waits or engine_scheduler(engine).awaits_copies
    assert tokens_of(outputs) == expected
    assert waits, "no poll waited for a report"
    assert num_silent > 0
    assert engine.offload_stats().num_timed_out_jobs > 0
    engine.close()
