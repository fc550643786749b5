"""No call takes long because of many chunks or a long prompt. Work is counted in operations, not in seconds."""

import gc
import hashlib
from collections import OrderedDict, deque
from typing import Any

import pytest

from tests.inside.policy import prompt_ends, run_table, tracked_runs
from tests.opcodes import num_opcodes
from tpu_offload import (
    BlockHash,
    JobResult,
    JobState,
    OffloadConfig,
    OffloadScheduler,
    ScheduledRequest,
    StepReport,
)
from tpu_offload.core.chunk_table import NUM_PARTS, ChunkTable, Discarded
from tpu_offload.core.engine_api import TierEventKind
from tpu_offload.core.index import ChunkIndex, ChunkState
from tpu_offload.core.index.chunk_index import MAX_FREED, MAX_REMOVED
from tpu_offload.core.index.slots import FreeSlots, without
from tpu_offload.core.policies import POLICIES, DensityPolicy, LRUPolicy, PriorityPolicy, Use, find_policy
from tpu_offload.core.policies.run_keys import RunKeys, RunTable
from tpu_offload.core.policies.runs import Run
from tpu_offload.core.saving import MAX_CHUNKS_PER_PLAN as MAX_SAVED
from tpu_offload.hashing import PrefixKeys
from tpu_offload.layout import KVLayout, LayerGroup, LayerGroupKind
from tpu_offload.types import ChunkKey, JobKind, Pool

NUM_CHUNKS = 30_000
READ = 10  # bytecodes for each block id and each hash that is validated; to plan a chunk takes many more
LAYOUT = KVLayout(
    block_size=16, groups=(LayerGroup.uniform(LayerGroupKind.FULL_ATTENTION, (0,), (16, 8, 2, 128), "bfloat16"),)
)


def block_hashes(name: int, num: int) -> list[BlockHash]:
    return [BlockHash(hashlib.blake2b(b"%d.%d" % (name, i), digest_size=16).digest()) for i in range(num)]


def chain(name: int, num: int) -> list[ChunkKey]:
    return [ChunkKey(block_hash) for block_hash in block_hashes(name, num)]


def make(policy: str, num_prompts: int, num_chunks: int, *, record: bool = False) -> ChunkIndex:
    """A full index."""
    index = ChunkIndex(PriorityPolicy(find_policy(policy)), record=record)
    index.grow(Pool.CHUNKS, num_prompts * num_chunks)
    for i in range(num_prompts):
        keys = chain(i, num_chunks)
        index.complete(keys, index.allocate(Use(i), keys, range(num_chunks)), success=True)
    return index


class CountedKeys(list):
    """Counts the keys that are visited."""

    num_seen = 0

    def __getitem__(self, number):
        result = super().__getitem__(number)
        self.num_seen += len(result) if isinstance(number, slice) else 1
        return result

    def __iter__(self):
        for key in super().__iter__():
            self.num_seen += 1
            yield key


class Engine:
    """A scheduler whose copies succeed as soon as they are planned."""

    def __init__(self, num_chunks: int, num_staging: int, *, record: bool = False) -> None:
        paths = {"save_path": "staged", "load_path": "staged"}  # whose copies the staging buffer bounds
        config = OffloadConfig.create(num_cpu_chunks=num_chunks, num_staging_blocks=num_staging, **paths)
        self.scheduler = OffloadScheduler(config, LAYOUT, clock=lambda: 0.0, record_events=record)
        self.num_chunks = num_chunks
        self.incarnation = 1
        self.report()

    def report(self, *jobs, **fields):
        results = tuple(JobResult(job_id=job.job_id, state=JobState.FINISHED) for job in jobs)
        return self.scheduler.apply(
            StepReport(
                worker_id=0, results=results, num_host_slots=(self.num_chunks,), incarnation=self.incarnation, **fields
            )
        )

    def save(self, request_id: str, hashes: list[BlockHash]) -> None:
        num_tokens = len(hashes) * 16
        blocks = list(range(len(hashes)))
        self.scheduler.match(request_id, hashes, num_tokens=num_tokens, num_computed_tokens=0)
        plan = self.scheduler.plan_step(
            [
                ScheduledRequest(
                    request_id=request_id,
                    block_tables=[blocks],
                    block_hashes=hashes,
                    num_prompt_tokens=num_tokens,
                    num_computed_tokens=num_tokens,
                )
            ]
        )
        self.report(*plan.of(JobKind.SAVE))
        while (plan := self.scheduler.plan_step()).of(JobKind.SAVE):
            self.report(*plan.of(JobKind.SAVE))

    def find(self, request_id: str, hashes: list[BlockHash]) -> int:
        found = self.scheduler.match(request_id, hashes, num_tokens=10**6, num_computed_tokens=0).num_tokens
        self.scheduler.finish(request_id)
        return found // 16


