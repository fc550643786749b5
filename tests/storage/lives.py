"""Random lives of a scheduler with one or two storage tiers, and the rules that must hold in each.

python -m tests.storage.lives --seeds 10000
"""

import argparse
import collections
import logging
import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from tests.core.fakes import BLOCK_SIZE
from tests.inside.scheduler import (
    asks_again,
    chunk_index,
    current_namespace,
    forget_confirmations,
    job_table,
    request_table,
    storage_planner,
    storage_planners,
    storage_stack_planner,
    tier_context,
)
from tests.storage.fakes import SharedEngine, SharedWorker, StorageEngine, StorageWorker, prompt
from tpu_offload import CopyJob, JobResult, Match, MatchState, OffloadStats, StepPlan
from tpu_offload.core.index import ChunkState
from tpu_offload.core.policies import POLICIES
from tpu_offload.types import ChunkKey, JobKind

_WAIT_S = 0.5  # for saves and for storage
_MAX_UNANSWERED = 2  # lookups that are in flight when the breaker opens


def live(seed: int, *, num_turns: int = 120) -> OffloadStats:
    """Prompts that share prefixes come and go; jobs end late, in part, or fail; memory is lost, caches are reset.

    With two tiers, one of them freezes now and then: its jobs end when it is thawed, after their timeout or before.

    Returns:
      The scheduler's counters at the end.
    Raises:
      AssertionError: a rule was broken: other bytes were loaded or stored than a request's tokens give, storage holds
        more than it may, a chunk is stored that admission excludes, a request waits too long, or an account is wrong.
      KeyError: what was never written, or is stale, is read or counts as stored.
    """
    return Life(random.Random(seed)).run(num_turns)


def live_shared(seed: int, *, num_turns: int = 120) -> OffloadStats:
    """The same with a tier where other engines add and remove chunks at any moment, or whose server is dead.

    Returns:
      The scheduler's counters at the end.
    Raises:
      AssertionError: as in `live`, except that what counts as stored may be gone. Also: a chunk is asked for more often
        than requests contain it, or read more often than it was found; a request waits too long for a lookup, or for a
        late one; something is deleted; keys are asked for after a reset; a dead server is asked too often.
    """
    return _SharedLife(random.Random(seed)).run(num_turns)


