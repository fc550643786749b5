"""When the scheduler saves, which requests, and in which order."""

import dataclasses
from typing import Any

import pytest

from tests.core.fakes import BLOCK_SIZE, LAYOUT, FakeEngine, FakeWorker, tokens
from tests.inside.scheduler import job_table, save_planner
from tpu_offload import (
    CachedPrefix,
    JobKind,
    JobState,
    MatchState,
    OffloadConfig,
    OffloadScheduler,
    RequestError,
    RequestLimits,
    ScheduledRequest,
)
from tpu_offload.core.policies import EvictionPolicy, LRUPolicy, Use
from tpu_offload.types import BlockHash

HASH = BlockHash(b"1")


def blocks(jobs) -> list[int]:
    return [block for job in jobs for block in job.block_ids]


def prefix(request, num_blocks=None, *, gone=0, limits=None) -> CachedPrefix:
    block_of = dict(list(zip(request.hashes, request.block_ids, strict=False))[gone:])
    num_blocks = num_blocks or len(request.hashes)
    return CachedPrefix(
        block_hashes=request.hashes,
        num_blocks=num_blocks,
        block_of=lambda group_id, block_hash: block_of.get(block_hash),
        num_prompt_tokens=len(request.tokens),
        limits=limits or RequestLimits(),
    )


def computed(engine: FakeEngine, name: str, prompt: list[int], **kwargs):
    """A request that has computed its prompt, without any save."""
    request = engine.add(name, prompt, **kwargs)
    plan, _ = engine.step({name: len(prompt)})
    assert plan.of(JobKind.SAVE) == ()
    return request


# --- HBM eviction ---------------------------------------------------------------------------------


def test_an_evicted_tail_is_saved_with_its_head_before_the_step() -> None:
    engine = FakeEngine(save_on="eviction")
    request = computed(engine, "a", tokens(16))
    engine.scheduler.evict(prefix(request))
    plan, _ = engine.step()
    assert (blocks(plan.of(JobKind.EARLY_SAVE)), plan.of(JobKind.SAVE)) == (request.block_ids, ())
    engine.settle()
    assert engine.add("b", tokens(17)).num_computed == 16
    engine.scheduler.evict(prefix(request))
    engine.scheduler.evict(prefix(request, 2))
    assert engine.step()[0].of(JobKind.EARLY_SAVE) == (), "it is there"
    engine.scheduler.check_invariants()


def test_a_tail_without_its_head_in_hbm_is_saved_only_behind_resident_chunks() -> None:
    engine = FakeEngine(save_on="eviction")
    request = computed(engine, "a", tokens(16))
    engine.scheduler.evict(prefix(request, 3, gone=2))
    assert engine.step()[0].empty
    engine.scheduler.evict(prefix(request, 2))
    assert blocks(engine.step()[0].of(JobKind.EARLY_SAVE)) == request.block_ids[:2]
    engine.scheduler.evict(prefix(request, gone=2))
    assert blocks(engine.step()[0].of(JobKind.EARLY_SAVE)) == request.block_ids[2:], "its head is on the way"
    engine.settle()
    assert engine.add("b", tokens(17)).num_computed == 16


def test_a_head_evicted_for_another_save_of_the_plan_cancels_its_tail() -> None:
    engine = FakeEngine(save_on="eviction", num_cpu_chunks=2, workers=[FakeWorker(num_host_chunks=2)])
    first = computed(engine, "a", tokens(8))
    engine.scheduler.evict(prefix(first, 1))
    engine.step()
    engine.settle()
    other = computed(engine, "b", tokens(8, start=100))
    engine.scheduler.evict(prefix(other))
    engine.scheduler.evict(prefix(first, gone=1))
    assert blocks(engine.step()[0].of(JobKind.EARLY_SAVE)) == other.block_ids
    engine.settle()
    assert engine.scheduler.stats().num_failed_jobs == 0
    engine.scheduler.check_invariants()


def test_a_prefix_that_is_evicted_twice_is_saved_once() -> None:
    engine = FakeEngine(save_on="eviction")
    request = computed(engine, "a", tokens(16))
    for num_blocks in (2, 4, 3, 4):
        engine.scheduler.evict(prefix(request, num_blocks))
    assert sorted(blocks(engine.step()[0].of(JobKind.EARLY_SAVE))) == sorted(request.block_ids)