@pytest.mark.parametrize("policy", POLICIES)
def test_clear_does_not_depend_on_the_number_of_chunks(policy) -> None:
    num_few, num_many = (num_opcodes(make(policy, n, 100).clear) for n in (3, 300))
    assert num_many < num_few + 10_000, "density has a few more queues"


@pytest.mark.parametrize("policy", POLICIES)
def test_what_a_clear_discards_is_freed_incrementally(policy) -> None:
    index = make(policy, 300, 100)
    index.clear()
    left = index.num_deferred
    assert left >= NUM_CHUNKS
    while left:
        index.tidy()
        assert left - MAX_FREED <= index.num_deferred < left
        left = index.num_deferred
    index.check_invariants()


def test_new_chunks_free_old_ones_so_that_both_never_take_the_memory_twice() -> None:
    index = make("density", 30, 100)
    index.clear()
    left = index.num_deferred
    for i in range(10):
        keys = chain(1000 + i, 100)
        index.complete(keys, index.allocate(Use(1000 + i), keys, range(100)), success=True)
    assert index.num_deferred <= max(0, left - 10 * 100)


def test_after_a_clear_all_slots_are_free_but_those_of_copies() -> None:
    index = make("density", 10, 10)
    pinned, late = chain(3, 10)[:4], chain(100, 3)
    index.pin(pinned)
    slots = index.find(pinned)
    late_slots = index.allocate(Use(100), late, range(3))
    index.clear()
    assert index.num_free_slots == 100 - 4 - 3
    given = index.allocate(Use(101), keys := chain(200, 100), range(100))
    assert not set(given) & {*slots, *late_slots}
    assert len(given) == 93
    assert given == sorted(given)
    index.complete(late, late_slots, success=False, quarantine=True)
    index.unpin(pinned)
    assert index.num_free_slots == 4
    index.end_quarantine(late_slots)
    assert sorted(index.allocate(Use(101), keys, range(93, 100))) == sorted([*slots, *late_slots])
    index.check_invariants()


def test_many_lost_slots_are_found_no_more_at_once_and_invalidated_incrementally() -> None:
    index = make("density", 30, 100, record=True)
    index.take_changes()
    num_lost = 2548
    assert num_lost > 2 * MAX_REMOVED
    lost = index.invalidate_slots(0, num_lost)
    assert len(lost) == MAX_REMOVED
    assert [len(index.find(chain(i, 100))) for i in (0, 10, 24)] == [0, 0, 0]
    assert len(index.find(chain(29, 100))) == 100
    while index.num_deferred:
        invalidated = index.tidy()
        assert 0 < len(invalidated) <= MAX_REMOVED
        lost += invalidated
    assert len(index) == 3000 - num_lost == 3000 - len(set(lost))
    assert sum(len(keys or ()) for keys, _, _ in index.take_changes()) == num_lost
    assert len(index.find(chain(25, 100), 48)) == 52
    index.check_invariants()


def test_many_invalid_chunks_are_removed_incrementally() -> None:
    index = make("density", 1, 3 * MAX_REMOVED)
    keys = chain(0, 3 * MAX_REMOVED)
    index.pin(keys)
    index.invalidate(keys)
    index.unpin(keys)
    assert len(index) == 2 * MAX_REMOVED
    index.tidy()
    assert len(index) == MAX_REMOVED
    assert index.state(keys[-1]) is not ChunkState.READY
    index.tidy()
    assert len(index) == 0
    index.check_invariants()


