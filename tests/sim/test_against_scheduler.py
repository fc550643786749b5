"""The real scheduler gets the same hits as the simulation for the same requests."""

import dataclasses
import functools
import itertools
import random

import pytest

from tests.core.fakes import BLOCK_SIZE, LAYOUT
from tests.core.policies.told import ToldPolicy
from tests.inside.scheduler import storage_planners
from tests.sim.traces import chats, make_trace
from tests.storage.memory_tier import NAME
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
from tpu_offload.config import SaveEvent, StorageAdmission, StorageEvictionPolicy, StorageWriteEvent
from tpu_offload.core.policies import POLICIES, LRUPolicy, Use
from tpu_offload.core.storage.adaptive_order import AdaptiveOrder
from tpu_offload.hashing import key_namespace, last_block_hash
from tpu_offload.sim import StorageSetup, TierSetup, no_hbm, replay, simulate_hbm
from tpu_offload.sim.replay import _Replay
from tpu_offload.types import BlockHash


class Engine:
    """A fake engine that computes a whole prompt in a step; copies finish immediately.

    With storage tiers it waits for what is read from them, and steps until nothing is in flight.
    """

    def __init__(self, policy, *, num_chunks, num_sightings=1, save_on=SaveEvent.COMPUTE, storage=()):
        config = OffloadConfig.create(
            num_staging_blocks=10_000,
            num_cpu_chunks=num_chunks,
            save_after_sightings=num_sightings,
            save_on=(save_on,),
            storage_tier=(NAME,) * len(storage),
            num_storage_chunks=tuple(tier.num_chunks for tier in storage),
            storage_write_on=tuple(tier.write_on for tier in storage) or (StorageWriteEvent.SAVE,),
            storage_admission=tuple(tier.admission for tier in storage) or (StorageAdmission.ALL,),
            storage_eviction_policy=tuple(tier.eviction for tier in storage) or (StorageEvictionPolicy.LRU,),
        )
        self.scheduler = OffloadScheduler(config, LAYOUT, policy=policy)
        self.num_chunks = num_chunks
        self.scheduler.apply(StepReport(worker_id=0, results=(), num_host_slots=(num_chunks,)))

    def step(self, *scheduled):
        plan = self.scheduler.plan_step(scheduled)
        results = tuple(JobResult(job_id=job.job_id, state=JobState.FINISHED) for job in plan.jobs)
        self.scheduler.apply(StepReport(worker_id=0, results=results, num_host_slots=(self.num_chunks,)))

    def settle(self):
        while self.scheduler.has_jobs or any(tier.records.to_delete for tier in storage_planners(self.scheduler)):
            self.step()

    def match(self, name, hashes, **tokens):
        """What is found in the end, after all that is read from storage has come."""
        while True:
            found = self.scheduler.match(name, hashes, **tokens)
            if found.state is not MatchState.ARRIVING:
                return found.num_tokens
            self.settle()

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
        found = self.match(name, hashes, num_tokens=num_tokens, num_computed_tokens=in_hbm)
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
        self.settle()
        self.step(
            ScheduledRequest(
                request_id=name,
                block_tables=[block_ids],
                block_hashes=hashes,
                num_prompt_tokens=num_tokens,
                num_computed_tokens=num_tokens,
            )
        )
        self.settle()
        self.scheduler.finish(name)
        return found // BLOCK_SIZE


def chat_trace(tmp_path, seed, **changes):
    """A trace with the scheduler's own keys, because policies may hash them."""
    trace = make_trace(tmp_path, chats(random.Random(seed), num_requests=150, **changes))
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


