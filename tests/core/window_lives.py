"""Random lives of a scheduler with sliding windows and states, of one or two workers, and a campaign of many.

python -m tests.core.window_lives --seeds 10000
"""

import argparse
import logging
import random
from typing import Any

from tests.core.fakes import BLOCK_SIZE, FakeWorker
from tests.core.router import Router, num_in_host_tier
from tests.core.window_engine import WindowEngine
from tpu_offload import KVLayout
from tpu_offload.types import BlockHash


class RandomLife:
    """One seed decides everything: shared prefixes, step sizes, aborts, faults, losses and delays."""

    worker_type: type[FakeWorker] = FakeWorker

    def __init__(self, seed: int, **settings: Any) -> None:
        self.rng = rng = random.Random(seed)
        num_slots = rng.choice([8, 20, 60])
        self.has_states = rng.random() < 0.4
        workers = [
            self.worker_type(
                i, num_host_chunks=num_slots, num_host_states=rng.choice([1, 3, 20]), staged=rng.random() < 0.5
            )
            for i in range(rng.randint(1, 2))
        ]
        self.blocks_per_chunk = rng.choice([1, 1, 1, 2])
        windows = rng.choice([(9,), (5,), (9, 5), (17, 9), (12, 3), (1, 40)])
        if self.has_states and rng.random() < 0.7:
            windows = ()
        path = rng.choice(["staged", "staged", "direct"])
        self.engine = WindowEngine(
            windows,
            num_blocks=rng.randint(40, 160),
            num_rows=rng.randint(6, 40) if self.has_states else 0,
            workers=workers,
            seed=seed,
            layout=self.make_layout(windows),
            save_path=path,
            load_path=path,
            blocks_per_chunk=self.blocks_per_chunk,
            num_staging_blocks=rng.randint(6, 40),
            num_cpu_chunks=num_slots,
            decode_save=rng.random() < 0.5,
            save_on=rng.choice(["compute", "compute", "compute,preemption"]),
            job_timeout_s=20.0,
            **settings,
        )
        self.undelivered: list[list[Any]] = [[] for _ in workers]
        self.fault_rate = rng.choice([0.0, 0.2])
        self.loss_rate = rng.choice([0.0, 0.0, 0.05])
        self.watch()

    def watch(self) -> None:
        """Counts, and follows the events, from here on."""
        self.num_requests = self.num_loaded = self.num_checked = 0
        self.num_routed = 0  # tokens that lookups and the router found
        self.router = Router(self.engine.scheduler)

    def make_layout(self, windows: tuple[int, ...]) -> KVLayout | None:
        """Another layout than that of the engine."""
        return None

    def prompt(self) -> list[int]:
        prompt: list[int] = []
        for _ in range(self.rng.randint(1, 4)):  # a walk in a small tree of shared prefixes
            prompt += [1000 * len(prompt) + self.rng.randint(0, 1)] * self.rng.randint(2, 5) * BLOCK_SIZE
        return prompt[: len(prompt) - self.rng.randint(0, 3)]

    def stops(self, prompt: list[int]) -> list[int]:
        """Where prompts part, sometimes."""
        if not self.has_states or self.rng.random() < 0.5:
            return []
        return self.rng.sample(range(BLOCK_SIZE, len(prompt), BLOCK_SIZE), min(2, (len(prompt) - 1) // BLOCK_SIZE))

    def arrive(self) -> None:
        self.num_requests += 1
        prompt, in_hbm = self.prompt(), 0
        if self.rng.random() < 0.3:
            in_hbm = self.rng.randrange(len(prompt)) // BLOCK_SIZE * BLOCK_SIZE
        request = self.engine.add(f"r{self.num_requests}", prompt, num_in_hbm=in_hbm, stops=self.stops(prompt))
        if request is not None:
            self.num_loaded += request.num_computed - in_hbm

    def tokens_to_compute(self) -> dict[str, int]:
        """How many tokens of which requests the next step computes."""
        computed = {}
        for request in self.engine.requests.values():
            left = len(request.tokens) - request.num_computed
            if not request.loading and left and self.rng.random() < 0.8:
                computed[request.request_id] = self.rng.randint(1, left)
        return computed

    def step(self) -> None:
        engine, rng = self.engine, self.rng
        computed = self.tokens_to_compute()
        engine.clock.now_s += rng.choice([0.1, 0.1, 5.0])
        _, results = engine.step(computed)
        for i, worker in enumerate(engine.workers):
            if rng.random() < self.loss_rate:
                self.lose_memory(worker)
            self.undelivered[i] += results[i]
            if rng.random() < 0.6:
                fail = rng.random() < self.fault_rate
                self.undelivered[i] += worker.finish(rng.randint(0, len(worker.in_flight)), fail=fail)
            if rng.random() < 0.7:
                rng.shuffle(self.undelivered[i])
                batch, self.undelivered[i] = self.undelivered[i], []
                engine.apply(worker, batch)

    def lose_memory(self, worker: FakeWorker) -> None:
        """A worker loses a range of chunks or of states."""
        of_states = self.has_states and self.rng.random() < 0.3
        num_slots = worker.num_host_states if of_states else worker.num_host_chunks
        first = self.rng.randrange(num_slots)
        end = self.rng.randint(first + 1, num_slots)
        if of_states:
            worker.lose_states(first, end)
        else:
            worker.lose(first, end, blocks_per_chunk=self.blocks_per_chunk)

    def check_router(self) -> None:
        """By the events, a prompt's prefix is as long as lookups find it."""
        self.router.take()
        for prompt in [self.prompt(), *(request.tokens for request in self.engine.requests.values())]:
            hashes: list[BlockHash] = []
            self.engine.hasher.extend(hashes, prompt)
            found = num_in_host_tier(self.engine.scheduler, hashes, len(prompt))
            assert self.router.num_cached_tokens(hashes, len(prompt)) == found, "the events name another prefix"
            self.num_routed += found

    def run(self, num_steps: int) -> None:
        engine, rng = self.engine, self.rng
        for _ in range(num_steps):
            if rng.random() < 0.5:
                self.arrive()
            for request in engine.requests.values():
                if request.num_computed == len(request.tokens) and rng.random() < 0.5:
                    engine.generate(request, rng.randint(0, 1))
            if engine.requests and rng.random() < 0.3:
                gone = engine.remove(rng.choice(sorted(engine.requests)), preempt=rng.random() < 0.3)
                if rng.random() < 0.5:
                    engine.add(gone.request_id, gone.tokens)
            if rng.random() < 0.01:
                engine.scheduler.reset()
            self.step()
            engine.scheduler.check_invariants()
            self.check_router()
            for request in engine.requests.values():
                if not request.loading:
                    self.num_checked += engine.check_bytes(request)
        for i, worker in enumerate(engine.workers):
            engine.apply(worker, self.undelivered[i])
        engine.settle()
        for request_id in list(engine.requests):
            engine.remove(request_id)
        engine.settle()
        stats = engine.scheduler.stats()
        assert (stats.staging_reserved_blocks, stats.num_jobs_in_flight) == (0, 0)
        assert stats.staging_peak_blocks <= stats.staging_budget_blocks


def run_many(life_type: type[RandomLife], doc: str | None) -> None:
    """Runs many lives; raises AssertionError at the first wrong block, naming the seed."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=1000)
    parser.add_argument("--first-seed", type=int, default=100_000)
    parser.add_argument("--steps", type=int, default=100)
    args = parser.parse_args()
    logging.disable(logging.CRITICAL)
    num_checked = num_loaded = 0
    for seed in range(args.first_seed, args.first_seed + args.seeds):
        life = life_type(seed)
        try:
            life.run(args.steps)
        except Exception as e:
            raise AssertionError(f"seed {seed}: {e}") from e
        num_checked += life.num_checked
        num_loaded += life.num_loaded
    print(
        f"{args.seeds} lives, {args.seeds * args.steps} steps: {num_loaded} tokens loaded, {num_checked} blocks "
        "checked, none wrong"
    )


if __name__ == "__main__":
    run_many(RandomLife, __doc__)