def test_a_reset_leaves_the_removal_of_invalid_chunks_to_later_calls() -> None:
    index = make("density", 3, 3 * MAX_REMOVED)
    keys, pinned = chain(0, 3 * MAX_REMOVED), chain(1, 10)
    index.pin(keys)
    index.pin(pinned)
    index.invalidate(keys)
    index.unpin(keys)
    index.clear()
    index.check_invariants()
    assert len(index) == 2 * MAX_REMOVED + len(pinned)
    sizes = []
    while index.num_deferred:
        index.tidy()
        index.check_invariants()
        sizes.append(len(index))
    assert sizes[:2] == [MAX_REMOVED + len(pinned), len(pinned)]
    index.unpin(pinned)
    assert len(index) == 0
    index.check_invariants()


@pytest.mark.parametrize("num_resident", [0, 1, 700, 20_000])
def test_a_lookup_looks_at_few_keys_of_a_long_prefix(num_resident) -> None:
    index = make("lru", 1, max(num_resident, 1))
    keys = CountedKeys(chain(0, 20_000) if num_resident else chain(1, 20_000))
    assert len(index.find(keys)) == num_resident
    missing, end = index.missing(keys, 0, 20_000)
    assert (list(missing), end) == (list(range(num_resident, 20_000)), 20_000)
    assert keys.num_seen < 60


def test_a_save_of_a_long_prompt_costs_what_the_staging_buffer_lets_through() -> None:
    counts = []
    for num_blocks in (200, 20_000):
        engine = Engine(40_000, 16)
        hashes, blocks = block_hashes(0, num_blocks), list(range(num_blocks))
        engine.scheduler.match("a", hashes, num_tokens=num_blocks * 16, num_computed_tokens=0)
        scheduled = ScheduledRequest(
            request_id="a",
            block_tables=[blocks],
            block_hashes=hashes,
            num_prompt_tokens=num_blocks * 16,
            num_computed_tokens=num_blocks * 16,
        )
        steps = [num_opcodes(engine.scheduler.plan_step, [scheduled])]
        steps.append(num_opcodes(engine.scheduler.plan_step))
        counts.append(max(steps))
    few, many = counts
    assert many < few + 2000 + READ * (20_000 - 200), "block ids are read, and no more"


def test_a_plan_of_very_many_new_chunks_costs_what_one_plan_saves() -> None:
    """On a path that takes no staging buffer."""
    counts = []
    for num_blocks in (2 * MAX_SAVED, 10 * MAX_SAVED):
        config = OffloadConfig.create(num_cpu_chunks=NUM_CHUNKS, save_path="direct", load_path="direct")
        scheduler = OffloadScheduler(config, LAYOUT, clock=lambda: 0.0)
        scheduler.apply(StepReport(worker_id=0, results=(), num_host_slots=(NUM_CHUNKS,)))
        hashes, blocks = block_hashes(0, num_blocks), list(range(num_blocks))
        scheduled = ScheduledRequest(
            request_id="a",
            block_tables=[blocks],
            block_hashes=hashes,
            num_prompt_tokens=num_blocks * 16,
            num_computed_tokens=num_blocks * 16,
        )
        counts.append([num_opcodes(scheduler.plan_step, [scheduled]), num_opcodes(scheduler.plan_step)])
    few, many = counts
    assert max(many) < max(few) + 2000 + 2 * READ * 8 * MAX_SAVED, "block ids and hashes are read, and no more"


def test_a_use_of_the_next_chunks_of_a_long_run_touches_only_these() -> None:
    """A load that the staging buffer cuts, and the steps that compute the rest: each uses a little more."""
    policy = DensityPolicy()
    index = ChunkIndex(policy)
    index.grow(Pool.CHUNKS, 20_000)
    keys, runs = chain(0, 20_000), run_table(policy)
    index.complete(keys, index.allocate(Use(0), keys, range(20_000)), success=True)
    for num_chunks in range(256, 20_001, 256):
        before = {key: runs[key] for key in keys}
        index.touch(Use(1), keys, num_chunks)
        assert sum(runs[key] is not run for key, run in before.items()) <= 1024
    index.check_invariants()