SAVE, EVICTION = StorageWriteEvent
ALL, SECOND_SIGHTING, AFTER_HIT = StorageAdmission
STACKS = {
    "one": [StorageSetup(60)],
    "one on eviction": [StorageSetup(60, EVICTION)],
    "one at the second sighting": [StorageSetup(60, SAVE, SECOND_SIGHTING)],
    "one on eviction after a hit": [StorageSetup(60, EVICTION, AFTER_HIT)],
    "large": [StorageSetup(10**4)],
    "small": [StorageSetup(7), StorageSetup(5, EVICTION)],
    "two": [StorageSetup(50), StorageSetup(150)],
    "eviction;save": [StorageSetup(50, EVICTION), StorageSetup(150)],
    "save;eviction": [StorageSetup(50), StorageSetup(150, EVICTION)],
    "eviction;eviction": [StorageSetup(50, EVICTION), StorageSetup(150, EVICTION)],
    "all;second_sighting": [StorageSetup(50), StorageSetup(150, SAVE, SECOND_SIGHTING)],
    "after_hit;all": [StorageSetup(50, SAVE, AFTER_HIT), StorageSetup(150)],
    "three": [StorageSetup(20), StorageSetup(60, EVICTION, SECOND_SIGHTING), StorageSetup(200, SAVE, AFTER_HIT)],
    "auto of two": [StorageSetup(200), StorageSetup(1500)],
    "density on save": [StorageSetup(60, eviction=StorageEvictionPolicy.DENSITY)],
    "density at the second sighting": [
        StorageSetup(120, EVICTION, SECOND_SIGHTING, eviction=StorageEvictionPolicy.DENSITY)
    ],
    "density on eviction after a hit": [
        StorageSetup(60, EVICTION, eviction=StorageEvictionPolicy.DENSITY),
        StorageSetup(200, EVICTION, AFTER_HIT, eviction=StorageEvictionPolicy.DENSITY),
    ],
    "density;auto": [StorageSetup(25, EVICTION, eviction=StorageEvictionPolicy.DENSITY), StorageSetup(120)],
    **{
        policy.value: [StorageSetup(30, eviction=policy), StorageSetup(100, EVICTION, eviction=policy)]
        for policy in StorageEvictionPolicy
    },
}


@pytest.mark.parametrize(
    ("stack", "name", "hbm", "save_on"),
    [
        *((stack, "lru", 0, SaveEvent.COMPUTE) for stack in STACKS),
        *((stack, "density", 0, SaveEvent.COMPUTE) for stack in ("one", "eviction;save", "three")),
        *((stack, "lru", 45, SaveEvent.COMPUTE) for stack in ("two", "save;eviction", "three")),
        *((stack, "lru", 45, SaveEvent.HBM_EVICTION) for stack in ("two", "eviction;save", "three")),
    ],
)
def test_the_same_with_storage(tmp_path, stack, name, hbm, save_on):
    trace = chat_trace(tmp_path, 8, most=27)  # prompts up to 31 blocks, which one step can demote
    hbm_result = simulate_hbm(trace, hbm) if hbm else no_hbm(trace)
    storage = tuple(STACKS[stack])
    engine = Engine(POLICIES[name], num_chunks=40, save_on=save_on, storage=storage)
    loaded, promoted = [], []
    for number, request in enumerate(trace.requests):
        evicted = [hashes_of(trace, block) for block in hbm_result.evicted[number]]
        hashes = hashes_of(trace, request.blocks[-1])
        loaded.append(engine.serve(f"r{number}", hashes, num_hbm_blocks=hbm_result.hits[number], evicted=evicted))
        promoted.append([tier.promoted_chunks for tier in engine.scheduler.tier_stats()])
    outcome = replay(trace, POLICIES[name](), TierSetup(40, save_on=save_on, storage=storage), hbm_result=hbm_result)
    hits = zip(outcome.host_hits, *(tier.hits for tier in outcome.storage), strict=True)
    assert [sum(numbers) for numbers in hits] == loaded
    stats, tiers = engine.scheduler.stats(), engine.scheduler.tier_stats()
    assert [tier.num_written for tier in outcome.storage] == [tier.cascaded_chunks for tier in tiers]
    if not hbm:
        assert [list(tier.hits) for tier in outcome.storage] == per_request(promoted)
    assert sum(tier.num_evicted for tier in outcome.storage) == stats.num_evicted_storage_chunks
    assert sum(tier.num_dropped for tier in outcome.storage) == stats.dropped_demotion_chunks
    assert outcome.num_saved == stats.saved_blocks
    assert outcome.num_promoted == stats.promoted_chunks
    assert outcome.num_evicted == stats.num_evicted_chunks
    assert any(sum(tier.hits) for tier in outcome.storage)
    assert stats.failed_storage_chunks == stats.num_failed_jobs == 0