class Life:
    """One seed decides everything. `tests.storage.hard_lives` has more faults."""

    tier_numbers: Sequence[int] = (1, 2)

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        own = random.Random(repr(rng.getstate()))  # so that `rng` draws what it drew when there was one policy
        self.num_tiers = num = rng.choice(self.tier_numbers)
        self.admissions = rng.choices(["all", "second_sighting", "after_hit"], k=num)
        self.load_mode = rng.choice(["auto", "auto", "load", "recompute"])
        self.engine = self.make_engine(
            **self.settings(rng),
            num_workers=rng.choice([1, 2]),
            num_host_chunks=rng.choice([4, 9]),
            sizes=tuple(rng.choices([3, 10, 40], k=num)),
            job_timeout_s=8.0,
            breaker_failures=rng.choice([0, 3]),
            max_storage_gb_in_flight=rng.choices([1e-9, 8 * 512 / 2**30], k=num),
            storage_write_on=rng.choices(["save", "eviction"], k=num),
            storage_admission=self.admissions,
            storage_eviction_policy=own.choices(["density", *POLICIES], k=num),
            policy=own.choice([POLICIES["lru"], POLICIES["density"]]),
            load_mode=self.load_mode,
            save_wait_s=_WAIT_S,
            storage_wait_s=_WAIT_S,
        )
        self.fault_rate = rng.choice([0.0, 0.15])
        self.prompts = [prompt(i, num_blocks=6) for i in range(4)]
        self.waiting: dict[str, tuple[list[int], float]] = {}  # since when
        self.seen: dict[ChunkKey, set[str]] = {}
        self.loaded: set[ChunkKey] = set()

    def settings(self, rng: random.Random) -> dict[str, Any]:
        """More settings."""
        return {}

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
        self._check_match(name, found, since_s)
        if found.state is MatchState.ARRIVING and rng.random() < 0.9:
            self.waiting[name] = tokens, since_s
        elif len(engine.requests) < 4:
            request = engine.add(name, tokens)
            self.loaded.update(engine.keys(tokens) if request.num_computed else ())
        else:
            engine.scheduler.finish(name)

    def _check_match(self, name: str, found: Match, since_s: float) -> None:
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
        self._check_plan(plan)
        if self.load_mode == "recompute":
            assert not plan.of(JobKind.PROMOTE), "it reads although it shall compute"
        engine.scheduler.check_invariants()
        self.step_workers(results)

    def step_workers(self, early: list[list[JobResult]]) -> None:
        """Some jobs of each worker end, beside those that have ended early, and are reported."""
        engine, rng = self.engine, self.rng
        for worker, results in zip(engine.workers, early, strict=True):
            engine.apply(
                worker, results + worker.finish(rng.randint(0, 3), fail=rng.random() < self._fault_rate(worker))
            )
            engine.scheduler.check_invariants()

    def _check_plan(self, plan: StepPlan) -> None:
        assert not plan.of(JobKind.LOOKUP), "a private tier is asked"

    def _fault_rate(self, worker: StorageWorker) -> float:
        return self.fault_rate

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
            self._reset()
            engine.scheduler.check_invariants()
            for name, request in engine.requests.items():  # they contain chunks of the new namespace now
                for key in engine.keys(request.tokens):
                    self.seen.setdefault(key, set()).add(name)
        if self.num_tiers > 1 and rng.random() < 0.1:
            frozen = set() if rng.random() < 0.5 else {rng.randrange(self.num_tiers)}
            for worker in engine.workers:
                worker.frozen = frozen
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

    def _reset(self) -> None:
        self.engine.scheduler.reset()

    def _check(self) -> None:
        """What counts as stored is on every worker, with the right bytes, and nothing else is."""
        engine = self.engine
        self.check_storage()
        for tier, admission in zip(storage_planners(engine.scheduler), self.admissions, strict=True):
            stored, limit = tier.stored_keys(), tier.records.capacity
            most = [worker.most_stored[tier.tier_id] for worker in engine.workers]
            assert max(most) <= limit, "a tier holds more than it may"
            assert len(tier.records.writing) + len(tier.records.promoting) <= tier.records.max_in_flight, (
                "more chunks of a tier are in flight than may be"
            )
            if admission == "second_sighting":
                assert all(len(self.seen.get(key, ())) >= 2 for key in stored), "a chunk of one request is stored"
            if admission == "after_hit":
                assert self.loaded.issuperset(stored), "a chunk is stored that nobody loaded"
        promoting = len(storage_stack_planner(engine.scheduler).pending())
        assert promoting <= max(worker.num_host_chunks for worker in engine.workers) // 2, "promotions fill the host"