@pytest.mark.parametrize("policy", ["density", "lru"])
def test_no_table_is_so_large_that_copying_it_would_stall_a_step(policy) -> None:
    index = make(policy, 300, 100)
    assert max(len(table) for table in _reachable(index) if isinstance(table, dict | set | OrderedDict)) < 1000


@pytest.mark.parametrize("policy", ["density", "lru"])
def test_the_garbage_collector_looks_at_few_references(policy) -> None:
    few, many = num_references(make(policy, 300, 100)), num_references(make(policy, 600, 100))
    assert many - few <= 300 * 23, "of each run of 100 chunks"
    assert few - (many - few) < 2500, "of what does not depend on how many there are"


def num_references(index: ChunkIndex) -> int:
    """What a full collection visits of an index and its policy."""
    gc.collect()
    return sum(len(gc.get_referents(held)) for held in _reachable(index) if gc.is_tracked(held))


def test_the_garbage_collector_visits_no_keys_of_a_run_and_no_entries_of_evicted_ones() -> None:
    """Of a run it visits the run, its `RunKeys`, and its entries in the queues of those that may be evicted."""
    policy = DensityPolicy()
    index = ChunkIndex(policy)
    index.grow(Pool.CHUNKS, 1000)
    for i in range(100):
        keys = chain(i, 20)
        index.complete(keys, index.allocate(Use(i), keys, range(20)), success=True)
    gc.collect()
    gc.collect()  # a tuple is untracked once those in it are
    runs = run_table(policy).runs()
    assert len(runs) == 100
    assert not any(gc.is_tracked(held) for run in runs for held in gc.get_referents(run.keys) if held is not RunKeys)
    assert not any(gc.is_tracked(entry) for entries in (prompt_ends(policy), tracked_runs(policy)) for entry in entries)


def _reachable(index):
    """All containers of an index and its policy."""
    seen, left = {}, [index]
    while left:
        held = left.pop()
        if id(held) in seen or isinstance(held, type) or (type(held).__module__ == "builtins" and callable(held)):
            continue
        seen[id(held)] = held
        left += [o for o in gc.get_referents(held) if not isinstance(o, bytes | int | str | float)]
    containers = (dict, list, set, deque, OrderedDict)
    return [o for o in seen.values() if isinstance(o, containers) or type(o).__module__.startswith("tpu_offload")]


@pytest.mark.parametrize("what", ["reset", "restart"])
def test_a_reset_and_a_restart_do_not_depend_on_the_number_of_chunks(what) -> None:
    counts = []
    for num_prompts in (2, 40):
        engine = Engine(10_000, 200, record=True)
        for i in range(num_prompts):
            engine.save(f"r{i}", block_hashes(i, 100))
            engine.scheduler.finish(f"r{i}")
        assert engine.scheduler.stats().num_resident_chunks == num_prompts * 100
        engine.scheduler.take_events()
        if what == "reset":
            counts.append(num_opcodes(engine.scheduler.reset))
        else:
            engine.incarnation += 1
            counts.append(num_opcodes(engine.report))
        stats = engine.scheduler.stats()
        assert (stats.num_resident_chunks, stats.num_host_chunks) == (0, 10_000)
        assert [engine.find(f"n{i}", block_hashes(i, 100)) for i in range(num_prompts)] == [0] * num_prompts
        (event,) = engine.scheduler.take_events()
        assert (event.kind, event.block_hashes, event.group_id) == (TierEventKind.CLEARED, (), None)
        engine.scheduler.check_invariants()
        engine.save("a", block_hashes(0, 100))
        assert engine.find("b", block_hashes(0, 100)) == 100
        (event,) = engine.scheduler.take_events()
        assert (event.kind, len(event.block_hashes)) == (TierEventKind.STORED, 100)
    few, many = counts
    assert many <= few + 5000, "what is left to tidy up in the same call is bounded"


def test_after_a_restart_nothing_is_saved_of_running_requests_whose_kv_is_lost_with_the_worker() -> None:
    engine = Engine(1000, 200)
    engine.save("a", block_hashes(0, 100))
    engine.incarnation += 1
    engine.report()
    assert engine.scheduler.plan_step().of(JobKind.SAVE) == ()
    engine.scheduler.check_invariants()