def test_chunks_without_room_are_dropped_and_counted_and_the_head_is_saved() -> None:
    engine = FakeEngine(save_on="eviction", num_staging_blocks=3)
    request = computed(engine, "a", tokens(16))
    engine.scheduler.evict(prefix(request))
    plan, _ = engine.step()
    assert blocks(plan.of(JobKind.EARLY_SAVE)) == request.block_ids[:3]
    assert engine.scheduler.stats().dropped_save_blocks == 1
    assert engine.scheduler.stats().deferred_save_blocks == 0
    engine.settle()
    assert engine.step()[0].empty, "it is not tried again"


def test_the_prompt_or_the_answer_too() -> None:
    for decode_save, num_saved in ((False, 2), (True, 3)):
        engine = FakeEngine(save_on="eviction", decode_save=decode_save)
        request = engine.add("a", tokens(16))
        engine.step({"a": 16})
        engine.scheduler.evict(dataclasses.replace(prefix(request, 3), num_prompt_tokens=10))
        assert len(blocks(engine.step()[0].of(JobKind.EARLY_SAVE))) == num_saved


def test_only_whole_chunks() -> None:
    engine = FakeEngine(save_on="eviction", blocks_per_chunk=2)
    request = computed(engine, "a", tokens(24))
    engine.scheduler.evict(prefix(request, 1))
    assert engine.step()[0].empty
    engine.scheduler.evict(prefix(request, 3))
    assert blocks(engine.step()[0].of(JobKind.EARLY_SAVE)) == request.block_ids[:2]
    engine.scheduler.evict(prefix(request, 6, gone=1))
    assert blocks(engine.step()[0].of(JobKind.EARLY_SAVE)) == request.block_ids[2:6], "the first chunk is there"


def test_an_eviction_is_no_use_of_resident_chunks() -> None:
    """Being evicted from HBM makes nothing more recent in the host tier."""
    engine = FakeEngine(
        save_on="eviction,compute", num_staging_blocks=1, num_cpu_chunks=3, workers=[FakeWorker(num_host_chunks=3)]
    )
    old = engine.add("old", tokens(8))
    engine.step({"old": 8})  # there is room for its first chunk only
    engine.remove("old")
    engine.settle()
    engine.serve("young", tokens(4, start=100))
    engine.add("busy", tokens(4, start=200))
    engine.step({"busy": 4})
    engine.scheduler.evict(prefix(old))
    assert engine.step()[0].empty
    assert engine.scheduler.stats().dropped_save_blocks == 2
    engine.settle()
    engine.serve("new", tokens(4, start=300))
    assert engine.add("x", tokens(5)).num_computed == 0
    assert engine.add("y", tokens(5, start=100)).num_computed == 4


def test_a_prefix_that_is_evicted_block_by_block_is_saved_once() -> None:
    """Several requests that are given blocks in one step each have the next block of its tail evicted."""
    engine = FakeEngine(save_on="eviction")
    request = computed(engine, "a", tokens(16))
    for num_blocks in (4, 3, 2):
        engine.scheduler.evict(prefix(request, num_blocks))
    assert len(save_planner(engine.scheduler).early) == 1
    plan, _ = engine.step()
    (job,) = plan.of(JobKind.EARLY_SAVE)
    assert list(job.block_ids) == request.block_ids


def test_a_longer_part_of_a_prefix_is_saved_too() -> None:
    engine = FakeEngine(save_on="eviction")
    request = computed(engine, "a", tokens(16))
    for num_blocks in (2, 4):
        engine.scheduler.evict(prefix(request, num_blocks))
    plan, _ = engine.step()
    assert sorted(blocks(plan.of(JobKind.EARLY_SAVE))) == sorted(request.block_ids)


def test_a_prefix_of_which_only_the_tail_is_offered_is_saved() -> None:
    engine = FakeEngine(save_on="eviction")
    request = computed(engine, "a", tokens(16))
    engine.scheduler.evict(prefix(request, gone=3))
    engine.scheduler.evict(prefix(request, 2))
    plan, _ = engine.step()
    assert blocks(plan.of(JobKind.EARLY_SAVE)) == request.block_ids[:2]