class _SharedLife(Life):
    def __init__(self, rng: random.Random) -> None:
        super().__init__(rng)
        self.change_rate = rng.choice([0.2, 0.8])
        self.num_asked: Counter[ChunkKey] = Counter()
        self.planned_s: dict[int, float] = {}  # of lookups
        self.was_reset = False
        self.ages = random.Random(repr(rng.getstate()))  # so that `rng` draws what it drew without it
        self.age_rate = self.ages.choice([0.0, 0.1, 0.5])
        self.names = [list(zip(self.engine.keys(p), self.engine.hashes(p), strict=True)) for p in self.prompts]

    def make_engine(self, **settings: Any) -> StorageEngine:
        return SharedEngine(**settings)

    def settings(self, rng: random.Random) -> dict[str, Any]:
        self.lookup_wait_s = rng.choice([0.05, 0.3])
        self.is_dead = rng.random() < 0.3
        return {"storage_lookup_wait_s": self.lookup_wait_s, "breaker_retry_s": 1000.0 if self.is_dead else 5.0}

    def _check_match(self, name: str, found: Match, since_s: float) -> None:
        super()._check_match(name, found, since_s)
        scheduler, now_s = self.engine.scheduler, self.engine.clock.now_s
        request = request_table(scheduler)[name]
        following = request.keys[request.last_match.num_found_chunks : request.last_match.num_found_chunks + 1]
        if found.state is MatchState.ARRIVING and not any(
            chunk_index(scheduler).state(key) is ChunkState.PENDING for key in following
        ):
            assert found.until_s is not None
            assert found.until_s <= since_s + self.lookup_wait_s, "a request waits too long for a lookup"
            planned_s = [self.planned_s[job.job_id] for job in job_table(scheduler).of(JobKind.LOOKUP)]
            assert all(now_s < s + self.lookup_wait_s for s in planned_s), "a request waits for a late lookup"

    def _arrive(self, name: str) -> None:
        self._change()
        if self.ages.random() < self.age_rate:
            forget_confirmations(storage_planner(self.engine.scheduler))
        super()._arrive(name)

    def _check_plan(self, plan: StepPlan) -> None:
        for job in plan.of(JobKind.LOOKUP):
            assert not self.was_reset, "nobody else has keys of this namespace"
            self.planned_s[job.job_id] = self.engine.clock.now_s
            if asks_again(storage_planner(self.engine.scheduler), job.job_id):
                assert all(len(prefix) == 1 for prefix in job.prefixes), "one that is gone hides those after it"
                continue
            for prefix in job.prefixes:
                self.num_asked.update(prefix)
        assert not any(job.deleted_keys for job in plan.jobs), "it may be another's"
        self._change()

    def _fault_rate(self, worker: StorageWorker) -> float:
        is_asked = any(job.kind is JobKind.LOOKUP for job, _ in worker.in_flight[:3])
        return 1.0 if self.is_dead and is_asked else self.fault_rate

    def _reset(self) -> None:
        super()._reset()
        self.was_reset = True

    def _change(self) -> None:
        """Another engine stores the beginning or some chunk of a prompt, or the server evicts some."""
        rng = self.rng
        while rng.random() < self.change_rate:
            chunks = self.names[rng.randrange(len(self.names))]
            some = chunks[: rng.randint(0, len(chunks))] if rng.random() < 0.6 else [rng.choice(chunks)]
            stores = rng.random() < 0.6
            for worker in self.engine.workers if rng.random() < 0.8 else [rng.choice(self.engine.workers)]:
                for key, name in some:
                    if stores:
                        worker.storage[key] = name
                    else:
                        worker.storage.pop(key, None)

    def _check(self) -> None:
        engine = self.engine
        namespace = current_namespace(engine.scheduler)
        assert all(key.endswith(namespace) for key in storage_stack_planner(engine.scheduler).stored_keys()), (
            "it is of before the reset"
        )
        for key, num_asked in self.num_asked.items():
            assert num_asked <= len(self.seen[key]), "a request asks for a chunk twice"
        for worker in engine.workers:
            assert isinstance(worker, SharedWorker)
            for key, num_missed in worker.num_missed.items():
                assert num_missed <= worker.num_found[key], "what is gone is read again"
        if self.is_dead and tier_context(engine.scheduler).config.breaker_failures:
            assert len(self.planned_s) <= 3 + _MAX_UNANSWERED, "a dead server is asked too often"


def engine_slots(job: CopyJob) -> set[int]:
    """Slots of the host tier that a job reads or writes."""
    return {slot for _, slot in job.chunks} | {place for part in job.parts for place in part.host_block_ids}


_COUNTED = ("cascaded_chunks", "promoted_chunks", "failed_storage_chunks", "num_evicted_storage_chunks")


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
