"""Whether KV is loaded or computed again, in simulated time: never much slower than the better of the two."""

import functools
import random

import pytest

from tests.core.fakes import LAYOUT, Clock
from tests.grids import few
from tests.storage.memory_tier import NAME
from tpu_offload import (
    BlockHasher,
    JobResult,
    JobState,
    MatchState,
    OffloadConfig,
    OffloadScheduler,
    ScheduledRequest,
    StepReport,
)
from tpu_offload.config import LoadMode
from tpu_offload.core.load_costs import LoadCosts, TwoTermFit
from tpu_offload.types import BlockHash, JobKind

BLOCKS_PER_CHUNK = 64
CHUNK_TOKENS = BLOCKS_PER_CHUNK * LAYOUT.block_size
CHUNK_NBYTES = BLOCKS_PER_CHUNK * LAYOUT.block_nbytes
TOKEN_S, ATTENDED_S = 1e-4, 1e-4 / 30_000  # the second half of 32k tokens takes almost twice as long as the first
STEP_TOKENS = 2048
BREAK_EVEN = CHUNK_NBYTES / CHUNK_TOKENS / TOKEN_S  # bytes a second, for short prompts
LATENCY_S = 0.002


def prefill_s(first, end):
    return TOKEN_S * (end - first) + ATTENDED_S * (end - first) * (first + end) / 2


class World:
    """A scheduler, a tier that reads one job after the other, and an engine that serves one request at a time."""

    def __init__(self, mode, *, rate, policy=None, **settings):
        self.rate = rate
        self.clock = Clock()
        config = OffloadConfig.create(
            **{
                "load_mode": mode,
                "num_cpu_chunks": 300,
                "blocks_per_chunk": BLOCKS_PER_CHUNK,
                "eviction_policy": "lru",
                "storage_tier": NAME,
                "num_storage_chunks": 10_000,
                "storage_wait_s": 1e6 if mode is LoadMode.LOAD else 0.5,
                "job_timeout_s": 1e6,
            }
            | settings
        )
        self.scheduler = OffloadScheduler(config, LAYOUT, clock=self.clock, policy=policy)
        self.hasher = BlockHasher(LAYOUT.fingerprint(), block_size=LAYOUT.block_size)
        self.reads: list[tuple[float, int]] = []  # of promotions: the end and the job, in order
        self.planned_s: dict[int, float] = {}
        self.measures = True  # the workers measure how long reads take
        self.measures_prefill = True  # so does the engine, of steps
        self.num_served = 0
        self.report()

    def report(self, *results):
        self.scheduler.apply(StepReport(worker_id=0, results=results, num_host_slots=(300,)))

    def step(self, *scheduled):
        """Plans a step; all but promotions ends at once."""
        plan = self.scheduler.plan_step(scheduled)
        for job in plan.of(JobKind.PROMOTE):
            start_s = max(self.clock.now_s, self.reads[-1][0] if self.reads else 0.0)
            self.reads.append((start_s + LATENCY_S + len(job.chunks) * CHUNK_NBYTES / self.rate, job.job_id))
            self.planned_s[job.job_id] = self.clock.now_s
        ended = {job.job_id: 0.0 for job in plan.jobs if job.kind is not JobKind.PROMOTE}
        ended |= {i: end_s - self.planned_s[i] for end_s, i in self.reads if end_s <= self.clock.now_s}
        self.reads = [read for read in self.reads if read[0] > self.clock.now_s]
        results = [
            JobResult(job_id=job_id, state=JobState.FINISHED, duration_s=1e-3, copy_s=copy_s if self.measures else 0.0)
            for job_id, copy_s in ended.items()
        ]
        self.report(*results)

    def settle(self):
        while self.scheduler.has_jobs:
            if self.reads:
                self.clock.now_s = max(self.clock.now_s, self.reads[0][0])
            self.step()

    @functools.cache  # noqa: B019
    def hashes(self, number, num_tokens):
        hashes: list[BlockHash] = []
        self.hasher.extend(hashes, [number * 100_000 + i for i in range(num_tokens)])
        return hashes

    def serve(self, number, num_tokens):
        """Serves a prompt; returns its time to the first token."""
        self.num_served += 1
        name, hashes, start_s = f"r{self.num_served}", self.hashes(number, num_tokens), self.clock.now_s
        while True:
            found = self.scheduler.match(name, hashes, num_tokens=num_tokens, num_computed_tokens=0)
            if found.state is not MatchState.ARRIVING:
                break
            self.scheduler.release(name)
            self.step()
            assert found.until_s is not None
            next_s = self.reads[0][0] if self.reads else self.clock.now_s
            self.clock.now_s = max(self.clock.now_s, min(found.until_s, next_s))
            self.step()
        blocks = [range(len(hashes))]
        self.scheduler.admit(name, blocks, num_loaded_tokens=found.num_tokens)
        self.step()
        for first in range(found.num_tokens, num_tokens, STEP_TOKENS):
            end = min(num_tokens, first + STEP_TOKENS)
            self.clock.now_s += prefill_s(first, end)
            if self.measures_prefill and end - first > 1:
                attended = (end - first) * (first + end) / 2
                self.scheduler.swap.observe_prefill(end - first, prefill_s(first, end), attended)
        took_s = self.clock.now_s - start_s
        self.step(
            ScheduledRequest(
                request_id=name,
                block_tables=blocks,
                block_hashes=hashes,
                num_prompt_tokens=num_tokens,
                num_computed_tokens=num_tokens,
            )
        )
        self.settle()
        self.scheduler.finish(name)
        self.scheduler.check_invariants()
        return took_s

    def push_out(self):
        """Takes all of the host tier for prompts that are not asked again."""
        for _ in range(3):
            self.serve(1000 + self.num_served, 100 * CHUNK_TOKENS)

    def warm_up(self):
        """Prompts of several sizes, from storage and not."""
        sizes = [1024, 4096, 2048, 8192, 3072]
        for number, size in enumerate(sizes, 100):
            self.serve(number, size)
        self.push_out()
        for number, size in enumerate(sizes, 100):
            self.serve(number, size)


