"""The real scheduler gets the same hits as the simulation for the same requests."""

import dataclasses
import random

import pytest

from tests.core.fakes import BLOCK_SIZE, LAYOUT
from tests.sim.traces import chats, make_trace
from tpu_offload import (
    CachedPrefix,
    JobResult,
    JobState,
    MatchState,
    OffloadConfig,
    OffloadScheduler,
    ScheduledRequest,
    StepReport,
)
from tpu_offload.config import SaveEvent, StorageAdmission, StorageWriteEvent
from tpu_offload.core.policies import POLICIES, LRUPolicy
from tpu_offload.hashing import key_namespace, last_block_hash
from tpu_offload.sim import StorageSetup, TierSetup, no_hbm, replay, simulate_hbm
from tpu_offload.types import BlockHash


class Engine:
    """A fake engine that computes a whole prompt in a step; copies finish immediately."""

    def __init__(self, policy, *, num_chunks, num_sightings=1, save_on=SaveEvent.COMPUTE, storage=()):
        config = OffloadConfig.create(
            num_staging_blocks=10_000,
            num_cpu_chunks=num_chunks,
            save_after_sightings=num_sightings,
            save_on=(save_on,),
            storage_tier=("tests.storage.memory_tier:MemoryTier",) * len(storage),
            num_storage_chunks=tuple(tier.num_chunks for tier in storage),
            storage_write_on=tuple(tier.write_on for tier in storage) or (StorageWriteEvent.SAVE,),
            storage_admission=tuple(tier.admission for tier in storage) or (StorageAdmission.ALL,),
        )
        self.scheduler = OffloadScheduler(config, LAYOUT, policy=policy)
        self.num_chunks = num_chunks
        self.scheduler.apply(StepReport(worker_id=0, results=(), num_host_chunks=num_chunks))

    def step(self, *scheduled):
        plan = self.scheduler.plan_step(scheduled)
        results = tuple(JobResult(job_id=job.job_id, state=JobState.FINISHED) for job in plan.jobs)
        self.scheduler.apply(StepReport(worker_id=0, results=results, num_host_chunks=self.num_chunks))

    def serve(self, name, hashes, *, num_hbm_blocks, evicted=()):
        """Serves a request; returns the number of loaded blocks.

        Args:
          name: the request's id.
          hashes: hashes of its blocks.
          num_hbm_blocks: number of its leading blocks that are in HBM.
          evicted: hashes of the prefixes whose last blocks HBM evicts for it.
        """
        num_tokens = len(hashes) * BLOCK_SIZE + 1  # so that the last block counts like the others
        in_hbm = num_hbm_blocks * BLOCK_SIZE
        found = self.scheduler.match(name, hashes, num_tokens=num_tokens, num_computed_tokens=in_hbm).num_tokens
        for prefix in evicted:
            self.scheduler.evict(
                CachedPrefix(
                    block_hashes=prefix,
                    num_blocks=len(prefix),
                    block_of=lambda group_id, block_hash, prefix=prefix: prefix.index(block_hash),  # type: ignore[misc]
                    num_prompt_tokens=len(prefix) * BLOCK_SIZE,
                )
            )
        block_ids = list(range(len(hashes)))
        self.scheduler.admit(name, [block_ids], num_loaded_tokens=found)
        self.step()
        self.step(
            ScheduledRequest(
                request_id=name,
                block_tables=[block_ids],
                block_hashes=hashes,
                num_prompt_tokens=num_tokens,
                num_computed_tokens=num_tokens,
            )
        )
        self.scheduler.finish(name)
        return found // BLOCK_SIZE


def chat_trace(tmp_path, seed):
    """A trace with the scheduler's own keys, because policies may hash them."""
    trace = make_trace(tmp_path, chats(random.Random(seed), num_requests=150))
    namespace = key_namespace(LAYOUT.fingerprint(), blocks_per_chunk=1)
    return dataclasses.replace(trace, keys=tuple(last_block_hash(key) + namespace for key in trace.keys))


def hashes_of(trace, block):
    """Hashes of the prefix that ends at a block."""
    hashes: list[BlockHash] = []
    while block >= 0:
        hashes.append(last_block_hash(trace.keys[block]))
        block = trace.parents[block]
    return hashes[::-1]


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("hbm", [0, 45])
@pytest.mark.parametrize("num_sightings", [1, 2])
def test_the_same_hits(tmp_path, name, hbm, num_sightings):
    trace = chat_trace(tmp_path, 6)
    hbm_result = simulate_hbm(trace, hbm) if hbm else no_hbm(trace)
    for num_chunks in (40, 70, 150):
        engine = Engine(POLICIES[name], num_chunks=num_chunks, num_sightings=num_sightings)
        hits = []
        for number, request in enumerate(trace.requests):
            hashes = hashes_of(trace, request.blocks[-1])
            hits.append(engine.serve(f"r{number}", hashes, num_hbm_blocks=hbm_result.hits[number]))
        setup = TierSetup(num_chunks, num_sightings=num_sightings)
        outcome = replay(trace, POLICIES[name](), setup, hbm_result=hbm_result)
        assert outcome.host_hits == tuple(hits)
        assert sum(hits) > 0 or hbm > num_chunks
        stats = engine.scheduler.stats()
        assert stats.saved_blocks == outcome.num_saved
        assert stats.num_evicted_chunks == outcome.num_evicted


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("num_sightings", [1, 2])
def test_the_same_hits_when_hbm_evicts(tmp_path, name, num_sightings):
    trace = chat_trace(tmp_path, 7)
    hbm_result = simulate_hbm(trace, 45)
    for num_chunks in (40, 70, 150):
        setup = TierSetup(num_chunks, save_on=SaveEvent.HBM_EVICTION, num_sightings=num_sightings)
        engine = Engine(
            POLICIES[name], num_chunks=num_chunks, num_sightings=num_sightings, save_on=SaveEvent.HBM_EVICTION
        )
        hits = []
        for number, request in enumerate(trace.requests):
            evicted = [hashes_of(trace, block) for block in hbm_result.evicted[number]]
            hashes = hashes_of(trace, request.blocks[-1])
            hits.append(engine.serve(f"r{number}", hashes, num_hbm_blocks=hbm_result.hits[number], evicted=evicted))
        outcome = replay(trace, POLICIES[name](), setup, hbm_result=hbm_result)
        assert outcome.host_hits == tuple(hits)
        assert sum(hits) > 0
        assert engine.scheduler.stats().saved_blocks == outcome.num_saved


