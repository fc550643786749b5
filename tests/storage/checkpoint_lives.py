"""Random lives with sliding windows and states above storage tiers.

python -m tests.storage.checkpoint_lives --seeds 10000
"""

import random
from typing import Any

from tests.core.fakes import POISON, FakeWorker
from tests.core.window_engine import WindowEngine, window_layout
from tests.core.window_lives import RandomLife, run_many
from tests.inside.scheduler import (
    current_namespace,
    forget_confirmations,
    storage_planner,
    storage_planners,
    tier_context,
)
from tests.storage.fakes import SharedWorker, StorageWorker
from tests.storage.memory_tier import NAME
from tpu_offload import KVLayout, MatchState, OffloadStats
from tpu_offload.types import BlockHash, ChunkKey, Pool

_WAIT_S = 3.0


class CheckpointWorker(StorageWorker):
    """Has states, too."""

    def __init__(
        self, worker_id: int = 0, *, num_host_chunks: int = 4, num_host_states: int = 0, staged: bool = True
    ) -> None:
        super().__init__(worker_id, num_host_chunks=num_host_chunks)
        self.num_host_states, self.staged = num_host_states, staged


class SharedCheckpointWorker(CheckpointWorker, SharedWorker):
    """Its storage is shared."""


def attach(engine: WindowEngine) -> None:
    """Tells the workers where states are, and how many records one has."""
    context = tier_context(engine.scheduler)
    for worker in engine.workers:
        assert isinstance(worker, CheckpointWorker)
        worker.blocks_per_chunk = context.blocks_per_chunk
        if context.has_states:
            worker.first_state = context.config.first_slots(context.layout)[Pool.STATES]
        worker.num_parts = context.config.records_per_state(context.layout)


class CheckpointLife(RandomLife):
    """Prompts wait for storage; what is stored is what the names of its records say."""

    worker_type: type[FakeWorker] = CheckpointWorker

    def __init__(self, seed: int, **settings: Any) -> None:
        rng = random.Random(-1 - seed)
        num = rng.choice([1, 1, 2])
        self.state_size = rng.choice([4, 12, 20])
        defaults: dict[str, Any] = {
            "storage_tier": (NAME,) * num,
            "num_storage_chunks": tuple(rng.choices([6, 30, 30, 100, 100], k=num)),
            "storage_write_on": rng.choices(["save", "eviction"], k=num),
            "storage_admission": rng.choices(["all", "all", "all", "all", "second_sighting", "after_hit"], k=num),
            "max_storage_gb_in_flight": rng.choices([1e-9, *[64 * 512 / 2**30] * 4], k=num),
            "breaker_failures": rng.choice([0, 3]),
            "save_wait_s": _WAIT_S,
            "storage_wait_s": _WAIT_S,
        }
        super().__init__(seed, **(defaults | settings))
        attach(self.engine)
        self.waiting: dict[str, tuple[list[int], list[int], float]] = {}
        self.num_promoted = 0

    def make_layout(self, windows: tuple[int, ...]) -> KVLayout | None:
        """With states of one record or several."""
        return window_layout(windows, has_states=True, state_size=self.state_size) if self.has_states else None

    def arrive(self) -> None:
        engine, rng = self.engine, self.rng
        self.num_requests += 1
        name, since_s = f"r{self.num_requests}", engine.clock.now_s
        if self.waiting and rng.random() < 0.7:
            name = rng.choice(sorted(self.waiting))
            tokens, stops, since_s = self.waiting.pop(name)
        else:
            tokens = self.prompt()
            stops = self.stops(tokens)
        hashes: list[BlockHash] = []
        engine.hasher.extend(hashes, tokens)
        found = engine.scheduler.match(name, hashes, num_tokens=len(tokens), num_computed_tokens=0)
        engine.scheduler.release(name)
        engine.scheduler.check_invariants()
        if found.state is MatchState.ARRIVING and rng.random() < 0.95:
            assert found.until_s is not None
            assert found.until_s <= since_s + _WAIT_S, "a request waits longer than it may"
            self.waiting[name] = tokens, stops, since_s
            return
        request = engine.add(name, tokens, stops=stops)
        if request is None:
            engine.scheduler.finish(name)
        else:
            self.num_loaded += request.num_computed

    def step(self) -> None:
        super().step()
        self.check_storage()

    def check_storage(self) -> None:
        """What counts as stored is on every worker, with the right bytes; no tier has more than it may."""
        engine = self.engine
        for tier in storage_planners(engine.scheduler):
            for worker in engine.workers:
                assert isinstance(worker, CheckpointWorker)
                assert worker.most_stored[tier.tier_id] <= tier.records.capacity, "a tier holds more than it may"
                for name in tier.stored_keys():
                    self.check_record(name, worker.storages[tier.tier_id][name])
            records = tier.records
            assert len(records.writing) + len(records.promoting) <= records.max_in_flight

    def check_record(self, name: ChunkKey, content: bytes) -> None:
        namespace = current_namespace(self.engine.scheduler)
        for group, end in ((0, len(name)), *((1 + g, -1) for g in range(len(self.engine.windows) - 1))):
            if name[:end].endswith(namespace) and (group == 0 or name[-1] == group - 1):
                block_hash = name[:end].removesuffix(namespace)
                assert content.endswith(self.engine.name(BlockHash(block_hash), group)), "a record of other bytes"
                return
        assert name[:-3].endswith(namespace), "a record without a name"
        assert content.startswith(b"state after ")

    def run(self, num_steps: int) -> None:
        super().run(num_steps)
        for name in self.waiting:
            self.engine.scheduler.finish(name)
        stats: OffloadStats = self.engine.scheduler.stats()
        self.num_promoted = stats.promoted_chunks