def ttft(mode, num_tokens, rate, *, measures=True):
    world = World(mode, rate=rate)
    world.measures = measures
    world.warm_up()
    world.serve(1, num_tokens)
    world.push_out()
    return world.serve(1, num_tokens), world


@pytest.mark.parametrize("num_tokens", [1024, 4096, 16384, 32768])
@pytest.mark.parametrize("share", few([0.02, 0.3, 0.6, 0.8, 0.95, 1.05, 1.3, 2.0, 30.0], 0.02, 0.6, 0.95, 1.3, 30.0))
def test_never_a_tenth_slower_than_the_better_of_the_two(share, num_tokens):
    rate = share * BREAK_EVEN
    loaded, _ = ttft(LoadMode.LOAD, num_tokens, rate)
    computed, world = ttft(LoadMode.RECOMPUTE, num_tokens, rate)
    assert computed == pytest.approx(prefill_s(0, num_tokens))
    assert world.scheduler.stats().promoted_chunks == 0
    chosen, _ = ttft(LoadMode.AUTO, num_tokens, rate, measures=False)
    assert chosen <= 1.1 * min(loaded, computed)
    chosen, world = ttft(LoadMode.AUTO, num_tokens, rate)
    assert chosen <= 1.1 * min(loaded, computed)
    stats = world.scheduler.stats()
    if share >= 2:
        assert chosen < 0.7 * computed, "it is loaded"
    if share <= 0.3:
        assert stats.num_skipped_promotions > 0


class NoisyWorld(World):
    """Reads that take up to a quarter longer or a sixth less than they take on average."""

    def step(self, *scheduled):
        rate, self.rate = self.rate, self.rate * self.noise.uniform(0.8, 1.2)
        super().step(*scheduled)
        self.rate = rate

    noise = random.Random(1)


def test_reads_that_vary_are_waited_for():
    """Near the break-even: whoever gives up shortly before the end of a read pays for it and for computing."""
    num_tokens, took_s = 4096, {}
    rate = 1.07 * BREAK_EVEN * num_tokens * TOKEN_S / prefill_s(0, num_tokens)
    for mode in (LoadMode.LOAD, LoadMode.AUTO):
        world = NoisyWorld(mode, rate=rate)
        world.warm_up()
        world.serve(1, num_tokens)
        took_s[mode] = 0.0
        for _ in range(8):
            world.push_out()
            took_s[mode] += world.serve(1, num_tokens) / 8
    assert took_s[LoadMode.AUTO] <= 1.1 * min(took_s[LoadMode.LOAD], prefill_s(0, num_tokens))


def test_before_anything_is_measured_it_loads():
    world = World(LoadMode.AUTO, rate=BREAK_EVEN)
    world.measures_prefill = False
    world.serve(1, 4096)
    for number in range(2, 5):
        world.serve(number, 100 * CHUNK_TOKENS)
    found = world.scheduler.match("x", world.hashes(1, 4096), num_tokens=4096, num_computed_tokens=0)
    assert (found.state, found.until_s) == (MatchState.ARRIVING, world.clock.now_s + 0.5)


def test_what_is_slower_is_measured_again_and_nobody_waits_for_it():
    world = World(LoadMode.AUTO, rate=0.1 * BREAK_EVEN)
    world.warm_up()
    world.serve(1, 4096)
    world.push_out()
    num_promoted = world.scheduler.stats().promoted_chunks
    world.clock.now_s += 31.0
    assert world.serve(1, 4096) == pytest.approx(prefill_s(0, 4096))
    assert world.scheduler.stats().promoted_chunks > num_promoted
    world.rate = 100 * BREAK_EVEN  # the disk is free again
    for number in range(2, 40):
        world.serve(number, 4096)
    for _ in range(8):
        world.clock.now_s += 31.0
        for number in range(2, 6):
            world.serve(number, 4096)
        world.push_out()
    assert world.serve(2, 4096) < 0.5 * prefill_s(0, 4096), "it is noticed"