def test_a_part_of_higher_priority_is_saved_first() -> None:
    engine = FakeEngine(save_on="eviction")
    request, other = computed(engine, "a", tokens(16)), computed(engine, "b", tokens(8, start=100))
    engine.scheduler.evict(prefix(request))
    engine.scheduler.evict(prefix(request, 2, limits=RequestLimits(priority=5)))
    engine.scheduler.evict(prefix(other, limits=RequestLimits(priority=3)))
    plan, _ = engine.step()
    saved = [*request.block_ids[:2], *other.block_ids, *request.block_ids[2:]]
    assert blocks(plan.of(JobKind.EARLY_SAVE)) == saved


def test_a_prefix_is_saved_though_a_request_offers_what_was_lost_of_it() -> None:
    engine = FakeEngine(save_on="eviction,preemption")
    lost = computed(engine, "a", tokens(16))
    engine.scheduler.mark_caches_lost()
    request = computed(engine, "b", tokens(16))
    engine.scheduler.preempt("a", held=engine.held(lost))
    engine.scheduler.evict(prefix(request))
    plan, _ = engine.step()
    assert blocks(plan.of(JobKind.EARLY_SAVE)) == request.block_ids


def test_what_a_loss_has_dropped_is_not_taken_for_saved() -> None:
    engine = FakeEngine(save_on="eviction")
    request = computed(engine, "a", tokens(16))
    engine.scheduler.evict(prefix(request))
    engine.scheduler.mark_caches_lost()
    engine.scheduler.evict(prefix(request))  # computed again
    plan, _ = engine.step()
    assert blocks(plan.of(JobKind.EARLY_SAVE)) == request.block_ids


def test_a_prefix_is_saved_again_after_a_reset_in_the_same_step() -> None:
    """What was offered before is not saved."""
    engine = FakeEngine(save_on="eviction")
    request = computed(engine, "a", tokens(16))
    engine.scheduler.evict(prefix(request))
    engine.scheduler.reset()
    other = engine.add("b", tokens(16))
    engine.scheduler.evict(prefix(other))
    plan, _ = engine.step()
    assert blocks(plan.of(JobKind.EARLY_SAVE)) == other.block_ids


def test_nothing_is_saved_of_before_a_reset_or_a_loss_of_the_caches() -> None:
    engine = FakeEngine(save_on="eviction,preemption")
    request = computed(engine, "a", tokens(16))
    engine.scheduler.evict(prefix(request))
    engine.scheduler.reset()
    assert engine.step()[0].of(JobKind.EARLY_SAVE) == ()
    engine.scheduler.evict(prefix(request))
    engine.scheduler.preempt("a", held=engine.held(request))
    engine.scheduler.mark_caches_lost()
    assert engine.step()[0].of(JobKind.EARLY_SAVE) == ()


@pytest.mark.parametrize(
    "wrong",
    [
        "nothing",
        CachedPrefix(block_hashes=[HASH], num_blocks=2, block_of=lambda g, h: 1, num_prompt_tokens=4),
        CachedPrefix(block_hashes=[HASH], num_blocks=0, block_of=lambda g, h: 1, num_prompt_tokens=4),
        CachedPrefix(block_hashes=7, num_blocks=1, block_of=lambda g, h: 1, num_prompt_tokens=4),  # type: ignore[arg-type]
        CachedPrefix(block_hashes=[HASH], num_blocks=1, block_of=7, num_prompt_tokens=4),  # type: ignore[arg-type]
        CachedPrefix(block_hashes=[HASH], num_blocks=1, block_of=lambda g, h: -1, num_prompt_tokens=4),
        CachedPrefix(block_hashes=[HASH], num_blocks=1, block_of=lambda g, h: h, num_prompt_tokens=4),  # type: ignore[arg-type, return-value]
        CachedPrefix(block_hashes=[HASH], num_blocks=1, block_of=lambda g, h: 1, num_prompt_tokens=-4),
        CachedPrefix(block_hashes=[1], num_blocks=1, block_of=lambda g, h: 1, num_prompt_tokens=4),  # type: ignore[list-item]
        CachedPrefix(block_hashes=[HASH], num_blocks=1, block_of=lambda g, h: 1, num_prompt_tokens=4, limits="limits"),  # type: ignore[arg-type]
    ],
    ids=[
        "type",
        "more blocks",
        "no blocks",
        "hashes",
        "no function",
        "negative block",
        "block",
        "tokens",
        "hash",
        "limits",
    ],
)
def test_invalid_arguments_are_refused(wrong) -> None:
    engine = FakeEngine(save_on="eviction")
    with pytest.raises(RequestError):
        engine.scheduler.evict(wrong)
    assert engine.step()[0].empty


