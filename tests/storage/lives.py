"""Random lives of a scheduler with a storage tier, and the rules that must hold in each.

python -m tests.storage.lives --seeds 10000
"""

import argparse
import collections
import logging
import random
from collections.abc import Callable
from typing import Any

from tests.core.fakes import BLOCK_SIZE
from tests.storage.fakes import StorageEngine, StorageWorker, prompt
from tpu_offload import CopyJob, JobResult, Match, MatchState, OffloadStats
from tpu_offload.types import ChunkKey, JobKind

_WAIT_S = 0.5  # for saves and for storage


def live(seed: int, *, num_turns: int = 120) -> OffloadStats:
    """Prompts that share prefixes come and go; jobs end late, in part, or fail; memory is lost, caches are reset.

    Returns:
      The scheduler's counters at the end.
    Raises:
      AssertionError: a rule was broken: other bytes were loaded or stored than a request's tokens give, storage holds
        more than it may, a chunk is stored that admission excludes, a request waits too long, or an account is wrong.
      KeyError: what was never written, or is stale, is read or counts as stored.
    """
    return Life(random.Random(seed)).run(num_turns)


class Life:
    """One seed decides everything. `tests.storage.hard_lives` has more faults."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.admission = rng.choice(["all", "second_sighting", "after_hit"])
        self.load_mode = rng.choice(["auto", "auto", "load", "recompute"])
        self.engine = self.make_engine(
            num_workers=rng.choice([1, 2]),
            num_host_chunks=rng.choice([4, 9]),
            num_storage_chunks=rng.choice([3, 10, 40]),
            job_timeout_s=8.0,
            breaker_failures=rng.choice([0, 3]),
            max_storage_gb_in_flight=rng.choice([1e-9, 8 * 512 / 2**30]),
            storage_write_on=rng.choice(["save", "eviction"]),
            storage_admission=self.admission,
            load_mode=self.load_mode,
            save_wait_s=_WAIT_S,
            storage_wait_s=_WAIT_S,
        )
        self.fault_rate = rng.choice([0.0, 0.15])
        self.prompts = [prompt(i, num_blocks=6) for i in range(4)]
        self.waiting: dict[str, tuple[list[int], float]] = {}  # since when
        self.seen: dict[ChunkKey, set[str]] = {}
        self.loaded: set[ChunkKey] = set()

    def make_engine(self, **settings: Any) -> StorageEngine:
        """Called once."""
        return StorageEngine(**settings)

    def run(self, num_turns: int) -> OffloadStats:
        for turn in range(num_turns):
            self.engine.clock.now_s += self.rng.choice([0.01, 0.3])
            self._arrive(f"r{turn}")
            disturbs_first = self.rng.random() < 0.5  # between a lookup and its plan
            if disturbs_first:
                self._disturb()
            self._step()
            self._leave()
            if not disturbs_first:
                self._disturb()
            self._check()
        self.end()
        return self.engine.scheduler.stats()

    def _arrive(self, name: str) -> None:
        """A new request, or one that waits, is looked up; it is admitted if there is nothing to wait for."""
        engine, rng = self.engine, self.rng
        if self.waiting and rng.random() < 0.7:
            name = rng.choice(sorted(self.waiting))
        elif rng.random() >= 0.4 or len(engine.requests) >= 3:
            return
        tokens, since_s = self.waiting.pop(name, (None, engine.clock.now_s))
        if tokens is None:
            tokens = self.prompts[rng.randrange(4)][: BLOCK_SIZE * rng.randint(1, 6)]
        for key in engine.keys(tokens):
            self.seen.setdefault(key, set()).add(name)
        found = engine.match(name, tokens)
        self._check_match(found, since_s)
        if found.state is MatchState.ARRIVING and rng.random() < 0.9:
            self.waiting[name] = tokens, since_s
        elif len(engine.requests) < 4:
            request = engine.add(name, tokens)
            self.loaded.update(engine.keys(tokens) if request.num_computed else ())
        else:
            engine.scheduler.finish(name)

    def _check_match(self, found: Match, since_s: float) -> None:
        if found.state is MatchState.ARRIVING:
            assert found.until_s is not None
            assert found.until_s <= since_s + _WAIT_S, "a request waits longer than it may"
        if self.load_mode == "recompute":
            assert found.num_tokens == 0, "it loads although it shall compute"

    def _step(self) -> None:
        engine = self.engine
        computed = {
            name: len(request.tokens) - request.num_computed
            for name, request in engine.requests.items()
            if not request.loading and request.num_computed < len(request.tokens)
        }
        plan, results = engine.step(computed)
        if self.load_mode == "recompute":
            assert not plan.of(JobKind.PROMOTE), "it reads although it shall compute"
        engine.scheduler.check_invariants()
        self.step_workers(results)

    def step_workers(self, early: list[list[JobResult]]) -> None:
        """Some jobs of each worker end, beside those that have ended early, and are reported."""
        engine, rng = self.engine, self.rng
        for worker, results in zip(engine.workers, early, strict=True):
            engine.apply(worker, results + worker.finish(rng.randint(0, 3), fail=rng.random() < self.fault_rate))
            engine.scheduler.check_invariants()

    def _leave(self) -> None:
        for name, request in list(self.engine.requests.items()):
            if not request.loading and request.num_computed >= len(request.tokens) and self.rng.random() < 0.7:
                self.engine.check_bytes(request, len(request.tokens))
                self.engine.remove(name)

    def _disturb(self) -> None:
        engine, rng = self.engine, self.rng
        if rng.random() < 0.02:
            engine.clock.now_s += 8.0
        if rng.random() < 0.02:
            engine.scheduler.reset()
            engine.scheduler.check_invariants()
            for name, request in engine.requests.items():  # they contain chunks of the new namespace now
                for key in engine.keys(request.tokens):
                    self.seen.setdefault(key, set()).add(name)
        if self.fault_rate and rng.random() < 0.05:
            worker = rng.choice(engine.workers)
            slot = rng.randrange(worker.num_host_chunks)
            if not any(slot in engine_slots(job) for job, _ in worker.in_flight):
                worker.lose(slot, slot + 1, blocks_per_chunk=1)
                self.tell(worker)
                engine.scheduler.check_invariants()
        self.disturb_more()

    def disturb_more(self) -> None:
        """More faults."""

    def tell(self, worker: StorageWorker) -> None:
        """A worker has lost memory, and reports it at once."""
        self.engine.apply(worker, [])

    def end(self) -> None:
        """The last turn is over."""

    def check_storage(self) -> None:
        """Each worker has what counts as stored, with the right bytes."""
        self.engine.check_storage(self.prompts)

    def _check(self) -> None:
        """What counts as stored is on every worker, with the right bytes, and nothing else is."""
        engine = self.engine
        self.check_storage()
        stored = engine.scheduler._storage._stored
        limit = engine.scheduler._storage._num_chunks
        assert all(worker.most_stored <= limit for worker in engine.workers), "storage holds more than it may"
        if self.admission == "second_sighting":
            assert all(len(self.seen.get(key, ())) >= 2 for key in stored), "a chunk of one request is stored"
        if self.admission == "after_hit":
            assert self.loaded.issuperset(stored), "a chunk is stored that nobody loaded"


def engine_slots(job: CopyJob) -> set[int]:
    """Slots of the host tier that a job reads or writes."""
    return {slot for _, slot in job.chunks} | {place for part in job.parts for place in part.host_block_ids}


_COUNTED = ("cascaded_chunks", "promoted_chunks", "num_failed_jobs", "num_timed_out_jobs", "num_evicted_storage_chunks")


def run_many(one: Callable[..., OffloadStats], doc: str | None) -> None:
    """Runs many lives; raises AssertionError at the first broken rule, naming the seed."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=1000)
    parser.add_argument("--first-seed", type=int, default=100_000)
    parser.add_argument("--steps", type=int, default=120)
    args = parser.parse_args()
    logging.disable(logging.CRITICAL)
    counts: collections.Counter[str] = collections.Counter()
    for seed in range(args.first_seed, args.first_seed + args.seeds):
        try:
            stats = one(seed, num_turns=args.steps)
        except Exception as e:
            raise AssertionError(f"seed {seed}: {type(e).__name__}: {e}") from e
        counts.update({name: getattr(stats, name) for name in _COUNTED})
    print(f"{args.seeds} lives, {args.seeds * args.steps} steps, no rule broken: {dict(counts)}")


if __name__ == "__main__":
    run_many(live, __doc__)
