"""Request swap as a state machine: whatever happens in what order, what comes back is what went out."""

import random

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.core.fakes import BLOCK_SIZE, LAYOUT
from tests.core.swap.fakes import HYBRID, WINDOWS_ONLY, SwapEngine


class SwapMachine(RuleBasedStateMachine):
    """Requests with shared prefixes run, leave, come back and end, under failures, losses, delays and resets.

    The engine of `fakes` compares every byte that comes back with what was there before; the plain model here knows
    which requests are where, and which must never come back.
    """

    @initialize(
        layout=st.sampled_from([LAYOUT, LAYOUT, HYBRID, WINDOWS_ONLY]),
        pool=st.integers(0, 40), num_workers=st.integers(1, 3), tier=st.booleans(),
        blocks_per_chunk=st.integers(1, 3), seed=st.integers(0, 1000),
    )  # fmt: skip
    def begin(self, layout, pool, num_workers, tier, blocks_per_chunk, seed):
        num_chunks = 12 if tier and layout is LAYOUT else 0
        self.engine = SwapEngine(
            layout=layout,
            pool=(pool,),
            num_workers=num_workers,
            num_host_chunks=num_chunks,
            blocks_per_chunk=blocks_per_chunk,
            job_timeout_s=10.0,
            seed=seed,
        )
        self.rng = random.Random(seed)
        self.num_started = 0
        self.stale: set[str] = set()  # out when the cache was reset: must not come back
        self.faulty = False
        self.engine.failing = lambda job: self.faulty and self.rng.random() < 0.5
        for i in range(3):
            self.engine.start(f"first{i}", [7] * 9 + [i] * 5)

    def names(self, where):
        return sorted(where)

    @precondition(lambda self: not self.engine.has_unsent_outs and len(self.engine.running) < 6)
    @rule(walk=st.lists(st.integers(0, 1), min_size=1, max_size=4), extra=st.integers(0, 7))
    def start(self, walk, extra):
        tokens: list[int] = []
        for step in walk:  # a walk in a small tree of shared prefixes
            tokens += [100 * len(tokens) + step] * BLOCK_SIZE
        tokens += [self.num_started + 10_000] * extra
        needed = -(-len(tokens) // BLOCK_SIZE)
        if min(map(len, self.engine.free)) >= needed:
            name = f"r{self.num_started}"
            self.num_started += 1
            self.engine.start(name, tokens, num_computed=self.rng.randint(max(0, len(tokens) - 3), len(tokens)))

    @precondition(lambda self: self.engine.running)
    @rule(data=st.data())
    def swap_out(self, data):
        name = data.draw(st.sampled_from(self.names(self.engine.running)))
        held = self.engine.scheduler.stats().swap_held_blocks
        if not self.engine.swap_out(name):
            assert self.engine.scheduler.stats().swap_held_blocks == held, "it took something and gave nothing"

    @precondition(lambda self: any(map(self.engine.swap.can_swap_in, self.engine.out)))
    @rule(data=st.data(), num_present=st.integers(0, 9))
    def swap_in(self, data, num_present):
        engine = self.engine
        name = data.draw(st.sampled_from([n for n in self.names(engine.out) if engine.swap.can_swap_in(n)]))
        assert name not in self.stale
        if engine.fits(name) and not engine.has_unsent_outs:
            num_full = 0 if engine.only_ring else engine.out[name].num_computed // BLOCK_SIZE
            present = self.rng.sample(range(num_full), min(num_present, num_full) if num_present > 5 else 0)
            engine.swap_in(name, present=present)

    @precondition(lambda self: self.engine.returning)
    @rule(data=st.data())
    def abort_swap_in(self, data):
        self.engine.abort_swap_in(data.draw(st.sampled_from(self.names(self.engine.returning))))

    @rule(data=st.data())
    def end(self, data):
        engine = self.engine
        known = self.names([*engine.running, *engine.out, *engine.returning])
        if known:
            engine.discard(*data.draw(st.lists(st.sampled_from(known), max_size=3, unique=True)))

    @rule(save=st.booleans(), faulty=st.booleans(), seconds=st.sampled_from([0.1] * 15 + [6.0]))
    def step(self, save, faulty, seconds):
        engine = self.engine
        self.faulty = faulty and self.rng.random() < 0.3
        engine.clock.now_s += seconds
        engine.step([engine.scheduled(request) for request in engine.running.values()] if save else [])

    @rule(data=st.data(), which=st.integers(0, 2), doubled=st.booleans())
    def report(self, data, which, doubled):
        worker = self.engine.workers[which % len(self.engine.workers)]
        results = data.draw(st.permutations(worker.unreported))
        results = results[: data.draw(st.integers(0, len(results)))]
        self.engine.report(worker, results + results[:1] if doubled else results)

    @rule(num_steps=st.integers(1, 2))
    def quiet(self, num_steps):
        self.faulty = False
        for _ in range(num_steps):
            self.engine.step()
            for worker in self.engine.workers:
                self.engine.report(worker)

    @rule(which=st.integers(0, 2), group=st.integers(0, 1), first=st.integers(0, 40), length=st.integers(1, 20))
    def lose(self, which, group, first, length):
        if self.rng.random() < 0.1:
            worker = self.engine.workers[which % len(self.engine.workers)]
            worker.lose(group % len(worker.pool), first, first + length)
            self.engine.report(worker, [])

    @rule(first=st.integers(0, 12))
    def lose_slots(self, first):
        if self.rng.random() < 0.1:
            self.engine.workers[0].lose_slots(first, first + 3)
            self.engine.report(self.engine.workers[0], [])

    @rule()
    def reset(self):
        if self.rng.random() < 0.1:
            self.engine.scheduler.reset()
            self.stale |= {*self.engine.out, *self.engine.returning}

    @invariant()
    def accounts_agree(self):
        if not hasattr(self, "engine"):
            return
        engine = self.engine
        engine.scheduler.check_invariants()
        assert not self.stale & set(engine.running), "what the reset made worthless came back"
        stats = engine.scheduler.stats()
        assert stats.swap_held_blocks <= stats.swap_peak_blocks <= stats.swap_pool_blocks
        for request in engine.running.values():
            engine.check(request)

    def teardown(self):
        if not hasattr(self, "engine"):
            return
        engine = self.engine
        self.faulty = False
        engine.settle()
        for name in self.names(engine.out):
            assert engine.swap.can_swap_in(name), "nothing is in flight, and it cannot return"
            if engine.fits(name):
                engine.swap_in(name)
        engine.settle()
        engine.discard(*engine.running, *engine.out, *engine.returning)
        engine.settle()
        engine.check_empty()
        assert [len(free) for free in engine.free] == [64] * len(engine.free)


TestSwapMachine = SwapMachine.TestCase
TestSwapMachine.settings = settings(max_examples=150, stateful_step_count=40, deadline=None, derandomize=True)