@pytest.mark.parametrize("save_on", ["compute", "preemption"])
def test_in_other_modes_an_eviction_does_nothing(save_on) -> None:
    engine = FakeEngine(save_on=save_on)
    request = engine.add("a", tokens(16))
    engine.scheduler.evict(prefix(request))
    assert engine.step()[0].empty


# --- preemption -----------------------------------------------------------------------------------


def test_a_preempted_request_finds_prompt_and_answer() -> None:
    engine = FakeEngine(save_on="preemption")
    request = computed(engine, "a", tokens(18))
    request.tokens += tokens(8, start=500)
    engine.grow_hashes(request)
    request.block_ids += engine.grant(2)
    engine.step({"a": 5})
    engine.remove("a", preempt=True)
    plan, _ = engine.step()
    assert blocks(plan.of(JobKind.EARLY_SAVE)) == request.block_ids[:5], "23 tokens are computed"
    engine.settle()
    assert engine.add("a", request.tokens).num_computed == 20
    assert engine.scheduler.stats().dropped_save_blocks == 0


def test_a_finished_request_is_not_saved() -> None:
    engine = FakeEngine(save_on="preemption")
    computed(engine, "a", tokens(16))
    engine.remove("a")
    assert engine.step()[0].empty


def test_a_chunk_that_waited_for_room_is_no_drop_if_it_is_saved_at_preemption() -> None:
    engine = FakeEngine(save_on="compute,preemption", num_staging_blocks=2)
    request = engine.add("a", tokens(16))
    plan, _ = engine.step({"a": 16})
    assert blocks(plan.of(JobKind.SAVE)) == request.block_ids[:2]
    (worker,) = engine.workers
    engine.apply(worker, worker.finish())
    engine.remove("a", preempt=True)
    assert engine.scheduler.stats().dropped_save_blocks == 0
    assert blocks(engine.step()[0].of(JobKind.EARLY_SAVE)) == request.block_ids[2:]


def test_blocks_of_a_load_in_flight_are_not_saved() -> None:
    engine = FakeEngine(save_on="compute,preemption")
    engine.serve("a", tokens(8))
    request = engine.add("b", tokens(16))
    assert request is not None
    assert (request.loading, request.num_computed) == (True, 8)
    engine.step()
    engine.scheduler.mark_caches_lost()
    request.num_computed = 16  # whatever the engine says
    engine.scheduler.preempt("b", held=engine.held(request))
    engine.scheduler.reset()
    assert engine.step()[0].of(JobKind.EARLY_SAVE) == ()


def test_held_of_a_preempted_request_is_validated() -> None:
    engine = FakeEngine(save_on="preemption")
    computed(engine, "a", tokens(16))
    mistakes: list[Any] = [
        "nothing",
        ScheduledRequest(request_id="a", block_tables=[5], block_hashes=[], num_prompt_tokens=4, num_computed_tokens=4),  # type: ignore[list-item]
        ScheduledRequest(
            request_id="b",
            block_tables=[[1]],
            block_hashes=[7],  # type: ignore[list-item]
            num_prompt_tokens=4,
            num_computed_tokens=4,
        ),
    ]
    for wrong in mistakes:
        with pytest.raises(RequestError):
            engine.scheduler.preempt(getattr(wrong, "request_id", "a"), held=wrong)
    engine.remove("a", preempt=True)
    assert len(blocks(engine.step()[0].of(JobKind.EARLY_SAVE))) == 4


# --- worth saving ---------------------------------------------------------------------------------