def test_a_tier_that_hangs_costs_no_more_than_computing_takes():
    world = World(LoadMode.AUTO, rate=10 * BREAK_EVEN)
    world.warm_up()
    world.serve(1, 2048)
    world.push_out()
    world.rate = 1e-3
    assert world.scheduler.match("x", world.hashes(1, 2048), num_tokens=2048, num_computed_tokens=0).until_s == (
        pytest.approx(world.clock.now_s + prefill_s(0, 2048), rel=0.1)
    )


def test_the_host_tier_is_compared_too():
    for rate, loads in ((20 * BREAK_EVEN, True), (0.5 * BREAK_EVEN, False)):
        costs = LoadCosts(LoadMode.AUTO, clock=Clock())
        assert costs.prefers_load(10 * CHUNK_NBYTES, first=0, end=10 * CHUNK_TOKENS)
        for num_chunks in (1, 8, 2, 16):
            end = num_chunks * CHUNK_TOKENS
            costs.observe_prefill(end, prefill_s(0, end), end * end / 2)
            costs.observe_load(num_chunks * CHUNK_NBYTES, 0.02 + num_chunks * CHUNK_NBYTES / rate)
        assert costs.prefers_load(10 * CHUNK_NBYTES, first=0, end=10 * CHUNK_TOKENS) == loads


def test_loads_of_one_size_say_nothing_about_the_host_tier():
    """The time until the end of a step cannot be told from that of the copy."""
    costs = LoadCosts(LoadMode.AUTO, clock=Clock())
    for _ in range(5):
        costs.observe_prefill(256, 0.001, 0)
        costs.observe_load(CHUNK_NBYTES, 1.0)
    assert costs.prefers_load(CHUNK_NBYTES, first=0, end=256)


def test_a_request_whose_load_is_slower_computes_and_is_counted():
    world = World(LoadMode.RECOMPUTE, rate=BREAK_EVEN)
    world.serve(1, 1024)
    assert world.serve(1, 1024) == pytest.approx(prefill_s(0, 1024))
    stats = world.scheduler.stats()
    assert (stats.found_tokens, stats.matched_tokens, stats.skipped_load_tokens) == (1023, 0, 1023)


@pytest.mark.parametrize("by_ratio", [True, False])
def test_the_end_of_a_long_prompt_does_not_hide_what_a_short_one_takes(by_ratio):
    """Its last steps are slow for a while, as on a machine that others use too."""
    fit = TwoTermFit(by_ratio=by_ratio)
    for first in range(0, 16_384, 256):
        attended = 256 * (first + 128)
        is_slow = 8_192 <= first < 12_288
        fit.add(256, attended, (3 if is_slow else 1) * (0.01 + 1e-8 * attended))
    estimate = fit.seconds(256, 256 * 128)
    assert estimate is not None
    assert (estimate < 1.5 * 0.0103) == by_ratio, "by position, or only the latest"


def test_times_that_cannot_be_are_no_measurements():
    fit = TwoTermFit()
    for seconds in (1e200, 5e-324, float("nan"), float("inf"), 0.0, -1.0):
        for _ in range(5):
            fit.add(2.0**62, 1.0, seconds)
    assert fit.seconds(1.0, 1.0) is None
    for _ in range(5):
        fit.add(2.0**62, 0.0, 1e-9)
    assert fit.seconds(2.0**62, 0.0) == pytest.approx(1e-9)


def test_factors_are_fitted_and_never_negative():
    fit = TwoTermFit()
    fit.add(1.0, 1.0, 3.0)
    fit.add(2.0, 1.0, 5.0)
    assert fit.seconds(1.0, 1.0) is None
    fit.add(10.0, 1.0, 21.0)
    assert fit.seconds(100.0, 1.0) == pytest.approx(201.0)
    fit.add(50.0, 1.0, 1e5)  # a stall
    assert fit.seconds(100.0, 1.0) == pytest.approx(201.0, rel=0.35)
    for measured in (((1.0, 9.0), (2.0, 5.0), (4.0, 1.0)), ((1.0, 1.0), (2.0, 5.0), (4.0, 13.0))):
        one_sided = TwoTermFit()
        for main, seconds in measured:
            one_sided.add(main, 1.0, seconds)
        factors = [one_sided.seconds(*term) for term in ((1.0, 0.0), (0.0, 1.0))]
        assert sorted(factor or 0 for factor in factors)[0] == 0 < max(factor or 0 for factor in factors), factors
    before = fit.seconds(100.0, 1.0)
    fit.add(0.0, 1.0, 1.0)
    fit.add(1.0, 1.0, 0.0)
    fit.add(1.0, 1.0, 3.0)  # as the first, so that both factors are fitted again
    once_more = TwoTermFit()
    for main, seconds in ((1.0, 3.0), (2.0, 5.0), (10.0, 21.0), (50.0, 1e5), (1.0, 3.0)):
        once_more.add(main, 1.0, seconds)
    assert fit.seconds(100.0, 1.0) == once_more.seconds(100.0, 1.0) != before, "one without time or amount is ignored"
