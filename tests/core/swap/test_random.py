"""Long random lives under pressure: most of what happens is requests that leave and come back."""

import random
from collections import Counter

import pytest

from tests.core.fakes import BLOCK_SIZE, LAYOUT
from tests.core.swap.fakes import HYBRID, WINDOWS_ONLY, SwapEngine


class RandomLife:
    """One seed decides everything."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        layout = rng.choice([LAYOUT, LAYOUT, LAYOUT, HYBRID, HYBRID, WINDOWS_ONLY])
        num_workers = rng.choice([1, 1, 2, 3])
        self.engine = SwapEngine(
            layout=layout,
            pool=(rng.choice([6, 12, 30]),),
            num_workers=num_workers,
            num_hbm=40,
            num_host_chunks=rng.choice([0, 6, 20]) if layout is LAYOUT else 0,
            blocks_per_chunk=rng.choice([1, 2]),
            job_timeout_s=10.0,
            seed=seed,
        )
        self.fault_rate = rng.choice([0.0, 0.0, 0.1])
        self.loss_rate = rng.choice([0.0, 0.0, 0.02])
        self.engine.failing = lambda job: rng.random() < self.fault_rate
        self.num_started = 0

    def start(self) -> None:
        rng, engine = self.rng, self.engine
        tokens: list[int] = []
        for _ in range(rng.randint(1, 4)):
            tokens += [100 * len(tokens) + rng.randint(0, 1)] * BLOCK_SIZE
        tokens += [10_000 + self.num_started] * rng.randint(0, 9)
        if min(map(len, engine.free)) >= len(tokens) // BLOCK_SIZE + 1:
            self.num_started += 1
            engine.start(f"r{self.num_started}", tokens, num_computed=rng.randint(len(tokens) // 2, len(tokens)))

    def act(self) -> None:
        rng, engine = self.rng, self.engine
        if len(engine.running) < 4 and rng.random() < 0.5:
            self.start()
        for name in sorted(engine.running):
            if rng.random() < 0.2:
                engine.swap_out(name)
        for name in sorted(engine.out):
            if engine.swap.can_swap_in(name) and engine.fits(name) and rng.random() < 0.5:
                num_full = engine.out[name].num_computed // BLOCK_SIZE
                # Blocks that were just freed are still read by the coming step: nothing can be written to them.
                present = (
                    []
                    if engine.has_unsent_outs or engine.only_ring
                    else [i for i in range(num_full) if rng.random() < 0.3]
                )
                engine.swap_in(name, present=present)
        for name in sorted(engine.returning):
            if rng.random() < 0.1:
                engine.abort_swap_in(name)
        known = sorted([*engine.running, *engine.out, *engine.returning])
        if known and rng.random() < 0.2:
            engine.discard(*rng.sample(known, min(len(known), rng.randint(1, 2))))
        if rng.random() < 0.005:
            engine.scheduler.reset()

    def step(self) -> None:
        rng, engine = self.rng, self.engine
        engine.clock.now_s += rng.choice([0.1] * 60 + [4.0, 11.0])
        engine.step([engine.scheduled(request) for request in engine.running.values() if rng.random() < 0.3])
        for worker in engine.workers:
            if rng.random() < self.loss_rate:
                worker.lose(rng.randrange(len(worker.pool)), 0, rng.randint(1, 8))
                engine.report(worker, [])
            if rng.random() < 0.8:
                results = rng.sample(worker.unreported, rng.randint(0, len(worker.unreported)))
                engine.report(worker, results + results[:1] * (rng.random() < 0.2))
        for request in engine.running.values():
            engine.check(request)

    def run(self, num_steps: int) -> Counter:
        engine = self.engine
        for _ in range(num_steps):
            self.act()
            self.step()
        engine.failing = lambda job: False
        engine.settle()
        assert all(map(engine.swap.can_swap_in, engine.out))
        engine.discard(*engine.running, *engine.out, *engine.returning)
        engine.settle()
        engine.check_empty()
        return Counter(engine.scheduler.stats().as_dict())


SEEDS = range(40)
COUNTS: Counter[str] = Counter()


@pytest.mark.parametrize("seed", SEEDS)
def test_random_life(seed):
    COUNTS.update(RandomLife(seed).run(250) | Counter(num_lives=1))


@pytest.mark.wide
def test_the_lives_were_lively():
    """Everything that can happen has happened, if all of them have run."""
    if COUNTS["num_lives"] < len(SEEDS):
        pytest.skip("the random lives did not run")
    for name in (
        "num_swapped_out", "num_swapped_in", "num_lost_swaps", "num_recomputed_no_room", "num_thrashed_swaps",
        "swap_skipped_blocks", "num_timed_out_jobs", "num_failed_jobs", "num_ignored_results", "saved_blocks",
    ):  # fmt: skip
        assert COUNTS[name] > 20, (name, COUNTS)