def test_a_chunk_that_two_requests_contain_is_saved() -> None:
    engine = FakeEngine(save_after_sightings=2, num_blocks=64)
    shared = tokens(8)
    engine.serve("a", [*shared, *tokens(8, start=100)])
    assert engine.scheduler.stats().saved_blocks == 0
    engine.serve("b", [*shared, *tokens(8, start=200)])
    assert engine.scheduler.stats().saved_blocks == 2
    assert engine.serve("c", [*shared, *tokens(8, start=200)]) == 8
    assert engine.scheduler.stats().saved_blocks == 4
    stats = engine.scheduler.stats()
    assert (stats.dropped_save_blocks, stats.deferred_save_blocks) == (0, 0), "what is not worth it is no drop"


def test_a_request_counts_once_however_often_it_is_matched_and_preempted() -> None:
    engine = FakeEngine(save_after_sightings=2, num_blocks=64)
    hashes: list[BlockHash] = []
    engine.hasher.extend(hashes, tokens(16))
    for _ in range(5):
        engine.scheduler.match("a", hashes, num_tokens=16, num_computed_tokens=0)
        engine.scheduler.release("a")
    for _ in range(3):
        engine.add("a", tokens(16))
        assert engine.step({"a": 16})[0].of(JobKind.SAVE) == ()
        engine.remove("a", preempt=True)
    engine.add("a", tokens(16))
    engine.remove("a")
    engine.add("a", tokens(16))  # another one
    assert len(blocks(engine.step({"a": 16})[0].of(JobKind.SAVE))) == 4


def test_chunks_found_in_hbm_count_as_seen() -> None:
    engine = FakeEngine(save_after_sightings=2, save_on="compute,eviction")
    request = computed(engine, "a", tokens(16))
    hashes = request.hashes
    engine.scheduler.match("b", hashes, num_tokens=17, num_computed_tokens=16)
    engine.scheduler.evict(prefix(request))
    assert len(blocks(engine.step()[0].of(JobKind.EARLY_SAVE))) == 4


def test_a_preempted_request_is_saved_without_sightings() -> None:
    engine = FakeEngine(save_after_sightings=5, save_on="preemption")
    computed(engine, "a", tokens(16))
    engine.remove("a", preempt=True)
    assert len(blocks(engine.step()[0].of(JobKind.EARLY_SAVE))) == 4


# --- limits of a request --------------------------------------------------------------------------


@pytest.mark.parametrize("save_on", ["compute", "eviction", "preemption"])
@pytest.mark.parametrize(
    ("limits", "num_saved"),
    [
        (RequestLimits(), 4),
        (RequestLimits(max_save_tokens=16), 4),
        (RequestLimits(max_save_tokens=11), 2),
        (RequestLimits(max_save_tokens=3), 0),
        (RequestLimits(cache=False), 0),
    ],
)
def test_max_save_tokens_of_a_request(save_on, limits, num_saved) -> None:
    engine = FakeEngine(save_on=save_on)
    request = engine.add("a", tokens(16), limits=limits)
    saves = list(engine.step({"a": 16})[0].of(JobKind.SAVE))
    engine.remove("a", preempt=save_on == "preemption")
    if save_on == "eviction":
        engine.scheduler.evict(prefix(request, limits=limits))
    saves += engine.step()[0].of(JobKind.EARLY_SAVE)
    assert len(blocks(saves)) == num_saved


@pytest.mark.parametrize(
    ("limits", "num_loaded"),
    [
        (RequestLimits(), 15),
        (RequestLimits(max_load_tokens=15), 12),
        (RequestLimits(max_load_tokens=8), 8),
        (RequestLimits(max_load_tokens=0), 0),
        (RequestLimits(cache=False), 0),
    ],
)
def test_max_load_tokens_of_a_request(limits, num_loaded) -> None:
    engine = FakeEngine()
    engine.serve("a", tokens(16))
    assert engine.add("b", tokens(16), limits=limits).num_computed == num_loaded
    engine.settle()
    engine.remove("b")
    assert engine.scheduler.stats().dropped_load_blocks == 0, "a limit is no drop"
    engine.scheduler.check_invariants()