class SharedCheckpointLife(CheckpointLife):
    """The server evicts records, one by one, and other engines store them again."""

    worker_type = SharedCheckpointWorker

    def __init__(self, seed: int) -> None:
        super().__init__(seed, storage_tier=(NAME,), num_storage_chunks=(100,), storage_write_on="save",
                         storage_admission="all", max_storage_gb_in_flight=1e-3, storage_lookup_wait_s=1.0)  # fmt: skip
        self.evicted: dict[ChunkKey, bytes] = {}
        self.ages = random.Random(-1000 - seed)
        self.age_rate = self.ages.choice([0, 0.1, 0.5])
        for worker in self.engine.workers:
            storage_planner(self.engine.scheduler).adopt(worker.worker_id, (), is_shared=True)

    def step(self) -> None:
        rng = self.rng
        for _ in range(rng.choice([0, 0, 1, 8])):
            stored = sorted(self.engine.workers[0].storage)  # type: ignore[attr-defined]
            name = rng.choice(stored) if stored else None
            for worker in self.engine.workers:
                assert isinstance(worker, SharedCheckpointWorker)
                content = worker.storage.pop(name, None) if name is not None else None
                if content is not None and name is not None and POISON not in content:
                    self.evicted[name] = content
        if self.evicted and rng.random() < 0.3:
            for name, content in self.evicted.items():
                for worker in self.engine.workers:
                    assert isinstance(worker, SharedCheckpointWorker)
                    worker.storage[name] = content
            self.evicted.clear()
        super().step()

    def arrive(self) -> None:
        if self.ages.random() < self.age_rate:
            forget_confirmations(storage_planner(self.engine.scheduler))
        super().arrive()

    def check_storage(self) -> None:
        """What counts as stored may be gone; what is there is right."""
        for worker in self.engine.workers:
            assert isinstance(worker, SharedCheckpointWorker)
            namespace = current_namespace(self.engine.scheduler)
            for name, content in worker.storage.items():
                if name.find(namespace) >= 0 and content.find(POISON) < 0:
                    self.check_record(name, content)


if __name__ == "__main__":
    run_many(CheckpointLife, __doc__)