def test_events_of_many_changes_are_reported_in_parts_and_in_order() -> None:
    engine = Engine(25_000, 25_000, record=True)
    engine.save("a", hashes := block_hashes(0, 25_000))
    parts = [engine.scheduler.take_events() for _ in range(4)]
    assert [sum(len(event.block_hashes) for event in events) for events in parts] == [10_000, 10_000, 5_000, 0]
    assert [h for events in parts for event in events for h in event.block_hashes] == hashes


# The parts that this is made of.


def test_chunk_table() -> None:
    table: ChunkTable[int] = ChunkTable()
    keys, new, newer = chain(0, 5000), ChunkKey(b"new"), ChunkKey(b"newer")
    table.set_all(keys, 7)
    table[keys[0]] = 8
    assert (len(table), sorted(table), table[keys[0]], table.get(ChunkKey(b"?"))) == (5000, sorted(keys), 8, None)
    assert max(map(len, table.parts)) < 5000 / NUM_PARTS * 5
    assert not table.add_all([new, keys[3], newer], 9)
    assert new not in table
    assert len(table) == 5000
    assert table.add_all([new, newer], 9)
    table.drop_all([new, newer])
    table.drop_all(keys[1:])
    assert dict(table) == {keys[0]: 8}


def test_discarded_containers_of_all_kinds_are_freed_incrementally() -> None:
    discarded = Discarded()
    held: list[Any] = [
        dict.fromkeys(range(50)),
        OrderedDict.fromkeys(range(50)),
        set(range(50)),
        list(range(50)),
        deque(range(50)),
    ]
    for container in held:
        discarded.add(container)
    left = len(discarded)
    assert left == 250
    while discarded:
        freed = discarded.free(20)
        assert left - len(discarded) <= freed <= 20
        left = len(discarded)
    assert left == 0


def test_clearing_what_is_empty_holds_nothing() -> None:
    """A table has 256 parts: 3,000 resets in a row held 163 MB until the next steps."""
    index = ChunkIndex(LRUPolicy())
    index.grow(Pool.CHUNKS, 10)
    for _ in range(3):
        index.clear()
    discarded = Discarded()
    empty: list[Any] = [{}, set(), [], deque(), OrderedDict()]
    for container in empty:
        discarded.add(container)
    assert not discarded
    assert not index._discarded


def test_free_slots() -> None:
    free = FreeSlots()
    free.put_last(range(10))
    free.put_last(range(20, 22))
    assert free.take(3) == [0, 1, 2]
    free.put_first([2, 0])
    assert list(free) == [0, 2, *range(3, 10), 20, 21]
    assert free.take(4) == [0, 2, 3, 4]
    free.put_first([4])
    assert free.remove_from(7) == [range(7, 10), range(20, 22)]
    assert (len(free), free.take(3), len(free)) == (3, [4, 5, 6], 0)
    assert without(range(2, 9), {1, 3, 4, 8, 20}) == [range(2, 3), range(5, 8)]


def test_prefix_keys_are_those_of_the_hashes() -> None:
    keys = PrefixKeys(b"-ns")
    keys.extend([BlockHash(b"a"), BlockHash(b"b"), BlockHash(b"c")])
    part = keys[1:]
    keys.extend([BlockHash(b"d")])
    assert list(keys) == [b"a-ns", b"b-ns", b"c-ns", b"d-ns"]
    assert (list(part), part[-1], part[0], len(part), list(part[1:2])) == (
        [b"b-ns", b"c-ns"], b"c-ns", b"b-ns", 2, [b"c-ns"],
    )  # fmt: skip
    assert list(reversed(part)) == [b"c-ns", b"b-ns"]
    with pytest.raises(IndexError):
        part[2]
    with pytest.raises(IndexError):
        part[-3]


def test_the_run_of_a_chunk_is_looked_up_and_not_searched_for() -> None:
    table = RunTable()
    keys = [ChunkKey(i.to_bytes(16, "little")) for i in range(5000)]
    table.add(Run(RunKeys(keys), depth=0, num_resident=5000, use_id=0))
    assert num_opcodes(lambda: keys[-1] in table) < 100
    assert keys[-1] in table
    assert ChunkKey(b"x") not in table