def test_limits_of_the_settings_hold_for_all_requests() -> None:
    engine = FakeEngine(max_save_tokens=12, max_load_tokens=8)
    engine.add("a", tokens(16), limits=RequestLimits(max_save_tokens=100))
    assert len(blocks(engine.step({"a": 16})[0].of(JobKind.SAVE))) == 3
    engine.settle()
    assert engine.add("b", tokens(16), limits=RequestLimits(max_load_tokens=100)).num_computed == 8
    assert engine.add("c", tokens(16), limits=RequestLimits(max_load_tokens=4)).num_computed == 4


def test_limits_last_until_the_request_ends() -> None:
    engine = FakeEngine(num_blocks=64)
    engine.add("a", tokens(16), limits=RequestLimits(cache=False))
    engine.remove("a", preempt=True)
    engine.add("a", tokens(16))
    assert engine.step({"a": 16})[0].empty
    engine.remove("a", preempt=True)
    # Also of one that is not matched again.
    request = engine.add("x", tokens(16, start=50))
    named = ScheduledRequest(
        request_id="a",
        block_tables=[request.block_ids],
        block_hashes=request.hashes,
        num_prompt_tokens=16,
        num_computed_tokens=16,
    )
    assert engine.scheduler.plan_step([named]).of(JobKind.SAVE) == ()
    engine.scheduler.finish("a")
    engine.add("a", tokens(16))
    assert len(blocks(engine.step({"a": 16})[0].of(JobKind.SAVE))) == 4


def test_a_request_with_cache_false_does_not_count_as_seen() -> None:
    engine = FakeEngine(save_after_sightings=2)
    engine.add("a", tokens(16), limits=RequestLimits(cache=False))
    engine.remove("a")
    engine.add("b", tokens(16))
    assert engine.step({"b": 16})[0].empty


@pytest.mark.parametrize("limits", [RequestLimits(cache=False), RequestLimits(max_load_tokens=0)])
def test_a_request_that_may_not_load_waits_for_no_save(limits) -> None:
    engine = FakeEngine()
    engine.add("a", tokens(16))
    engine.step({"a": 16})
    hashes: list[BlockHash] = []
    engine.hasher.extend(hashes, tokens(17))
    for name, own, expected in (("b", limits, MatchState.MISS), ("c", None, MatchState.ARRIVING)):
        found = engine.scheduler.match(name, hashes, num_tokens=17, num_computed_tokens=0, limits=own)
        assert found.state is expected


@pytest.mark.parametrize("early", [False, True])
def test_the_highest_priority_is_saved_first(early) -> None:
    engine = FakeEngine(save_on="preemption" if early else "compute", num_staging_blocks=6)
    names = {"low": -1, "usual": 0, "high": 2}
    for i, (name, priority) in enumerate(names.items()):
        engine.add(name, tokens(12, start=100 * i), limits=RequestLimits(priority=priority))
    requests = dict(engine.requests)
    plan, _ = engine.step(dict.fromkeys(names, 12))
    if early:
        for name in names:
            engine.remove(name, preempt=True)
        plan, _ = engine.step()
    assert blocks(plan.of(JobKind.EARLY_SAVE) if early else plan.of(JobKind.SAVE)) == [
        block for name in ("high", "usual") for block in requests[name].block_ids
    ]


@pytest.mark.parametrize(
    ("limits", "said"),
    [
        ({"max_save_tokens": 3}, "MAX_SAVE_TOKENS=3 is less than the 4 tokens of a chunk, so nothing is saved"),
        ({"max_save_tokens": 7, "blocks_per_chunk": 2}, "MAX_SAVE_TOKENS=7 is less than the 8 tokens of a chunk"),
        ({"max_load_tokens": 3}, "TPU_OFFLOAD_MAX_LOAD_TOKENS=3 is less than the 4 tokens of a block, so nothing is"),
        ({"max_save_tokens": 8, "max_load_tokens": 4, "blocks_per_chunk": 2}, ""),
        ({"max_save_tokens": 3, "num_cpu_chunks": 0}, ""),
    ],
    ids=str,
)
def test_a_limit_within_which_nothing_is_copied_is_warned_of(limits, said, caplog):
    OffloadScheduler(OffloadConfig.create(**({"num_cpu_chunks": 8} | limits)), LAYOUT)
    assert said in caplog.text
    assert caplog.text.count("MAX_") == bool(said)