@pytest.mark.parametrize(
    ("sizes", "write_on", "least"),
    [((99,), SAVE, 300), ((60, 130), SAVE, 300), ((75,), EVICTION, 200), ((60, 130), EVICTION, 300)],
)
def test_the_same_where_storage_changes_its_policy(tmp_path, caplog, sizes, write_on, least):
    """Documents that return in turn, more than fit: `auto` leaves `lru` for `density`."""
    caplog.set_level("INFO")
    trace = make_trace(tmp_path, [[f"{document} {i}" for i in range(10)] for document in range(20)] * 25)
    storage = tuple(StorageSetup(size, write_on) for size in sizes)
    engine = Engine(POLICIES["lru"], num_chunks=40, storage=storage)
    loaded = []
    for number, request in enumerate(trace.requests):
        loaded.append(engine.serve(f"r{number}", hashes_of(trace, request.blocks[-1]), num_hbm_blocks=0))
    outcome = replay(trace, POLICIES["lru"](), TierSetup(40, storage=storage))
    assert [sum(hits) for hits in zip(*(tier.hits for tier in outcome.storage), strict=True)] == loaded
    num_written = [tier.num_written for tier in outcome.storage]
    assert num_written == [tier.cascaded_chunks for tier in engine.scheduler.tier_stats()]
    assert sum(loaded[-100:]) > least
    changes = [text.split(" evicts by density from now on: ") for text in caplog.messages if "from now on" in text]
    real = [found for name, found in changes if name.startswith("storage tier ")]
    assert real
    assert real == [found for name, found in changes if name == "the simulated tier"]


@pytest.mark.parametrize("write_on", [SAVE, EVICTION])
@pytest.mark.parametrize("sizes", [(70,), (60, 130)])
def test_orders_are_compared_by_the_same(tmp_path, sizes, write_on):
    """By what neither HBM nor the tiers above have."""
    trace = chat_trace(tmp_path, 3, most=27)
    hbm_result = simulate_hbm(trace, 30)
    storage = tuple(StorageSetup(size, write_on) for size in sizes)
    engine = Engine(POLICIES["lru"], num_chunks=40, storage=storage)
    simulated = _Replay(trace, POLICIES["lru"](), TierSetup(40, storage=storage))
    for number, request in enumerate(trace.requests):
        hashes = hashes_of(trace, request.blocks[-1])
        engine.serve(f"r{number}", hashes, num_hbm_blocks=hbm_result.hits[number])
        simulated.serve([trace.keys[block] for block in request.blocks], in_hbm=hbm_result.hits[number], evicted=())
    real = [tier.records._order for tier in storage_planners(engine.scheduler)]
    orders = [(order, tier._order) for order, tier in zip(real, simulated._storage, strict=True)]
    for one, other in orders:
        assert isinstance(one, AdaptiveOrder)
        assert isinstance(other, AdaptiveOrder)
        assert (one.followed, one._lead, one._variance) == (other.followed, other._lead, other._variance)
        assert one._variance > 0


@pytest.mark.parametrize("stack", ["one", "one on eviction", "two", "eviction;save"])
@pytest.mark.parametrize("hbm", [0, 45])
def test_a_policy_is_told_the_same(tmp_path, stack, hbm):
    """Of each request how much of its prompt HBM and storage had; not where storage gets what the host tier evicts."""
    trace = chat_trace(tmp_path, 8, most=27)
    hbm_result = simulate_hbm(trace, hbm) if hbm else no_hbm(trace)
    simulated: dict[int, Use] = {}
    real: dict[int, Use] = {}
    engine = Engine(functools.partial(ToldPolicy, real), num_chunks=40, storage=tuple(STACKS[stack]))
    for number, request in enumerate(trace.requests):
        hashes = hashes_of(trace, request.blocks[-1])
        engine.serve(f"r{number}", hashes, num_hbm_blocks=hbm_result.hits[number])
    replay(trace, ToldPolicy(simulated), TierSetup(40, storage=tuple(STACKS[stack])), hbm_result=hbm_result)
    told, expected = ([(use.num_in_hbm, use.num_in_storage) for use in uses.values()] for uses in (real, simulated))
    assert told == expected
    assert any(in_storage for _, in_storage in told) == ("eviction" not in stack)


def per_request(totals):
    """What each request added, by tier, from the running totals."""
    before = [[0] * len(totals[0]), *totals]
    differences = [[b - a for a, b in zip(*pair, strict=True)] for pair in itertools.pairwise(before)]
    return [list(numbers) for numbers in zip(*differences, strict=True)]