def test_prompts_that_find_no_room(tmp_path):
    trace = make_trace(tmp_path, [[*range(i * 10, i * 10 + 8)] for i in (0, 1, 0, 0)])
    engine = Engine(LRUPolicy, num_chunks=5, num_sightings=1)
    hits = []
    for number, request in enumerate(trace.requests):
        hashes = hashes_of(trace, request.blocks[-1])
        hits.append(engine.serve(f"r{number}", hashes, num_hbm_blocks=0))
    outcome = replay(trace, LRUPolicy(), TierSetup(5))
    assert outcome.host_hits == tuple(hits)
    assert outcome.num_dropped == engine.scheduler.stats().dropped_save_blocks > 0


# --- storage ----------------------------------------------------------------------------------------


class StorageEngine(Engine):
    """With storage tiers. A request waits for all that it can get from them, and nothing is in flight between two."""

    def serve_from_all(self, name, hashes):
        """Serves a request; returns the blocks that the host tier had, and those that came from each storage tier."""
        before = self.promoted
        num_tokens = len(hashes) * BLOCK_SIZE + 1
        found = self.match(name, hashes, num_tokens)
        in_host = found.num_tokens // BLOCK_SIZE
        while found.state is MatchState.ARRIVING:
            self.step()
            found = self.match(name, hashes, num_tokens)
        self.scheduler.admit(name, [list(range(len(hashes)))], num_loaded_tokens=found.num_tokens)
        self.step()
        self.step(
            ScheduledRequest(
                request_id=name,
                block_tables=[list(range(len(hashes)))],
                block_hashes=hashes,
                num_prompt_tokens=num_tokens,
                num_computed_tokens=num_tokens,
            )
        )
        while self.scheduler.has_jobs:
            self.step()
        self.scheduler.finish(name)
        return in_host, *(after - before for before, after in zip(before, self.promoted, strict=True))

    def match(self, name, hashes, num_tokens):
        return self.scheduler.match(name, hashes, num_tokens=num_tokens, num_computed_tokens=0)

    @property
    def promoted(self):
        return [stats.promoted_chunks for stats in self.scheduler.tier_stats()]


STACKS = {
    "save": [(120, "save", "all")],
    "eviction": [(120, "eviction", "all")],
    "second sighting": [(120, "save", "second_sighting")],
    "after a hit": [(120, "eviction", "after_hit")],
    "all": [(2000, "save", "all")],
    "eviction; save": [(60, "eviction", "all"), (2000, "save", "all")],
    "eviction; second sighting": [(60, "eviction", "all"), (300, "save", "second_sighting")],
    "save; save": [(90, "save", "all"), (400, "save", "all")],
}


@pytest.mark.parametrize("name", ["lru", "density"])
@pytest.mark.parametrize("stack", STACKS)
def test_storage(tmp_path, name, stack):
    """The same hits, request by request and tier by tier, where the order of copies within a request does not matter.

    Elsewhere about as many in all: a prompt that is longer than half of the host tier is read in turns, and of what the
    host tier evicts in a step a tier may drop some.
    """
    trace = chat_trace(tmp_path, 8)
    tiers = tuple(
        StorageSetup(num, StorageWriteEvent(write_on), StorageAdmission(admission))
        for num, write_on, admission in STACKS[stack]
    )
    engine = StorageEngine(POLICIES[name], num_chunks=70, storage=tiers)
    hits = [
        engine.serve_from_all(f"r{number}", hashes_of(trace, request.blocks[-1]))
        for number, request in enumerate(trace.requests)
    ]
    outcome = replay(trace, POLICIES[name](), TierSetup(70, storage=tiers))
    simulated = list(zip(outcome.host_hits, *outcome.storage_hits, strict=True))
    num_hits, num_simulated = (sum(map(sum, found)) for found in (hits, simulated))
    if name == "lru" and all(tier.write_on is StorageWriteEvent.SAVE for tier in tiers):
        assert simulated == hits
        assert outcome.num_stored == tuple(stats.cascaded_chunks for stats in engine.scheduler.tier_stats())
    else:
        assert abs(num_simulated - num_hits) <= 0.04 * num_hits
    assert all(sum(of_tier) > 100 for of_tier in outcome.storage_hits)