class Uses(EvictionPolicy):
    """LRU that records its calls."""

    def __init__(self) -> None:
        self.lru = LRUPolicy()
        self.uses: list[Use] = []

    def insert(self, use, keys, parent, depth) -> None:
        self.uses.append(use)
        self.lru.insert(use, keys, parent, depth)

    def touch(self, use, keys, num_chunks, residents) -> None:
        self.uses.append(use)
        self.lru.touch(use, keys, num_chunks, residents)

    def remove(self, key, parent) -> None:
        self.lru.remove(key, parent)

    def became_leaf(self, key) -> None:
        self.lru.became_leaf(key)

    def clear(self):
        return self.lru.clear()

    def evict(self, num_chunks, residents) -> None:
        self.lru.evict(num_chunks, residents)

    def check_invariants(self, leaves, residents) -> None:
        self.lru.check_invariants(leaves, residents)


def test_policies_see_the_priority() -> None:
    made: list[Uses] = []

    class Kept(Uses):
        def __init__(self) -> None:
            super().__init__()
            made.append(self)

    engine = FakeEngine(policy=Kept)
    engine.add("a", tokens(16), limits=RequestLimits(priority=3))
    engine.step({"a": 16})
    engine.settle()
    engine.remove("a")
    uses = [use for policy in made for use in policy.uses]
    assert {use.priority for use in uses} == {3}
    assert len({use.use_id for use in uses}) == 1


def test_policies_see_what_a_request_used_and_that_an_eviction_from_hbm_is_no_request() -> None:
    class Kept(Uses):
        def __init__(self) -> None:
            super().__init__()
            self.num_touched: list[int] = []
            made.append(self)

        def touch(self, use, keys, num_chunks, residents) -> None:
            super().touch(use, keys, num_chunks, residents)
            self.num_touched.append(num_chunks)

    made: list[Kept] = []
    engine = FakeEngine(policy=Kept, save_on="eviction")
    request = computed(engine, "a", tokens(16))
    engine.remove("a")
    (policy,) = [policy for policy in made if policy.uses]
    assert [use.is_request for use in policy.uses] == [True]
    assert policy.num_touched == [4], "what it computed, though nothing of it is saved"
    engine.scheduler.evict(prefix(request))
    engine.step()
    assert [use.is_request for use in policy.uses] == [True, False]


def test_blocks_of_another_request_with_the_same_hash(caplog) -> None:
    """The first block of one prompt is the second of another, and hashes do not cover the tokens before."""
    engine = FakeEngine()
    one, two = (BlockHash(bytes([i]) * 16) for i in range(2))
    offer: dict[str, Any] = {"block_tables": [[4, 5]], "num_prompt_tokens": 8, "num_computed_tokens": 8}
    offer_one = offer | {"num_prompt_tokens": 4, "num_computed_tokens": 4}
    plan = engine.scheduler.plan_step([ScheduledRequest(request_id="a", block_hashes=[one], **offer_one)])
    assert [job.num_blocks for job in plan.of(JobKind.SAVE)] == [1]
    for _ in range(2):
        assert engine.scheduler.plan_step([ScheduledRequest(request_id="b", block_hashes=[two, one], **offer)]).empty
    assert len(caplog.records) == 1
    engine.scheduler.check_invariants()


def test_hashes_that_are_not_chained_are_not_saved(caplog) -> None:
    """Two blocks of a prompt have the same hash: it does not cover the tokens before."""
    engine = FakeEngine()
    one, two, three = (BlockHash(bytes([i]) * 16) for i in range(3))
    repeated = [one, two, one, three]
    offer: dict[str, Any] = {"block_tables": [[4, 5, 6, 7]], "num_prompt_tokens": 16, "num_computed_tokens": 16}
    for _ in range(2):
        plan = engine.scheduler.plan_step(
            [ScheduledRequest(request_id="a", block_hashes=repeated, **offer)],
        )
        assert plan.empty
    assert [record.getMessage() for record in caplog.records] == [
        "request 'a': the same block hash is used for blocks with different prefixes; expected hashes of all tokens up "
        "to the end of each block (BlockHasher makes them). Nothing more of this request is saved (1 requests so far)"
    ]
    plan = engine.scheduler.plan_step([ScheduledRequest(request_id="b", block_hashes=[one, two, three], **offer)])
    assert [job.num_blocks for job in plan.of(JobKind.SAVE)] == [3]
    engine.scheduler.finish("a")
    engine.scheduler.check_invariants()


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_save_tokens": -1},
        {"max_load_tokens": 1.5},
        {"max_load_tokens": True},
        {"priority": "high"},
        {"priority": 2**40},
        {"cache": 1},
    ],
    ids=str,
)
def test_invalid_limits_are_refused(wrong) -> None:
    with pytest.raises(RequestError) as e:
        RequestLimits(**wrong)
    (name, value), *_ = wrong.items()
    assert f"{name}={value!r}" in str(e.value)
    assert "\n" not in str(e.value)


def test_limits_of_another_type_are_refused() -> None:
    engine = FakeEngine()
    with pytest.raises(RequestError, match="expected RequestLimits"):
        engine.add("a", tokens(16), limits={"cache": False})  # type: ignore[arg-type]


# --- tenants --------------------------------------------------------------------------------------


@pytest.mark.parametrize("save_on", ["compute", "eviction", "preemption"])
def test_tenants_share_nothing(save_on) -> None:
    engine = FakeEngine(save_on=save_on, num_blocks=64)
    for name in ("red", "blue"):
        request = engine.add(name, tokens(16), cache_salt=name)
        assert request.num_computed == 0
        engine.step({name: 16})
        engine.remove(name, preempt=save_on == "preemption")
        if save_on == "eviction":
            engine.scheduler.evict(prefix(request))
        engine.step()
        engine.settle()
    for name in ("red", "blue"):
        assert engine.add(f"{name} again", tokens(17), cache_salt=name).num_computed == 16
    assert engine.add("nobody", tokens(17)).num_computed == 0


# --- what goes wrong ------------------------------------------------------------------------------


def test_an_early_save_that_fails_is_not_published() -> None:
    engine = FakeEngine(save_on="eviction")
    request = computed(engine, "a", tokens(16))
    engine.scheduler.evict(prefix(request))
    engine.step()
    (worker,) = engine.workers
    engine.apply(worker, worker.finish(fail=True, failed_blocks=(2,)))
    engine.scheduler.check_invariants()
    assert engine.add("b", tokens(17)).num_computed == 2 * BLOCK_SIZE


def test_suspended_saves_are_drops() -> None:
    engine = FakeEngine(save_on="eviction", breaker_failures=1)
    (worker,) = engine.workers
    first = computed(engine, "a", tokens(16))
    engine.scheduler.evict(prefix(first))
    engine.step()
    engine.apply(worker, worker.finish(fail=True))
    second = computed(engine, "b", tokens(16, start=100))
    engine.scheduler.evict(prefix(second))
    assert engine.step()[0].of(JobKind.EARLY_SAVE) == ()
    assert engine.scheduler.stats().dropped_save_blocks == 4
    engine.clock.now_s += 10
    engine.scheduler.evict(prefix(second))
    assert len(blocks(engine.step()[0].of(JobKind.EARLY_SAVE))) == 1, "a probe"


def test_an_early_save_comes_before_others_when_there_is_room_for_one() -> None:
    engine = FakeEngine(save_on="compute,eviction", num_staging_blocks=4)
    request = engine.add("a", tokens(16))
    other = engine.add("b", tokens(16, start=100))
    request.num_computed = 16
    for worker in engine.workers:
        worker.hbm.update(zip(request.block_ids, request.hashes, strict=True))
    engine.scheduler.evict(prefix(request))
    plan, _ = engine.step({"b": 16})
    assert blocks(plan.of(JobKind.EARLY_SAVE)) == request.block_ids
    assert plan.of(JobKind.SAVE) == ()
    (worker,) = engine.workers
    engine.apply(worker, worker.finish())
    assert blocks(engine.step()[0].of(JobKind.SAVE)) == other.block_ids
    assert all(job.state is not JobState.PLANNED for job in job_table(engine.scheduler))
